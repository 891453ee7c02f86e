r"""`C = (λI + A)⁻¹` of a symmetric `A ≽ 0` as a product of halves, for one `λ` or for all of them."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._support.compile import HIGHEST
from ._triangular import solve_lower, upper_mm


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
    """`X = (Λ + λ_i)^{-1/2} Qᵀ` from `A = QΛQᵀ`: any ridge, column by column."""

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


def shifted_cholesky(A: Float[Array, "m m"], ridge: Float[Array, ""]) -> Float[Array, "m m"]:
    """The factor of `λI + A`; above the diagonal it has what was there before."""
    diagonal = jnp.arange(A.shape[0])
    return jax.scipy.linalg.cho_factor(A.at[diagonal, diagonal].add(ridge), lower=True)[0]


def spectrum(A: Float[Array, "m m"]) -> tuple[Float[Array, " m"], Float[Array, "m m"]]:
    """Eigenvalues and eigenvectors of `A`, symmetric but for rounding."""
    return jnp.linalg.eigh(0.5 * (A + A.T))
