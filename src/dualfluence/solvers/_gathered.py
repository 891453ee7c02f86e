"""Solve on the block of the points that have a weight, if most points have no weight."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..operators import AbstractKernelOperator
from ._base import AbstractDualSolver, LinearSystem, Solution

FINE = 1e-4
"""A solve with this relative residual is good enough for every right-hand side. A tenth of it costs
loose solves a few iterations."""


class Gathered(AbstractDualSolver):
    r"""Uses `inner` only on the rows `S`, which must contain every point with a weight.

    For the other points `W` is zero, so $\Delta\alpha_F = b_F/\lambda$ at once (the paper's shortcut), and

    $$(\lambda I + W_SK_{SS})\,\Delta\alpha_S = b_S - W_SK_{SF}\,\Delta\alpha_F .$$

    This gives the same solution with one product with the whole `K`; all other products use the block.
    """

    inner: AbstractDualSolver
    rows: Int[Array | np.ndarray, " m"]

    def solve(self, system: LinearSystem) -> Solution:
        rows: Any = self.rows
        op, ridge = system.op, system.ridge
        take = lambda tree: jax.tree.map(lambda a: a[rows] if a.ndim else a, tree)  # noqa: E731
        block, factor_s, b_s = op.take(rows), take(system.factor), system.b[rows]
        k_sf = (system.k_b[rows] - block.mv(b_s)) / ridge
        rhs = b_s - factor_s.hess_mv(k_sf)
        # What is left is to be small next to `b`. Next to `rhs`, which can be a hundred times larger, a loose
        # solve need not lead downhill.
        share = jnp.linalg.norm(system.b) / jnp.maximum(jnp.linalg.norm(rhs), _tiny(rhs))
        rtol = jnp.maximum(system.rtol * jnp.minimum(share, 1), jnp.minimum(system.rtol, FINE))
        system_s = LinearSystem(
            block, factor_s, ridge, rhs, block.mv(rhs), take(system.preconditioner), rtol
        )
        part = self.inner.solve(system_s)
        value = (system.b / ridge).at[rows].set(part.value)
        return Solution(
            value=value,
            k_value=op.mv(value),
            reach=jnp.abs(value),
            iterations=part.iterations,
            residual=part.residual,
            converged=part.converged,
            products=part.products + 3,
            jitter=part.jitter,
        )

    def describe(self, op: AbstractKernelOperator) -> str:
        return f"{self.inner.describe(op)} on {self.rows.shape[0]} of {op.num_points} points"


def _tiny(like: Array) -> float:
    return float(jnp.finfo(like.dtype).tiny)


def rows_that_count(weights: np.ndarray) -> np.ndarray | None:
    """Positions of all points with a weight, filled up with some that have none; `None` if more than
    half of the points have a weight.

    The block has one of a few sizes (a half of all points, 3/8, 1/4, 3/16, ...), so that later requests
    find compiled programs.
    """
    kept = np.flatnonzero(weights)
    size, half = weights.size, weights.size // 2
    while kept.size <= half:
        size = half * 3 // 4 if kept.size <= half * 3 // 4 else half
        half //= 2
    if size == weights.size:
        return None
    spare = np.flatnonzero(weights == 0)[: size - kept.size]
    return np.sort(np.concatenate([kept, spare])).astype(np.int32)
