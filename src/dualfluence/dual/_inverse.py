r"""`C = B⁻¹` with `B = λI + RᵀKR` as a product of halves, for one `λ` or for all of them."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._support.compile import filter_jit
from ..losses import AbstractFactor
from ._triangular import inverse_transpose, solve_lower, upper_mm

HIGHEST = jax.lax.Precision.HIGHEST


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
        self, points: Int[Array, " k"], r: int, ridge: Float[Array, " k"]
    ) -> Float[Array, "k r m"]:
        """The columns of `X` that belong to these points, `r` each, as rows."""


class CholeskySolves(AbstractInverse):
    """`X = L⁻¹` for one ridge, by solves."""

    chol: Float[Array, "m m"]

    def half(self, h: Float[Array, "m k"], ridge: Float[Array, " k"]) -> Float[Array, "m k"]:
        return solve_lower(self.chol, h)

    def back(self, u: Float[Array, "m k"], ridge: Float[Array, " k"]) -> Float[Array, "m k"]:
        return solve_lower(self.chol, u, transpose=True)

    def columns(
        self, points: Int[Array, " k"], r: int, ridge: Float[Array, " k"]
    ) -> Float[Array, "k r m"]:
        m, k = self.chol.shape[0], points.size
        rows = (points[:, None] * r + jnp.arange(r)[None, :]).reshape(-1)
        units = jnp.zeros((m, k * r), self.chol.dtype).at[rows, jnp.arange(k * r)].set(1)
        return solve_lower(self.chol, units).T.reshape(k, r, m)


class CholeskyInverse(AbstractInverse):
    """`X = L⁻¹` for one ridge, held as `Xᵀ`."""

    transposed: Float[Array, "m m"]

    def half(self, h: Float[Array, "m k"], ridge: Float[Array, " k"]) -> Float[Array, "m k"]:
        return upper_mm(self.transposed, h, transpose=True)

    def back(self, u: Float[Array, "m k"], ridge: Float[Array, " k"]) -> Float[Array, "m k"]:
        return upper_mm(self.transposed, u)

    def columns(
        self, points: Int[Array, " k"], r: int, ridge: Float[Array, " k"]
    ) -> Float[Array, "k r m"]:
        m = self.transposed.shape[0]
        return self.transposed.reshape(m // r, r, m)[points]


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
        self, points: Int[Array, " k"], r: int, ridge: Float[Array, " k"]
    ) -> Float[Array, "k r m"]:
        m = self.vectors.shape[0]
        return self._scale(ridge).T[:, None, :] * self.vectors.reshape(m // r, r, m)[points]


@filter_jit
def folded(K: Float[Array, "m m"], c: int, factor: AbstractFactor) -> Float[Array, "s s"]:
    """`RᵀKR`."""
    m = K.shape[0]
    half = factor.rmv(K.reshape(m // c, c, m)).reshape(-1, m)
    size = half.shape[0]
    return factor.rmv(half.T.reshape(m // c, c, size)).reshape(size, size)


def cholesky_inverse(
    K: Float[Array, "m m"], c: int, factor: AbstractFactor, ridge: float, *, whole: bool
) -> AbstractInverse:
    """One factor for one ridge; `whole` inverts it too, which diagonal blocks of `B⁻¹` need."""
    chol = cholesky(K, c, factor, jnp.asarray(ridge, K.dtype))
    return CholeskyInverse(_inverse_transpose(chol)) if whole else CholeskySolves(chol)


_inverse_transpose = filter_jit(inverse_transpose)


def spectral_inverse(K: Float[Array, "m m"], c: int, factor: AbstractFactor) -> SpectralInverse:
    """One eigendecomposition for every ridge; about ten times the work of a Cholesky factor."""
    return SpectralInverse(*_eigh(K, c, factor))


@filter_jit
def cholesky(
    K: Float[Array, "m m"], c: int, factor: AbstractFactor, ridge: Float[Array, ""]
) -> Float[Array, "s s"]:
    """The factor of `B`; above the diagonal it has what was there before."""
    B = folded(K, c, factor)
    diagonal = jnp.arange(B.shape[0])
    return jax.scipy.linalg.cho_factor(B.at[diagonal, diagonal].add(ridge), lower=True)[0]


@filter_jit
def _eigh(K: Array, c: int, factor: AbstractFactor) -> tuple[Array, Array]:
    B = folded(K, c, factor)
    return jnp.linalg.eigh(0.5 * (B + B.T))
