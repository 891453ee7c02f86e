r"""Scores of every training point for every query at one checkpoint of a network.

$$S_{qi} = \tfrac{1}{\lambda}[v_q^\top K_{qi}\,g_i - (R^\top K_{nq}v_q)^\top B^{-1}(R^\top K_{ni}\,g_i)],
  \qquad B = \lambda I + R^\top KR ,$$

the first-order effect of leaving `i` out, with `g_i` the gradient of the mean loss. `RᵀKR` is computed
from one block of rows of `K` after the other; `K` is never stored as a whole.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._support.compile import filter_jit, jit
from .._support.memory import memory_budget, total_memory
from ..dual._quantity import Quantity
from ..dual._triangular import inverse_transpose, solve_lower
from ..kernels import empirical_kernel, kernel_rows
from ..kernels._linearized import Linearized
from ..losses import AbstractFactor, AbstractLoss
from ..models._low_rank import RandomFeatureSource
from ..models._sources import NetworkSource

HIGHEST = jax.lax.Precision.HIGHEST

BLOCK_SHARE = 0.1
"""Share of the kernel's memory budget for one block of rows of `K`."""

QUERIES_AT_ONCE = 512
"""Queries of one block. Doubled, `v_qᵀK_qn` takes twice the memory, and the solves gain little."""

FULL_SHARE = 0.6
"""Share of the memory that `RᵀKR` and its factor may take; beyond, `auto` goes to margins."""

PROJECTED_RANK = 2048
"""Random directions of `method="projected"`; twice as many halve the variance of its entries."""

LOSSES_OF_METHODS = {
    "outputs": (),
    "margin": (
        "margins instead of outputs: the curvature between other classes is left out, the system is "
        "n by n instead of n·c by n·c",
    ),
    "projected": (
        "gradients projected on random directions: entries of K are off by about 1/√rank of their size",
    ),
}
"""What each method leaves out, in words."""


class Local(eqx.Module):
    """Loss terms at a checkpoint: queries' gradients `v`, and `g`, `R` of the training points."""

    v: Float[Array, "q c"]
    g: Float[Array, "n c"]
    roots: Float[Array, "n c r"]


def choose_method(n: int, c: int, dtype: Any) -> str:
    """All outputs where `RᵀKR` and its factor fit in memory, else margins."""
    needed = 2 * (n * c) ** 2 * jnp.dtype(dtype).itemsize
    return "outputs" if needed <= FULL_SHARE * total_memory() else "margin"


def checkpoint_scores(
    model: Linearized,
    x: Array,
    targets: Array,
    xq: Array,
    quantity: Quantity,
    *,
    loss: AbstractLoss,
    ridge: float,
    method: str,
    leverage: bool,
    rank: int = PROJECTED_RANK,
) -> Float[Array, "q n"]:
    """`S` at the parameters of `model`, by all outputs, margins, or projected gradients."""
    local = local_terms(model, x, targets, xq, quantity, loss)
    lam = jnp.asarray(ridge, local.g.dtype)
    if method == "projected":
        source = RandomFeatureSource(NetworkSource(model), jax.random.key(0), rank)
        return _projected(source.features(x), source.features(xq), local, lam, leverage)
    if method == "margin":
        local = as_margins(local)
        blocks, cross = _margin_blocks(model, x, xq, local)
        local = Local(local.v[:, :1] * 0 + 1, local.g[:, :1] * 0 + 1, _margin_roots(local))
        # The directions of v and g are in the kernel already; only their sizes are left.
        return _solve(blocks, [(0, cross[:, 0])], local, lam, leverage)
    queries = _query_blocks(model, xq, local.v, x)
    return _solve(_row_blocks(model, x), queries, local, lam, leverage)


@filter_jit
def local_terms(
    model: Linearized,
    x: Array,
    targets: Array,
    xq: Array,
    quantity: Quantity,
    loss: AbstractLoss,
) -> Local:
    """Gradients and curvature of the mean loss, and of the measured quantity, at a checkpoint."""
    f, f_q = model.base_outputs(x), model.base_outputs(xq)
    weights = jnp.full(x.shape[0], 1 / x.shape[0], f.dtype)
    g = weights[:, None] * loss.grad(f, targets)
    roots = _roots(loss.hess_factor(f, targets, weights), f)
    return Local(quantity.grad(f_q, quantity.targets), g, roots)


def _roots(factor: AbstractFactor, f: Float[Array, "n c"]) -> Float[Array, "n c r"]:
    """`R` as blocks, without empty columns."""
    n, c = f.shape
    narrow = factor.narrow()
    # Rᵀ of every output's unit vector, then turned: R as blocks.
    eye = jnp.broadcast_to(jnp.eye(c, dtype=f.dtype), (n, c, c))
    return jnp.transpose(narrow.rmv(eye), (0, 2, 1))


