"""Is this matrix a kernel? Finite, symmetric and positive semidefinite, up to rounding."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._support.checks import check_finite
from .._support.compile import filter_jit, jit
from . import AbstractKernelOperator, DenseOperator, KroneckerOperator, ShardedOperator

ROUNDING_SLACK = 1e3
"""Deviations up to this many units in the last place of the largest entry count as rounding."""

EXACT_SIZE = 600
LANCZOS_STEPS = 32
PROBES = 16


def check_kernel(op: AbstractKernelOperator) -> str:
    """Raise if `K` is not a kernel; else say how far it was checked."""
    if not op.in_memory:
        return "on disk, verified by checksum as it is read"
    if isinstance(op, ShardedOperator):
        return _check_by_products(op)
    if not isinstance(op, (DenseOperator, KroneckerOperator)):
        return "positive semidefinite by construction"
    K = op.matrix
    if not bool(_all_finite(K)):
        check_finite("kernel", K)
    slack = ROUNDING_SLACK * float(jnp.finfo(K.dtype).eps)
    largest, asymmetry = (float(v) for v in _asymmetry(K))
    if asymmetry > slack * largest:
        raise ValueError(
            f"kernel: K must be symmetric, but |K − Kᵀ| reaches {asymmetry:.3g} where the largest "
            f"entry is {largest:.3g}. A kernel function must satisfy k(x1, x2) = k(x2, x1)ᵀ."
        )
    exact = K.shape[0] <= EXACT_SIZE
    low, high = _extreme_eigenvalues(K) if exact else _ritz_values(K)
    if float(low) < -slack * max(float(high), 0.0) or float(high) < 0:
        raise ValueError(
            f"kernel: K must be positive semidefinite, but it has an eigenvalue near "
            f"{float(low):.3g} (largest {float(high):.3g}). Not every similarity is a kernel."
        )
    how = "all eigenvalues" if exact else f"{LANCZOS_STEPS} Lanczos steps"
    return f"symmetric to {asymmetry / max(largest, 1e-300):.1e}, semidefinite by {how}"


def _check_by_products(op: AbstractKernelOperator) -> str:
    """The same checks from products alone, for a `K` that is not in one place.

    An asymmetric part or a negative eigenvalue shows in random directions, if not with certainty.
    """
    asymmetry, size, curvature = (float(v) for v in _probe(op))
    slack = ROUNDING_SLACK * float(jnp.finfo(op.dtype).eps)
    if not np.isfinite([asymmetry, size, curvature]).all():
        raise ValueError("kernel: every entry must be finite, but K has NaN or infinite entries.")
    if asymmetry > slack * size:
        raise ValueError(
            f"kernel: K must be symmetric, but |uᵀKv − vᵀKu| reaches {asymmetry:.3g} where |u||Kv| is "
            f"{size:.3g}. A kernel function must satisfy k(x1, x2) = k(x2, x1)ᵀ."
        )
    if curvature < -slack * size:
        raise ValueError(
            f"kernel: K must be positive semidefinite, but uᵀKu falls to {curvature:.3g} (|u||Ku| is "
            f"{size:.3g}). Not every similarity is a kernel."
        )
    return f"symmetric and semidefinite in {PROBES} random directions"


@filter_jit
def _probe(op: AbstractKernelOperator) -> tuple[Array, Array, Array]:
    """Largest `|uᵀKv − vᵀKu|`, largest `|u||Kv|`, smallest Ritz value on the span of the probes."""
    shape = (op.num_points, op.num_outputs, PROBES)
    U = jax.random.normal(jax.random.key(0), shape, op.dtype)
    KU = op.mm(U)
    gram = jnp.einsum("nci,ncj->ij", U, KU, precision="highest")
    asymmetry = jnp.max(jnp.abs(gram - gram.T))
    size = jnp.max(jnp.linalg.norm(U.reshape(-1, PROBES), axis=0)) * jnp.max(
        jnp.linalg.norm(KU.reshape(-1, PROBES), axis=0)
    )
    return asymmetry, size, jnp.linalg.eigvalsh(0.5 * (gram + gram.T))[0]


@jit
def _all_finite(K: Float[Array, "m m"]) -> Array:
    return jnp.isfinite(K).all()


@jit
def _asymmetry(K: Float[Array, "m m"]) -> tuple[Array, Array]:
    return jnp.max(jnp.abs(K)), jnp.max(jnp.abs(K - K.T))


@jit
def _extreme_eigenvalues(K: Float[Array, "m m"]) -> tuple[Array, Array]:
    values = jnp.linalg.eigvalsh(0.5 * (K + K.T))
    return values[0], values[-1]


@filter_jit
def _ritz_values(K: Float[Array, "m m"]) -> tuple[Array, Array]:
    """Smallest and largest Ritz value of a short Lanczos run with full reorthogonalisation."""
    m = K.shape[0]
    v = jax.random.normal(jax.random.key(0), (m,), K.dtype)
    basis = jnp.zeros((LANCZOS_STEPS, m), K.dtype).at[0].set(v / jnp.linalg.norm(v))

    def extend(basis: Array, j: Array) -> tuple[Array, Array]:
        w = jnp.dot(K, basis[j], precision="highest")
        for _ in range(2):
            w = w - jnp.dot(jnp.dot(basis, w, precision="highest"), basis, precision="highest")
        norm = jnp.linalg.norm(w)
        w = jnp.where(norm > 0, w / jnp.where(norm > 0, norm, 1), w)
        return basis.at[j + 1].set(w, mode="drop"), norm

    basis, _ = jax.lax.scan(extend, basis, jnp.arange(LANCZOS_STEPS))
    small = jnp.dot(basis, jnp.dot(K, basis.T, precision="highest"), precision="highest")
    values = jnp.linalg.eigvalsh(0.5 * (small + small.T))
    return values[0], values[-1]
