r"""The explicit inverse of a fit's own system, `B = λI + RᵀKR`."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._support.compile import filter_jit
from ..linalg import (
    AbstractInverse,
    CholeskyInverse,
    CholeskySolves,
    SpectralInverse,
    inverse_transpose,
    shifted_cholesky,
    spectrum,
)
from ..losses import AbstractFactor


def cholesky_inverse(
    K: Float[Array, "m m"], c: int, factor: AbstractFactor, ridge: float, *, whole: bool
) -> AbstractInverse:
    """One factor for one ridge; `whole` inverts it too, which diagonal blocks of `B⁻¹` need."""
    chol = system_cholesky(K, c, factor, jnp.asarray(ridge, K.dtype))
    return CholeskyInverse(_inverse_transpose(chol)) if whole else CholeskySolves(chol)


_inverse_transpose = filter_jit(inverse_transpose)


def spectral_inverse(K: Float[Array, "m m"], c: int, factor: AbstractFactor) -> SpectralInverse:
    """One eigendecomposition for every ridge; about ten times the work of a Cholesky factor."""
    return SpectralInverse(*_eigh(K, c, factor))


@filter_jit
def system_cholesky(
    K: Float[Array, "m m"], c: int, factor: AbstractFactor, ridge: Float[Array, ""]
) -> Float[Array, "s s"]:
    """The factor of `B`; above the diagonal it has what was there before."""
    return shifted_cholesky(factor.folded(K, c), ridge)


@filter_jit
def _eigh(K: Array, c: int, factor: AbstractFactor) -> tuple[Array, Array]:
    return spectrum(factor.folded(K, c))
