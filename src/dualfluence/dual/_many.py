r"""Many edits of the weights at once: one damped Newton iteration for a batch of training sets.

Each column of a batch has weights of its own and shares everything else: kernel, targets, ridge.
Products with `K` are then products with a block of columns, which read `K` once for all of them.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._support.compile import filter_jit
from .._support.memory import memory_budget
from .._support.progress import ProgressFn, Ticker
from ..operators import AbstractKernelOperator
from ..problem._certificate import measure_norms, reach
from ..problem._objective import Problem, State
from ..solvers import AbstractPreconditioner
from ..solvers._cg import conjugate_gradients
from ._model import TrainedModel

ARMIJO = 1e-4
MAX_HALVINGS = 40
MAX_STEPS = 100
CG_STEPS = 1000
LOOSEST = 0.1
"""Inner tolerance of the first of several steps, squared for the second and so on: near the end
Newton's method gains digits as fast, and a tighter start spends products on a far optimum."""

STALLED = 0.9
"""A full step that leaves more than this share of the gradient gains nothing."""

STALLED_STEPS = 3
"""Such steps in a row after which a column stands at its rounding floor; one alone may be a loose solve."""

LIVE_COPIES = 16
"""Arrays of shape `(n, c, k)` alive in a step, for the choice of `k`."""

MEMORY_SHARE = 0.25
"""Share of the kernel's memory budget that a batch may take."""


class Many(NamedTuple):
    """Dual variables for each column, and what is proved of them.

    - `alpha`, `k_alpha`: `α` and `Kα`, shape `(n, c, k)`.
    - `distance_bound`: bound on `‖θ − θ_retrained‖`, one per column.
    - `converged`: whether the tolerance that was asked for is met (or the rounding floor reached).
    - `steps`: Newton steps of the slowest column.
    """

    alpha: Array
    k_alpha: Array
    distance_bound: np.ndarray
    converged: np.ndarray
    steps: int


class SharedInverse(AbstractPreconditioner):
    """`B⁻¹` of the fit itself: one point more or less changes `B` by a matrix of rank `c`.

    For leave-one-out systems CG then takes a handful of iterations. Not for edits of many points.
    """

    chol: Float[Array, "m m"]

    def inverse(self, factor: Any, ridge: Any) -> Any:
        def apply(v: Array) -> Array:
            flat = jax.scipy.linalg.cho_solve((self.chol, True), v.reshape(-1))
            return flat.reshape(v.shape)

        return apply


def problem_of(fitted: TrainedModel) -> Problem:
    """The fit's objective with its weights and ridge on the device, outside compiled functions."""
    return jax.tree.map(jnp.asarray, fitted.problem())


