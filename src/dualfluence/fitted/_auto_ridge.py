"""`ridge="auto"`: the ridge under which points that are left out are predicted best."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._support.compile import NotFinite
from ..attribution._ridge_path import GRID, make_grid, ridge_path
from ..dual._model import Trained, TrainedModel
from ..losses import SquaredError

WHAT = "fit: ridge='auto'"

STRIDE = 4
"""For a loss that is not quadratic, first every fourth ridge (one a decade) is tried, then those two and one
beside the best so far. Doubled, a narrow minimum is missed more often, and four fits are saved."""

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

    For squared error the path from the untrained model is exact, and one fit follows. Other losses are
    fitted at ridges of the grid, far apart and then nearer, and each point is left out of each fit by one
    Newton step: the step to another ridge would be too long to compare ridges by.

    **Arguments:**

    - `fit_at`: from a ridge to a fit of the same problem; should reuse its kernel.
    - `untrained`: the model at `α = 0`.
    - `grid`: ridges to choose from.
    """
    ridges = _default_grid(untrained) if grid is None else make_grid(untrained, grid, WHAT)
    if isinstance(untrained.loss, SquaredError):
        path = ridge_path(untrained, ridges, WHAT)
        return fit_at(path.best), path.reason
    return _search(fit_at, ridges)


def _size(model: TrainedModel) -> float:
    size = float(jnp.mean(model.kernel_diagonal))
    if not 0 < size < np.inf:
        raise NotFinite(f"{WHAT}: the mean diagonal of K is {size:.3g}. Give a number.")
    return size


def _default_grid(model: TrainedModel) -> np.ndarray:
    eps = float(jnp.finfo(model.kernel_diagonal.dtype).eps)
    return _size(model) * GRID[SAFE * eps <= GRID]


def _search(fit_at: Callable[[float], Trained], ridges: np.ndarray) -> tuple[Trained, str]:
    """Least own leave-one-out loss among fits at a stride, then at half of it beside the best."""
    losses: dict[int, float] = {}
    best: tuple[float, Trained] | None = None
    at, stride = 0, STRIDE
    wanted = list(range(0, ridges.size, stride))
    while stride:
        for index in (i for i in wanted if 0 <= i < ridges.size and i not in losses):
            fitted = fit_at(float(ridges[index]))
            losses[index] = _own_loss(fitted)
            if best is None or losses[index] < best[0]:
                best, at = (losses[index], fitted), index
        stride //= 2
        wanted = [at - stride, at + stride]
    assert best is not None  # a grid has a ridge
    loss, fitted = best
    edge = ", at the edge of the grid" if at in (0, ridges.size - 1) else ""
    reason = (
        f"ridge {fitted.ridge:.3g}: least leave-one-out loss, {loss:.4g}, of {len(losses)} fits on a grid "
        f"of {ridges.size} (each point left out by one Newton step){edge}"
    )
    return fitted, reason


def _own_loss(fitted: TrainedModel) -> float:
    """Leave-one-out loss at the fit's own ridge; infinite for a fit that does not stand."""
    own = float(ridge_path(fitted, [fitted.ridge], WHAT).leave_one_out[0])
    return own if np.isfinite(own) and fitted.stats.converged else float("inf")
