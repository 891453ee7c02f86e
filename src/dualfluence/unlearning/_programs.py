"""The programs of a stream of removals: one call a point, and one small array back.

Everything is on the device already, the number of every point included: on one H200 a request waits
0.2 ms for four numbers to arrive there. On a CPU the step itself is NumPy's and the certificate alone a
program.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._support.compile import ARRAYS, jit
from ..problem._certificate import Certificate, Norms, measure_norms, norms_of_square
from ..problem._objective import AnyArray, Problem, State
from ._anchor import Anchor
from ._elimination import solve_small
from ._quick import Fixed, Gone, make_correction, make_step, step_on_host


class Found(NamedTuple):
    """A state, its residual, and the certificate's three norms, which nobody has waited for yet."""

    state: State
    rho: Array
    norms: Array

    def certificate(self, ridge: float) -> Certificate:
        """On the host: the one wait of a request."""
        gradient, rounding, parameters = np.asarray(self.norms).tolist()
        return Certificate(gradient, rounding, parameters, ridge)


class Compiled(NamedTuple):
    """One point less, one step more, judgement as it is, and judgement with products of its own."""

    less: Any
    polish: Any
    judge: Any
    measure: Any


class Programs:
    """Programs of one anchor. `weights` are those of the objective, summing to one."""

    def __init__(self, anchor: Anchor) -> None:
        leaves, tree = jax.tree.flatten(anchor)
        self.anchor, self._arrays = anchor, [leaf for leaf in leaves if isinstance(leaf, ARRAYS)]
        fixed = tuple(None if isinstance(leaf, ARRAYS) else (leaf,) for leaf in leaves)
        self._run = _compiled(tree, fixed)
        self._dtype, self._ridge = anchor.N.dtype, np.asarray(anchor.problem.ridge)

    def leave_out(
        self,
        gone: Gone,
        state: State,
        points: list[int],
        shares: np.ndarray,
        weights: np.ndarray,
    ) -> tuple[Gone, Found]:
        """Points one after another. `shares` are all of the anchor's, `weights` the samples' until now."""
        if gone.on_host:
            left = np.where(weights > 0, shares, 0)
            return self._left_on_host(gone, state, points, left)
        found: Any = None
        names = _names(gone.shares.shape[0])
        for point in points:
            held = (gone.Y, gone.C, gone.v, gone.force, gone.shares, gone.place)
            before = (state.alpha, state.k_alpha, state.drift)
            *after, found = self._run.less(names[point], *held, *before, *self._arrays)
            gone, state = Gone(*after, count=gone.count + 1), found.state
        return gone, found

    def polish(self, gone: Gone, found: Found, left: np.ndarray) -> Found:
        """One step on what is left of the residual by the anchor's inverse: one read of `N`, none of `K`.

        `left` are the shares of the anchor's weights that are left.
        """
        if gone.on_host:
            return self._polished_on_host(gone, found, left)
        held = (gone.Y, gone.C, gone.shares)
        return self._run.polish(*held, found.state, found.rho, *self._arrays)

    def measure(self, alpha: Float[Array, "n c"], weights: np.ndarray) -> Found:
        """The same dual variables with products of their own: no drift, and `ρᵀKρ` itself."""
        return self._run.measure(alpha, self._cast(weights), *self._arrays)

    def _left_on_host(
        self, gone: Gone, state: State, points: list[int], left: np.ndarray
    ) -> tuple[Gone, Found]:
        alpha, k_alpha, drift = (np.asarray(a) for a in (state.alpha, state.k_alpha, state.drift))
        for point in points:
            share, left[point] = self._cast(left[point]), 0
            kept = self._cast(left > 0)
            gone, step = step_on_host(self.anchor, gone, alpha, point, share, kept)
            alpha, k_alpha, drift = alpha + step.delta, k_alpha + step.k_delta, drift + step.drift
        return gone, self._judged(alpha, k_alpha, drift, left)

    def _polished_on_host(self, gone: Gone, found: Found, left: np.ndarray) -> Found:
        anchor, state, used = self.anchor, found.state, gone.count * found.rho.shape[1]
        held = (gone.Y[:used], gone.C[: gone.count])
        arrays = (anchor.N, *held, anchor.hess, found.rho, self._cast(left > 0), anchor.error)
        plain = [np.asarray(a) for a in (*arrays, self._cast(left.sum()), self._ridge)]
        delta, k_delta, drift = make_correction(np, *plain)
        moved = (np.asarray(state.alpha) + delta, np.asarray(state.k_alpha) + k_delta)
        return self._judged(*moved, np.asarray(state.drift) + drift, left)

    def _judged(
        self, alpha: np.ndarray, k_alpha: np.ndarray, drift: Any, left: np.ndarray
    ) -> Found:
        state = State(jnp.asarray(alpha), jnp.asarray(k_alpha), np.asarray(drift))
        rho, norms = self._run.judge(state, self._cast(left / left.sum()), *self._arrays)
        return Found(state, rho, norms)

    def _cast(self, value: Any) -> Any:
        return np.asarray(value, self._dtype)


