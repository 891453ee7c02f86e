"""The programs of a stream of removals: each point takes one call, which returns one small array.

All data are on the device already, even the number of every point, because sending four numbers to an
H200 takes 0.2 ms. On a CPU NumPy computes the step, and only the certificate is a program.
"""

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from .._support.compile import ARRAYS, PRECISION, jit
from .._support.types import AnyArray
from ..operators._base import Layout
from ..problem._certificate import Certificate, Norms, measure_norms, norms_of_square
from ..problem._objective import HostArray, Problem, State
from ._anchor import Anchor
from ._anchor_mesh import Places, columns_at
from ._elimination import solve_small
from ._quick import (
    HOST,
    Algebra,
    Eliminated,
    Fixed,
    Gone,
    Scalar,
    make_correction,
    make_step,
    next_row,
    step_on_host,
)


class Found(NamedTuple):
    """A state, its residual, and the three norms of the certificate, which may still be being computed."""

    state: State
    rho: Array
    norms: Array

    def certificate(self, ridge: float) -> Certificate:
        """The norms on the host; this is the only wait of a request."""
        gradient, rounding, parameters = np.asarray(self.norms).tolist()
        return Certificate(gradient, rounding, parameters, ridge)


class RequestPrograms(NamedTuple):
    """The programs: remove one point, take one step, and compute the certificate, with or without new
    products."""

    less: Callable[..., Any]
    polish: Callable[..., Found]
    judge: Callable[..., Found]
    measure: Callable[..., Found]


class Programs:
    """Programs of one anchor. `weights` are the weights of the objective, which sum to one."""

    def __init__(self, anchor: Anchor) -> None:
        leaves, tree = jax.tree.flatten(anchor)
        self.anchor, self._arrays = anchor, [leaf for leaf in leaves if isinstance(leaf, ARRAYS)]
        fixed = tuple(None if isinstance(leaf, ARRAYS) else (leaf,) for leaf in leaves)
        self._run = _compiled(tree, fixed)
        self._dtype = anchor.N.dtype

    def leave_out(
        self,
        gone: Gone,
        state: State,
        points: list[int],
        shares: np.ndarray,
        weights: np.ndarray,
    ) -> tuple[Gone, Found]:
        """Leave points out one after another. `shares` are the weights at the anchor, which sum to one;
        `weights` are the present sample weights."""
        if gone.on_host:
            left = np.where(weights > 0, shares, 0)
            return self._left_on_host(gone, state, points, left)
        found: Any = None
        layout = self.anchor.op.layout
        names: Any = _names(state.alpha.shape[0]) if layout.sharding is None else _hosts(layout)
        for point in points:
            held = (*gone.eliminated, gone.shares, gone.place)
            before = (state.alpha, state.k_alpha, state.drift)
            *after, found = self._run.less(names[point], *held, *before, *self._arrays)
            room, count = gone.room, gone.count
            room.rows, room.T = after[:2]
            gone = Gone(room, *after[2:], count=count + 1, mark=room.wrote(count))
            state = found.state
        return gone, found

    def polish(self, gone: Gone, found: Found, left: np.ndarray) -> Found:
        """One step on the remaining residual with the inverse of the anchor. It reads `N` once and does
        not read `K`.

        `left` are the shares of the remaining points in the weights of the anchor.
        """
        if gone.on_host:
            return self._polished_on_host(gone, found, left)
        held = (gone.eliminated, gone.shares)
        return self._run.polish(*held, found.state, found.rho, *self._arrays)

    def measure(self, alpha: Float[Array, "n c"], weights: np.ndarray) -> Found:
        """The same dual variables with new products: without drift, and with `ρᵀKρ` instead of its upper
        bound."""
        return self._run.measure(alpha, self._cast(weights), *self._arrays)

    def _left_on_host(
        self, gone: Gone, state: State, points: list[int], left: np.ndarray
    ) -> tuple[Gone, Found]:
        alpha, k_alpha, drift = (np.asarray(a) for a in (state.alpha, state.k_alpha, state.drift))
        for point in points:
            share, left[point] = self._cast(left[point]), 0
            kept = self._cast(left > 0)
            gone, step = step_on_host(self._fixed, gone, alpha, point, share, kept)
            alpha, k_alpha, drift = alpha + step.delta, k_alpha + step.k_delta, drift + step.drift
        return gone, self._judged(alpha, k_alpha, drift, left)

    def _polished_on_host(self, gone: Gone, found: Found, left: np.ndarray) -> Found:
        state, held = found.state, gone.first(gone.count)
        given = (np.asarray(found.rho), self._cast(left > 0), self._cast(left.sum()))
        delta, k_delta, drift = make_correction(HOST, self._fixed, held, *given)
        moved = (np.asarray(state.alpha) + delta, np.asarray(state.k_alpha) + k_delta)
        return self._judged(*moved, np.asarray(state.drift) + drift, left)

    def _judged(
        self, alpha: np.ndarray, k_alpha: np.ndarray, drift: Scalar, left: np.ndarray
    ) -> Found:
        # As they are: a program takes arrays of the host faster than `jnp.asarray` does.
        given = (alpha, k_alpha, np.asarray(drift), self._cast(left / left.sum()))
        return self._run.judge(*given, *self._arrays)

    @cached_property
    def _fixed(self) -> Fixed:
        """On the host."""
        return jax.tree.map(np.asarray, Fixed.of(self.anchor))

    def _cast(self, value: ArrayLike) -> np.ndarray:
        return np.asarray(value, self._dtype)


