r"""Leaving points out one after another, each by a small solve with the anchor's inverse.

With the sums of weights as they were at the anchor, removing a point drops its term and lowers the ridge
by its share $\lambda m$. The step of the others and of the outputs is (DESIGN, section 1)

$$K\Delta\alpha = N(b + E_i\tau),\quad
  \Delta\alpha = \tfrac1\lambda\left(b + E_i\tau - W_0K\Delta\alpha\right),$$
$$b = \lambda m\,\alpha,\qquad \Delta\alpha_i = -\alpha_i,$$

where the last equation fixes `τ`. The point is then eliminated from the inverse by a symmetric update of rank
`c`, which is stored and not applied: $N \leftarrow N + YCY^\top$, $Y = N_{\cdot i}$,
$C = (I - W_iN_{ii})^{-1}W_i$.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._support.compile import filter_jit, jit
from ..operators import AbstractKernelOperator
from ..problem._certificate import Norms, measure_norms
from ..problem._objective import AnyArray, Problem, State
from ._anchor import HIGHEST, Anchor, Majorant


class Gone(eqx.Module):
    """Points eliminated since the anchor.

    - `Y`, `YC`: the updates of `N`, transposed: `(capacity·c, n·c)`. Rows past `count` are scratch. On a
      CPU they are arrays of the host, written in place.
    - `v`: `Nα` of the anchor's `α` at the points that are left.
    - `force`: squared norm of the forces that `v` holds back at eliminated points.
    - `count`: points eliminated.
    """

    Y: Float[AnyArray, "kc nc"]
    YC: Float[AnyArray, "kc nc"]
    v: Float[AnyArray, "n c"]
    force: Float[AnyArray, ""]
    count: int = eqx.field(static=True)

    @property
    def room(self) -> int:
        """Points that fit without new arrays."""
        return self.Y.shape[0] // self.v.shape[1]


class Step(NamedTuple):
    """What leaving one point out does: `Δα`, `KΔα`, its rounding, and what elimination needs later."""

    delta: Any
    k_delta: Any
    drift: Any
    C: Any
    v: Any
    force: Any


def on_host() -> bool:
    """Whether small algebra goes to NumPy: on a CPU it has no program to start and no copy to make."""
    return jax.default_backend() == "cpu"


def nothing_gone(anchor: Anchor, capacity: int) -> Gone:
    """Room for `capacity` points."""
    size, c = anchor.N.shape[0], anchor.alpha.shape[1]
    xp: Any = np if on_host() else jnp
    # Two arrays: a program that may overwrite its arguments must not get one of them twice.
    Y, YC = (xp.zeros((capacity * c, size), anchor.N.dtype) for _ in range(2))
    return Gone(Y, YC, xp.asarray(_product(anchor)), xp.zeros((), anchor.N.dtype), 0)


def with_room(gone: Gone, capacity: int) -> Gone:
    """The same with room for `capacity` points."""
    xp: Any = np if isinstance(gone.Y, np.ndarray) else jnp
    more = ((0, capacity * gone.v.shape[1] - gone.Y.shape[0]), (0, 0))
    return Gone(xp.pad(gone.Y, more), xp.pad(gone.YC, more), gone.v, gone.force, gone.count)


@filter_jit
def _product(anchor: Anchor) -> Float[Array, "n c"]:
    flat = anchor.alpha.reshape(-1)
    return jnp.dot(anchor.N, flat, precision=HIGHEST).reshape(anchor.alpha.shape)


def one_less(
    anchor: Anchor,
    gone: Gone,
    problem: Problem,
    state: State,
    point: int,
    share: float,
    kept: np.ndarray,
) -> tuple[Gone, State]:
    """Leave out one point of the given share of the weight; `kept` marks the points that are left."""
    dtype, count = anchor.N.dtype, gone.count
    m: Any = np.asarray(share, dtype)
    ridge: Any = np.asarray(problem.ridge, dtype)
    left: Any = kept
    Y: Any
    YC: Any
    if isinstance(gone.Y, np.ndarray):
        Y, YC, step = _on_host(anchor, gone, np.asarray(state.alpha), point, m, ridge, left)
    else:
        where: Any = np.asarray([point, count], np.int32)
        before = (gone.Y, gone.YC, gone.v, gone.force)
        Y, YC, step = _on_device(*before, anchor, state.alpha, where, m, ridge, left)
    drift: Any = state.drift + step.drift
    xp: Any = np if isinstance(drift, np.generic) else jnp
    after = State(state.alpha + step.delta, state.k_alpha + step.k_delta, xp.asarray(drift))
    return Gone(Y, YC, step.v, step.force, count + 1), after


def _on_host(
    anchor: Anchor,
    gone: Gone,
    alpha: np.ndarray,
    point: int,
    share: np.ndarray,
    ridge: np.ndarray,
    kept: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, Step]:
    Y: Any = gone.Y
    YC: Any = gone.YC
    c, used = alpha.shape[1], gone.count * alpha.shape[1]
    rows = slice(point * c, (point + 1) * c)
    N, hess, start = (np.asarray(a) for a in (anchor.N, anchor.hess, anchor.alpha))
    own = YC[:used, rows]
    column = (N[rows] + own.T @ Y[:used]).T
    error = np.asarray(anchor.error)
    step = _step(np, column, own, start, hess, alpha, gone.v, gone.force, ridge, share, kept, point,
                 error)  # fmt: skip
    Y[used : used + c], YC[used : used + c] = column.T, (column @ step.C).T
    return Y, YC, step


def _device_step(
    Y: Float[Array, "kc nc"],
    YC: Float[Array, "kc nc"],
    v: Float[Array, "n c"],
    force: Float[Array, ""],
    anchor: Anchor,
    alpha: Float[Array, "n c"],
    where: Int[AnyArray, "2"],
    share: Float[AnyArray, ""],
    ridge: Float[AnyArray, ""],
    kept: Float[AnyArray, " n"],
) -> tuple[Array, Array, Step]:
    with jax.default_matmul_precision("highest"):
        (point, count), c = where, alpha.shape[1]
        before = (jnp.arange(Y.shape[0]) < count * c).astype(Y.dtype)
        own = jax.lax.dynamic_slice_in_dim(YC, point * c, c, axis=1) * before[:, None]
        column = (jax.lax.dynamic_slice_in_dim(anchor.N, point * c, c) + own.T @ Y).T
        step = _step(jnp, column, own, anchor.alpha, anchor.hess, alpha, v, force, ridge, share, kept,
                     point, anchor.error)  # fmt: skip
        place = (count * c, jnp.zeros_like(count))
        Y = jax.lax.dynamic_update_slice(Y, column.T, place)
        YC = jax.lax.dynamic_update_slice(YC, (column @ step.C).T, place)
    return Y, YC, step


_on_device = jit(_device_step, donate_argnums=(0, 1))
"""`_device_step`, compiled once per capacity; the updates of `N` are written in place."""


def _step(
    xp: Any,
    column: Any,
    own: Any,
    start: Any,
    hess: Any,
    alpha: Any,
    v: Any,
    force: Any,
    ridge: Any,
    share: Any,
    kept: Any,
    i: Any,
    error: Any,
) -> Step:
    """The formulas of this file's head in NumPy or JAX; `column` is `N[:, i]`, `start` the anchor's `α`."""
    n, c = start.shape
    W_i, scale = hess[i], ridge * share
    system = xp.eye(c, dtype=column.dtype) - W_i @ column.reshape(n, c, c)[i]
    b, v_b = scale * start * kept[:, None], scale * v
    right = -ridge * alpha[i] - scale * start[i] + W_i @ v_b[i]
    solved = xp.linalg.solve(system, xp.concatenate([W_i, right[:, None]], axis=1))
    C, tau = 0.5 * (solved[:, :c] + solved[:, :c].T), solved[:, c]
    k_delta = v_b + (column @ tau).reshape(n, c)
    others = (b - (hess @ k_delta[:, :, None])[:, :, 0]) / ridge * kept[:, None]
    delta = xp.where((xp.arange(n) == i)[:, None], -alpha, others)
    # What the error of N adds: the norm of what it is multiplied with, forces at eliminated points included.
    held = own @ tau
    size = xp.sqrt((b**2).sum() + (tau**2).sum() + (held**2).sum() + scale**2 * force)
    pushed = C @ (column.T @ (start * kept[:, None]).reshape(-1))
    v = v + (column @ (pushed - start[i])).reshape(n, c)
    return Step(delta, k_delta, error * size, C, v, xp.asarray(force + (pushed**2).sum()))


@filter_jit
def glance(
    op: AbstractKernelOperator,
    majorant: Majorant,
    kernel_diagonal: Float[Array, "n c"],
    problem: Problem,
    state: State,
) -> Norms:
    """The certificate's parts at a state, `ρᵀKρ` bounded from above."""
    rho = problem.residual(state)
    square = majorant.square(op, rho)
    # Only ρᵀKρ is asked for: any vector with that product will do.
    size = jnp.sum(rho**2)
    k_rho = rho * (square / jnp.where(size > 0, size, 1))
    return measure_norms(problem, state, rho, k_rho, kernel_diagonal)


