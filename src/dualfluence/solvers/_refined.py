"""Iterative refinement: float32 solves inside, float64 residuals outside."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from .._support.options import check_count, check_instance
from ..operators import AbstractKernelOperator
from ._base import AbstractDualSolver, LinearSystem, Solution

INNER_RTOL = 1e-4
"""Tolerance of a float32 solve; each refinement reduces the defect by about that factor."""


class _Round(NamedTuple):
    """The state of a refinement: the answer so far, its defect, and the work done."""

    value: Array
    k_value: Array
    defect: Array
    relative: Array
    before: Array
    rounds: Array
    iterations: Array
    products: Array
    jitter: Array


class Refined(AbstractDualSolver):
    r"""Solve in float32, take the defect in float64, solve for the defect, add; repeat.

    $d = b - (\lambda I + WK)\,\Delta\alpha$ with $K\Delta\alpha$ accumulated in float64. Stops at
    `rtol`, when a round no longer halves the defect, or after `max_rounds`.
    """

    inner: AbstractDualSolver
    max_rounds: int = eqx.field(static=True, default=10)

    def __check_init__(self) -> None:
        check_instance(
            "Refined: inner", self.inner, AbstractDualSolver, "a solver, e.g. Cholesky()"
        )
        check_count("Refined: max_rounds", self.max_rounds)

    def solve(self, system: LinearSystem) -> Solution:
        op, b, rtol = system.op, system.b, system.rtol
        low_op = op.narrow
        narrow = low_op.dtype
        # A right-hand side or a defect of zero is divided by `tiny`, which gives zero instead of NaN.
        tiny = jnp.finfo(b.dtype).tiny
        size = jnp.maximum(jnp.linalg.norm(b), tiny)
        low_factor = _cast(system.factor, narrow)
        low_ridge = jnp.asarray(system.ridge, narrow)
        # No inner solve is tighter than the tolerance that was asked for.
        loose = jnp.maximum(rtol, INNER_RTOL).astype(narrow)

        def unfinished(at: _Round) -> Array:
            # A round that does not halve the defect has met a system that float32 cannot hold: more rounds
            # would cost products and change nothing.
            helping = (at.relative < 0.5 * at.before) | (at.rounds == 0)
            return (at.relative > rtol) & helping & (at.rounds < self.max_rounds)

        def advance(at: _Round) -> _Round:
            # The defect is brought to size one: as it shrinks, float32 would lose it.
            scale = jnp.maximum(at.relative * size, tiny)
            low = (at.defect / scale).astype(narrow)
            step = self.inner.solve(
                LinearSystem(
                    low_op, low_factor, low_ridge, low, low_op.mv(low), system.preconditioner, loose
                )
            )
            value = at.value + scale * step.value.astype(b.dtype)
            k_value = op.mv(value)
            defect = system.defect(value, k_value)
            relative = jnp.linalg.norm(defect) / size
            tried = _Round(
                value,
                k_value,
                defect,
                relative,
                at.relative,
                at.rounds + 1,
                at.iterations + step.iterations,
                # Beside the solve's own products: one for its right-hand side, one for the defect.
                at.products + step.products + 2,
                jnp.maximum(at.jitter, step.jitter.astype(b.dtype)),
            )
            # A round that made it worse counts, but its answer is dropped.
            kept = tried._replace(
                value=at.value, k_value=at.k_value, defect=at.defect, relative=at.relative
            )
            return jax.tree.map(lambda a, o: jnp.where(relative < at.relative, a, o), tried, kept)

        zero, one, count = jnp.zeros_like(b), jnp.ones((), b.dtype), jnp.asarray(0)
        start = _Round(zero, zero, b, one, one, count, count, count, 0 * one)
        end = jax.lax.while_loop(unfinished, advance, start)
        return Solution(
            value=end.value,
            k_value=end.k_value,
            reach=jnp.abs(end.value),
            iterations=end.iterations,
            residual=end.relative,
            converged=end.relative <= rtol,
            products=end.products,
            jitter=end.jitter,
        )

    def describe(self, op: AbstractKernelOperator) -> str:
        return f"{self.inner.describe(op.narrow)}, refined in float64"


def _cast(tree: Any, dtype: DTypeLike) -> Any:
    return jax.tree.map(
        lambda a: a.astype(dtype) if eqx.is_inexact_array(a) else a,
        tree,
    )
