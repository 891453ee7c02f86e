r"""Contract the features of two batches of points into one kernel tile."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

TERMS_AT_ONCE = 6
"""Number of products of tile size that may be in memory at once."""


class Pair(NamedTuple):
    """$A$ `(n, b, s, m)`, or indices `(n, b, s)`, and $G$ `(n, c, b, s, k)` of one gradient."""

    left: Array
    right: Array


class Features(NamedTuple):
    """The contribution of a batch of points to any kernel tile.

    - `pairs`: gradients kept as two factors.
    - `rows`: gradients kept whole, each `(n, c, p)`.
    - `outputs`: `(n, c)`, and `finite`: whether the derivatives of each point are finite, `(n,)`.
    """

    pairs: tuple[Pair, ...]
    rows: tuple[Array, ...]
    outputs: Array
    finite: Array


def take_points(features: Features, index: Array) -> Features:
    """The features of some of the points."""
    return jax.tree.map(lambda a: jnp.take(a, index, axis=0), features)


def contract(f1: Features, f2: Features, *, traced: bool, dtype: Any, precision: Any) -> Array:
    r"""Sum every parameter's contribution to a tile.

    $$K_{ia,jb} = \sum_{\text{pairs}}\sum_{s,t} (A_{is}\cdot A_{jt})(G_{ias}\cdot G_{jbt})
    + \sum_{\text{rows}} R_{ia}\cdot R_{jb}$$

    Each side has its own outputs, unless `traced`.

    **Returns:** `(n1, c1, n2, c2)`, or with `traced` its mean over $a = b$, `(n1, n2)`.
    """
    terms = [_pair_term(p, q, traced, precision) for p, q in zip(f1.pairs, f2.pairs, strict=True)]
    terms += [_gram(p, q, traced, precision) for p, q in zip(f1.rows, f2.rows, strict=True)]
    shape = _tile_shape(f1.outputs.shape, f2.outputs.shape, traced)
    total = terms[0] if terms else jnp.zeros(shape, dtype)
    for k, term in enumerate(terms[1:], start=1):
        # Else the compiler may fuse all sums into one and hold every product for it.
        if k % TERMS_AT_ONCE == 0:
            total = jax.lax.optimization_barrier(total)
        total = total + term
    return total


def _tile_shape(first: tuple[int, ...], second: tuple[int, ...], traced: bool) -> tuple[int, ...]:
    return (first[0], second[0]) if traced else (*first[:2], *second[:2])


def _gram(r1: Array, r2: Array, traced: bool, precision: Any) -> Array:
    """$R_{ia}\\cdot R_{jb}$ of `(n, c, p)` arrays, or the mean over equal outputs."""
    if not traced:
        return jax.lax.dot_general(r1, r2, (((2,), (2,)), ((), ())), precision=precision)
    flat1, flat2 = (jnp.reshape(r, (r.shape[0], -1)) for r in (r1, r2))
    return jnp.matmul(flat1, flat2.T, precision=precision) / r1.shape[1]


def _left_gram(a1: Array, a2: Array, dtype: Any, precision: Any) -> Array:
    """$A_i\\cdot A_j$ of `(n, m)` rows, or equality of `(n,)` indices."""
    if a1.ndim == 1:
        return (a1[:, None] == a2[None, :]).astype(dtype)
    return jnp.matmul(a1, a2.T, precision=precision)


def _pair_term(p: Pair, q: Pair, traced: bool, precision: Any) -> Array:
    b, s = p.right.shape[2:4]

    def at(k: Any, u: Any, v: Any) -> Array:
        left = _left_gram(p.left[:, k, u], q.left[:, k, v], p.right.dtype, precision)
        right = _gram(p.right[:, :, k, u], q.right[:, :, k, v], traced, precision)
        return right * (left if traced else left[:, None, :, None])

    if b * s == 1:
        return at(0, 0, 0)

    # One position pair at a time: the tile is the only array that grows with n1·n2·c².
    def step(i: Array, total: Array) -> Array:
        k, u, v = i // (s * s), (i // s) % s, i % s
        return total + at(k, u, v)

    shape = _tile_shape(p.right.shape, q.right.shape, traced)
    return jax.lax.fori_loop(0, b * s * s, step, jnp.zeros(shape, p.right.dtype))
