"""Factors, solves and products of the system of a checkpoint, compiled."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._support.compile import HIGHEST, jit
from ..linalg import solve_each
from ..linalg._inverse import inverse_transpose, solve_lower


@partial(jit, static_argnames=("n", "odd"))
def half(B: Array, n: int, odd: int) -> Array:
    m = B.shape[0] // n
    own = B.reshape(n, m, n, m)[:, odd::2, :, odd::2]
    return (m / own.shape[1]) * own.reshape(n * own.shape[1], -1)


@partial(jit, static_argnames=("n", "odd"))
def half_rows(Y: Float[Array, "m q"], n: int, odd: int) -> Array:
    m = Y.shape[0] // n
    own = Y.reshape(n, m, -1)[:, odd::2]
    return jnp.sqrt(jnp.asarray(m / own.shape[1], Y.dtype)) * own.reshape(-1, Y.shape[1])


@jit
def correlation(a: Float[Array, "q n"], b: Float[Array, "q n"]) -> Float[Array, " q"]:
    product = jnp.sum(a * b, axis=1)
    size = jnp.sqrt(jnp.sum(a**2, axis=1) * jnp.sum(b**2, axis=1))
    return product / jnp.where(size > 0, size, 1)


@jit
def scores_of(direct: Array, z: Array, T: Array, ridge: Array) -> Array:
    return (direct - jnp.dot(z.T, T, precision=HIGHEST)) / ridge


def _factor_body(B: Array, ridge: Array) -> Array:
    diagonal = jnp.arange(B.shape[0])
    return jax.lax.linalg.cholesky(B.at[diagonal, diagonal].add(ridge), symmetrize_input=False)


factor = jit(_factor_body, donate_argnums=0)
"""The Cholesky factor of `B + λI`; what is above its diagonal has no meaning."""


@jit
def solve_both(chol: Array, Y: Array) -> Array:
    return solve_lower(chol, solve_lower(chol, Y), transpose=True)


rows_of_inverse = jit(inverse_transpose)


@jit
def along_points(z: Float[Array, "m q"], h: Float[Array, "n r"]) -> Float[Array, "q n"]:
    return jnp.einsum("nrq,nr->qn", z.reshape(*h.shape, -1), h, precision=HIGHEST)


@jit
def own_solve(X: Float[Array, "k r m"], h: Float[Array, "k r"]) -> Float[Array, "k r"]:
    """`C_ii⁻¹h_i` from rows of `L⁻ᵀ`."""
    gram = jnp.einsum("kam,kbm->kab", X, X, precision=HIGHEST)
    return solve_each(gram, h)


@partial(jit, static_argnames="r")
def taken_back(
    chol: Array, inverse: Array, z: Array, T: Array, block: Array, ridge: Array, r: int
) -> Array:
    """What the closed form of leave-one-out adds to a block of points: `z_iᵀC_ii⁻¹(CT)_i/λ`."""
    n = z.shape[0] // r
    X = jnp.take(inverse.reshape(n, r, -1), block, axis=0)
    at_point = jnp.einsum("kam,mk->ka", X, solve_lower(chol, T), precision=HIGHEST)
    own = jnp.take(z.reshape(n, r, -1), block, axis=0)
    return jnp.einsum("krq,kr->qk", own, own_solve(X, at_point), precision=HIGHEST) / ridge