@lru_cache(maxsize=16)
def _compiled(tree: Any, fixed: tuple[Any, ...]) -> Compiled:
    """Programs for anchors of one structure; those of the next anchor are the same."""

    def anchor_of(arrays: tuple[Any, ...]) -> Anchor:
        rest = iter(arrays)
        return jax.tree.unflatten(tree, [next(rest) if leaf is None else leaf[0] for leaf in fixed])

    def less(point: Any, *arrays: Any) -> Any:
        return _less(anchor_of(arrays[9:]), point, *arrays[:9])

    def polish(Y: Any, C: Any, shares: Any, state: State, rho: Any, *arrays: Any) -> Any:
        return _polished(Y, C, shares, state, rho, anchor_of(arrays))

    def judge(state: State, weights: Any, *arrays: Any) -> Any:
        return _judged(anchor_of(arrays), state, weights)

    def measure(alpha: Any, weights: Any, *arrays: Any) -> Any:
        return _measured(anchor_of(arrays), alpha, weights)

    # The updates of N are written in place; rows that they had keep what they hold. No product of `less` and
    # `judge` has a large operand, so that trial runs of its kernels need no room, and a skinny one gains.
    quick = jit(less, donate_argnums=1).outermost, jit(judge).outermost
    return Compiled(quick[0], jit(polish), quick[1], jit(measure))


@lru_cache(maxsize=4)
def _names(n: int) -> tuple[Array, ...]:
    """The number of every point, each an array of its own on the device."""
    return tuple(jnp.arange(n, dtype=jnp.int32))


def _less(
    anchor: Anchor,
    point: Int[Array, ""],
    Y: Float[Array, "kc nc"],
    C: Float[Array, "k c c"],
    v: Float[Array, "n c"],
    force: Float[Array, ""],
    shares: Float[Array, " n"],
    place: Int[Array, ""],
    alpha: Float[Array, "n c"],
    k_alpha: Float[Array, "n c"],
    drift: Float[AnyArray, ""],
) -> tuple[Array, Array, Array, Array, Array, Array, Found]:
    share, c = shares[point], alpha.shape[1]
    shares = jnp.where(jnp.arange(shares.shape[0]) == point, 0, shares)
    kept, fixed = (shares > 0).astype(shares.dtype), Fixed.of(anchor)
    with jax.default_matmul_precision("highest"):
        own = jax.lax.dynamic_slice_in_dim(Y, point * c, c, axis=1).reshape(C.shape)
        own = jnp.sum(C[:, :, :, None] * own[:, None], axis=2).reshape(-1, c)
        column = (jax.lax.dynamic_slice_in_dim(anchor.N, point * c, c) + own.T @ Y).T
        given = (alpha, v, force, share, kept, point)
        step = make_step(jnp, solve_small, fixed, column, own, *given)
    Y = jax.lax.dynamic_update_slice_in_dim(Y, _finite(column.T), place * c, axis=0)
    C = jax.lax.dynamic_update_slice_in_dim(C, _finite(step.C)[None], place, axis=0)
    state = State(alpha + step.delta, k_alpha + step.k_delta, drift + step.drift)
    found = Found(state, *_judged(anchor, state, shares / jnp.sum(shares)))
    return Y, C, step.v, step.force, shares, place + 1, found


def _polished(Y: Any, C: Any, shares: Any, state: State, rho: Any, anchor: Anchor) -> Found:
    total, kept = jnp.sum(shares), (shares > 0).astype(shares.dtype)
    arrays = (Y, C, anchor.hess, rho, kept, anchor.error)
    with jax.default_matmul_precision("highest"):
        step = make_correction(jnp, anchor.N, *arrays, total, anchor.problem.ridge)
    after = state.moved(*step)
    return Found(after, *_judged(anchor, after, shares / total))


def _finite(rows: Float[Array, "c k"]) -> Float[Array, "c k"]:
    """Rows fit for scratch: a step that failed is seen in its state, and must not be seen in later ones."""
    return jnp.where(jnp.isfinite(rows), rows, 0)


def _judged(
    anchor: Anchor, state: State, weights: Float[AnyArray, " n"]
) -> tuple[Float[Array, "n c"], Float[Array, "3"]]:
    """The residual and the certificate's parts at a state, `ρᵀKρ` bounded from above."""
    problem = _reweighted(anchor.problem, weights)
    rho = problem.residual(state)
    square = anchor.majorant.square(anchor.op, rho)
    return rho, _stacked(norms_of_square(problem, state, rho, square, anchor.kernel_diagonal))


def _measured(anchor: Anchor, alpha: Float[Array, "n c"], weights: Float[AnyArray, " n"]) -> Found:
    problem, state = _reweighted(anchor.problem, weights), State(alpha, anchor.op.mv(alpha))
    rho = problem.residual(state)
    norms = measure_norms(problem, state, rho, anchor.op.mv(rho), anchor.kernel_diagonal)
    return Found(state, rho, _stacked(norms))


def _reweighted(problem: Problem, weights: Any) -> Problem:
    p = problem
    return Problem(p.loss, p.targets, weights, p.ridge, p.offset, p.epsilon)


def _stacked(norms: Norms) -> Float[Array, "3"]:
    """On a GPU in memory of the host, which the program writes to: a copy later costs 0.3 ms."""
    stacked = jnp.stack([norms.gradient, norms.rounding, norms.parameters])
    memory = getattr(jax, "memory", None)  # not in JAX 0.6
    if memory is None or jax.default_backend() != "gpu":
        return stacked
    return jax.device_put(stacked, memory.Space.Host)
