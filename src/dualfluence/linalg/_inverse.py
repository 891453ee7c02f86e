r"""`C = (λI + A)⁻¹` of a symmetric `A ≽ 0` as a product of halves, for one `λ` or for all of them."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._support.compile import HIGHEST

LEAF = 512
"""Size at which a triangle is no longer split. Doubled, more of the work runs on half-empty blocks;
halved, the blocks are too small for fast products."""


def upper_mm(
    U: Float[Array, "m m"], v: Float[Array, "m k"], *, transpose: bool = False
) -> Float[Array, "m k"]:
    """`U v`, or `Uᵀ v`, for an upper triangular `U` with zeros below its diagonal."""
    m = U.shape[0]
    if m <= LEAF:
        return _dot(U.T if transpose else U, v)
    h = m // 2
    A, D, corner = U[:h, :h], U[h:, h:], U[:h, h:]
    top, bottom = (upper_mm(t, u, transpose=transpose) for t, u in ((A, v[:h]), (D, v[h:])))
    if transpose:
        return jnp.concatenate([top, bottom + _dot(corner.T, v[:h])])
    return jnp.concatenate([top + _dot(corner, v[h:]), bottom])


def solve_lower(
    chol: Float[Array, "m m"], v: Float[Array, "m k"], *, transpose: bool = False
) -> Float[Array, "m k"]:
    """`L⁻¹ v`, or `L⁻ᵀ v`. Nothing above the diagonal is read."""
    m = chol.shape[0]
    if m <= LEAF:
        return jax.scipy.linalg.solve_triangular(chol, v, lower=True, trans=int(transpose))
    h = m // 2
    A, D, low = chol[:h, :h], chol[h:, h:], chol[h:, :h]
    if transpose:
        bottom = solve_lower(D, v[h:], transpose=True)
        top = solve_lower(A, v[:h] - _dot(low.T, bottom), transpose=True)
    else:
        top = solve_lower(A, v[:h])
        bottom = solve_lower(D, v[h:] - _dot(low, top))
    return jnp.concatenate([top, bottom])


def inverse_transpose(chol: Float[Array, "m m"]) -> Float[Array, "m m"]:
    r"""`L⁻ᵀ` by halves: `[[A⁻ᵀ, −A⁻ᵀ L₂₁ᵀ D⁻ᵀ], [0, D⁻ᵀ]]`. Nothing above the diagonal is read.

    A third of `m³` operations, as many as the factor itself took; a solve against the identity
    takes three times that. Transposed, the columns of `L⁻¹` are rows, which lie together.
    """
    m = chol.shape[0]
    if m <= LEAF:
        eye = jnp.eye(m, dtype=chol.dtype)
        return jax.scipy.linalg.solve_triangular(chol, eye, lower=True, trans=1)
    h = m // 2
    A, D = inverse_transpose(chol[:h, :h]), inverse_transpose(chol[h:, h:])
    corner = -upper_mm(A, upper_mm(D, chol[h:, :h], transpose=True).T)
    zero = jnp.zeros((m - h, h), chol.dtype)
    return jnp.block([[A, corner], [zero, D]])


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, precision=HIGHEST)


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