def as_margins(local: Local) -> Local:
    """`g` and `R` along each point's own gradient direction, `v` as it is."""
    size = jnp.linalg.norm(local.g, axis=1, keepdims=True)
    direction = local.g / jnp.maximum(size, jnp.finfo(size.dtype).tiny)
    along = jnp.einsum("nc,ncr->nr", direction, local.roots, precision=HIGHEST)
    curvature = jnp.linalg.norm(along, axis=1)
    return Local(local.v, local.g, (direction * curvature[:, None])[:, :, None])


class _Folded(eqx.Module):
    """A network seen along one direction of outputs per point: `(x, u) ↦ u·f(x)`."""

    apply_fn: Any = eqx.field(static=True)

    def __call__(self, params: PyTree, inputs: tuple[Array, Array]) -> Float[Array, "n 1"]:
        x, u = inputs
        return jnp.sum(self.apply_fn(params, x) * u, axis=1, keepdims=True)


def _margin_roots(local: Local) -> Float[Array, "n 1 1"]:
    """`R` in units of `g`: the folded network has outputs along `g` itself."""
    size = jnp.linalg.norm(local.g, axis=1)
    root = jnp.linalg.norm(local.roots[:, :, 0], axis=1)
    return (root / jnp.maximum(size, jnp.finfo(size.dtype).tiny))[:, None, None]


def _margin_blocks(
    model: Linearized, x: Array, xq: Array, local: Local
) -> tuple[Iterator[tuple[int, Array]], Array]:
    mask = jax.tree.unflatten(jax.tree.structure(model.params), model.trainable)
    folded, train = _Folded(model.apply_fn), (x, local.g)
    rows = _rows_at_once(x.shape[0], 1, local.g.dtype)
    blocks = kernel_rows(folded, model.params, train, rows, trainable=mask)
    with jax.default_matmul_precision("highest"):
        cross = empirical_kernel(
            folded, model.params, (xq, local.v), train, trainable=mask, progress=False
        )
    return blocks, cross.value


def _row_blocks(model: Linearized, x: Array) -> Iterator[tuple[int, Array]]:
    """`K` of the training points by blocks of rows, with the first row of each."""
    n, c = model.apply_shape(x)
    return model.kernel_rows(x, _rows_at_once(n, c, model.dtype))


def _query_blocks(
    model: Linearized, xq: Array, v: Float[Array, "q c"], x: Array
) -> Iterator[tuple[int, Array]]:
    """`v_qᵀK_qn`, `(rows, n, c)`, by blocks of queries, with the first query of each."""
    total = xq.shape[0]
    rows = min(total, QUERIES_AT_ONCE)
    for i in range(0, total, rows):
        # The last block starts early instead of being short: one shape, one compilation.
        start = min(i, total - rows)
        here = slice(start, start + rows)
        yield start, model.kernel_along(xq[here], v[here], x)


