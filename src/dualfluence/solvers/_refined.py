"""Iterative refinement: float32 solves inside, float64 residuals outside."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..losses import AbstractFactor
from ..operators import AbstractKernelOperator, MixedOperator
from ._base import AbstractDualSolver, Solution
from ._preconditioner import AbstractPreconditioner

INNER_RTOL = 1e-4
"""What a float32 solve is asked for; each refinement gains about that factor."""


class Refined(AbstractDualSolver):
    r"""Solve in float32, take the defect in float64, solve for the defect, add; repeat.

    $d = b - (\lambda I + WK)\,\Delta\alpha$ with $K\Delta\alpha$ accumulated in float64. Stops at
    `rtol`, when a round no longer halves the defect, or after `max_rounds`.
    """

    inner: AbstractDualSolver
    max_rounds: int = eqx.field(static=True, default=10)

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
        assert isinstance(op, MixedOperator)
        narrow = op.op.dtype
        low_factor, low_ridge = _cast(factor, narrow), ridge.astype(narrow)
        loose = jnp.maximum(rtol, INNER_RTOL).astype(narrow)
        size = jnp.maximum(jnp.linalg.norm(b), jnp.finfo(b.dtype).tiny)

        def unfinished(carry: tuple[Array, ...]) -> Array:
            *_, relative, before, rounds, _, _ = carry
            helping = (relative < 0.5 * before) | (rounds == 0)
            return (relative > rtol) & helping & (rounds < self.max_rounds)

        def advance(carry: tuple[Array, ...]) -> tuple[Array, ...]:
            value, k_value, defect, relative, _, rounds, iterations, products = carry
            scale = jnp.maximum(relative * size, jnp.finfo(b.dtype).tiny)
            low = (defect / scale).astype(narrow)
            step = self.inner.solve(
                op.op,
                low_factor,
                low_ridge,
                low,
                op.op.mv(low),
                preconditioner=preconditioner,
                rtol=loose,
            )
            new = value + scale * step.value.astype(b.dtype)
            k_new = op.mv(new)
            left = b - ridge * new - factor.hess_mv(k_new)
            error = jnp.linalg.norm(left) / size
            better = error < relative
            keep = lambda a, o: jnp.where(better, a, o)  # noqa: E731
            return (
                keep(new, value),
                keep(k_new, k_value),
                keep(left, defect),
                keep(error, relative),
                relative,
                rounds + 1,
                iterations + step.iterations,
                products + step.products + 2,
            )

        zero, one, count = jnp.zeros_like(b), jnp.ones((), b.dtype), jnp.asarray(0)
        start = (zero, zero, b, one, one, count, count, count)
        value, k_value, _, relative, _, _, iterations, products = jax.lax.while_loop(
            unfinished, advance, start
        )
        return Solution(value, k_value, iterations, relative, relative <= rtol, products)

    def describe(self, op: AbstractKernelOperator) -> str:
        inner = self.inner.describe(op.op if isinstance(op, MixedOperator) else op)
        return f"{inner}, refined in float64"


def _cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(
        lambda a: a.astype(dtype) if eqx.is_inexact_array(a) else a,
        tree,
    )
