r"""Lanczos with full reorthogonalisation: extreme eigenvalues and low-rank forms of a symmetric matrix.

Orthogonal to all earlier vectors, twice in every step: the short recurrence alone loses that as
soon as an eigenvalue has converged, and then finds copies of it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .._support.compile import PRECISION

BREAKDOWN = 100.0
"""Rounding units of the largest entry of `T` below which a step has found nothing new. The space is
then invariant and goes on from a random vector, so that repeated eigenvalues are found as often as they
occur."""


class Krylov(NamedTuple):
    """`C ≈ Qᵀ T Q`: rows of `basis` are orthonormal, `diagonal` and `beside` make `T`."""

    basis: Float[Array, "m p"]
    diagonal: Float[Array, " m"]
    beside: Float[Array, " m"]

    def ritz(self) -> tuple[np.ndarray, np.ndarray]:
        """Eigenvalues of `T`, rising, and its eigenvectors as columns; NaN where products overflowed."""
        off = np.asarray(self.beside, float)[:-1]
        T = np.diag(np.asarray(self.diagonal, float)) + np.diag(off, 1) + np.diag(off, -1)
        if not np.isfinite(T).all():
            return np.full(len(T), np.nan), np.full(T.shape, np.nan)
        return np.linalg.eigh(T)


def lanczos(
    mv: Callable[[Float[Array, " p"]], Float[Array, " p"]],
    p: int,
    dtype: DTypeLike,
    steps: int,
    seed: int,
) -> Krylov:
    """`steps` steps from a random vector of size `p`, at most `p` of them."""
    keys = jax.random.split(jax.random.key(seed), steps + 1)
    start = jax.random.normal(keys[0], (p,), dtype)
    basis = jnp.zeros((steps, p), dtype).at[0].set(start / jnp.linalg.norm(start))
    zeros = jnp.zeros(steps, dtype)

    def advance(k: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        basis, diagonal, beside = carry
        w = mv(basis[k])
        diagonal = diagonal.at[k].set(jnp.vdot(basis[k], w))
        w = _orthogonal(basis, w)
        size = jnp.linalg.norm(w)
        scale = jnp.max(jnp.abs(diagonal)) + jnp.max(beside)
        found = size > BREAKDOWN * jnp.finfo(dtype).eps * scale
        fresh = _orthogonal(basis, jax.random.normal(keys[k + 1], (p,), dtype))
        w = jnp.where(found, w, fresh)
        w = w / jnp.maximum(jnp.linalg.norm(w), jnp.finfo(dtype).tiny)
        # The last step has no place to go: its vector is dropped, its length kept.
        basis = basis.at[k + 1].set(w, mode="drop")
        return basis, diagonal, beside.at[k].set(jnp.where(found, size, 0))

    with jax.default_matmul_precision(PRECISION):
        return Krylov(*jax.lax.fori_loop(0, steps, advance, (basis, zeros, zeros)))


def _orthogonal(basis: Float[Array, "m p"], w: Float[Array, " p"]) -> Float[Array, " p"]:
    """`w` less its part in the span of `basis`; once is not enough in floating point."""
    for _ in range(2):
        w = w - basis.T @ (basis @ w)
    return w