def _rows_at_once(n: int, c: int, dtype: Any) -> int:
    each = 3 * n * c * c * jnp.dtype(dtype).itemsize
    return int(min(n, max(1, BLOCK_SHARE * memory_budget() // each)))


def _solve(
    blocks: Iterable[tuple[int, Array]],
    cross: Iterable[tuple[int, Array]],
    local: Local,
    ridge: Array,
    leverage: bool,
) -> Float[Array, "q n"]:
    n, _, r = local.roots.shape
    B = jnp.zeros((n * r, n * r), local.g.dtype)
    T = jnp.zeros((n * r, n), local.g.dtype)
    for start, block in blocks:
        B, T = _fold_rows(B, T, block, local, jnp.asarray(start))
        jax.block_until_ready(T)
    chol = _factor(B, ridge)
    del B
    gain, parts, done = _own_blocks(chol, T) if leverage else None, [], 0
    for start, thin in cross:
        end = start + thin.shape[0]
        V = _solve_both(chol, _fold_queries(thin, local.roots))
        scores = _scores(thin, V, T, local.g, ridge)
        if gain is not None:
            scores = scores + _leverage(V, gain, ridge)
        # Queries that the block before had too.
        parts.append(scores[done - start :])
        done = end
    return jnp.concatenate(parts)


@jit
def _scores(thin: Array, V: Array, T: Array, g: Array, ridge: Array) -> Array:
    direct = jnp.einsum("qnb,nb->qn", thin, g, precision=HIGHEST)
    return (direct - jnp.dot(V.T, T, precision=HIGHEST)) / ridge


def _fold_rows_body(
    B: Array, T: Array, block: Array, local: Local, start: Array
) -> tuple[Array, Array]:
    rows, (n, _, r) = block.shape[0], local.roots.shape
    here = jax.lax.dynamic_slice_in_dim(local.roots, start, rows)
    left = jnp.einsum("iar,iajb->irjb", here, block, precision=HIGHEST)
    folded = jnp.einsum("irjb,jbs->irjs", left, local.roots, precision=HIGHEST)
    push = jnp.einsum("irjb,jb->irj", left, local.g, precision=HIGHEST)
    at = (start * r, jnp.zeros_like(start))
    B = jax.lax.dynamic_update_slice(B, folded.reshape(rows * r, n * r), at)
    return B, jax.lax.dynamic_update_slice(T, push.reshape(rows * r, n), at)


_fold_rows = jit(_fold_rows_body, donate_argnums=(0, 1))


def _factor_body(B: Array, ridge: Array) -> Array:
    diagonal = jnp.arange(B.shape[0])
    return jax.lax.linalg.cholesky(B.at[diagonal, diagonal].add(ridge), symmetrize_input=False)


_factor = jit(_factor_body, donate_argnums=0)


@jit
def _fold_queries(thin: Float[Array, "q n b"], roots: Float[Array, "n b r"]) -> Float[Array, "m q"]:
    """`RᵀK_nq v_q`."""
    Y = jnp.einsum("nbr,qnb->nrq", roots, thin, precision=HIGHEST)
    return Y.reshape(-1, thin.shape[0])


@jit
def _solve_both(chol: Array, Y: Array) -> Array:
    return solve_lower(chol, solve_lower(chol, Y), transpose=True)


@jit
def _own_blocks(chol: Float[Array, "m m"], T: Float[Array, "m n"]) -> Float[Array, "n r"]:
    """`C_{ii}⁻¹ (C T_i)_i`: what the closed form of leave-one-out takes back of each point."""
    n = T.shape[1]
    half = solve_lower(chol, T)
    X = inverse_transpose(chol).reshape(n, chol.shape[0] // n, -1)
    gram = jnp.einsum("kam,kbm->kab", X, X, precision=HIGHEST)
    at_point = jnp.einsum("kam,mk->ka", X, half, precision=HIGHEST)
    return jnp.linalg.solve(gram, at_point[:, :, None])[:, :, 0]


@jit
def _leverage(V: Float[Array, "m q"], gain: Float[Array, "n r"], ridge: Array) -> Array:
    n, r = gain.shape
    return jnp.einsum("nrq,nr->qn", V.reshape(n, r, -1), gain, precision=HIGHEST) / ridge


@filter_jit
def _projected(
    phi: Float[Array, "n c r"],
    phi_q: Float[Array, "q c r"],
    local: Local,
    ridge: Array,
    leverage: bool,
) -> Float[Array, "q n"]:
    """`v_qᵀφ_q (λI + ΦᵀWΦ)⁻¹ φ_iᵀg_i`, divided by one minus the leverage along `g_i`."""
    A = jnp.einsum("ncs,ncr->nsr", local.roots, phi, precision=HIGHEST)
    A = A.reshape(-1, phi.shape[2])
    gram = jnp.dot(A.T, A, precision=HIGHEST) + ridge * jnp.eye(A.shape[1], dtype=A.dtype)
    chol = (jnp.linalg.cholesky(gram), True)
    train = jnp.einsum("nc,ncr->rn", local.g, phi, precision=HIGHEST)
    query = jnp.einsum("qc,qcr->rq", local.v, phi_q, precision=HIGHEST)
    solved = jax.scipy.linalg.cho_solve(chol, query)
    if not leverage:
        return jnp.dot(solved.T, train, precision=HIGHEST)
    Q = jax.scipy.linalg.cho_solve(chol, phi.reshape(-1, phi.shape[2]).T).T.reshape(phi.shape)
    Q = jnp.einsum("nar,nbr->nab", phi, Q, precision=HIGHEST)
    W = jnp.einsum("nas,nbs->nab", local.roots, local.roots, precision=HIGHEST)
    W_Q = jnp.einsum("nab,nbc->nac", W, Q, precision=HIGHEST)
    small = jnp.eye(W.shape[1], dtype=W.dtype)[None] - W_Q
    tau = jnp.linalg.solve(small, local.g[:, :, None])[:, :, 0]
    return jnp.dot(
        solved.T, jnp.einsum("nc,ncr->rn", tau, phi, precision=HIGHEST), precision=HIGHEST
    )
