"""`ridge="auto"`: the ridge under which points that are left out are predicted best."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._support.checks import NotFinite
from ..losses import SquaredError
from ._model import Trained, TrainedModel
from ._ridge_path import GRID, RidgePath, make_grid, ridge_path

WHAT = "fit: ridge='auto'"

REACH = 10.0
"""Factor on a fit's own ridge within which one Newton step is trusted to compare ridges."""

MAX_FITS = 12
"""Fits at most for a loss that is not quadratic. A walk over the whole default grid takes eight."""

FIRST = 1e-3
"""Where that walk starts, over the mean diagonal of `K`: the middle of the default grid."""

SAFE = 1e3
"""Ridges of the default grid are at least this many rounding units of the mean diagonal of `K`: below,
the difference that leave-one-out outputs are made of is rounding."""


def is_auto(ridge: Any) -> bool:
    """Whether the ridge is to be found; any other word is an error."""
    if isinstance(ridge, str) and ridge != "auto":
        raise ValueError(f"ridge: λ must be a positive number or 'auto', got {ridge!r}.")
    return isinstance(ridge, str)


def auto_ridge(
    fit_at: Callable[[float], Trained], untrained: Trained, grid: Any = None
) -> tuple[Trained, str]:
    """The fit whose ridge has the least leave-one-out loss, and why.

    For squared error the path from the untrained model is exact, and one fit follows. For other losses
    the path is one Newton step from a fit: a walk over fits, each at the best ridge within reach of the
    one before, until that is its own.

    **Arguments:**

    - `fit_at`: from a ridge to a fit of the same problem; should reuse its kernel.
    - `untrained`: the model at `α = 0`.
    - `grid`: ridges to choose from.
    """
    ridges = _default_grid(untrained) if grid is None else make_grid(untrained, grid, WHAT)
    if isinstance(untrained.loss, SquaredError):
        path = ridge_path(untrained, ridges, WHAT)
        return fit_at(path.best), path.reason
    return _walk(fit_at, ridges, FIRST * _size(untrained))


def _size(model: TrainedModel) -> float:
    size = float(jnp.mean(model.kernel_diagonal))
    if not 0 < size < np.inf:
        raise NotFinite(f"{WHAT}: the mean diagonal of K is {size:.3g}. Give a number.")
    return size


def _default_grid(model: TrainedModel) -> np.ndarray:
    eps = float(jnp.finfo(model.kernel_diagonal.dtype).eps)
    return _size(model) * GRID[SAFE * eps <= GRID]


def _walk(
    fit_at: Callable[[float], Trained], ridges: np.ndarray, first: float
) -> tuple[Trained, str]:
    ridge = float(ridges[np.argmin(np.abs(np.log(ridges / first)))])
    tried: dict[float, tuple[float, Trained]] = {}
    while ridge not in tried and len(tried) < MAX_FITS:
        fitted = fit_at(ridge)
        near = ridges[np.abs(np.log(ridges / ridge)) <= np.log(REACH) * (1 + 1e-9)]
        path = ridge_path(fitted, near, WHAT)
        tried[ridge] = (_own_loss(path, ridge, fitted), fitted)
        ridge = path.best
    best = min(tried, key=lambda r: tried[r][0])
    edge = ", at the edge of the grid" if best in (ridges[0], ridges[-1]) else ""
    reason = (
        f"ridge {best:.3g}: least leave-one-out loss, {tried[best][0]:.4g}, of {len(tried)} fits on a "
        f"walk over {ridges.size} ridges (each point left out by one Newton step){edge}"
    )
    return tried[best][1], reason


def _own_loss(path: RidgePath, ridge: float, fitted: TrainedModel) -> float:
    """Leave-one-out loss at the fit's own ridge; infinite for a fit that does not stand."""
    own = float(path.leave_one_out[np.flatnonzero(path.ridges == ridge)[0]])
    return own if np.isfinite(own) and fitted.stats.converged else float("inf")
