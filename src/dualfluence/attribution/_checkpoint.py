r"""Scores of every training point for every query at one checkpoint of a network.

With `g_i` the gradient of the mean loss, the first-order effect of leaving `i` out is

$$S_{qi} = \tfrac{1}{\lambda}[v_q^\top K_{qi}\,g_i - z_q^\top P^\top K_{ni}\,g_i],
  \qquad z_q = (\lambda I + P^\top KP)^{-1} P^\top K_{nq}v_q .$$

`P` is all of the curvature's root `R`, or probes. Kernels are those of the network folded along `P`, so `K`
itself is never computed. With `P = R` and `g_i = R_ih_i`, the sum is `S_qi = h_iᵀz_qi`: no more kernels.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .._support.compile import HIGHEST, filter_jit
from .._support.memory import even_size
from .._support.points import common_dtype
from ..kernels._linearized import Linearized
from ..linalg import solve_each
from ..losses import AbstractLoss, TokenCrossEntropy
from ..models._low_rank import RandomFeatureSource
from ..models._sources import NetworkSource
from ..problem._quantity import Quantity
from ._probes import Probes, RandomProbes
from ._solves import (
    along_points,
    correlation,
    factor,
    half,
    half_rows,
    own_solve,
    rows_of_inverse,
    scores_of,
    solve_both,
    taken_back,
)
from ._streamed import streamed_scores
from ._terms import Local, Scored, Terms, directed_terms, local_terms
from ._token_sketch import sketched_scores, unsketched
from ._tokens import Queries, Sequences, directions_of, token_blocks, token_parts
from ._view import View, rows_at_once

PROJECTED_RANK = 2048
"""Random directions of `method="projected"`; twice as many halve the variance of its entries."""


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
    """The scores `S` at the parameters of `model`: exact, by probes, or from a random projection of each
    gradient to `projected` numbers."""
    if isinstance(loss, TokenCrossEntropy) and isinstance(probes, RandomProbes):
        train = Sequences.of(model, x, targets, loss, probes.m, key)
        queries = Queries(model, xq, quantity)
        return _sequence_scores(train, queries, ridge, projected, leverage, tokens)
    if projected is not None:
        local = local_terms(model, x, targets, xq, quantity, loss)
        source = RandomFeatureSource(NetworkSource(model), jax.random.key(0), projected)
        features = source.features(x), source.features(xq)
        return Scored(_projected(*features, local, jnp.asarray(ridge, local.g.dtype), leverage))
    terms = directed_terms(model, x, targets, xq, quantity, loss, probes, key)
    view = View(model, x, terms.P)
    B, Y = view.system(), view.from_queries(xq, terms.v)
    halves = _halves(B, Y, terms, ridge) if _many_draws(probes) else []
    chol = factor(B, jnp.asarray(ridge, B.dtype))
    del B
    whole = _System(chol, solve_both(chol, Y), rows_of_inverse(chol) if leverage else None)
    if probes is None:
        outside = np.flatnonzero(np.asarray(terms.outside))
        values = _inside_scores(whole, terms.h, jnp.asarray(ridge, chol.dtype))
        if outside.size:
            blocks = _few(outside, len(terms.g))
            found = _direct_scores(view, terms, x, xq, [whole], ridge, blocks)[0]
            values = values.at[:, outside].set(found[:, : outside.size])
        return Scored(values, None)
    blocks = _all_points(len(terms.g), view.num_directions, chol.dtype)
    values, *each = _direct_scores(view, terms, x, xq, [whole, *halves], ridge, blocks)
    return Scored(values, terms.left_out, correlation(*each) if halves else None)


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
    found = streamed_scores(blocks, cross, shape, lam, leverage, train.m > 1, solved)
    if tokens:
        z = directions_of(train, queries, jnp.concatenate(solved, axis=1), lam)
        parts = token_parts(train, z)
    return found._replace(left_out=jnp.zeros((), lam.dtype), tokens=parts)


class _System(NamedTuple):
    """`B` factored, its solutions `z` for all queries, and rows of `L⁻ᵀ` where leverage is asked for.

    `odd` is the half of the probes that it has, else `None`.
    """

    chol: Array
    z: Float[Array, "nr q"]
    inverse: Array | None = None
    odd: int | None = None

    def rows(self, T: Float[Array, "nr k"], n: int) -> Array:
        return T if self.odd is None else half_rows(T, n, self.odd)


def _halves(B: Array, Y: Array, terms: Terms, ridge: float) -> list[_System]:
    """The systems of every second probe, each in the size that it would have alone."""
    n, lam = terms.g.shape[0], jnp.asarray(ridge, B.dtype)
    chols = [factor(half(B, n, odd), lam) for odd in (0, 1)]
    return [
        _System(chol, solve_both(chol, half_rows(Y, n, odd)), odd=odd)
        for odd, chol in enumerate(chols)
    ]


def _many_draws(probes: Probes | None) -> bool:
    return isinstance(probes, RandomProbes) and probes.m > 1


def _direct_scores(
    view: View,
    terms: Terms,
    x: Array,
    xq: Array,
    systems: list[_System],
    ridge: float,
    blocks: Iterator[tuple[np.ndarray, int]],
) -> list[Array]:
    """`S` with kernels from each point along its `g`: one block of points after the other."""
    found: list[list[Array]] = [[] for _ in systems]
    n, lam = terms.g.shape[0], jnp.asarray(ridge, terms.g.dtype)
    for block, skip in blocks:
        at, g = jnp.take(x, block, axis=0), jnp.take(terms.g, block, axis=0)
        direct = view.pairs(xq, terms.v, at, g)
        T = view.along(at, g).T
        for parts, system in zip(found, systems, strict=True):
            own = system.rows(T, n)
            scores = scores_of(direct, system.z, own, lam)
            if system.inverse is not None:
                taken = taken_back(
                    system.chol,
                    system.inverse,
                    system.z,
                    own,
                    jnp.asarray(block),
                    lam,
                    r=view.num_directions,
                )
                scores = scores + taken
            parts.append(scores[:, skip:])
        jax.block_until_ready(found[0][-1])  # one block in memory, not all
    return [jnp.concatenate(parts, axis=1) for parts in found]


def _all_points(n: int, r: int, dtype: DTypeLike) -> Iterator[tuple[np.ndarray, int]]:
    """All points in blocks of one size, with the number of those that the block before had too."""
    size = even_size(n, rows_at_once(n, r, dtype))
    for i in range(0, n, size):
        start = min(i, n - size)
        yield np.arange(start, start + size), i - start


def _few(points: np.ndarray, n: int) -> Iterator[tuple[np.ndarray, int]]:
    """Some points in one block, filled up to a power of two: few sizes, few compilations."""
    size = min(n, 1 << max(3, int(points.size - 1).bit_length()))
    yield np.concatenate([points, np.repeat(points[-1:], max(0, size - points.size))]), 0


def _inside_scores(system: _System, h: Float[Array, "n r"], ridge: Array) -> Float[Array, "q n"]:
    """`h_iᵀz_qi`; with leverage `h_iᵀ(λC_ii)⁻¹z_qi`, where `C` is the inverse of `B`."""
    if system.inverse is not None:
        n, r = h.shape
        h = own_solve(system.inverse.reshape(n, r, -1), h) / ridge
    return along_points(system.z, h)


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
    tau = solve_each(small, local.g)
    return jnp.dot(
        solved.T, jnp.einsum("nc,ncr->rn", tau, phi, precision=HIGHEST), precision=HIGHEST
    )
