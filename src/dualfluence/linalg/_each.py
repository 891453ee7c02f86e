"""Factorisations and solves of many matrices at once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float

MOST_OPERATIONS = 200_000
"""From as many operations on, jaxlib shares a batch of LAPACK calls between the threads of its pool."""


def each(solve: Callable[..., Any], operations: int, *arrays: Array) -> Any:
    """`solve` for every item of the leading axes; on CPUs a few items at a time.

    If jaxlib splits a batch of LAPACK calls over threads, the batch occupies one thread of the pool while
    it waits for these calls, which run on the same pool. Two such batches at a time, of one program or of
    two, hold both threads of a machine with two cores, and wait for ever. Batches with too few operations
    to be split run on the calling thread, and so does a single matrix.

    **Arguments:** `operations`: number of operations for one item, not smaller than jaxlib's own count:
    `c³` for a solve or a Cholesky factor of size `c`, `SPECTRUM·c³` for eigenvectors.
    """
    together, k = jax.vmap(solve), arrays[0].shape[0]
    most = max(1, (MOST_OPERATIONS - 1) // max(1, operations))
    if k <= most:
        return together(*arrays)
    size = next(d for d in range(most, 0, -1) if k % d == 0)

    def in_parts(*arrays: Array) -> Any:
        parts = [a.reshape(k // size, size, *a.shape[1:]) for a in arrays]
        found = jax.lax.map(lambda part: together(*part), parts)
        return jax.tree.map(lambda a: a.reshape(k, *a.shape[2:]), found)

    return jax.lax.platform_dependent(*arrays, cpu=in_parts, default=together)


SPECTRUM = 30
"""Operations of eigenvectors, in `c³`: more than LAPACK takes."""


def solve_each(A: Float[Array, "k c c"], b: Float[Array, "k c"]) -> Float[Array, "k c"]:
    """`A_i⁻¹ b_i` of every item."""
    return each(jnp.linalg.solve, A.shape[1] ** 3, A, b)


def spectrum_each(A: Float[Array, "k c c"]) -> tuple[Float[Array, "k c"], Float[Array, "k c c"]]:
    """Eigenvalues, upwards, and eigenvectors of every symmetric matrix."""
    return each(lambda A: tuple(jnp.linalg.eigh(A)), SPECTRUM * A.shape[1] ** 3, A)


@custom_vmap
def cholesky(A: Float[Array, "c c"]) -> Float[Array, "c c"]:
    """`jnp.linalg.cholesky` that stays one matrix at a time under `vmap`, see `each`."""
    return jnp.linalg.cholesky(A)


@cholesky.def_vmap
def _cholesky_each(size: int, batched: list[bool], A: Array) -> tuple[Array, bool]:
    return each(jnp.linalg.cholesky, A.shape[1] ** 3, A), True


def _lower_inverse(L: Float[Array, "c c"]) -> Float[Array, "c c"]:
    """`L⁻¹` of a lower triangle."""
    eye = jnp.eye(L.shape[0], dtype=L.dtype)
    return jax.scipy.linalg.solve_triangular(L, eye, lower=True)


lower_inverse = custom_vmap(_lower_inverse)
"""The same, which stays one matrix at a time under `vmap`."""


@lower_inverse.def_vmap
def _lower_inverse_each(size: int, batched: list[bool], L: Array) -> tuple[Array, bool]:
    return each(_lower_inverse, L.shape[1] ** 3, L), True