@lru_cache(maxsize=16)
def _compiled(tree: Any, fixed: tuple[tuple[Any] | None, ...]) -> RequestPrograms:
    """Programs for anchors of one structure; the next anchor uses the same programs."""

    def anchor_of(arrays: tuple[Array, ...]) -> Anchor:
        rest = iter(arrays)
        return jax.tree.unflatten(tree, [next(rest) if leaf is None else leaf[0] for leaf in fixed])

    def less(point: Array, *arrays: Array) -> tuple:
        held, state = Eliminated(*arrays[:5]), State(*arrays[7:10])
        return _less(anchor_of(arrays[10:]), point, held, arrays[5], arrays[6], state)

    def polish(held: Eliminated, shares: Array, state: State, rho: Array, *arrays: Array) -> Found:
        return _polished(anchor_of(arrays), held, shares, state, rho)

    def judge(alpha: Array, k_alpha: Array, drift: Array, weights: Array, *arrays: Array) -> Found:
        state = State(alpha, k_alpha, drift)
        return Found(state, *_judged(anchor_of(arrays), state, weights))

    def measure(alpha: Array, weights: Array, *arrays: Array) -> Found:
        return _measured(anchor_of(arrays), alpha, weights)

    # The rows of N and T are written in place; those that were there keep what they hold. No product of
    # `less` and `judge` has a large operand, so that trial runs of its kernels need no room, and a skinny
    # one gains.
    quick = jit(less, donate_argnums=(1, 2)).outermost, jit(judge).outermost
    return RequestPrograms(quick[0], jit(polish), quick[1], jit(measure))


@lru_cache(maxsize=4)
def _names(n: int) -> tuple[Array, ...]:
    """The number of every point, each an array of its own on the device."""
    return tuple(jnp.arange(n, dtype=jnp.int32))


@lru_cache(maxsize=4)
def _hosts(layout: Layout) -> np.ndarray:
    """The row of every point on a mesh, on the host: every device gets it with the request."""
    return layout.positions.astype(np.int32)


def _less(
    anchor: Anchor,
    point: Int[Array, ""],
    held: Eliminated,
    shares: Float[Array, " n"],
    place: Int[Array, ""],
    state: State,
) -> tuple[Array, Array, Array, AnyArray, Array, Array, Array, Found]:
    rows, T, C, forces, points = held
    share, c = shares[point], state.alpha.shape[1]
    shares = jnp.where(jnp.arange(shares.shape[0], dtype=point.dtype) == point, 0, shares)
    kept = (shares > 0).astype(shares.dtype)
    own = jax.lax.dynamic_slice_in_dim(anchor.N, point * c, c)
    rows = jax.lax.dynamic_update_slice_in_dim(rows, own, place * c, axis=0)
    points = jax.lax.dynamic_update_slice_in_dim(points, point[None], place, axis=0)
    with jax.default_matmul_precision(PRECISION):
        seen = _seen(anchor, rows, point * c, c)
        row = next_row(T, C, seen)
        row = jax.lax.dynamic_update_slice_in_dim(row, jnp.eye(c, dtype=T.dtype), place * c, axis=1)
        now = Eliminated(rows, T, C, forces, points)
        given = (now, seen, row, state.alpha, share, kept, point)
        step = make_step(DEVICE, Fixed.of(anchor), *given)
    # A step that failed is seen in its state. In scratch it would be seen in later ones: zero times NaN.
    sound = jnp.where(jnp.isfinite(row), row, 0)
    T = jax.lax.dynamic_update_slice_in_dim(T, sound, place * c, axis=0)
    C = jax.lax.dynamic_update_slice_in_dim(C, step.C[None], place, axis=0)
    after = state.moved(jnp.asarray(step.delta), jnp.asarray(step.k_delta), step.drift)
    found = Found(after, *_judged(anchor, after, shares / jnp.sum(shares)))
    return _placed(anchor, (rows, T, C, step.forces, points, shares, place + 1, found))


