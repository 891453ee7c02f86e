"""Fit kernel tiles into a byte budget and reuse features from tile to tile."""

from dataclasses import dataclass
from math import ceil, isqrt
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from .._support.checks import NotFinite
from .._support.points import count_points
from .._support.tiles import even_size
from ._gram import TERMS_AT_ONCE, Features
from ._prepare import Prepared

SYMMETRIC_TILES = 5
"""Tiles per side that a large symmetric kernel is cut into: 60 % of the square is computed."""

TALL = 3
"""Quarters of the memory for features that the rows of a tile get if the features of its columns are
not kept."""

WORTH_CUTTING = 2048
"""Rows (points times outputs) from which a symmetric kernel is cut to save its lower half."""


@dataclass(frozen=True)
class Tiles:
    """`shape` of a tile, `chunk` of points differentiated at once, `keep` all features or not."""

    shape: tuple[int, int]
    chunk: int
    keep: bool


def choose_tiles(
    prepared: Prepared, n1: int, n2: int | None, *, budget: int, traced: bool
) -> Tiles:
    """The largest tiles whose features, products and backward passes fit into `budget`.

    Half of the budget is for features: of all points if they fit, else of one tile's rows and columns.
    The other half is for the products, and before that for the backward passes.
    """
    recipe = prepared.recipe
    symmetric = n2 is None
    columns = n1 if n2 is None else n2
    per_point, workspace = prepared.feature_bytes, prepared.workspace_bytes
    half = budget // 2
    if 2 * per_point > half or workspace > half:
        raise ValueError(
            f"empirical kernel: tile_bytes={budget} is too small for one pair of points, which"
            f" needs {2 * max(2 * per_point, workspace)}. Raise tile_bytes, choose fewer"
            " `trainable` parameters, or use ntk_mv, which holds no Jacobian."
        )
    outputs = 1 if traced else recipe.num_outputs**2
    copies = min(len(recipe.groups) + 1, TERMS_AT_ONCE) + 2
    entry = outputs * np.dtype(recipe.dtype).itemsize * copies
    side = max(1, isqrt(half // entry))
    keep = (n1 if symmetric else n1 + columns) * per_point <= half
    rows, cols = min(side, n1), min(side, columns)
    if not keep and symmetric:
        rows = min(rows, half // (2 * per_point))
    elif not keep:
        # Columns' features are made anew for every tile of rows: tall tiles, and few of them.
        most = half // per_point
        rows = max(1, min(n1, TALL * most // 4, half // entry))
        cols = max(1, min(columns, most - rows, half // (entry * rows)))
    if symmetric and n1 * recipe.num_outputs >= WORTH_CUTTING:
        rows = min(rows, ceil(n1 / SYMMETRIC_TILES))
    rows, cols = even_size(n1, rows), even_size(columns, cols)
    return Tiles((rows, rows if symmetric else cols), max(1, half // max(workspace, 1)), keep)


def even_parts(n: int, size: int) -> list[slice]:
    """`n` rows in parts of at most `size`, as equal as possible."""
    step = even_size(n, size)
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


class FeatureStore:
    """Provides the features of tiles. It keeps all features, or those of the rows while it computes
    those of the columns."""

    def __init__(
        self,
        prepared: Prepared,
        leaves: Any,
        rest: Any,
        x1: Any,
        x2: Any | None,
        tiles: Tiles,
        *,
        traced: bool,
    ) -> None:
        self._prepared, self._leaves, self._rest = prepared, leaves, rest
        self._x1, self._x2 = x1, x1 if x2 is None else x2
        self._tiles, self._traced = tiles, traced
        self.index1 = np.arange(count_points(x1))
        self.index2 = None if x2 is None else np.arange(count_points(x2))
        self._flags: list[tuple[str, np.ndarray, Any, Any]] = []
        self._row: tuple[int, Features] | None = None
        self._kept: tuple[Features, Features] | None = None
        if tiles.keep:
            f1 = self._make("x1", x1, self.index1)
            if self.index2 is None or x2 is x1:
                self._kept = (f1, f1)
            else:
                self._kept = (f1, self._make("x2", x2, self.index2))

    def _make(self, name: str, x: Any, index: np.ndarray) -> Features:
        made = self._prepared.features(self._leaves, self._rest, x, self._tiles.chunk)
        self._flags.append((name, index, made.outputs, made.finite))
        return made

    def _at(self, name: str, x: Any, index: np.ndarray) -> Features:
        return self._make(name, jax.tree.map(lambda a: a[index], x), index)

    def block(self, i: Array, j: Array) -> Array:
        """The tile of the points `i` of `x1` and `j` of `x2`."""
        if self._kept is not None:
            if len(i) == len(self.index1) and len(j) == count_points(self._x2):
                return self._prepared.tile(*self._kept, traced=self._traced)
            return self._prepared.tile_at(*self._kept, i, j, traced=self._traced)
        rows, cols = np.asarray(i), np.asarray(j)
        if self._row is None or self._row[0] != rows[0]:
            self._row = None
            self._row = (int(rows[0]), self._at("x1", self._x1, rows))
        f1 = self._row[1]
        same = self.index2 is None and rows[0] == cols[0]
        f2 = f1 if same else self._at("x2" if self.index2 is not None else "x1", self._x2, cols)
        return self._prepared.tile(f1, f2, traced=self._traced)

    def check_finite(self) -> None:
        """Raise an error that names the points if outputs or derivatives were not finite."""
        for flags in self._flags:
            require_finite(*flags)


def require_finite(name: str, index: np.ndarray, outputs: Any, finite: Any) -> None:
    """Raise an error that names the points if their outputs or derivatives are not finite."""
    good = {"outputs": np.isfinite(np.asarray(outputs)).all(1), "derivatives": finite}
    for what, flags in good.items():
        bad = np.unique(index[~np.asarray(flags)])
        if bad.size:
            raise NotFinite(
                f"empirical kernel: {what} of apply_fn are not finite at {bad.size} points"
                f" of {name}: {bad[:8].tolist()}. Check those inputs and the parameters for"
                " NaN, infinities and overflow."
            )
