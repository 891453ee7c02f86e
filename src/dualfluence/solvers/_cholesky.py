"""Direct solves; each kernel structure has its own."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..losses import AbstractFactor, DiagonalFactor, SoftmaxFactor
from ..operators import AbstractKernelOperator, DenseOperator, KroneckerOperator, LowRankOperator
from ._base import AbstractDualSolver, Solution, relative_residual
from ._preconditioner import AbstractPreconditioner

HIGHEST = jax.lax.Precision.HIGHEST

Inverse = Callable[[Array, Array], Array]
"""`(b, Kb) ↦ (λI + WK)⁻¹ b`."""


class Cholesky(AbstractDualSolver):
    r"""Factor the symmetric form, then refine once or more against the original equation.

    | kernel | loss curvature | factorisation |
    |---|---|---|
    | dense | any | one of size `n·c` |
    | `Σ ⊗ I` | same for all outputs (squared error) | one of size `n` |
    | `Σ ⊗ I` | diagonal (logistic) | `c` of size `n` |
    | `Σ ⊗ I` | softmax | `c + 1` of size `n` |
    | `ΦΦᵀ` | any | one of the rank's size (Woodbury) |

    Anything else is made dense first, which `describe` says.
    """

    refinements: int = eqx.field(static=True, default=1)

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
        inverse = _factorise(op, factor, ridge)
        value = inverse(b, k_b)
        k_value = op.mv(value)
        for _ in range(self.refinements):
            defect = b - ridge * value - factor.hess_mv(k_value)
            value = value + inverse(defect, op.mv(defect))
            k_value = op.mv(value)
        residual = relative_residual(op, factor, ridge, b, value, k_value)
        return Solution(
            value=value,
            k_value=k_value,
            iterations=jnp.asarray(0),
            residual=residual,
            converged=jnp.isfinite(residual),
            products=jnp.asarray(1 + 2 * self.refinements),
        )

    def describe(self, op: AbstractKernelOperator) -> str:
        densified = not isinstance(op, (DenseOperator, KroneckerOperator, LowRankOperator))
        return f"Cholesky of {type(op).__name__} made dense" if densified else "Cholesky"


def _factorise(op: AbstractKernelOperator, factor: AbstractFactor, ridge: Array) -> Inverse:
    """`(b, Kb) ↦ (λI + WK)⁻¹ b` from the cheapest factorisation for this structure."""
    if isinstance(op, KroneckerOperator) and isinstance(factor, DiagonalFactor):
        return _kronecker_diagonal(op, factor, ridge)
    if isinstance(op, KroneckerOperator) and isinstance(factor, SoftmaxFactor):
        return _kronecker_softmax(op, factor, ridge)
    if isinstance(op, LowRankOperator):
        return _low_rank(op, factor, ridge)
    return _dense(op, factor, ridge)


def _symmetric_form(
    solve_b: Callable[[Array], Array], factor: AbstractFactor, ridge: Array
) -> Inverse:
    """`Δα = (b − R B⁻¹ RᵀK b)/λ`."""
    return lambda b, k_b: (b - factor.mv(solve_b(factor.rmv(k_b)))) / ridge


def _dense(op: AbstractKernelOperator, factor: AbstractFactor, ridge: Array) -> Inverse:
    n, c = op.num_points, op.num_outputs
    half = factor.rmv(op.dense().reshape(n, c, n * c)).reshape(n * c, n * c)
    B = factor.rmv(half.T.reshape(n, c, n * c)).reshape(n * c, n * c)
    B = B + ridge * jnp.eye(n * c, dtype=B.dtype)
    chol = jax.scipy.linalg.cho_factor(B, lower=True)
    return _symmetric_form(
        lambda v: jax.scipy.linalg.cho_solve(chol, v.reshape(-1)).reshape(v.shape), factor, ridge
    )


def _kronecker_diagonal(op: KroneckerOperator, factor: DiagonalFactor, ridge: Array) -> Inverse:
    """`B` splits by output; outputs with equal curvature share one factor."""
    scales = factor.scale.T

    def cholesky(scale: Array) -> Array:
        B = scale[:, None] * op.matrix * scale[None, :]
        return jnp.linalg.cholesky(B + ridge * jnp.eye(B.shape[0], dtype=B.dtype))

    chols = jax.lax.map(cholesky, scales)

    def solve_b(v: Array) -> Array:
        if scales.shape[0] == 1:
            return jax.scipy.linalg.cho_solve((chols[0], True), v)
        return _solve_each(chols, v.T).T

    return _symmetric_form(solve_b, factor, ridge)


def _kronecker_softmax(op: KroneckerOperator, factor: SoftmaxFactor, ridge: Array) -> Inverse:
    r"""`c + 1` factorisations of size `n`, as in multi-class Laplace approximation for GPs.

    With `D = diag(w_i p_ia)` and `E_a = (Σ/λ + D_a⁻¹)⁻¹`, the softmax Hessian's rank-one terms
    leave `(Σ⊗I/λ + W⁺)⁻¹ = E − E𝟙(Σ_a E_a)⁻¹𝟙ᵀE` (Rasmussen & Williams, section 3.5).
    """
    S = op.matrix
    n = S.shape[0]
    eye = jnp.eye(n, dtype=S.dtype)
    roots = (factor.root_weights * factor.root_probs).T

    def cholesky(root: Array) -> Array:
        return jnp.linalg.cholesky(ridge * eye + root[:, None] * S * root[None, :])

    chols = jax.lax.map(cholesky, roots)

    def times_e(v: Array) -> Array:
        return ridge * (roots * _solve_each(chols, roots * v.T)).T

    def add_e(total: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
        chol, root = pair
        half = jax.scipy.linalg.solve_triangular(chol, jnp.diag(root), lower=True)
        return total + ridge * jnp.dot(half.T, half, precision=HIGHEST), None

    # A removed point has a zero row and column here; a one on its diagonal keeps the sum
    # invertible and touches nothing, because E is zero there too.
    gone = (factor.root_weights[:, 0] == 0).astype(S.dtype)
    total, _ = jax.lax.scan(add_e, jnp.diag(gone), (chols, roots))
    chol_total = (jnp.linalg.cholesky(total), True)

    def inverse(b: Array, k_b: Array) -> Array:
        e = times_e(k_b / ridge)
        mean = jax.scipy.linalg.cho_solve(chol_total, jnp.sum(e, axis=1))
        correction = times_e(jnp.broadcast_to(mean[:, None], e.shape))
        return (b - e + correction) / ridge

    return inverse


def _solve_each(chols: Float[Array, "k n n"], columns: Float[Array, "k n"]) -> Float[Array, "k n"]:
    """`A_a⁻¹ u_a` for every output, one factor at a time.

    A batched solve holds all factors once more in its own layout, and on a GPU once more for every
    solve in the program.
    """
    return jax.lax.map(
        lambda pair: jax.scipy.linalg.cho_solve((pair[0], True), pair[1]), (chols, columns)
    )


def _low_rank(op: LowRankOperator, factor: AbstractFactor, ridge: Array) -> Inverse:
    """Woodbury: `B⁻¹ = (I − A(λI + AᵀA)⁻¹Aᵀ)/λ` with `A = RᵀΦ`."""
    A = factor.rmv(op.features).reshape(-1, op.features.shape[2])
    gram = jnp.dot(A.T, A, precision=HIGHEST) + ridge * jnp.eye(A.shape[1], dtype=A.dtype)
    chol = jax.scipy.linalg.cho_factor(gram, lower=True)

    def solve_b(v: Array) -> Array:
        flat = v.reshape(-1)
        inner = jax.scipy.linalg.cho_solve(chol, jnp.dot(A.T, flat, precision=HIGHEST))
        return ((flat - jnp.dot(A, inner, precision=HIGHEST)) / ridge).reshape(v.shape)

    return _symmetric_form(solve_b, factor, ridge)
