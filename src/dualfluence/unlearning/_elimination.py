"""Systems of a few equations without a library call.

A call of LAPACK's counterpart on a GPU takes longer than the whole step that a 10×10 system belongs to.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LARGEST = 32
"""Equations up to which elimination is written out. Doubled, programs take four times as long to compile."""


def solve_small(A: Float[Array, "c c"], B: Float[Array, "c k"]) -> Float[Array, "c k"]:
    """`A⁻¹B` by Gauss–Jordan elimination with partial pivoting, written out; by LAPACK if `A` is large."""
    c = A.shape[0]
    if c > LARGEST:
        return jnp.linalg.solve(A, B)
    M, rows = jnp.concatenate([A, B], axis=1), jnp.arange(c)[:, None]
    for k in range(c):
        M = _eliminated(M, rows, k)
    return M[:, c:]


def _eliminated(M: Float[Array, "c ck"], rows: Array, k: int) -> Float[Array, "c ck"]:
    """Column `k` as that of the identity, with the largest entry below as the pivot."""
    pivot = k + jnp.argmax(jnp.abs(M[k:, k]))
    chosen = jax.lax.dynamic_index_in_dim(M, pivot, keepdims=True)
    M = jnp.where(rows == pivot, M[k : k + 1], M)
    # Where the pivot is in row k, this row is overwritten below.
    chosen = chosen / chosen[:, k : k + 1]
    M = jnp.where(rows == k, chosen, M - M[:, k : k + 1] * chosen)
    # Fused with the next step, every entry would be computed again for each of its uses.
    return jax.lax.optimization_barrier(M)
