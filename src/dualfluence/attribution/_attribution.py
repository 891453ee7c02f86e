"""The result of an attribution: the effect of leaving out each point on each query."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree

from .._support.archive import read_archive, write_archive
from .._support.files import write_whole
from .._support.options import check_count
from .._support.show import Shown, Table, count
from .._support.types import AnyArray, AnyPath, Inputs, Json, Numbers
from ..losses._tokens import IGNORED

FORMAT = "dualfluence-attribution"
VERSION = 2

MEANING = "positive: leaving the point out raises the query's {of}"


class Ranked(NamedTuple):
    """Training points in order of effect: positions and values, both `(q, k)`."""

    indices: np.ndarray
    values: np.ndarray


class Top(NamedTuple):
    """The `k` most helpful and the `k` most harmful points of every query.

    Helpful: leaving it out makes the query worse. Harmful: leaving it out makes it better.
    """

    helpful: Ranked
    harmful: Ranked


@dataclass(frozen=True, eq=False, repr=False)
class Attribution(Shown):
    """The effect of leaving out each training point on a quantity at each query.

    - `values`: `(q, n)`, query by training point; an array, or a memory map of a file.
    - `of`: the measured quantity, e.g. `"loss"`.
    - `direction`: 1 if a rise of the quantity is bad, −1 if it is good (a margin).
    - `own`: for each training point, the change of the same quantity at that point itself, `(n,)`.
    - `outputs_without`: outputs at each training point of the model trained without it, `(n, c)`.
    - `distance_bound`: certificates of refined answers, `(n,)`, else `None`.
    - `unit`: the unit of the numbers; `None` for scores without a unit.
    - `notes`: how the numbers were found and what they leave out.
    - `tokens`: for sequences, the part of every training token, `(q, n, T)`; they sum to `values`.
    - `x`, `y`, `xq`, `yq`: training points and queries, for pictures; files contain them only with
      `include_features`.
    """

    values: np.ndarray
    of: str
    direction: int = 1
    own: np.ndarray | None = None
    outputs_without: np.ndarray | None = None
    distance_bound: np.ndarray | None = None
    unit: str | None = "change of the quantity"
    notes: tuple[str, ...] = ()
    stats: Json = field(default_factory=dict)
    x: AnyArray | None = None
    y: AnyArray | None = None
    xq: AnyArray | None = None
    yq: AnyArray | None = None
    tokens: np.ndarray | None = None

    @property
    def num_queries(self) -> int:
        return self.values.shape[0]

    @property
    def num_points(self) -> int:
        return self.values.shape[1]

    def _table(self) -> Table:
        unit = "no unit" if self.unit is None else self.unit
        seconds = f", {self.stats['seconds']:.3g} s" if "seconds" in self.stats else ""
        size = f"{count(self.num_queries, 'query', 'queries')} × {count(self.num_points, 'training point')}"
        return (
            f"Attribution of the {self.of}: {size}, {unit}{seconds}. {MEANING.format(of=self.of)}.",
            (),
        )

    def top(self, k: int = 10) -> Top:
        """The `k` most helpful and most harmful points of every query, strongest first.

        If there are fewer points than `k`, all of them.
        """
        k = min(check_count("top: k", k), self.num_points)
        helpful, harmful = [], []
        for row in self.values:
            signed = self.direction * np.asarray(row)
            helpful.append(_largest(signed, k))
            harmful.append(_largest(-signed, k))
        return Top(self._ranked(helpful), self._ranked(harmful))

    def _ranked(self, rows: list[np.ndarray]) -> Ranked:
        indices = np.stack(rows)
        return Ranked(indices, np.take_along_axis(np.asarray(self.values), indices, axis=1))

    def _in_float32(self) -> "Attribution":
        """The same scores for a caller whose JAX has only float32; scores in a file stay as they are."""

        def narrow(array: PyTree) -> PyTree:
            plain = type(array) is np.ndarray and array.dtype == np.float64
            return array.astype(np.float32) if plain else array

        names = ("values", "own", "outputs_without", "tokens")
        return replace(self, **{name: narrow(getattr(self, name)) for name in names})

    def self_influence(self) -> np.ndarray:
        """How much worse the model does at each training point if the point is left out, `(n,)`.

        A value is large if only the point itself supports its label: mislabelled, rare or memorised points.
        """
        if self.own is None:
            raise ValueError(
                "self_influence: these scores do not contain the effect of points on "
                "themselves. Attribute with the training points as queries and take the "
                "diagonal."
            )
        return self.direction * self.own

    def save(self, path: AnyPath, *, include_features: bool = False) -> None:
        """Write one `.npz` file without pickle, atomically; `include_features` adds `x`, `xq`, …"""
        arrays = {"values": np.asarray(self.values)}
        names = ("own", "outputs_without", "distance_bound", "tokens") + (
            ("x", "y", "xq", "yq") if include_features else ()
        )
        for name in names:
            if getattr(self, name) is not None:
                arrays[name] = np.asarray(getattr(self, name))
        names = ("of", "direction", "unit", "notes", "stats")
        header = {"format": FORMAT, "version": VERSION} | {n: getattr(self, n) for n in names}
        write_archive(Path(path), header, arrays)

    @classmethod
    def load(cls, path: AnyPath) -> "Attribution":
        """Read a file of `save`; a damaged file, or one of another kind, raises an error."""
        header, arrays = read_archive(Path(path), FORMAT, VERSION, "Attribution.load")
        names = ("of", "direction", "unit", "stats")
        fields = {name: header[name] for name in names}
        return cls(notes=tuple(header["notes"]), **fields, **arrays)

    def to_pandas(self, *, long: bool = False, tokens: bool = False, k: int | None = None) -> Any:
        """A `pandas.DataFrame`, by default one row per query and one column per training point.

        **Arguments:**

        - `long`: one row for each pair, with columns `query`, `train` and `effect`, strongest helpful points
          of a query first.
        - `tokens`: one row for each training token that counts, with two more columns: `token`, the
          position of the token, and `part`. Only for scores with `tokens`.
        - `k`: in long form only the `k` most helpful and the `k` most harmful points of every query.
        """
        try:
            pd: Any = import_module("pandas")  # the user's own: nothing here depends on it
        except ImportError as error:
            raise ImportError("to_pandas: pandas is not installed; pip install pandas.") from error
        if tokens and self.tokens is None:
            raise ValueError("to_pandas: these scores have no tokens. Attribute with tokens=True.")
        if long or tokens:
            return pd.DataFrame(self._long(tokens, k))
        if k is not None:
            raise ValueError("to_pandas: k needs long=True. Give both, or leave k out.")
        frame = pd.DataFrame(np.asarray(self.values))
        frame.index.name, frame.columns.name = "query", "train"
        return frame

    def _long(self, tokens: bool, k: int | None) -> dict[str, np.ndarray]:
        """Columns of the long form."""
        signed = self.direction * np.asarray(self.values)
        order = np.argsort(-signed, axis=1, kind="stable")
        if k is not None and 2 * check_count("to_pandas: k", k) < self.num_points:
            order = np.concatenate([order[:, :k], order[:, -k:]], axis=1)
        query = np.repeat(np.arange(self.num_queries), order.shape[1])
        train = order.reshape(-1)
        columns = {"query": query, "train": train, "effect": np.asarray(self.values)[query, train]}
        if not tokens:
            return columns
        assert self.tokens is not None
        parts, counted = np.asarray(self.tokens), np.ones(self.tokens.shape[1:], bool)
        if self.y is not None and np.shape(self.y) == counted.shape:
            counted = np.asarray(self.y) != IGNORED
        row, token = np.nonzero(counted[train])
        columns = {name: column[row] for name, column in columns.items()}
        part = parts[columns["query"], columns["train"], token]
        return columns | {"token": token, "part": part}

    def to_html(
        self,
        path: Any,
        *,
        texts: Iterable[Any] | None = None,
        queries: Iterable[Any] | None = None,
        decode: Callable[[list[int]], Any] | None = None,
        names: Sequence[Any] | None = None,
        k: int = 8,
    ) -> None:
        """Write a page of sentences: every query with its helpful and harmful training sentences, tokens
        shaded.

        **Arguments:**

        - `path`: one HTML file that loads no other file and runs no scripts.
        - `texts`, `queries`: the sentences, in the order of the scores.
        - `decode`: if targets are token numbers, a function from a list of token numbers to text:
          `tokenizer.decode`. Scores with `tokens` are then shaded. If `texts` or `queries` is missing,
          the page shows the decoded tokens that count.
        - `names`: names of the classes, for targets that are labels.
        - `k`: number of helpful and of harmful sentences per query.
        """
        from ._attribution_text import text_page

        write_whole(Path(path), text_page(self, texts, queries, decode, names, k))

    def plot(self, query: int = 0, k: int = 8, **options: Any) -> Any:
        """The query with its most helpful and most harmful points, as pictures or as a table."""
        from ._attribution_plot import plot_strip  # matplotlib is an extra

        return plot_strip(self, query, k, **options)

    def with_features(
        self,
        x: Inputs = None,
        y: Numbers | None = None,
        xq: Inputs = None,
        yq: Numbers | None = None,
    ) -> "Attribution":
        """The same scores with training points and queries added, for pictures."""
        for name, rows, want in (("x", x, self.num_points), ("xq", xq, self.num_queries)):
            if rows is not None and len(rows) != want:
                raise ValueError(f"with_features: {name} must have {want} rows, got {len(rows)}.")
        return replace(self, x=x, y=y, xq=xq, yq=yq)


@dataclass(frozen=True, eq=False, repr=False)
class GroupAttribution(Shown):
    """The effect of leaving out whole groups on a quantity at each query.

    - `values`: `(q, g)`, with each group left out as a whole.
    - `sums`: `(q, g)`, the sum of the single effects of its points; the difference is their joint effect.
    - `interactions`: `(q, g, g)`, effect of two groups together minus the effect of each, if requested.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    values: np.ndarray
    sums: np.ndarray
    of: str
    direction: int
    distance_bound: np.ndarray
    interactions: np.ndarray | None = None
    notes: tuple[str, ...] = ()

    def _table(self) -> Table:
        queries = count(self.values.shape[0], "query", "queries")
        size = f"{queries} × {count(len(self.names), 'group')}"
        return f"GroupAttribution of the {self.of}: {size}. {MEANING.format(of=self.of)}.", ()


def _largest(values: np.ndarray, k: int) -> np.ndarray:
    part = np.argpartition(-values, k - 1)[:k] if k < values.size else np.arange(values.size)
    return part[np.lexsort((part, -values[part]))]