def polish(
    anchor: Anchor,
    gone: Gone,
    problem: Problem,
    state: State,
    kept: np.ndarray,
    scale: float,
) -> State:
    """One step on what is left of the residual by the anchor's inverse: one read of `N`, none of `K`.

    `scale` is the sum of weights over that at the anchor.
    """
    rho = _residual(problem, state)
    host = isinstance(gone.Y, np.ndarray)
    used = gone.count * rho.shape[1]
    xp: Any = np if host else jnp
    Y, YC = (gone.Y[:used], gone.YC[:used]) if host else (gone.Y, gone.YC)
    inside = (xp.arange(Y.shape[0]) < used).astype(Y.dtype)
    arrays = (anchor.N, Y, YC, anchor.hess, rho, kept, anchor.error)
    numbers = [np.asarray(value, Y.dtype) for value in (scale, problem.ridge)]
    if host:
        delta, k_delta, drift = _correct(np, inside, *(np.asarray(a) for a in arrays), *numbers)
    else:
        delta, k_delta, drift = _correct_on_device(inside, *arrays, *numbers)
    return State(state.alpha + delta, state.k_alpha + k_delta, xp.asarray(state.drift + drift))


def _correct(
    xp: Any,
    inside: Any,
    N: Any,
    Y: Any,
    YC: Any,
    hess: Any,
    rho: Any,
    kept: Any,
    error: Any,
    scale: Any,
    ridge: Any,
) -> tuple[Any, Any, Any]:
    """`Δα = −A⁻¹ρ` without the eliminated points, `KΔα`, and what the error of `N` adds to it."""
    rho = rho * scale * kept[:, None]
    flat = rho.reshape(-1)
    held = (YC @ flat) * inside
    k_delta = -(N @ flat + held @ Y).reshape(rho.shape)
    delta = (-rho - (hess @ k_delta[:, :, None])[:, :, 0]) / ridge * kept[:, None]
    return delta, k_delta, error * xp.sqrt((rho**2).sum() + (held**2).sum())


def _corrected(*arrays: Any) -> tuple[Array, Array, Array]:
    with jax.default_matmul_precision("highest"):
        return _correct(jnp, *arrays)


_correct_on_device = jit(_corrected)


@filter_jit
def _residual(problem: Problem, state: State) -> Float[Array, "n c"]:
    return problem.residual(state)


@filter_jit
def measure(anchor: Anchor, problem: Problem, alpha: Float[Array, "n c"]) -> tuple[State, Norms]:
    """The same dual variables with products of their own: no drift, and `ρᵀKρ` itself."""
    after = State(alpha, anchor.op.mv(alpha))
    rho = problem.residual(after)
    return after, measure_norms(problem, after, rho, anchor.op.mv(rho), anchor.kernel_diagonal)
