"""Scores of sequences, from rows of a kernel that come one block after the other."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._support.compile import HIGHEST, jit
from ..linalg._inverse import inverse_transpose, solve_lower
from ._solves import correlation, factor, half, half_rows, own_solve, scores_of, solve_both
from ._terms import Scored


def streamed_scores(
    blocks: Iterable[tuple[int, Array]],
    cross: Iterable[tuple[int, Array]],
    shape: tuple[int, int],
    ridge: Array,
    leverage: bool,
    halved: bool,
    solved: list[Array],
) -> Scored:
    """`S` from rows of `K` and of `v_qᵀK`, folded, with the last direction along `g`.

    `solved` receives `B⁻¹PᵀKv`, queries on the last axis.
    """
    n, r = shape
    B = jnp.zeros((n * r, n * r), ridge.dtype)
    T = jnp.zeros((n * r, n), ridge.dtype)
    for start, block in blocks:
        B, T = _fold_rows(B, T, block, jnp.asarray(start))
        jax.block_until_ready(T)
    halves = []
    for odd in range(2 * halved):
        halves.append((factor(half(B, n, odd), ridge), half_rows(T, n, odd)))
    chol = factor(B, ridge)
    del B
    gain, parts, done = _own_blocks(chol, T) if leverage else None, [], 0
    agreement = []
    for start, thin in cross:
        end = start + thin.shape[0]
        direct, Y = _fold_queries(thin)
        V = solve_both(chol, Y)
        solved.append(V[:, done - start :])
        scores = scores_of(direct, V, T, ridge)
        if gain is not None:
            scores = scores + _leverage(V, gain, ridge)
        # Queries that the block before had too.
        parts.append(scores[done - start :])
        if halved:
            each = [
                scores_of(direct, solve_both(c, half_rows(Y, n, odd)), t, ridge)
                for odd, (c, t) in enumerate(halves)
            ]
            agreement.append(correlation(*each)[done - start :])
        done = end
    return Scored(jnp.concatenate(parts), None, jnp.concatenate(agreement) if halved else None)


def _fold_rows_body(B: Array, T: Array, block: Array, start: Array) -> tuple[Array, Array]:
    rows, n = block.shape[0], T.shape[1]
    r = B.shape[0] // n
    at = (start * r, jnp.zeros_like(start))
    folded = block[:, :r, :, :r].reshape(rows * r, n * r)
    B = jax.lax.dynamic_update_slice(B, folded, at)
    push = block[:, :r, :, r].reshape(rows * r, n)
    return B, jax.lax.dynamic_update_slice(T, push, at)


_fold_rows = jit(_fold_rows_body, donate_argnums=(0, 1))


@jit
def _fold_queries(thin: Float[Array, "q n b"]) -> tuple[Array, Array]:
    """`v_qᵀK_qi g_i`, `(q, n)`, and `PᵀK_nq v_q`."""
    Y = jnp.transpose(thin[:, :, :-1], (1, 2, 0))
    return thin[:, :, -1], Y.reshape(-1, thin.shape[0])


@jit
def _own_blocks(chol: Float[Array, "m m"], T: Float[Array, "m n"]) -> Float[Array, "n r"]:
    """`C_{ii}⁻¹ (C T_i)_i`: what the closed form of leave-one-out takes back of each point."""
    n = T.shape[1]
    X = inverse_transpose(chol).reshape(n, chol.shape[0] // n, -1)
    at_point = jnp.einsum("kam,mk->ka", X, solve_lower(chol, T), precision=HIGHEST)
    return own_solve(X, at_point)


@jit
def _leverage(V: Float[Array, "m q"], gain: Float[Array, "n r"], ridge: Array) -> Array:
    n, r = gain.shape
    return jnp.einsum("nrq,nr->qn", V.reshape(n, r, -1), gain, precision=HIGHEST) / ridge
