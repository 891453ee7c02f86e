r"""Scores of every training point for every query at one checkpoint of a network.

$$S_{qi} = \tfrac{1}{\lambda}[v_q^\top K_{qi}\,g_i - (R^\top K_{nq}v_q)^\top B^{-1}(R^\top K_{ni}\,g_i)],
  \qquad B = \lambda I + R^\top KR ,$$

the first-order effect of leaving `i` out, with `g_i` the gradient of the mean loss. `RᵀKR` is computed
from one block of rows of `K` after the other; `K` is never stored as a whole.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._support.compile import filter_jit, jit
from .._support.memory import memory_budget
from .._support.precision import HIGHEST, PRECISION
from .._support.trees import common_dtype
from ..kernels import kernel_rows
from ..kernels._along import kernel_along
from ..kernels._linearized import Linearized
from ..linalg._triangular import inverse_transpose, solve_lower
from ..losses import AbstractLoss, TokenCrossEntropy
from ..models._low_rank import RandomFeatureSource
from ..models._sources import NetworkSource
from ..problem._quantity import Quantity
from ._probes import Probes, RandomProbes, root_blocks
from ._token_sketch import sketched_scores, unsketched
from ._tokens import Queries, Sequences, directions_of, token_blocks, token_parts

BLOCK_SHARE = 0.1
"""Share of the kernel's memory budget for one block of rows of `K`."""

QUERIES_AT_ONCE = 512
"""Queries of one block. Doubled, `v_qᵀK_qn` takes twice the memory, and the solves gain little."""

PROJECTED_RANK = 2048
"""Random directions of `method="projected"`; twice as many halve the variance of its entries."""


class Local(eqx.Module):
    """Loss terms at a checkpoint: queries' gradients `v`, and `g`, `R` of the training points."""

    v: Float[Array, "q c"]
    g: Float[Array, "n c"]
    roots: Float[Array, "n c r"]


class Scored(NamedTuple):
    """Scores of a checkpoint; of probes, what they left out and how much their draw matters.

    `left_out` is the share of the curvature (its trace) that is not along the probes. `agreement` is, for
    each query, the correlation between the scores of one half of random probes and of the other.
    """

    values: Float[Array, "q n"]
    left_out: Float[Array, ""] | None = None
    agreement: Float[Array, " q"] | None = None
    tokens: Float[Array, "q n t"] | None = None


def checkpoint_scores(
    model: Linearized,
    x: Array,
    targets: Array,
    xq: Array,
    quantity: Quantity,
    *,
    loss: AbstractLoss,
    ridge: float,
    key: Array,
    probes: Probes | None = None,
    projected: int | None = None,
    leverage: bool = False,
    tokens: bool = False,
) -> Scored:
    """`S` at the parameters of `model`: exact, by probes, or from `projected` numbers of each gradient."""
    if isinstance(loss, TokenCrossEntropy) and isinstance(probes, RandomProbes):
        train = Sequences.of(model, x, targets, loss, probes.m, key)
        queries = Queries(model, xq, quantity)
        return _sequence_scores(train, queries, ridge, projected, leverage, tokens)
    if probes is not None:
        v, g, P, left_out = _probed_terms(model, x, targets, xq, quantity, loss, probes, key)
        lam = jnp.asarray(ridge, g.dtype)
        halved = isinstance(probes, RandomProbes) and probes.m > 1
        blocks, queries = _probed_blocks(model, x, xq, v, g, P)
        shape = P.shape[0], P.shape[2]
        found = _solve(blocks, queries, None, shape, lam, leverage, halved)
        return found._replace(left_out=left_out)
    local = local_terms(model, x, targets, xq, quantity, loss)
    lam = jnp.asarray(ridge, local.g.dtype)
    if projected is not None:
        source = RandomFeatureSource(NetworkSource(model), jax.random.key(0), projected)
        return Scored(_projected(source.features(x), source.features(xq), local, lam, leverage))
    queries = _query_blocks(model, xq, local.v, x)
    shape = local.roots.shape[0], local.roots.shape[2]
    return _solve(_row_blocks(model, x), queries, local, shape, lam, leverage)


