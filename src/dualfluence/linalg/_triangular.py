r"""Products, solves and inverses of large triangular matrices, made of matrix products.

Halved again and again, nearly all of the work lies in full blocks. Zeros are skipped: each function
takes half of the operations of a full matrix.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

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
