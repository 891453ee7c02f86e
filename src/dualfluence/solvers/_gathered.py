"""Solve on the block of `K` that still counts, where most points have weight zero."""

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from ..losses import AbstractFactor
from ..operators import AbstractKernelOperator, DenseOperator, KroneckerOperator, take_block
from ._base import AbstractDualSolver, Solution
from ._preconditioner import AbstractPreconditioner


class Gathered(AbstractDualSolver):
    r"""`inner` on the rows `S` alone, which must hold every point with a weight.

    Elsewhere `W` is zero, so that $\Delta\alpha_F = b_F/\lambda$ at once (the paper's shortcut), and

    $$(\lambda I + W_SK_{SS})\,\Delta\alpha_S = b_S - W_SK_{SF}\,\Delta\alpha_F .$$

    The same solution for one product with the whole of `K` and the rest with the block.
    """

    inner: AbstractDualSolver
    rows: Int[Array | np.ndarray, " m"]

    def solve(
        self,
        op: AbstractKernelOperator,
        factor: AbstractFactor,
        ridge: Float[Array, ""],
        b: Float[Array, "n c"],
        k_b: Float[Array, "n c"],
        *,
        preconditioner: AbstractPreconditioner,
        rtol: Float[Array, ""],
    ) -> Solution:
        rows: Any = self.rows
        take = lambda tree: jax.tree.map(lambda a: a[rows] if a.ndim else a, tree)  # noqa: E731
        assert isinstance(op, (DenseOperator, KroneckerOperator))
        block, factor_s, b_s = take_block(op, rows), take(factor), b[rows]
        k_sf = (k_b[rows] - block.mv(b_s)) / ridge
        rhs = b_s - factor_s.hess_mv(k_sf)
        part = self.inner.solve(
            block,
            factor_s,
            ridge,
            rhs,
            block.mv(rhs),
            preconditioner=take(preconditioner),
            rtol=rtol,
        )
        value = (b / ridge).at[rows].set(part.value)
        return Solution(
            value=value,
            k_value=op.mv(value),
            iterations=part.iterations,
            residual=part.residual,
            converged=part.converged,
            products=part.products + 3,
        )

    def describe(self, op: AbstractKernelOperator) -> str:
        return f"{self.inner.describe(op)} on {self.rows.shape[0]} of {op.num_points} points"


def rows_that_count(weights: np.ndarray) -> np.ndarray | None:
    """Every point with a weight and some without; `None` where more than half have one.

    Always one of a few sizes (a half of all points, 3/8, 1/4, 3/16, ...), so that later requests find
    compiled programs.
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
