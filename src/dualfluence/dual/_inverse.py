r"""`C = B⁻¹` with `B = λI + RᵀKR` as a product of halves, for one `λ` or for all of them."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._support.compile import filter_jit
from ..losses import AbstractFactor

HIGHEST = jax.lax.Precision.HIGHEST

LEAF = 256
"""Size at which the inverse of a triangular factor is no longer split."""


class AbstractInverse(eqx.Module):
    """`C = XᵀX`, where `half` multiplies by `X` and `back` by its transpose."""

    @abc.abstractmethod
    def half(self, h: Float[Array, "m k"], ridge: Float[Array, " k"]) -> Float[Array, "m k"]:
        """`X h`; each column has a ridge of its own where the form allows for it."""

    @abc.abstractmethod
    def back(self, u: Float[Array, "m k"], ridge: Float[Array, " k"]) -> Float[Array, "m k"]:
        """`Xᵀ u`."""

    @abc.abstractmethod
    def columns(
        self, points: Int[Array, " k"], c: int, ridge: Float[Array, " k"]
    ) -> Float[Array, "m k c"]:
        """The columns of `X` that belong to these points."""


class CholeskyInverse(AbstractInverse):
    """`X = L⁻¹` for one ridge."""

    chol: Float[Array, "m m"]
    inverse_chol: Float[Array, "m m"] | None

    def half(self, h: Float[Array, "m k"], ridge: Float[Array, " k"]) -> Float[Array, "m k"]:
        return jax.scipy.linalg.solve_triangular(self.chol, h, lower=True)

    def back(self, u: Float[Array, "m k"], ridge: Float[Array, " k"]) -> Float[Array, "m k"]:
        return jax.scipy.linalg.solve_triangular(self.chol, u, lower=True, trans=1)

    def columns(
        self, points: Int[Array, " k"], c: int, ridge: Float[Array, " k"]
    ) -> Float[Array, "m k c"]:
        assert self.inverse_chol is not None
        m = self.chol.shape[0]
        return self.inverse_chol.reshape(m, m // c, c)[:, points]


class SpectralInverse(AbstractInverse):
    """`X = (Λ + λ_i)^{-1/2} Qᵀ` from `RᵀKR = QΛQᵀ`: any ridge, column by column."""

    values: Float[Array, " m"]
    vectors: Float[Array, "m m"]

    def _scale(self, ridge: Float[Array, " k"]) -> Float[Array, "m k"]:
        return 1 / jnp.sqrt(jnp.maximum(self.values, 0)[:, None] + ridge[None, :])

    def half(self, h: Float[Array, "m k"], ridge: Float[Array, " k"]) -> Float[Array, "m k"]:
        return self._scale(ridge) * jnp.dot(self.vectors.T, h, precision=HIGHEST)

    def back(self, u: Float[Array, "m k"], ridge: Float[Array, " k"]) -> Float[Array, "m k"]:
        return jnp.dot(self.vectors, self._scale(ridge) * u, precision=HIGHEST)

    def columns(
        self, points: Int[Array, " k"], c: int, ridge: Float[Array, " k"]
    ) -> Float[Array, "m k c"]:
        m = self.vectors.shape[0]
        rows = self.vectors.reshape(m // c, c, m)[points]
        return self._scale(ridge)[:, :, None] * jnp.transpose(rows, (2, 0, 1))


@filter_jit
def folded(K: Float[Array, "m m"], c: int, factor: AbstractFactor) -> Float[Array, "m m"]:
    """`RᵀKR`."""
    m = K.shape[0]
    half = factor.rmv(K.reshape(m // c, c, m)).reshape(m, m)
    return factor.rmv(half.T.reshape(m // c, c, m)).reshape(m, m)


def cholesky_inverse(
    K: Float[Array, "m m"], c: int, factor: AbstractFactor, ridge: float, *, whole: bool
) -> CholeskyInverse:
    """One factor for one ridge; `whole` inverts it too, which diagonal blocks of `B⁻¹` need."""
    chol = _cholesky(K, c, factor, jnp.asarray(ridge, K.dtype))
    return CholeskyInverse(chol, invert_lower(chol) if whole else None)


def spectral_inverse(K: Float[Array, "m m"], c: int, factor: AbstractFactor) -> SpectralInverse:
    """One eigendecomposition for every ridge; about ten times the work of a Cholesky factor."""
    return SpectralInverse(*_eigh(K, c, factor))


@filter_jit
def _cholesky(K: Array, c: int, factor: AbstractFactor, ridge: Array) -> Array:
    B = folded(K, c, factor)
    # cho_factor leaves the upper triangle as it was; nothing here reads it.
    return jax.scipy.linalg.cho_factor(B + ridge * jnp.eye(B.shape[0], dtype=B.dtype), lower=True)[
        0
    ]


@filter_jit
def _eigh(K: Array, c: int, factor: AbstractFactor) -> tuple[Array, Array]:
    B = folded(K, c, factor)
    return jnp.linalg.eigh(0.5 * (B + B.T))


@filter_jit
def invert_lower(chol: Float[Array, "m m"]) -> Float[Array, "m m"]:
    r"""`L⁻¹` by halves: `[[A⁻¹, 0], [−D⁻¹ L₂₁ A⁻¹, D⁻¹]]`.

    A third of `m³` operations, as many as the factor itself took; a solve against the identity
    takes three times that.
    """
    m = chol.shape[0]
    if m <= LEAF:
        eye = jnp.eye(m, dtype=chol.dtype)
        return jax.scipy.linalg.solve_triangular(chol, eye, lower=True)
    h = m // 2
    A, D, low = chol[:h, :h], chol[h:, h:], chol[h:, :h]
    right = jax.scipy.linalg.solve_triangular(A, low.T, lower=True, trans=1).T
    corner = -jax.scipy.linalg.solve_triangular(D, right, lower=True)
    zero = jnp.zeros((h, m - h), chol.dtype)
    return jnp.block([[invert_lower(A), zero], [corner, invert_lower(D)]])
