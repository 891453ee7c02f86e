r"""Lanczos with full reorthogonalisation: extreme eigenvalues, and low-rank forms of the curvature.

Orthogonal to all earlier vectors, twice in every step: the short recurrence alone loses that as
soon as an eigenvalue has converged, and then finds copies of it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._support.compile import filter_jit
from ._curvature import Curvature, Hessian
from ._update import PRECISION

EIGENVALUE_STEPS = 40
"""Products for the ends of the spectrum. Both are good to a per cent or better by then."""

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
        """Eigenvalues of `T`, rising, and its eigenvectors as columns."""
        off = np.asarray(self.beside, float)[:-1]
        T = np.diag(np.asarray(self.diagonal, float)) + np.diag(off, 1) + np.diag(off, -1)
        return np.linalg.eigh(T)


@filter_jit
def lanczos(curvature: Curvature, hessian: Hessian, steps: int, seed: int) -> Krylov:
    """`steps` steps from a random vector; at most as many as there are parameters."""
    p, dtype = curvature.num_params, curvature.dtype
    keys = jax.random.split(jax.random.key(seed), steps + 1)
    start = jax.random.normal(keys[0], (p,), dtype)
    basis = jnp.zeros((steps, p), dtype).at[0].set(start / jnp.linalg.norm(start))
    zeros = jnp.zeros(steps, dtype)

    def advance(k: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        basis, diagonal, beside = carry
        w = curvature.product(basis[k], hessian)
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


def extreme_eigenvalues(curvature: Curvature, hessian: Hessian) -> tuple[float, float]:
    """Smallest and largest eigenvalue of `C`, each moved outwards by its error bound."""
    steps = min(EIGENVALUE_STEPS, curvature.num_params)
    krylov = lanczos(curvature, hessian, steps, 0)
    values, vectors = krylov.ritz()
    # An eigenvalue lies within β·|last entry| of every Ritz value.
    off = abs(float(krylov.beside[-1])) * np.abs(vectors[-1]) if steps < curvature.num_params else 0
    return float((values - off).min()), float((values + off).max())
