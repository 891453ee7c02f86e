r"""Many probes of sequences at the price of backward passes: gradients projected to few numbers.

With `φ = S JᵀP` for a random `S` of `k` rows, `Σ φφᵀ` is `k × k` and is summed probe by probe, so that
neither memory nor the solve grows with the number of probes:

$$S_{qi} = (S J_q^\top v_q)^\top (\lambda I + \Sigma\,\varphi\varphi^\top)^{-1} S J_i^\top g_i .$$

`S` acts on each matrix of parameters from both sides, `G ↦ L G R`, which is cheap for a gradient.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from .._support.compile import HIGHEST, filter_jit, jit
from .._support.memory import PANEL_BYTES, even_size
from .._support.points import common_dtype
from ._tokens import Queries, Sequences

SKETCH_PROBES = 16
"""Probes of `method="projected"` for sequences. They cost backward passes alone."""


class Sketch(eqx.Module):
    """`S`: for each trainable leaf, a pair of matrices with random signs, or none where all is kept."""

    left: tuple[Array | None, ...]
    right: tuple[Array | None, ...]

    def __call__(self, tree: PyTree) -> Float[Array, " k"]:
        """`S g` of one gradient."""
        parts = []
        for leaf, L, R in zip(jax.tree.leaves(tree), self.left, self.right, strict=True):
            part = _matrix(leaf).astype(common_dtype(jnp.float32, leaf.dtype))
            part = part if L is None else L.astype(part.dtype) @ part
            part = part if R is None else part @ R.astype(part.dtype)
            parts.append(part.reshape(-1))
        return jnp.concatenate(parts)


def make_sketch(theta: PyTree, rank: int, key: Array) -> Sketch:
    """About `rank` numbers in all, shared among the leaves by the roots of their sizes."""
    leaves = [_matrix(leaf) for leaf in jax.tree.leaves(theta)]
    roots = np.sqrt([leaf.size for leaf in leaves])
    left, right = [], []
    for leaf, share, own in zip(
        leaves, roots / roots.sum(), jax.random.split(key, len(leaves)), strict=True
    ):
        a, b = leaf.shape
        most = max(1, round(rank * share))
        rows = min(a, max(1, round((most * a / b) ** 0.5)))
        columns = min(b, -(-most // rows))
        rows = min(a, -(-most // columns))
        keys = jax.random.split(own)
        left.append(None if rows == a else _signs(keys[0], (rows, a), rows))
        right.append(None if columns == b else _signs(keys[1], (b, columns), columns))
    return Sketch(tuple(left), tuple(right))


def _signs(key: Array, shape: tuple[int, int], kept: int) -> Array:
    return jax.random.rademacher(key, shape, jnp.float32) / np.float32(kept**0.5)


def _matrix(leaf: Array) -> Array:
    """A leaf as a matrix; what has one axis becomes a row."""
    return leaf.reshape(1, -1) if leaf.ndim < 2 else leaf.reshape(-1, leaf.shape[-1])


def sketched_scores(
    train: Sequences, queries: Queries, ridge: Array, rank: int
) -> tuple[Float[Array, "q n"], Float[Array, "q k"], Sketch]:
    """Scores, and `(λI + Σφφᵀ)⁻¹ S Jᵀv` of every query with the sketch that it belongs to."""
    theta = train.model._outputs()[0]
    sketch = make_sketch(theta, rank, jax.random.key(0))
    k = jax.eval_shape(sketch, theta).shape[0]
    A, own = jnp.zeros((k, k), ridge.dtype), []
    # Blocks of one size, so that one program serves all but the last.
    size = even_size(train.num, max(1, 4 * PANEL_BYTES // (4 * k * (train.m + 1))))
    for start in range(0, train.num, size):
        stop = min(start + size, train.num)
        here = (train.x[start:stop], train.targets[start:stop], train.keys[start:stop])
        A, g = _added(A, train, sketch, here, min(stop - start, train.at_once(train.m + 1)))
        own.append(g)
    v = _query_sketch(queries, sketch)
    values, solved = _solved(A, v, jnp.concatenate(own), ridge)
    return values, solved, sketch


def _added_body(
    A: Array, train: Sequences, sketch: Sketch, here: tuple[Array, ...], size: int
) -> tuple[Array, Array]:
    # At the caller's precision of products: rounding is far below the error of a projection.
    phi = jax.lax.map(lambda row: jax.vmap(sketch)(train.gradients(row)), here, batch_size=size)
    phi = phi.astype(A.dtype)
    rows = phi[:, :-1].reshape(-1, A.shape[0])
    return A + jnp.dot(rows.T, rows, precision=HIGHEST), phi[:, -1]


_added = filter_jit(_added_body)


@filter_jit
def _query_sketch(queries: Queries, sketch: Sketch) -> Float[Array, "q k"]:
    rows = (queries.x, queries.quantity.targets)
    return jax.lax.map(lambda row: sketch(queries.gradient(row)), rows)


@jit
def _solved(A: Array, v: Array, g: Array, ridge: Array) -> tuple[Array, Array]:
    chol = jnp.linalg.cholesky(A + ridge * jnp.eye(A.shape[0], dtype=A.dtype))
    solved = jax.scipy.linalg.cho_solve((chol, True), v.astype(A.dtype).T).T
    return jnp.dot(solved, g.T, precision=HIGHEST), solved


@filter_jit
def unsketched(theta: PyTree, sketch: Sketch, solved: Float[Array, "q k"]) -> Float[Array, "q p"]:
    """`Sᵀ` times rows, as directions of parameters."""
    back = jax.linear_transpose(sketch, theta)
    return jax.vmap(lambda row: ravel_pytree(back(row)[0])[0])(solved)