def _sequence_scores(
    train: Sequences,
    queries: Queries,
    ridge: float,
    projected: int | None,
    leverage: bool,
    tokens: bool,
) -> Scored:
    """`S` of sequences by random probes, and on request the part of every token."""
    lam = jnp.asarray(ridge, common_dtype(jnp.float32, train.model.dtype))
    parts = None
    if projected is not None:
        values, small, sketch = sketched_scores(train, queries, lam, projected)
        if tokens:
            theta = train.model.split(train.model.params)[0]
            parts = token_parts(train, unsketched(theta, sketch, small))
        return Scored(values, tokens=parts)
    solved: list[Array] = []
    blocks, cross = token_blocks(train, queries)
    shape = (train.num, train.m)
    found = _solve(blocks, cross, None, shape, lam, leverage, train.m > 1, solved)
    if tokens:
        z = directions_of(train, queries, jnp.concatenate(solved, axis=1), lam)
        parts = token_parts(train, z)
    return found._replace(left_out=jnp.zeros((), lam.dtype), tokens=parts)


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
    roots = root_blocks(loss.hess_factor(f, targets, weights), f)
    return Local(quantity.grad(f_q, quantity.targets), g, roots)


@filter_jit
def _probed_terms(
    model: Linearized,
    x: Array,
    targets: Array,
    xq: Array,
    quantity: Quantity,
    loss: AbstractLoss,
    probes: Probes,
    key: Array,
) -> tuple[Array, Array, Array, Array]:
    """As `local_terms` with probes instead of roots, and the share of the curvature that they leave out."""
    f, f_q = model.base_outputs(x), model.base_outputs(xq)
    weights = jnp.full(x.shape[0], 1 / x.shape[0], f.dtype)
    g = weights[:, None] * loss.grad(f, targets)
    factor = loss.hess_factor(f, targets, weights)
    P = probes.directions(factor, f, key)
    whole = jnp.sum(jnp.broadcast_to(factor.hess_diagonal(), f.shape))
    left_out = jnp.maximum(0, 1 - jnp.sum(P**2) / jnp.where(whole > 0, whole, 1))
    if isinstance(probes, RandomProbes):
        left_out = jnp.zeros_like(left_out)  # in the mean over draws
    return quantity.grad(f_q, quantity.targets), g, P, left_out


class Folded(eqx.Module):
    """A network seen along directions of outputs of each point: `(x, U) ↦ Uᵀf(x)`."""

    apply_fn: Any = eqx.field(static=True)

    def __call__(self, params: PyTree, inputs: tuple[Array, Array]) -> Float[Array, "n m"]:
        x, directions = inputs
        f = self.apply_fn(params, x)
        return jnp.einsum("nc,ncm->nm", f, directions.astype(f.dtype), precision=HIGHEST)


def _probed_blocks(
    model: Linearized, x: Array, xq: Array, v: Array, g: Array, P: Array
) -> tuple[Iterator[tuple[int, Array]], Iterator[tuple[int, Array]]]:
    """Rows of the kernel along every probe and `g`, and the same of the queries along `v`."""
    mask = jax.tree.unflatten(jax.tree.structure(model.params), model.trainable)
    folded = Folded(model.apply_fn)
    train = (x, jnp.concatenate([P, g[:, :, None]], axis=2))
    n, _, width = train[1].shape
    first = jnp.zeros((*v.shape, width), v.dtype).at[:, :, 0].set(v)
    unit = jnp.zeros((v.shape[0], width), v.dtype).at[:, 0].set(1)

    def along(here: slice) -> Array:
        with jax.default_matmul_precision(PRECISION):
            return kernel_along(
                folded, model.params, (xq[here], first[here]), unit[here], train, trainable=mask
            )

    rows = kernel_rows(
        folded, model.params, train, _rows_at_once(n, width, g.dtype), trainable=mask
    )
    return rows, _by_queries(along, xq.shape[0])


def _row_blocks(model: Linearized, x: Array) -> Iterator[tuple[int, Array]]:
    """`K` of the training points by blocks of rows, with the first row of each."""
    n, c = model.apply_shape(x)
    return model.kernel_rows(x, _rows_at_once(n, c, model.dtype))


def _query_blocks(
    model: Linearized, xq: Array, v: Float[Array, "q c"], x: Array
) -> Iterator[tuple[int, Array]]:
    """`v_qᵀK_qn`, `(rows, n, c)`, by blocks of queries, with the first query of each."""
    return _by_queries(lambda here: model.kernel_along(xq[here], v[here], x), xq.shape[0])


def _by_queries(along: Callable[[slice], Array], total: int) -> Iterator[tuple[int, Array]]:
    rows = min(total, QUERIES_AT_ONCE)
    for i in range(0, total, rows):
        # The last block starts early instead of being short: one shape, one compilation.
        start = min(i, total - rows)
        yield start, along(slice(start, start + rows))


