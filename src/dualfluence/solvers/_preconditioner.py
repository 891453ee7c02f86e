r"""Preconditioners for `B = λI + RᵀKR`, built once from `K` and reused for every `R` and edit."""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from .._support.compile import filter_jit
from ..losses import AbstractFactor
from ..operators import AbstractKernelOperator

Apply = Callable[[Float[Array, "n c"]], Float[Array, "n c"]]


class AbstractPreconditioner(eqx.Module):
    """Approximates `B⁻¹` for whatever factor `R` the current step has."""

    @abc.abstractmethod
    def inverse(self, factor: AbstractFactor, ridge: Float[Array, ""]) -> Apply:
        """`v ↦ P⁻¹v` with `P ≈ λI + RᵀKR`."""


class NoPreconditioner(AbstractPreconditioner):
    """`P = I`."""

    def inverse(self, factor: AbstractFactor, ridge: Float[Array, ""]) -> Apply:
        return lambda v: v


class SpectralPreconditioner(AbstractPreconditioner):
    r"""From a low-rank `K ≈ LLᵀ`: `P = λI + FFᵀ` with `F = RᵀL`, inverted by Woodbury.

    `L` knows nothing of weights, labels or removed points, so one sketch of `K` serves every later
    request: each costs one `r×r` Cholesky factor and, per iteration, two thin products.
    """

    features: Float[Array, "n c r"]

    def inverse(self, factor: AbstractFactor, ridge: Float[Array, ""]) -> Apply:
        F = factor.rmv(self.features).reshape(-1, self.features.shape[2])
        gram = jnp.dot(F.T, F, precision="highest")
        eye = jnp.eye(gram.shape[0], dtype=gram.dtype)
        # The small inverse once: an application is then three thin products, no triangular solve.
        # An approximate inverse is all that a preconditioner has to be.
        chol = jnp.linalg.cholesky(gram + ridge * eye)
        root = jax.scipy.linalg.solve_triangular(chol, eye, lower=True)

        def apply(v: Float[Array, "n c"]) -> Float[Array, "n c"]:
            flat = v.reshape(-1)
            inner = jnp.dot(root, jnp.dot(F.T, flat, precision="highest"), precision="highest")
            inner = jnp.dot(F, jnp.dot(root.T, inner, precision="highest"), precision="highest")
            return ((flat - inner) / ridge).reshape(v.shape)

        return apply


@filter_jit
def spectral_preconditioner(
    op: AbstractKernelOperator, rank: int, key: PRNGKeyArray, power_steps: int = 1
) -> SpectralPreconditioner:
    r"""Nyström sketch of `K` with `rank` columns after `power_steps` rounds of subspace iteration.

    $K \approx KQ(Q^\top KQ)^{-1}Q^\top K$. Cost: `power_steps + 1` products with `rank` columns,
    which read a dense `K` as often as that many single products.
    """
    n, c = op.num_points, op.num_outputs
    dtype = op.dtype
    Q = jax.random.normal(key, (n * c, rank), dtype)

    def times_k(columns: Array) -> Array:
        return op.mm(columns.reshape(n, c, rank)).reshape(n * c, rank)

    for _ in range(power_steps):
        Q = times_k(jnp.linalg.qr(Q)[0])
    Q = jnp.linalg.qr(Q)[0]
    KQ = times_k(Q)
    # A shift of rounding size keeps the small Gram matrix positive definite.
    shift = jnp.finfo(dtype).eps * jnp.linalg.norm(KQ)
    KQ = KQ + shift * Q
    gram = jnp.dot(Q.T, KQ, precision="highest")
    chol = jnp.linalg.cholesky(0.5 * (gram + gram.T))
    L = jax.scipy.linalg.solve_triangular(chol, KQ.T, lower=True).T
    return SpectralPreconditioner(L.reshape(n, c, rank))
