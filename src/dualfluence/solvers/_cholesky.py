"""Direct solves, one for each structure of the kernel."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._support.compile import HIGHEST
from .._support.options import check_count
from ..losses import AbstractFactor, DiagonalFactor, SoftmaxFactor
from ..operators import AbstractKernelOperator, DenseOperator, KroneckerOperator, LowRankOperator
from ._base import AbstractDualSolver, LinearSystem, Solution

Inverse = Callable[[Array, Array], Array]
"""`(b, Kb) ↦ (λI + WK)⁻¹ b`."""

JITTER = 4.0
"""If rounding makes a matrix indefinite, `λ` of that step is raised by this many `eps` of its trace.
With twice this value, such steps are shorter; the answer and its certificate do not depend on it."""


class _Refinement(NamedTuple):
    """A solution, its residual, the residual before, and the number of refinements."""

    value: Array
    k_value: Array
    residual: Array
    before: Array
    rounds: Array


class Cholesky(AbstractDualSolver):
    r"""Factor the symmetric form, then refine once or more against the original equation.

    | kernel | loss curvature | factorisation |
    |---|---|---|
    | dense | any | one of size `n·c` |
    | `Σ ⊗ I` | same for all outputs (squared error) | one of size `n` |
    | `Σ ⊗ I` | diagonal (logistic) | `c` of size `n` |
    | `Σ ⊗ I` | softmax | `c + 1` of size `n` |
    | `ΦΦᵀ` | any | one of the rank's size (Woodbury) |

    Any other structure is made dense first, and `describe` says so.
    """

    refinements: int = eqx.field(static=True, default=1)
    max_refinements: int = eqx.field(static=True, default=6)

    def __check_init__(self) -> None:
        check_count("Cholesky: refinements", self.refinements, least=0)
        check_count("Cholesky: max_refinements", self.max_refinements, least=0)

    def solve(self, system: LinearSystem) -> Solution:
        op = system.op
        inverse, jitter = _factorise(op, system.factor, system.ridge)

        def refined(at: _Refinement) -> _Refinement:
            defect = system.defect(at.value, at.k_value)
            value = at.value + inverse(defect, op.mv(defect))
            k_value = op.mv(value)
            residual = system.relative_residual(value, k_value)
            return _Refinement(value, k_value, residual, at.residual, at.rounds + 1)

        def worth_it(at: _Refinement) -> Array:
            helping = at.residual < 0.5 * at.before
            return (at.residual > system.rtol) & helping & (at.rounds < self.max_refinements)

        value = inverse(system.b, system.k_b)
        k_value = op.mv(value)
        residual = system.relative_residual(value, k_value)
        at = _Refinement(value, k_value, residual, residual, jnp.asarray(0))
        for _ in range(self.refinements):
            at = refined(at)
        at = jax.lax.while_loop(worth_it, refined, at)
        return Solution(
            value=at.value,
            k_value=at.k_value,
            reach=jnp.abs(at.value),
            iterations=jnp.asarray(0),
            residual=at.residual,
            converged=system.is_stable(at.value, at.k_value),
            products=1 + 2 * at.rounds,
            jitter=jitter,
        )

    def describe(self, op: AbstractKernelOperator) -> str:
        densified = not isinstance(op, (DenseOperator, KroneckerOperator, LowRankOperator))
        name = super().describe(op)
        return f"{name} of {type(op).__name__} made dense" if densified else name


def _factorise(
    op: AbstractKernelOperator, factor: AbstractFactor, ridge: Array
) -> tuple[Inverse, Array]:
    """The function `(b, Kb) ↦ (λI + WK)⁻¹ b` from the cheapest factorisation for this structure, and
    its jitter."""
    if isinstance(op, KroneckerOperator) and isinstance(factor, DiagonalFactor):
        return _kronecker_diagonal(op, factor, ridge)
    if isinstance(op, KroneckerOperator) and isinstance(factor, SoftmaxFactor):
        return _kronecker_softmax(op, factor, ridge)
    if isinstance(op, LowRankOperator):
        return _low_rank(op, factor, ridge)
    return _dense(op, factor, ridge)


def _with_jitter(
    factors_at: Callable[[Array], Any], ridge: Array, trace: Array
) -> tuple[Any, Array]:
    """Cholesky factors at `ridge`, or at a larger ridge if rounding made a matrix indefinite.

    The larger ridge replaces `λ` in the whole step. The step is then shorter and still goes downhill.
    """
    factors = factors_at(ridge)
    failed = jnp.stack([jnp.isnan(part).any() for part in jax.tree.leaves(factors)]).any()
    larger = ridge + JITTER * jnp.finfo(ridge.dtype).eps * trace
    return jax.lax.cond(
        failed, lambda: (factors_at(larger), larger), lambda: (factors, jnp.asarray(ridge))
    )


def _symmetric_form(
    solve_b: Callable[[Array], Array], factor: AbstractFactor, ridge: Array
) -> Inverse:
    """`Δα = (b − R B⁻¹ RᵀK b)/λ`."""
    return lambda b, k_b: (b - factor.mv(solve_b(factor.rmv(k_b)))) / ridge


def _columns(chols: Float[Array, "k n n"], v: Float[Array, "n k"]) -> Float[Array, "n k"]:
    """Each column of `v` solved with its own factor, one after the other.

    A batched solve copies all factors into another layout, and on a GPU copies them again for every
    solve in the program.
    """
    solve = lambda pair: jax.scipy.linalg.cho_solve((pair[0], True), pair[1])  # noqa: E731
    return jax.lax.map(solve, (chols, v.T)).T


def _dense(
    op: AbstractKernelOperator, factor: AbstractFactor, ridge: Array
) -> tuple[Inverse, Array]:
    n, c = op.num_points, op.num_outputs

    def cholesky(ridge: Array) -> Array:
        half = factor.rmv(op.dense().reshape(n, c, n * c)).reshape(n * c, n * c)
        B = factor.rmv(half.T.reshape(n, c, n * c)).reshape(n * c, n * c)
        return jnp.linalg.cholesky(B + ridge * jnp.eye(n * c, dtype=B.dtype))

    trace = jnp.sum(factor.hess_diagonal() * op.diagonal())
    chol, used = _with_jitter(cholesky, ridge, trace)

    def solve_b(v: Array) -> Array:
        return jax.scipy.linalg.cho_solve((chol, True), v.reshape(-1)).reshape(v.shape)

    return _symmetric_form(solve_b, factor, used), used - ridge


def _scaled_choleskys(S: Array, roots: Float[Array, "k n"], ridge: Array) -> Float[Array, "k n n"]:
    """Factors of `λI + diag(r)Σdiag(r)` for each row `r`, one after the other to save memory."""
    eye = jnp.eye(S.shape[0], dtype=S.dtype)
    return jax.lax.map(
        lambda root: jnp.linalg.cholesky(ridge * eye + root[:, None] * S * root[None, :]), roots
    )


def _kronecker_diagonal(
    op: KroneckerOperator, factor: DiagonalFactor, ridge: Array
) -> tuple[Inverse, Array]:
    """`B` splits by output; outputs with equal curvature share one factor."""
    scales = factor.scale.T
    trace = jnp.max(jnp.dot(scales**2, jnp.diagonal(op.matrix), precision=HIGHEST))
    chols, used = _with_jitter(lambda r: _scaled_choleskys(op.matrix, scales, r), ridge, trace)

    def solve_b(v: Array) -> Array:
        if scales.shape[0] == 1:
            return jax.scipy.linalg.cho_solve((chols[0], True), v)
        return _columns(chols, v)

    return _symmetric_form(solve_b, factor, used), used - ridge


def _kronecker_softmax(
    op: KroneckerOperator, factor: SoftmaxFactor, ridge: Array
) -> tuple[Inverse, Array]:
    r"""`c + 1` factorisations of size `n`, as in multi-class Laplace approximation for GPs.

    With `D = diag(w_i p_ia)` and `E_a = (Σ/λ + D_a⁻¹)⁻¹`, the softmax Hessian's rank-one terms
    leave `(Σ⊗I/λ + W⁺)⁻¹ = E − E𝟙(Σ_a E_a)⁻¹𝟙ᵀE` (Rasmussen & Williams, section 3.5).
    """
    S = op.matrix
    roots = (factor.root_weights * factor.root_probs).T
    # A removed point has a zero row and column here; a one on its diagonal keeps the sum
    # invertible and touches nothing, because E is zero there too.
    gone = (factor.root_weights[:, 0] == 0).astype(S.dtype)

    def factors(ridge: Array) -> tuple[Array, Array]:
        chols = _scaled_choleskys(S, roots, ridge)

        def add_e(total: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
            chol, root = pair
            half = jax.scipy.linalg.solve_triangular(chol, jnp.diag(root), lower=True)
            return total + ridge * jnp.dot(half.T, half, precision=HIGHEST), None

        total, _ = jax.lax.scan(add_e, jnp.diag(gone), (chols, roots))
        return chols, jnp.linalg.cholesky(total)

    trace = jnp.max(jnp.dot(roots**2, jnp.diagonal(S), precision=HIGHEST))
    (chols, chol_total), used = _with_jitter(factors, ridge, trace)

    def times_e(v: Array) -> Array:
        return used * roots.T * _columns(chols, roots.T * v)

    def inverse(b: Array, k_b: Array) -> Array:
        e = times_e(k_b / used)
        mean = jax.scipy.linalg.cho_solve((chol_total, True), jnp.sum(e, axis=1))
        correction = times_e(jnp.broadcast_to(mean[:, None], e.shape))
        return (b - e + correction) / used

    return inverse, used - ridge


def _low_rank(op: LowRankOperator, factor: AbstractFactor, ridge: Array) -> tuple[Inverse, Array]:
    """On the side of the rank: `v = ΦᵀΔα` solves `(λI + ΦᵀWΦ)v = Φᵀb`, and `Δα = (b − WΦv)/λ`."""
    flat = op.features.reshape(-1, op.features.shape[2])
    A = factor.rmv(op.features).reshape(flat.shape)
    gram = jnp.dot(A.T, A, precision=HIGHEST)

    def cholesky(ridge: Array) -> Array:
        return jnp.linalg.cholesky(gram + ridge * jnp.eye(A.shape[1], dtype=A.dtype))

    chol, used = _with_jitter(cholesky, ridge, jnp.trace(gram))

    def inverse(b: Array, k_b: Array) -> Array:
        inner = jnp.dot(flat.T, b.reshape(-1), precision=HIGHEST)
        v = jax.scipy.linalg.cho_solve((chol, True), inner)
        outputs = jnp.dot(flat, v, precision=HIGHEST).reshape(b.shape)
        return (b - factor.hess_mv(outputs)) / used

    return inverse, used - ridge
