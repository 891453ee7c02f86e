r"""Ridge regression on features with every point left out, in float64 on the host.

With centred features `Φ`, a free intercept and the penalty `a` the outputs are `f = Hy`,
$H = \tfrac1n 11^\top + \Phi(\Phi^\top\Phi + a)^{-1}\Phi^\top$, and without point `i` they are
$y_i - (y_i - f_i)/(1 - H_{ii})$ there and move by $-H_{ji}(y_i - f_i)/(1 - H_{ii})$ at the others.
Both are exact. The penalty is one on the sum of the losses, which stays when a point goes.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float

PENALTIES = np.logspace(-6, 2, 33)
"""Tried by default, over the mean eigenvalue of `ΦᵀΦ`: four to a decade."""

NOISE = 1e-12
"""Eigenvalues below this share of the largest are rounding."""

LEAST = 1e-9
"""Smallest `1 − H_ii` that is told from rounding; below, a point is alone in its direction."""


@dataclass(frozen=True, eq=False)
class Ridge:
    """The model of least leave-one-out error over a grid of penalties.

    - `features`, `targets`: what it was fitted on, `(n, r)` and `(n, c)`.
    - `centre`, `mean`: means of both.
    - `values`, `vectors`: of `ΦᵀΦ` for the centred features.
    - `penalty`: `a`.
    - `error`: mean squared leave-one-out error, summed over outputs.
    """

    features: Float[np.ndarray, "n r"]
    targets: Float[np.ndarray, "n c"]
    centre: Float[np.ndarray, " r"]
    mean: Float[np.ndarray, " c"]
    values: Float[np.ndarray, " k"]
    vectors: Float[np.ndarray, "r k"]
    penalty: float
    error: float

    @cached_property
    def rotated(self) -> Float[np.ndarray, "n k"]:
        """Centred features along the eigenvectors."""
        return (self.features - self.centre) @ self.vectors

    @cached_property
    def weights(self) -> Float[np.ndarray, "k c"]:
        shrunk = self.values + self.penalty
        return (self.rotated.T @ (self.targets - self.mean)) / shrunk[:, None]

    @cached_property
    def outputs(self) -> Float[np.ndarray, "n c"]:
        return self.rotated @ self.weights + self.mean

    @cached_property
    def leverage(self) -> Float[np.ndarray, " n"]:
        """`H_ii`: how much of a point's own target comes back as its output."""
        return self.rotated**2 @ (1 / (self.values + self.penalty)) + 1 / len(self.targets)

    @cached_property
    def left_out(self) -> Float[np.ndarray, "n c"]:
        """Outputs at every point of the model without it."""
        rest = np.maximum(1 - self.leverage, LEAST)[:, None]
        return self.targets - (self.targets - self.outputs) / rest

    @cached_property
    def effect(self) -> Float[np.ndarray, " n"]:
        """Root mean square change of the outputs at all points when one is left out."""
        n, shrunk = len(self.targets), self.values + self.penalty
        moved = self.rotated**2 @ (self.values / shrunk**2) + 1 / n
        gap = np.linalg.norm(self.targets - self.left_out, axis=1)
        return gap * np.sqrt(moved / n)

    def predict(self, features: Float[np.ndarray, "q r"]) -> Float[np.ndarray, "q c"]:
        return (features - self.centre) @ self.vectors @ self.weights + self.mean

    def without(self, points: np.ndarray, features: np.ndarray) -> Float[np.ndarray, "q c"]:
        """Outputs at `features` of the model fitted again without a set of points, same penalty."""
        kept = np.delete(self.features, points, axis=0)
        y = np.delete(self.targets, points, axis=0)
        centre, mean = kept.mean(axis=0), y.mean(axis=0)
        kept = kept - centre
        gram = kept.T @ kept + self.penalty * np.eye(kept.shape[1])
        return (features - centre) @ np.linalg.solve(gram, kept.T @ (y - mean)) + mean


def fit_ridge(
    features: Float[np.ndarray, "n r"],
    targets: Float[np.ndarray, "n c"],
    penalties: np.ndarray | None = None,
) -> Ridge:
    """The `Ridge` of least leave-one-out error."""
    centre, mean = features.mean(axis=0), targets.mean(axis=0)
    centred, y = features - centre, targets - mean
    values, vectors = np.linalg.eigh(centred.T @ centred)
    rounding = (len(y) * np.finfo(float).eps) ** 2 * float(np.sum(features**2))
    kept = values > max(values[-1] * NOISE, rounding, np.finfo(float).tiny)
    if not kept.any():
        raise ValueError(
            f"audit: all {len(y)} points have the same features, so that nothing tells them apart."
        )
    values, vectors = values[kept], vectors[:, kept]
    rotated = centred @ vectors
    right, squares, n = rotated.T @ y, rotated**2, len(y)
    grid = PENALTIES * values.mean() if penalties is None else penalties
    errors = []
    for penalty in grid:
        shrunk = values + penalty
        rest = np.maximum(1 - squares @ (1 / shrunk) - 1 / n, LEAST)
        residual = (y - rotated @ (right / shrunk[:, None])) / rest[:, None]
        errors.append(float(np.sum(residual**2) / n))
    best = int(np.argmin(errors))
    return Ridge(features, targets, centre, mean, values, vectors, float(grid[best]), errors[best])