def _rows_at_once(n: int, c: int, dtype: Any) -> int:
    each = 3 * n * c * c * jnp.dtype(dtype).itemsize
    return int(min(n, max(1, BLOCK_SHARE * memory_budget() // each)))


def _solve(
    blocks: Iterable[tuple[int, Array]],
    cross: Iterable[tuple[int, Array]],
    local: Local | None,
    shape: tuple[int, int],
    ridge: Array,
    leverage: bool,
    halved: bool = False,
    solved: list[Array] | None = None,
) -> Scored:
    """`S` from rows of `K` and of `v_qᵀK`; without `local` both are folded, the last direction along `g`.

    `solved` receives `B⁻¹RᵀKv`, queries on the last axis.
    """
    n, r = shape
    B = jnp.zeros((n * r, n * r), ridge.dtype)
    T = jnp.zeros((n * r, n), ridge.dtype)
    for start, block in blocks:
        B, T = _fold_rows(B, T, block, local, jnp.asarray(start))
        jax.block_until_ready(T)
    halves = []
    for odd in range(2 * halved):
        half_B, half_T = _half(B, T, n, odd)
        halves.append((_factor(half_B, ridge), half_T))
    chol = _factor(B, ridge)
    del B
    gain, parts, done = _own_blocks(chol, T) if leverage else None, [], 0
    agreement = []
    for start, thin in cross:
        end = start + thin.shape[0]
        direct, Y = _fold_queries(thin, local)
        V = _solve_both(chol, Y)
        if solved is not None:
            solved.append(V[:, done - start :])
        scores = _scores(direct, V, T, ridge)
        if gain is not None:
            scores = scores + _leverage(V, gain, ridge)
        # Queries that the block before had too.
        parts.append(scores[done - start :])
        if halved:
            each = [
                _scores(direct, _solve_both(c, _half_rows(Y, n, odd)), t, ridge)
                for odd, (c, t) in enumerate(halves)
            ]
            agreement.append(_correlation(*each)[done - start :])
        done = end
    return Scored(jnp.concatenate(parts), None, jnp.concatenate(agreement) if halved else None)


@partial(jit, static_argnames=("n", "odd"))
def _half(B: Array, T: Array, n: int, odd: int) -> tuple[Array, Array]:
    """The system of every second probe, in the size that these alone would have."""
    m = B.shape[0] // n
    own = B.reshape(n, m, n, m)[:, odd::2, :, odd::2]
    share = m / own.shape[1]
    return share * own.reshape(n * own.shape[1], -1), _half_rows(T, n, odd)


@partial(jit, static_argnames=("n", "odd"))
def _half_rows(Y: Float[Array, "m q"], n: int, odd: int) -> Array:
    m = Y.shape[0] // n
    own = Y.reshape(n, m, -1)[:, odd::2]
    return jnp.sqrt(jnp.asarray(m / own.shape[1], Y.dtype)) * own.reshape(-1, Y.shape[1])


@jit
def _correlation(a: Float[Array, "q n"], b: Float[Array, "q n"]) -> Float[Array, " q"]:
    product = jnp.sum(a * b, axis=1)
    size = jnp.sqrt(jnp.sum(a**2, axis=1) * jnp.sum(b**2, axis=1))
    return product / jnp.where(size > 0, size, 1)


@jit
def _scores(direct: Array, V: Array, T: Array, ridge: Array) -> Array:
    return (direct - jnp.dot(V.T, T, precision=HIGHEST)) / ridge


def _fold_rows_body(
    B: Array, T: Array, block: Array, local: Local | None, start: Array
) -> tuple[Array, Array]:
    rows, n = block.shape[0], T.shape[1]
    r = B.shape[0] // n
    if local is None:
        folded, push = block[:, :r, :, :r], block[:, :r, :, r]
    else:
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
def _fold_queries(thin: Float[Array, "q n b"], local: Local | None) -> tuple[Array, Array]:
    """`v_qᵀK_qi g_i`, `(q, n)`, and `RᵀK_nq v_q`."""
    if local is None:
        direct, Y = thin[:, :, -1], jnp.transpose(thin[:, :, :-1], (1, 2, 0))
    else:
        direct = jnp.einsum("qnb,nb->qn", thin, local.g, precision=HIGHEST)
        Y = jnp.einsum("nbr,qnb->nrq", local.roots, thin, precision=HIGHEST)
    return direct, Y.reshape(-1, thin.shape[0])


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
