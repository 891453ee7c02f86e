"""Is this matrix a kernel? Finite, symmetric and positive semidefinite, up to rounding."""

from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._support.compile import filter_jit, jit
from ..linalg import Krylov, lanczos

ROUNDING_SLACK = 1e3
"""Deviations up to this many units in the last place of the largest entry count as rounding."""

TILE_SIDE = 1024
"""Rows of a tile that is compared with its mirror image. Both fit into a processor's cache: twice the
side takes twice the time there; half of it leaves an accelerator waiting for the host."""

EXACT_SIZE = 600
LANCZOS_STEPS = 32
PROBES = 16


def check_entries(K: Float[Array, "m m"]) -> str:
    """Raise unless this matrix is a kernel; else describe how this was checked."""
    slack = ROUNDING_SLACK * float(jnp.finfo(K.dtype).eps)
    finite, largest, asymmetry = (float(v) for v in _entries(K))
    if not finite:
        _raise_at_first_bad_entry(K)
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


def check_by_products(op: Any) -> str:
    """The same checks from products alone, for an operator whose entries are not in one place.

    An asymmetric part or a negative eigenvalue is very likely, but not certain, to show in random
    directions.
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
def _probe(op: Any) -> tuple[Array, Array, Array]:
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
def _entries(K: Float[Array, "m m"]) -> tuple[Array, Array, Array]:
    """Whether every entry is finite, the largest `|K|`, and the largest `|K − Kᵀ|`.

    Compares one tile with its mirror image at a time: `K − Kᵀ` would be a second `K`.
    """
    m = K.shape[0]
    side = min(m, TILE_SIDE)

    def tile(i: Array, j: Array) -> Array:
        # The last tiles start early instead of being short: some entries are looked at twice.
        start = (jnp.minimum(i * side, m - side), jnp.minimum(j * side, m - side))
        return jax.lax.dynamic_slice(K, start, (side, side))

    def look(i: Array, j: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
        finite, largest, asymmetry = found
        upper, lower = tile(i, j), tile(j, i).T
        size = jnp.maximum(jnp.abs(upper), jnp.abs(lower))
        # A flag of its own: a maximum over entries need not keep a NaN.
        return (
            finite & jnp.all(jnp.isfinite(upper) & jnp.isfinite(lower)),
            jnp.maximum(largest, jnp.max(size)),
            jnp.maximum(asymmetry, jnp.max(jnp.abs(upper - lower))),
        )

    count, zero = -(-m // side), jnp.zeros((), K.dtype)
    return jax.lax.fori_loop(
        0,
        count,
        lambda i, found: jax.lax.fori_loop(i, count, partial(look, i), found),
        (jnp.asarray(True), zero, zero),
    )


def _raise_at_first_bad_entry(K: Float[Array, "m m"]) -> NoReturn:
    for row in range(K.shape[0]):
        entries = np.asarray(K[row])
        bad = np.flatnonzero(~np.isfinite(entries))
        if bad.size:
            raise ValueError(
                f"kernel: every entry must be finite, got {entries[bad[0]]} at index "
                f"({row}, {bad[0]}). Clean or drop these points first."
            )
    raise AssertionError("some entry is not finite")


@jit
def _extreme_eigenvalues(K: Float[Array, "m m"]) -> tuple[Array, Array]:
    values = jnp.linalg.eigvalsh(0.5 * (K + K.T))
    return values[0], values[-1]


@jit
def _krylov_space(K: Float[Array, "m m"]) -> Krylov:
    return lanczos(lambda v: jnp.dot(K, v), K.shape[0], K.dtype, LANCZOS_STEPS, 0)


def _ritz_values(K: Float[Array, "m m"]) -> tuple[float, float]:
    """Smallest and largest eigenvalue of `K` on a short Krylov space."""
    values = _krylov_space(K).ritz()[0]
    return values[0], values[-1]