def columns_at_once(fitted: TrainedModel) -> int:
    """How many columns a batch may have in the memory there is."""
    n, c = fitted.state.alpha.shape
    each = LIVE_COPIES * n * c * fitted.state.alpha.dtype.itemsize
    network = fitted.source.network
    if network is not None and fitted.kernel_op.num_bytes == 0:
        # A product without entries of K holds one parameter vector for every column.
        each += 4 * network.num_params * jnp.dtype(network.dtype).itemsize
    return int(max(1, min(512, MEMORY_SHARE * memory_budget() // each)))


def reweighted(
    fitted: TrainedModel,
    sample_weights: np.ndarray,
    *,
    start: Array | None = None,
    until: float | None = None,
    relative: float | None = None,
    rtol: float | None = None,
    preconditioner: AbstractPreconditioner | None = None,
    progress: bool | ProgressFn = False,
) -> Many:
    r"""The model trained with each column of sample weights, `(n, k)`, in one batch.

    Without a tolerance: one undamped Newton step from the fit, the influence function. With
    `until` (on the distance bound) or `relative` (on that over `‖θ − θ₀‖`): damped steps until
    every column meets it or stands at the rounding floor.

    **Arguments:**

    - `start`: dual variables to start from, `(n, c)` or `(n, c, k)`; by default those of the fit.
    - `rtol`: relative residual of linear solves.
    - `preconditioner`: for CG; by default the one kept from the fit.
    """
    op, dtype = fitted.kernel_op, fitted.state.alpha.dtype
    if op.layout.sharding is not None:
        raise ValueError(
            f"attribute: the rows of K are on {op.layout.num_devices} devices, and batches of edits "
            "need them on one. Fit without mesh."
        )
    weights = jnp.asarray(sample_weights / sample_weights.sum(axis=0), dtype)
    tight = (1e-13 if jnp.finfo(dtype).bits == 64 else 1e-6) if rtol is None else rtol
    state = _start(fitted, start, weights.shape[1])
    pre = fitted.preconditioner if preconditioner is None else preconditioner
    args = (op, problem_of(fitted), pre, fitted.kernel_diagonal)
    if until is None and relative is None:
        state, report = _step(
            *args, weights, state, jnp.full(weights.shape[1], tight, dtype), False
        )
        bound = np.asarray(report.gradient + report.rounding) / fitted.ridge
        return Many(*state, bound, np.asarray(report.solved), 1)
    return _iterate(args, weights, state, fitted.ridge, until, relative, tight, progress)


class _Report(eqx.Module):
    """Per column: norms after the step, its length, and whether the inner solve converged."""

    gradient: Float[Array, "..."]
    rounding: Float[Array, "..."]
    parameters: Float[Array, "..."]
    noise: Float[Array, "..."]
    step_size: Float[Array, "..."]
    solved: Array


def _start(fitted: TrainedModel, alpha: Array | None, k: int) -> tuple[Array, Array]:
    if alpha is None:
        pair = (fitted.state.alpha, fitted.state.k_alpha)
        return tuple(jnp.repeat(v[:, :, None], k, axis=2) for v in pair)  # type: ignore[return-value]
    if alpha.ndim == 2:
        alpha = jnp.repeat(alpha[:, :, None], k, axis=2)
    return alpha, _times(fitted.kernel_op, alpha)


@filter_jit
def _times(op: AbstractKernelOperator, v: Array) -> Array:
    return op.mm(v)


def _iterate(
    args: tuple[Any, ...],
    weights: Array,
    state: tuple[Array, Array],
    ridge: float,
    until: float | None,
    relative: float | None,
    rtol: float,
    progress: bool | ProgressFn,
) -> Many:
    op, problem, pre, diagonal = args
    dtype = weights.dtype
    report = _inspect(op, problem, diagonal, weights, state)
    done, steps, last = np.zeros(weights.shape[1], bool), 0, np.asarray(report.gradient)
    stalled = np.zeros(weights.shape[1], int)
    with Ticker(MAX_STEPS, "edits in a batch", progress) as ticker:
        while True:
            bound, done_now = _judge(report, ridge, until, relative)
            # However near the fit is to what a column asks for, it is not the answer for other weights.
            done = done | (done_now & (steps > 0))
            if done.all() or steps == MAX_STEPS:
                break
            # Steps repeat, so that none needs more than half the digits; a column that is done, whose
            # right-hand side is rounding, must not iterate on it.
            needed = max(rtol, LOOSEST ** (steps + 1), float(jnp.finfo(dtype).eps) ** 0.5)
            inner = jnp.asarray(np.where(done, np.inf, needed), dtype)
            moved, report = _step(op, problem, pre, diagonal, weights, state, inner, True)
            gradient = np.asarray(report.gradient)
            # Columns that are done keep their state: a step at the floor only adds rounding.
            keep = jnp.asarray(done)
            state = tuple(  # type: ignore[assignment]
                jnp.where(keep, a, b) for a, b in zip(state, moved, strict=True)
            )
            idle = (gradient > STALLED * last) & (np.asarray(report.step_size) == 1)
            stalled = np.where(idle, stalled + 1, 0)
            done = done | (stalled == STALLED_STEPS)
            last, steps = gradient, steps + 1
            ticker.tick()
    # The bound that is handed out rests on a product Kα of its own, not on the sum of steps.
    state = (state[0], _times(op, state[0]))
    report = _inspect(op, problem, diagonal, weights, state)
    bound, met = _judge(report, ridge, until, relative, slack=3.0)
    if not np.isfinite(bound).all():
        raise FloatingPointError(
            "attribute: the gradient of an edited objective is not finite; try float64 or a larger "
            "ridge."
        )
    return Many(*state, bound, met, steps)


def _judge(
    report: _Report, ridge: float, until: float | None, relative: float | None, slack: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    gradient, rounding = np.asarray(report.gradient), np.asarray(report.rounding)
    bound = (gradient + rounding) / ridge
    met = gradient <= slack * np.maximum(rounding, np.asarray(report.noise))
    if until is not None:
        met = met | (bound <= until)
    if relative is not None:
        met = met | (bound <= relative * np.asarray(report.parameters))
    return bound, met


def _with_weights(problem: Problem, weights: Array) -> Problem:
    return eqx.tree_at(lambda p: p.weights, problem, weights)


@filter_jit
def _inspect(
    op: AbstractKernelOperator,
    problem: Problem,
    diagonal: Array,
    weights: Array,
    state: tuple[Array, Array],
) -> _Report:
    def column(w: Array, alpha: Array, k_alpha: Array) -> tuple[Array, ...]:
        here = _with_weights(problem, w)
        rho = here.residual(State(alpha, k_alpha))
        norms = measure_norms(here, State(alpha, k_alpha), rho, op.mv(rho), diagonal)
        return norms.gradient, norms.rounding, norms.parameters, norms.noise

    norms = jax.vmap(column, in_axes=(1, 2, 2))(weights, *state)
    ones = jnp.ones_like(norms[0])
    gradient, rounding, parameters, noise = norms
    return _Report(gradient, rounding, parameters, noise, ones, ones > 0)


@filter_jit
def _step(
    op: AbstractKernelOperator,
    problem: Problem,
    preconditioner: AbstractPreconditioner,
    diagonal: Array,
    weights: Array,
    state: tuple[Array, Array],
    rtol: Array,
    damped: bool,
) -> tuple[tuple[Array, Array], _Report]:
    """One Newton step of (★) for every column."""

    def column(
        w: Array, tol: Array, alpha: Array, k_alpha: Array
    ) -> tuple[tuple[Array, Array], _Report]:
        here, at = _with_weights(problem, w), State(alpha, k_alpha)
        rho = here.residual(at)
        delta, k_delta, parts, solved = _solve(op, here, at, -rho, preconditioner, tol)
        t = _line_search(here, at, rho, delta, k_delta) if damped else jnp.ones((), w.dtype)
        drift = t * reach(jnp.sqrt(jnp.maximum(diagonal, 0)), parts)
        new = at.moved(t * delta, t * k_delta, drift)
        rho = here.residual(new)
        norms = measure_norms(here, new, rho, op.mv(rho), diagonal)
        own = norms.gradient, norms.rounding, norms.parameters, norms.noise
        report = _Report(*own, t, solved)
        return (new.alpha, new.k_alpha), report

    return jax.vmap(column, in_axes=(1, 0, 2, 2), out_axes=((2, 2), 0))(weights, rtol, *state)


def _solve(
    op: AbstractKernelOperator,
    problem: Problem,
    state: State,
    b: Array,
    preconditioner: AbstractPreconditioner,
    rtol: Array,
) -> tuple[Array, Array, Array, Array]:
    """`(λI + WK)Δα = b` by CG on the symmetric form, with `KΔα` from the same products.

    The third array is the size of the vectors whose products add up to `KΔα`: it has rounded like them.
    """
    factor, ridge = problem.factor(state), problem.ridge
    k_b = op.mv(b)

    def mv(p: Array) -> tuple[Array, Array]:
        k_r_p = op.mv(factor.mv(p))
        return ridge * p + factor.rmv(k_r_p), k_r_p

    scale = ridge * jnp.maximum(jnp.linalg.norm(b), jnp.finfo(b.dtype).tiny)
    result = conjugate_gradients(
        mv,
        factor.rmv(k_b),
        measure=lambda r: jnp.linalg.norm(factor.mv(r)) / scale,
        rtol=rtol,
        max_steps=CG_STEPS,
        precondition=preconditioner.inverse(factor, ridge),
    )
    inner = factor.mv(result.x)
    delta, k_delta = (b - inner) / ridge, (k_b - result.extra) / ridge
    parts = (jnp.abs(b) + jnp.abs(inner)) / ridge
    return delta, k_delta, parts, result.converged & ~result.indefinite


def _line_search(problem: Problem, state: State, rho: Array, delta: Array, k_delta: Array) -> Array:
    """Backtracking on the objective: `(n, c)` work, no product with `K`."""
    start, slope = problem.value(state), jnp.sum(rho * k_delta)
    slack = 10 * jnp.finfo(delta.dtype).eps * jnp.abs(start)

    def too_high(carry: tuple[Array, Array]) -> Array:
        t, halvings = carry
        value = problem.value(State(state.alpha + t * delta, state.k_alpha + t * k_delta))
        return ~(value <= start + ARMIJO * t * slope + slack) & (halvings < MAX_HALVINGS)

    def halve(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        return carry[0] / 2, carry[1] + 1

    return jax.lax.while_loop(too_high, halve, (jnp.ones((), delta.dtype), jnp.asarray(0)))[0]


def plain(op: AbstractKernelOperator) -> AbstractKernelOperator:
    """The operator under a mixed-precision one."""
    return op.narrow
