"""Systems of a few equations without a library call.

On a GPU, a library call for a 10×10 system takes longer than the whole step that needs it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LARGEST = 32
"""Largest number of equations for which elimination is written out. With twice this value, programs
take four times as long to compile."""


def solve_small(A: Float[Array, "c c"], B: Float[Array, "c k"]) -> Float[Array, "c k"]:
    """`A⁻¹B` for a symmetric positive definite `A` by Gauss–Jordan elimination, written out.

    Such a matrix needs no search for pivots, which would be half of the GPU kernels. By LAPACK if `A`
    is large.
    """
    c = A.shape[0]
    # From here on the library's call is small beside its own work.
    if c > LARGEST:
        return jnp.linalg.solve(A, B)
    M = jnp.concatenate([A, B], axis=1)
    for k in range(c):
        M = _eliminated(M, k)
        # Two unknowns make one kernel. With more, every entry would be computed again too often.
        M = jax.lax.optimization_barrier(M) if k % 2 else M
    return M[:, c:]


def _eliminated(M: Float[Array, "c ck"], k: int) -> Float[Array, "c ck"]:
    """`M` with its column `k` reduced to column `k` of the identity."""
    pivot = M[k : k + 1] / M[k, k]
    here = jnp.arange(M.shape[0])[:, None] == k
    return jnp.where(here, pivot, M - M[:, k : k + 1] * pivot)
