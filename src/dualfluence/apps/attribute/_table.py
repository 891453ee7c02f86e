"""Points and labels out of a table: a CSV or TSV file, compressed or not."""

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...adapters._tables import MOST_NAMES

SHOWN_DIGITS = 6
"""Letters of a number up to which a page shows all of it."""

SEPARATORS = {".csv": ",", ".tsv": "\t"}


class Columns(dict[Any, Any]):
    """Columns by name, as a data frame has them."""

    @property
    def columns(self) -> list[Any]:
        return list(self)

    def to_numpy(self) -> np.ndarray:
        return np.column_stack(list(self.values()))


@dataclass(frozen=True, eq=False)
class Table:
    """Points `x`, texts or columns, with their labels; `shown` is what a page shows of each point."""

    x: Any
    y: np.ndarray
    shown: Any
    is_text: bool


def is_table_file(path: Path | None) -> bool:
    return path is not None and _ending(path) in SEPARATORS


def read_table(path: Path, label: str, text: str | None, points: int | None) -> Table:
    """The rows of a table.

    **Arguments:**

    - `label`, `text`: names of columns in the first row, or their numbers from 0 in a table without names.
      Without `text` all other columns are features.
    - `points`: how many points to use, counted from the first.
    """
    rows = _rows(path)
    names: list[Any] = list(range(len(rows[0])))
    if not (label.isdigit() and (text is None or text.isdigit())):
        names, rows = rows[0], rows[1:]
    rows = rows[:points]
    if not rows:
        raise ValueError(f"{path}: expected rows with points, got none.")
    at = _position(path, names, label, "--label")
    y = _numbers([row[at] for row in rows], f"{path}: column {label}", labels=True)
    if text is not None:
        words = [row[_position(path, names, text, "--text")] for row in rows]
        return Table(words, y, words, True)
    columns = Columns(
        {
            name: _numbers([row[k] for row in rows], f"{path}: column {name}")
            for k, name in enumerate(names)
            if k != at
        }
    )
    _check_features(path, columns)
    shown = [
        ", ".join(f"{n}\N{NO-BREAK SPACE}{_short(row[k])}" for k, n in enumerate(names) if k != at)
        for row in rows
    ]
    return Table(columns, y, shown, False)


def _short(cell: str) -> str:
    """A long number by its first digits."""
    try:
        return f"{float(cell):.4g}" if len(cell) > SHOWN_DIGITS else cell
    except ValueError:
        return cell


def _check_features(path: Path, columns: Columns) -> None:
    """There are some, and none of them is a text: those need an option."""
    if not columns:
        raise ValueError(f"{path}: expected columns beside that of --label, got none.")
    for name, values in columns.items():
        if values.dtype.kind == "U" and len(np.unique(values)) > MOST_NAMES:
            raise ValueError(
                f"{path}: column {name} has {len(np.unique(values))} different texts, expected numbers or at "
                f"most {MOST_NAMES} names. If it is the text to look at, give --text {name}; else drop it."
            )


def _rows(path: Path) -> list[list[str]]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", newline="") as file:
            separator = SEPARATORS[_ending(path)]
            quoting = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
            rows = [row for row in csv.reader(file, delimiter=separator, quoting=quoting) if row]
    except (UnicodeDecodeError, csv.Error, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path}: not a table of text in UTF-8: {error}") from error
    if not rows:
        raise ValueError(f"{path}: expected rows with points, got none.")
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"{path}: expected {len(rows[0])} columns as in the first row, got {len(row)} in row "
                f"{number}."
            )
    return rows


def _position(path: Path, names: list[Any], wanted: str, option: str) -> int:
    key = int(wanted) if names and isinstance(names[0], int) else wanted
    if key not in names:
        raise ValueError(f"{path}: {option}: expected one of {names[:20]}, got {wanted!r}.")
    return names.index(key)


def _numbers(values: list[str], what: str, labels: bool = False) -> np.ndarray:
    """Whole numbers, numbers, or names; an empty cell is an error."""
    empty = [k for k, v in enumerate(values) if not v.strip()]
    if empty:
        raise ValueError(
            f"{what}: {len(empty)} of {len(values)} cells are empty, the first in row {empty[0]}."
        )
    for kind in (int, float) if labels else (float,):
        try:
            return np.array([kind(v) for v in values])
        except (ValueError, OverflowError):
            continue
    return np.array(values)


def _ending(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
