"""Preconditioned conjugate gradients on the symmetric form."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._support.options import check_count
from ._base import AbstractDualSolver, LinearSystem, Solution
from ._preconditioner import any_column

Vector = Float[Array, "..."]

CANCELLATION = 16.0
"""If the terms of a solution are this many times larger than the solution, `K·solution` is computed
again as one product. With twice this value, the sum of products may lose one more bit before that."""

PRODUCT_CANCELLATION = {64: 1e2, 32: 1e4}
"""The same limit, in bits, if only the products cancel. Their error stays in the outputs of the
training points, so a tenfold value would cost these one more digit. In float32 a request should be
quick."""


class CGResult(eqx.Module):
    """`x` with `Ax ≈ b`; `extra` is the sum of the operator's side products along the way."""

    x: Vector
    extra: Any
    iterations: Int[Array, ""]
    residual: Float[Array, ""]
    converged: Bool[Array, ""]
    indefinite: Bool[Array, ""]


def conjugate_gradients(
    mv: Callable[[Vector], tuple[Vector, Vector]],
    b: Vector,
    *,
    rtol: Float[Array, ""] | float,
    max_steps: int,
    precondition: Callable[[Vector], Vector] = lambda v: v,
    measure: Callable[[Vector], Float[Array, ""]] | None = None,
) -> CGResult:
    r"""Solve `Ax = b`, `A` symmetric positive definite, to `measure(b − Ax) ≤ rtol`.

    By default `measure` is the norm of the residual divided by the norm of `b`.

    `mv(p)` returns `Ap` and a side product, linear in `p`; the side products are summed with the same
    step sizes as `x`. This gives `K R z` from products that CG computes anyway; a general-purpose
    solver would need one more pass over `K`. It stops early with the flag `indefinite` when it finds a
    direction of non-positive curvature.
    """
    tiny = jnp.finfo(b.dtype).tiny
    if measure is None:
        # A right-hand side of zero has the residual 0/tiny = 0, and not a step is taken.
        scale = jnp.maximum(jnp.linalg.norm(b), tiny)
        measure = lambda r: jnp.linalg.norm(r) / scale  # noqa: E731
    _, side = jax.eval_shape(mv, b)
    z = precondition(b)
    start = (
        jnp.zeros_like(b),
        jnp.zeros(side.shape, side.dtype),
        b,
        z,
        jnp.sum(b * z),
        jnp.asarray(0),
        measure(b),
        jnp.asarray(False),
    )

    def unfinished(carry: tuple[Any, ...]) -> Array:
        *_, step, residual, indefinite = carry
        # A residual of NaN ends the loop too, and `converged` is false then.
        return (residual > rtol) & (step < max_steps) & ~indefinite

    def advance(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        x, extra, r, p, rz, step, _, _ = carry
        Ap, side_p = mv(p)
        curvature = jnp.sum(p * Ap)
        # Either of them can only fail by rounding or where K is not a kernel: stop where we are.
        bad = ~((curvature > 0) & (rz > 0))
        # A step of zero keeps the last good answer. The inner `where` divides by one, so that no NaN arises.
        a = jnp.where(bad, 0, rz / jnp.where(bad, 1, curvature))
        r = r - a * Ap
        z = precondition(r)
        rz_new = jnp.sum(r * z)
        # `rz` is positive unless `bad`, where the direction is not used any more: `tiny` only avoids 0/0.
        p_new = z + (rz_new / jnp.maximum(rz, tiny)) * p
        return x + a * p, extra + a * side_p, r, p_new, rz_new, step + 1, measure(r), bad

    x, extra, _, _, _, steps, residual, bad = jax.lax.while_loop(unfinished, advance, start)
    return CGResult(x, extra, steps, residual, residual <= rtol, bad)


class CG(AbstractDualSolver):
    r"""Conjugate gradients on `B = λI + RᵀKR`: one product with `K` per iteration.

    $\Delta\alpha = (b - Rz)/\lambda$ with $Bz = R^\top Kb$. Eigenvalues of `B` are at least `λ`; the
    preconditioner from the fit reduces the large ones.
    """

    max_steps: int = eqx.field(static=True, default=1000)

    def __check_init__(self) -> None:
        check_count("CG: max_steps", self.max_steps)

    def solve(self, system: LinearSystem) -> Solution:
        op, factor, ridge, b = system.op, system.factor, system.ridge, system.b

        def mv(p: Vector) -> tuple[Vector, Vector]:
            k_r_p = op.mv(factor.mv(p))
            return ridge * p + factor.rmv(k_r_p), k_r_p

        # The residual of (★) is R r/λ for a residual r here, and that is what has to be small
        # next to b: measured on r itself, a loose solve need not reduce the gradient at all.
        scale = jnp.maximum(ridge * jnp.linalg.norm(b), jnp.finfo(b.dtype).tiny)
        result = conjugate_gradients(
            mv,
            factor.rmv(system.k_b),
            measure=lambda r: jnp.linalg.norm(factor.mv(r)) / scale,
            rtol=system.rtol,
            max_steps=self.max_steps,
            precondition=system.preconditioner.inverse(factor, ridge),
        )
        r_z = factor.mv(result.x)
        value = (b - r_z) / ridge
        terms = (jnp.abs(b) + jnp.abs(r_z)) / ridge
        # Where the terms cancel, value keeps the error of that and the summed product another: the
        # two would be of different models. A product of its own is then worth its price.
        summed = (system.k_b - result.extra) / ridge
        cancelled = jnp.linalg.norm(terms) > CANCELLATION * jnp.linalg.norm(value)
        limit = PRODUCT_CANCELLATION[64 if jnp.finfo(b.dtype).bits == 64 else 32]
        lost = jnp.linalg.norm(system.k_b) > limit * ridge * jnp.linalg.norm(summed)
        cancelled = cancelled | lost
        k_value, reach = jax.lax.cond(
            any_column(cancelled),
            lambda: (
                jnp.where(cancelled, op.mv(value), summed),
                jnp.where(cancelled, jnp.abs(value), terms),
            ),
            lambda: (summed, terms),
        )
        return Solution(
            value=value,
            k_value=k_value,
            reach=reach,
            iterations=result.iterations,
            residual=result.residual,
            converged=result.converged & ~result.indefinite,
            products=result.iterations + jnp.where(cancelled, 1, 0),
            jitter=jnp.zeros((), b.dtype),
        )
