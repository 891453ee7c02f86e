"""Names of training points. The user chooses them, each is used once, and files contain only their
salted hashes."""

import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from .._support.files import FileError, write_whole
from ._ledger import reference

MAX_NAME = 256
"""Longest name, in characters."""


def as_name(value: object) -> str:
    """A name as text; whole numbers are names too."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (str, int, np.integer)):
        raise TypeError(f"ids: a name is text or a whole number, got {type(value).__name__}.")
    text = str(value)
    if not 0 < len(text) <= MAX_NAME:
        raise ValueError(f"ids: a name has 1 to {MAX_NAME} characters, got {len(text)}.")
    return text


def as_names(num_points: int, ids: Iterable[object] | None) -> list[str]:
    """One name per point, all different; by default positions."""
    names = [str(i) for i in range(num_points)] if ids is None else [as_name(v) for v in ids]
    if len(names) != num_points:
        raise ValueError(
            f"ids: expected one name for each of {num_points} points, got {len(names)}."
        )
    if len(set(names)) != len(names):
        again = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"ids: names must differ, {again!r} comes twice.")
    return names


class Ids:
    """The row of each name. Removed names are remembered, so that they cannot be used again."""

    def __init__(self, names: list[str], salt: bytes, sample_weights: np.ndarray) -> None:
        self._salt = salt
        self._rows: dict[str, int | None] = {
            self.reference(name): (row if sample_weights[row] > 0 else None)
            for row, name in enumerate(names)
        }
        self._names = {row: each for each, row in self._rows.items() if row is not None}

    def reference(self, name: object) -> str:
        """The salted hash of a name, as in files."""
        return reference(self._salt, as_name(name))

    def rows(self, names: Sequence[object]) -> list[int]:
        """Rows of names, or an error for a name that is unknown, removed or given twice."""
        if not names:
            raise ValueError("ids: give at least one name.")
        texts = [as_name(name) for name in names]
        if len(set(texts)) != len(texts):
            raise ValueError("ids: a name comes twice in one request.")
        return [self._row(self.reference(text), text) for text in texts]

    def rows_of(self, references: list[str]) -> list[int]:
        """Rows of salted hashes."""
        return [self._row(each, f"{each[:12]}…") for each in references]

    def check_new(self, names: Sequence[object]) -> None:
        """Raise unless every name is new."""
        texts = [as_name(name) for name in names]
        if not texts or len(set(texts)) != len(texts):
            raise ValueError("ids: give one name for each new point, all different.")
        for text in texts:
            if self.reference(text) in self._rows:
                raise ValueError(
                    f"ids: {text!r} has been used before; a name can be used only once."
                )

    def add(self, names: Sequence[object], first: int) -> None:
        self.add_references([self.reference(name) for name in names], first)

    def add_references(self, references: list[str], first: int) -> None:
        """Names of new rows from `first` on."""
        for i, each in enumerate(references):
            self._rows[each] = first + i
            self._names[first + i] = each

    def remove(self, rows: list[int]) -> None:
        """From now on their names belong to no point."""
        for row in rows:
            self._rows[self._names.pop(row)] = None

    def move(self, rows: list[int], first: int) -> None:
        """Their points have new rows, from `first` on, in this order."""
        self.add_references([self._names.pop(row) for row in rows], first)

    def _row(self, each: str, shown: str) -> int:
        if each not in self._rows:
            raise KeyError(f"ids: no point is called {shown!r}.")
        row = self._rows[each]
        if row is None:
            raise KeyError(f"ids: {shown!r} was removed.")
        return row


def read_salt(path: Path, *, new: bool) -> bytes:
    """The secret of the folder, readable only by its owner; made if the ledger is `new`.

    A kill at the first start can leave an empty file beside an empty ledger. No name was hashed with
    it, so a new salt replaces it.
    """
    found = path.exists()
    if found and not (new and path.stat().st_size == 0):
        return _read_salt(path)
    if not new:
        raise FileError(
            f"desk: {path} is missing, and without it no name of the ledger can be found. "
            "Restore it from a copy."
        )
    salt = secrets.token_bytes(32)
    write_whole(path, salt.hex(), private=True)
    return salt


def _read_salt(path: Path) -> bytes:
    try:
        salt = bytes.fromhex(path.read_text("ascii"))
    except PermissionError as error:
        raise FileError(
            f"desk: {path} can be read only by its owner. Open the desk as that user."
        ) from error
    except ValueError:
        salt = b""
    if len(salt) != 32:
        raise FileError(
            f"desk: {path} is not a salt of this desk: expected 64 hexadecimal digits. Restore it from a "
            "copy."
        )
    return salt
