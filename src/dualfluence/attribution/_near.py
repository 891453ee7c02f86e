"""Nearest points by kernel distance, `d² = k(x,x) + k(x',x') − 2k(x,x')`, a block of rows at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

ROWS = 512
"""Rows of the kernel at a time."""


@dataclass(frozen=True, eq=False)
class Distances:
    """Squared kernel distances from points to the training points.

    - `block`: kernel of rows `i:j` of the points with all training points.
    - `own`, `train`: `k(x, x)` of the points and of the training points.
    - `same`: whether the points are the training points, so that a point is not its own neighbour.
    """

    block: Callable[[slice], Float[np.ndarray, "b n"]]
    own: Float[np.ndarray, " q"]
    train: Float[np.ndarray, " n"]
    same: bool

    def rows(self) -> Iterator[tuple[slice, Float[np.ndarray, "b n"]]]:
        for start in range(0, len(self.own), ROWS):
            where = slice(start, min(start + ROWS, len(self.own)))
            k = np.asarray(self.block(where), float)
            squares = np.maximum(self.own[where, None] + self.train[None] - 2 * k, 0)
            if self.same:
                rows = np.arange(where.start, where.stop)
                squares[rows - where.start, rows] = np.inf
            yield where, squares


class Nearest(NamedTuple):
    """For each point the nearest training point, and the nearest training point with another target.
    Without such a point, the position is −1 and the distance infinite.
    """

    at: np.ndarray
    distance: np.ndarray
    other_at: np.ndarray
    other_distance: np.ndarray


def nearest(
    distances: Distances, disagrees: Callable[[slice], np.ndarray], among: np.ndarray
) -> Nearest:
    """The nearest points among some of the training points.

    **Arguments:**

    - `disagrees`: a function that takes `i` and `j` and returns, for the rows `i:j`, a mask `(b, n)` that
      is true at the training points whose target differs from that of the row.
    - `among`: which training points count.
    """
    q = len(distances.own)
    found = Nearest(np.full(q, -1), np.full(q, np.inf), np.full(q, -1), np.full(q, np.inf))
    for where, squares in distances.rows():
        squares = np.where(among[None], squares, np.inf)
        _take(found.at, found.distance, where, squares)
        _take(
            found.other_at,
            found.other_distance,
            where,
            np.where(disagrees(where), squares, np.inf),
        )
    return found


def _take(index: np.ndarray, distance: np.ndarray, where: slice, squares: np.ndarray) -> None:
    at = squares.argmin(axis=1)
    least = squares[np.arange(len(at)), at]
    index[where] = np.where(np.isfinite(least), at, -1)
    distance[where] = np.sqrt(least)


def linear(x: Float[np.ndarray, "n d"], xq: Float[np.ndarray, "q d"] | None) -> Distances:
    """Distances of the linear kernel: plain Euclidean distances."""
    own = np.sum(x**2, axis=1)
    if xq is None:
        return Distances(lambda rows: x[rows] @ x.T, own, own, True)
    return Distances(lambda rows: xq[rows] @ x.T, np.sum(xq**2, axis=1), own, False)
