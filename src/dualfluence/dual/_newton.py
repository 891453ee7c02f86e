r"""Newton's method on the dual variables: the step (★), damped by a line search.

$$(\lambda I + W'K)\,\Delta\alpha = -(g' + \lambda\alpha)$$

One step is the influence function. Repeated (`_train`), it is exact retraining.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from .._support.checks import check_concrete
from .._support.compile import NotFinite, filter_jit
from ..losses._losses import check_convex
from ..operators import AbstractKernelOperator
from ..problem._certificate import Certificate, Norms, measure_norms, reach
from ..problem._objective import HostArray, Problem, State, each_column
from ..solvers import AbstractDualSolver, AbstractPreconditioner, LinearSystem, Solution

ARMIJO = 1e-4
"""Share of the predicted decrease that a step must bring. Doubled, nothing changes that matters."""

NEAR_MINIMUM = 0.5
"""A shortened step ends where the slope is at most this share of what it was, and so does any step whose
decrease is rounding. Halved, each search takes about one look more."""

MAX_TRIALS = 40
"""Looks along one step, down to 1e-12 of it. Beyond that the step is noise."""

VALUE_SLACK = 8.0
"""How many estimates of rounding two values of the objective may differ by and still count as equal.
Doubled, the slope decides a little earlier whether to take a step."""

DAMPING = 4.0
"""The ridge of a damped step's system is at least so many `eps` of the trace of `WK`. Below that, `Δα` is
the small difference of large terms and points anywhere. Doubled, such steps are shorter; where they
lead to is the same."""

COUNTERS = {"traces": 0}
"""How often the step was traced, i.e. compiled; tests read it."""


class StepReport(NamedTuple):
    """What one Newton step did, on the host; one transfer brings all of it.

    - `iterations`, `products`, `residual`, `converged`: of the linear solve.
    - `step_size`: `t` of the line search.
    - `settled`: whether the decrease that the step predicted was below the objective's rounding.
    - `lighter`: whether the step was accepted because it reduces rounding, although the objective does
      not fall measurably; see `_is_lighter`.
    - `value_noise`: the objective's rounding after the step, which may be far below the rounding before
      the step. `settled`, `lighter` and `value_noise` are for runs of many steps: an undamped step does
      not evaluate the objective.
    - `min_curvature`: smallest Hessian eigenvalue of the loss over the largest.
    - `gradient_norm`, `rounding`, `parameter_norm`: of the certificate after the step.
    - `output_size`, `kernel_size`: largest `|f|` and largest `√K_ii`.
    - `jitter`: how much larger than `λ` the ridge of the step's system was.
    - `noise`: of the certificate after the step.
    """

    iterations: int
    products: int
    residual: float
    converged: bool
    step_size: float
    settled: bool
    lighter: bool
    value_noise: float
    min_curvature: float
    gradient_norm: float
    rounding: float
    parameter_norm: float
    output_size: float
    kernel_size: float
    jitter: float
    noise: float

    @classmethod
    def unpack(cls, packed: Float[Array, " fields *k"]) -> "list[StepReport]":
        """One report for each column, or a single one."""
        # The host decides what comes next, so that a traced run has no values to decide by.
        check_concrete("edit", packed)
        columns = np.asarray(packed).reshape(len(cls._fields), -1).T.tolist()
        return [
            values._replace(
                iterations=int(values.iterations),
                products=int(values.products),
                converged=bool(values.converged),
                settled=bool(values.settled),
                lighter=bool(values.lighter),
            )
            for values in map(cls._make, columns)
        ]

    def certificate(self, ridge: float) -> Certificate:
        norms = self.gradient_norm, self.rounding, self.parameter_norm
        return Certificate(*norms, ridge, noise=self.noise)


class Point(eqx.Module):
    """A state with its residual `ρ`, the product `Kρ` and what its certificate is made of.

    The next step needs `Kρ` anyway, so the certificate costs no product of its own in a loop.
    """

    state: State
    rho: Float[Array, "n c"]
    k_rho: Float[Array, "n c"]
    norms: Norms


def inspect(
    op: AbstractKernelOperator, problem: Problem, state: State, diagonal: Float[Array, "n c"]
) -> Point:
    """Residual and certificate at `state`: one product with `K`."""
    rho = problem.residual(state)
    k_rho = op.mv(rho)
    return Point(state, rho, k_rho, measure_norms(problem, state, rho, k_rho, diagonal))


@filter_jit
def inspect_jit(
    op: AbstractKernelOperator, problem: Problem, state: State, diagonal: Float[Array, "n c"]
) -> Point:
    """`inspect` for one column of weights or many, compiled."""
    return each_column(lambda p, s: inspect(op, p, s, diagonal), problem, state)


@filter_jit
def op_mv(op: AbstractKernelOperator, v: Float[Array, "n c *k"]) -> Float[Array, "n c *k"]:
    """`K v` for one column or many, compiled."""
    return op.mv(v) if v.ndim == 2 else op.mm(v)


@filter_jit
def op_diagonal(op: AbstractKernelOperator) -> Float[Array, "n c"]:
    """Diagonal of `K`, compiled."""
    return op.diagonal()


def _newton_step(
    op: AbstractKernelOperator,
    problem: Problem,
    point: Point,
    diagonal: Float[Array, "n c"],
    solver: AbstractDualSolver,
    preconditioner: AbstractPreconditioner,
    rtol: Float[HostArray, ""],
    damping: Float[HostArray, ""] | None,
    first: Bool[HostArray, ""] | None = None,
) -> tuple[Point, Float[Array, " fields"]]:
    """One step of (★) for one column; with `damping`, a step that lowers the objective.

    `damping` is in units of the ridge that rounding alone needs, and 1 unless an earlier step failed.
    The `first` step of a run may be accepted only because it reduces rounding; see `_is_lighter`.
    """
    COUNTERS["traces"] += 1
    factor, ridge = problem.factor(point.state), problem.ridge
    # The ridge of the system is raised, never that of the objective: such a step points downhill too, and
    # the optimum that steps lead to stays where it is.
    if damping is not None:
        trace = jnp.sum(factor.hess_diagonal() * diagonal)
        ridge = jnp.maximum(
            ridge, damping * (DAMPING * float(jnp.finfo(op.solve_dtype).eps) * trace)
        )
    solution = solver.solve(
        LinearSystem(op, factor, ridge, -point.rho, -point.k_rho, preconditioner, rtol)
    )
    # An undamped step is taken as a whole, and asks for no value of the objective.
    t, root = jnp.ones((), point.rho.dtype), jnp.sqrt(jnp.maximum(diagonal, 0))
    settled, lighter, value_noise = jnp.asarray(True), jnp.asarray(False), 0 * t
    if damping is not None:
        noise = VALUE_SLACK * problem.value_noise(point.state)
        # The decrease to first order is `−ρᵀKΔα`: below the rounding of two values no search can see it.
        settled = jnp.abs(jnp.sum(point.rho * solution.k_value)) <= noise
        lighter = jnp.asarray(first) & _is_lighter(point, solution, root)
        t = _line_search(problem, point, solution, noise, lighter)
    new = inspect(op, problem, _moved(point.state, solution, t, root), diagonal)
    if damping is not None:
        value_noise = VALUE_SLACK * problem.value_noise(new.state)
    packed = (
        solution.iterations,
        # One more product than the solve: that of `inspect`, which the next step starts from.
        solution.products + 1,
        solution.residual,
        solution.converged,
        t,
        settled,
        lighter,
        value_noise,
        factor.min_curvature,
        new.norms.gradient,
        new.norms.rounding,
        new.norms.parameters,
        jnp.max(jnp.abs(problem.outputs(new.state))),
        jnp.max(root),
        solution.jitter + (ridge - problem.ridge),
        new.norms.noise,
    )
    return new, jnp.stack([jnp.asarray(value, t.dtype) for value in packed])


@filter_jit
def newton_step(
    op: AbstractKernelOperator,
    problem: Problem,
    point: Point,
    diagonal: Float[Array, "n c"],
    solver: AbstractDualSolver,
    preconditioner: AbstractPreconditioner,
    rtol: Float[HostArray, "*k"],
    damping: Float[HostArray, "*k"],
    first: Bool[HostArray, "*k"],
    moving: Bool[HostArray, " k"] | None = None,
) -> tuple[Point, Float[Array, " fields *k"]]:
    """A damped step for one column of weights or many; columns that are not `moving` stay where they are."""

    def step(
        problem: Problem, point: Point, rtol: Array, damping: Array, first: Array, moving: Any
    ) -> tuple[Point, Array]:
        new, packed = _newton_step(
            op, problem, point, diagonal, solver, preconditioner, rtol, damping, first
        )
        return new if moving is None else choose(moving, new, point), packed

    return each_column(step, problem, point, rtol, damping, first, moving)


@filter_jit
def choose(flag: Bool[HostArray, "*k"] | np.ndarray, yes: Point, no: Point) -> Point:
    """For each column, `yes` if its flag is set, else `no`."""
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), yes, no)


@filter_jit
def as_columns(alpha: Float[Array, "n c k"], k_alpha: Float[Array, "n c k"]) -> State:
    """One state for each column, right after the product `Kα`."""
    return jax.vmap(State, in_axes=-1, out_axes=-1)(alpha, k_alpha)


@filter_jit
def repeated(state: State, k: int) -> State:
    """The same state for each of `k` columns, drift included."""
    return jax.tree.map(lambda a: jnp.repeat(jnp.asarray(a)[..., None], k, axis=-1), state)


@filter_jit
def influence_step(
    op: AbstractKernelOperator,
    problem: Problem,
    state: State,
    diagonal: Float[Array, "n c"],
    solver: AbstractDualSolver,
    preconditioner: AbstractPreconditioner,
    rtol: Float[HostArray, "*k"],
) -> tuple[Point, Float[Array, " fields *k"]]:
    """The influence function for one column of weights or many: `inspect` and an undamped step, in one
    compiled program."""

    def step(problem: Problem, state: State, rtol: Array) -> tuple[Point, Array]:
        start = inspect(op, problem, state, diagonal)
        return _newton_step(op, problem, start, diagonal, solver, preconditioner, rtol, None)

    return each_column(step, problem, state, rtol)


def _moved(state: State, step: Solution, t: Array, root: Float[Array, "n c"]) -> State:
    return state.moved(t * step.value, t * step.k_value, t * reach(root, step.reach))


def _is_lighter(point: Point, step: Solution, root: Float[Array, "n c"]) -> Bool[Array, ""]:
    """Whether the gradient is all rounding, and the whole step takes away at least half of `α`.

    Points whose effects cancel have a large `α` that changes nothing. Once such points are removed, this
    `α` is only a source of rounding. The step that makes `α` small has as much rounding and may raise
    the objective; the steps after it start from a small `α` and do not. At an optimum no step is
    lighter.
    """
    alpha = point.state.alpha
    # Half is far above what rounding changes in `α`, and each such step leaves half as much for the next.
    half = reach(root, alpha + step.value) <= 0.5 * reach(root, alpha)
    return half & point.norms.at_floor


class _Trial(NamedTuple):
    """A step size on trial. At the step size `low` the objective still falls, at `high` it rises."""

    t: Array
    low: Array
    high: Array
    rounds: Array
    taken: Array


def _line_search(
    problem: Problem,
    point: Point,
    step: Solution,
    noise: Float[Array, ""],
    lighter: Bool[Array, ""],
) -> Float[Array, ""]:
    """The whole step if it lowers `L_w` enough, else a step near the minimum along this direction, by
    bisection.

    Only `(n, c)` work, no product with `K`: `L_w` along the step is a convex function whose slope is
    `ρ(t)ᵀKΔα`. Where the decrease is below the rounding of `L_w` its values say nothing, a lower one
    no more than a higher one. The slope still does, to full relative accuracy: a step that has not
    gone past the minimum by half of where it came from is taken. Nearer to as far as it came from,
    two steps in a row can lead back to the start. Where the gradient is rounding too, so is the slope,
    and the step is taken as it is. A `lighter` one is taken in any case.
    """
    delta, k_delta = step.value, step.k_value
    start, slope = problem.value(point.state), jnp.sum(point.rho * k_delta)
    at_floor = point.norms.at_floor

    def look(trial: _Trial) -> _Trial:
        t = trial.t
        there = point.state.moved(t * delta, t * k_delta)
        value, slope_t = problem.value(there), jnp.sum(problem.residual(there) * k_delta)
        lower = value <= start + ARMIJO * t * slope
        unclear = jnp.abs(value - start) <= noise
        enough = jnp.where(unclear, at_floor | (slope_t <= -NEAR_MINIMUM * slope), lower)
        # A shortened step should come near the minimum along the line, not just below the start.
        near = (trial.rounds == 0) | (jnp.abs(slope_t) <= -NEAR_MINIMUM * slope)
        # Written so that a slope of NaN counts as uphill: where the objective overflows the step is halved.
        past = ~(slope_t <= 0)
        low, high = jnp.where(past, trial.low, t), jnp.where(past, t, trial.high)
        taken = (enough & near) | lighter
        return _Trial(jnp.where(taken, t, (low + high) / 2), low, high, trial.rounds + 1, taken)

    one = jnp.ones((), delta.dtype)
    begin = _Trial(one, 0 * one, one, jnp.asarray(0), jnp.asarray(False))
    end = jax.lax.while_loop(lambda at: ~at.taken & (at.rounds < MAX_TRIALS), look, begin)
    # No look was taken: the last one known to lie downhill, or no step at all, which makes the course damp
    # the next one harder.
    return jnp.where(end.taken, end.t, end.low)


def check_report(report: StepReport, dtype: DTypeLike, what: str) -> None:
    """Raise on NaN or on a loss that is not convex."""
    check_convex(what, report.min_curvature, dtype)
    check_finite_norm(report.gradient_norm + report.rounding, what)


def check_finite_norm(gradient_norm: float, what: str) -> None:
    """Raise unless the certificate is a number."""
    # Every later comparison with NaN is false: the run would go on to its last step and return numbers.
    if not np.isfinite(gradient_norm):
        raise NotFinite(
            f"{what}: the gradient is not finite. The kernel may be indefinite, the numbers may "
            "overflow, or the ridge may be below the kernel's rounding; try float64, a larger ridge, "
            "or features and targets of ordinary size."
        )