def _seen(anchor: Anchor, rows: Array, start: Array, c: int) -> Float[Array, "kc c"]:
    """Columns `start:start + c`."""
    layout = anchor.op.layout
    if layout.sharding is not None:
        return columns_at(rows, start, c, layout)
    return jax.lax.dynamic_slice_in_dim(rows, start, c, axis=1)


def _placed(anchor: Anchor, made: tuple) -> tuple:
    """On a mesh, results where the next request expects them, so that it finds its program compiled."""
    layout = anchor.op.layout
    if layout.sharding is None:
        return made
    *arrays, found = made
    put, places = jax.lax.with_sharding_constraint, Places.of(layout)
    rows, *small = arrays
    small = [put(array, places.every) for array in small]
    return put(rows, places.columns), *small, _found_placed(found, places)


def _found_placed(found: Found, places: Places) -> Found:
    put, state = jax.lax.with_sharding_constraint, found.state
    alpha, k_alpha, rho = (put(a, places.rows) for a in (state.alpha, state.k_alpha, found.rho))
    drift, norms = (put(a, places.every) for a in (jnp.asarray(state.drift), found.norms))
    return Found(State(alpha, k_alpha, drift), rho, norms)


def _spread(
    like: Float[Array, "n c"], points: Int[Array, " k"], rows: Float[Array, " kc"]
) -> Float[Array, "n c"]:
    """Zeros with rows added at the points. Rows after the last point are zero, so their position does
    not matter."""
    return jnp.zeros_like(like).at[points].add(rows.reshape(-1, like.shape[1]))


DEVICE = Algebra(jnp, lambda A, B: solve_small(A, B), _spread)


def _polished(
    anchor: Anchor,
    held: Eliminated,
    shares: Float[Array, " n"],
    state: State,
    rho: Float[Array, "n c"],
) -> Found:
    total, kept = jnp.sum(shares), (shares > 0).astype(shares.dtype)
    given = (held, rho, kept, total)
    with jax.default_matmul_precision(PRECISION):
        step: Any = make_correction(DEVICE, Fixed.of(anchor), *given)
    after = state.moved(*step)
    found = Found(after, *_judged(anchor, after, shares / total))
    layout = anchor.op.layout
    return found if layout.sharding is None else _found_placed(found, Places.of(layout))


def _judged(
    anchor: Anchor, state: State, weights: Float[HostArray, " n"]
) -> tuple[Float[Array, "n c"], Float[Array, "3"]]:
    """The residual and the certificate's norms at a state, `ρᵀKρ` bounded from above."""
    problem = _reweighted(anchor.problem, weights)
    rho = problem.residual(state)
    square = anchor.majorant.square(anchor.op, rho)
    norms = norms_of_square(problem, state, rho, square, anchor.kernel_diagonal)
    return rho, _stacked(norms) if anchor.op.layout.sharding is None else _in_one(norms)


def _measured(anchor: Anchor, alpha: Float[Array, "n c"], weights: Float[HostArray, " n"]) -> Found:
    problem, state = _reweighted(anchor.problem, weights), State(alpha, anchor.op.mv(alpha))
    rho = problem.residual(state)
    norms = measure_norms(problem, state, rho, anchor.op.mv(rho), anchor.kernel_diagonal)
    layout = anchor.op.layout
    if layout.sharding is not None:
        return _found_placed(Found(state, rho, _in_one(norms)), Places.of(layout))
    return Found(state, rho, _stacked(norms))


def _reweighted(problem: Problem, weights: Any) -> Problem:
    p = problem
    return Problem(p.loss, p.targets, weights, p.ridge, p.offset, p.epsilon)


def _in_one(norms: Norms) -> Float[Array, "3"]:
    return jnp.stack([norms.gradient, norms.rounding, norms.parameters])


def _stacked(norms: Norms) -> Float[Array, "3"]:
    """The norms in one array. On a GPU the program writes them to memory of the host, because a later
    copy costs 0.3 ms."""
    stacked = _in_one(norms)
    memory = getattr(jax, "memory", None)  # not in JAX 0.6
    if memory is None or jax.default_backend() != "gpu":
        return stacked
    return jax.device_put(stacked, memory.Space.Host)
