"""One procedure for every run: from zero (`fit`, `retrain`) or from the optimum before (`edit`)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._support.progress import ProgressFn, Ticker
from ..operators import AbstractKernelOperator
from ..problem._certificate import Certificate
from ..problem._objective import Problem, State
from ..solvers import AbstractDualSolver, AbstractPreconditioner
from ._newton import (
    StepReport,
    check_finite_norm,
    check_report,
    influence_step,
    inspect_jit,
    newton_step,
    op_mv,
)
from ._outcome import Ending, Outcome

MAX_STEPS = 1000
"""Newton steps of a run at most, by default. Each lowers the objective; tens are usual, but losses with
straight tails take about one step for each point far out on a tail."""

STALLED_STEPS = 4
"""Steps in a row that neither the objective nor the gradient can tell from rounding. Doubled, a run at
its floor takes four steps more before it says so."""

MAX_REFRESHES = 8
"""Fresh products `Kα` in one run. Each is made where the running sum promised an end."""

FLOOR_SLACK = 3.0
"""How far above the estimate of rounding a gradient still counts as at its floor, because another
product of the same accuracy differs by as much."""

HARDER, EASIER = 16.0, 4.0
"""Factors on the damping after a step that failed and after one that did not. Larger ones find a step in
fewer trials and overshoot more."""

MAX_DAMPING = 1e8
"""Beyond so much damping a step is along the gradient, and more of it changes nothing."""

UNSOLVED = 0.5
"""A linear solve that leaves more than this share of its right-hand side has failed."""

LOOSEST = 0.1
"""Relative residual of the first linear solves: far from the optimum more is wasted."""


@dataclass(frozen=True)
class Machine:
    """What takes steps: `K`, its diagonal, a linear solver with its preconditioner.

    - `what`: who asks, for messages.
    """

    op: AbstractKernelOperator
    diagonal: Float[Array, "n c"]
    solver: AbstractDualSolver
    preconditioner: AbstractPreconditioner
    ridge: float
    what: str


class Goal(NamedTuple):
    """When a run ends.

    - `distance`: bound on `‖θ − θ*‖` to reach, or `None`.
    - `relative`: that bound over `‖θ − θ₀‖`, or `None`.
    - `max_steps`: at most so many steps; exactly so many where no bound is given.
    - `by_default`: whether `relative` is the tolerance of the dtype, which nobody asked for.
    - `min_steps`: at least so many steps. However near the model before an edit already is, it is not the
      model after it.
    """

    distance: float | None
    relative: float | None
    max_steps: int
    by_default: bool = False
    min_steps: int = 0

    def in_dtype(self, dtype: Any) -> "Goal":
        """The same goal for a run in this dtype."""
        return self._replace(relative=default_tolerance(dtype)) if self.by_default else self

    def met(self, cert: Certificate) -> bool:
        by_distance = self.distance is not None and cert.distance_bound <= self.distance
        return by_distance or (self.relative is not None and cert.relative_bound <= self.relative)

    @property
    def counts_steps(self) -> bool:
        return self.distance is None and self.relative is None


def fit_goal(tolerance: float | None, max_steps: int, dtype: Any) -> Goal:
    """To a relative distance, by default the one that a fit in this dtype aims for."""
    relative = default_tolerance(dtype) if tolerance is None else tolerance
    return Goal(None, relative, max_steps, tolerance is None)


def default_tolerance(dtype: Any) -> float:
    """Relative certified distance that a fit aims for."""
    return 1e-10 if jnp.finfo(dtype).bits == 64 else 1e-5


def default_rtol(dtype: Any) -> float:
    """Relative residual of linear solves: near the limit in float64, a safe one in float32."""
    return 1e-11 if jnp.finfo(dtype).bits == 64 else 1e-5


def take_one_step(machine: Machine, problem: Problem, state: State, rtol: float) -> Outcome:
    """The influence function: one undamped step, one compiled program, one transfer."""
    dtype = state.alpha.dtype
    tol: Any = np.asarray(rtol, dtype)
    m = machine
    point, packed = influence_step(
        m.op, problem, state, m.diagonal, m.solver, m.preconditioner, tol
    )
    report = StepReport.unpack(packed)
    check_report(report, dtype, m.what)
    cert = report.certificate(m.ridge)
    if not report.converged and report.residual > UNSOLVED and not cert.at_floor:
        # The system is beyond the dtype: a damped step is what can be had, and its note says so.
        return train(m, problem, state, Goal(None, None, 1), rtol=rtol, progress=False)
    return Outcome(
        point=point,
        certificate=cert,
        ending="steps",
        # Where all that is left of the gradient is rounding, so is the residual of the solve.
        solved=report.converged or cert.at_floor,
        output_share=_output_share(cert, report),
        steps=1,
        iterations=report.iterations,
        products=report.products + 1,
        residual=report.residual,
        jitter=report.jitter,
    )


def train(
    machine: Machine,
    problem: Problem,
    start: State,
    goal: Goal,
    *,
    rtol: float,
    progress: bool | ProgressFn,
) -> Outcome:
    """Damped Newton from `start` until `goal`, or until rounding ends it.

    Every step lowers the objective, which is convex, so that the run converges from anywhere. The
    gradient norm need not fall on the way and is only consulted where the objective's decrease has
    gone below its rounding. Early linear solves are loose, later ones reach `rtol`. A run
    of a given number of steps solves each of them to `rtol`.

    The certificate that is returned comes from a product `Kα` of its own, not from the running sum
    of steps: where that sum had drifted and the goal is missed after all, the run goes on.
    """
    run = _Run(machine, problem, start)
    loosest = rtol if goal.counts_steps else LOOSEST
    with Ticker(goal.max_steps, machine.what, progress) as ticker:
        while True:
            ending = run.ending(goal)
            if ending is None:
                run.step(max(rtol, loosest * run.progress))
                ticker.tick()
            elif run.confirms(ending, goal):
                return run.outcome(ending, goal)


class _Run:
    """Where a run stands.

    `best` is the point of the smallest gradient so far, `sure` the one of the smallest bound among those
    with a product of their own.
    """

    def __init__(self, machine: Machine, problem: Problem, start: State) -> None:
        self.machine, self.problem = machine, problem
        self.point = self.best = inspect_jit(machine.op, problem, start, machine.diagonal)
        self.certificate = self.point.norms.certificate(machine.ridge)
        check_finite_norm(self.certificate.distance_bound, machine.what)
        self.first = self.norm = self.certificate.gradient_norm
        self.stalled = self.steps = self.iterations = self.refreshes = 0
        self.products, self.residual, self.jitter = 1, 0.0, 0.0
        self.last: StepReport | None = None
        self.sure, self.damping = (self.point, self.certificate), 1.0

    @property
    def progress(self) -> float:
        """The gradient over what it was at the start, at most 1."""
        return min(1.0, self.norm / max(self.first, 1e-300))

    def step(self, rtol: float) -> None:
        m, dtype = self.machine, self.point.rho.dtype
        tol: Any = np.asarray(rtol, dtype)
        damping, first = np.asarray(self.damping, dtype), np.asarray(self.steps == 0)
        how: Any = (m.solver, m.preconditioner, tol, damping, first)
        self.point, packed = newton_step(m.op, self.problem, self.point, m.diagonal, *how)
        report = self.last = StepReport.unpack(packed)
        check_report(report, dtype, m.what)
        self.steps, self.iterations = self.steps + 1, self.iterations + report.iterations
        self.products, self.residual = self.products + report.products, report.residual
        self.norm = report.gradient_norm
        self.jitter = max(self.jitter, report.jitter)
        # While the objective still falls nothing has stalled, whatever the gradient does. It does not
        # where no step was taken, with as much damping as there is.
        stuck = report.step_size == 0 and self.damping >= MAX_DAMPING
        falls = not report.settled and not stuck
        helped = falls or self.norm <= 0.9 * self.certificate.gradient_norm
        unsolved = not report.converged and report.residual > UNSOLVED
        helped = helped or (unsolved and self.damping < MAX_DAMPING)
        # A direction that is all rounding leads nowhere; more damping turns it towards the gradient.
        failed = unsolved or report.step_size == 0
        changed = self.damping * HARDER if failed else self.damping / EASIER
        self.damping = min(max(1.0, changed), MAX_DAMPING)
        self.stalled = 0 if helped else self.stalled + 1
        # Below its rounding a gradient says nothing, and a step still brings `α` to `-g/λ`, where it rounds
        # as the optimum does.
        seen = max(self.certificate.gradient_norm, self.certificate.noise)
        if self.norm <= seen or not report.settled or report.lighter:
            self.best, self.certificate = self.point, report.certificate(m.ridge)

    @property
    def solved(self) -> bool:
        """Whether the last step was solved for; those before it only say where it starts.

        A step whose ridge rounding has raised is not Newton's to many digits. It is a direction, and
        the line search has judged it.
        """
        last = self.last
        if last is None or last.converged:
            return True
        return last.jitter > 0 and last.residual <= UNSOLVED

    def ending(self, goal: Goal) -> Ending | None:
        """Whether the running sums say that this is the end, and which."""
        if goal.met(self.certificate) and self.steps >= goal.min_steps:
            return "met"
        if self.steps >= goal.max_steps:
            return "steps"
        if self.certificate.at_floor and self._flat:
            return "floor"
        return "stalled" if self.stalled >= STALLED_STEPS else None

    @property
    def _flat(self) -> bool:
        """Whether the objective cannot fall by more than its rounding: `L − L* ≤ ‖∇L‖²/(2λ)`.

        The estimate of the gradient's rounding is cautious. While the objective falls the run goes on.
        So it does until a step was taken as a whole: before that, `α` can be far from `-g/λ` although the
        gradient is small, where points pull against each other, and then it rounds by more than the
        optimum does.
        """
        if self.last is None or self.last.step_size < 1:
            return False
        left = self.norm**2 / (2 * self.machine.ridge)
        return self.last.settled or left <= self.last.value_noise

    def confirms(self, ending: Ending, goal: Goal) -> bool:
        """Whether a fresh product says so too; if not, the run goes on from there."""
        if self.steps:
            self._refresh()
        cert = self.certificate
        still = {
            "met": goal.met(cert),
            "floor": cert.gradient_norm <= FLOOR_SLACK * cert.noise and self._flat,
            "steps": True,
            "stalled": True,
        }
        # Steps from a fresh product may help again where the drift of the sum had stopped them.
        return still[ending] or self.refreshes >= MAX_REFRESHES

    def _refresh(self) -> None:
        m, alpha = self.machine, self.best.state.alpha
        state = State(alpha, op_mv(m.op, alpha))
        self.point = self.best = inspect_jit(m.op, self.problem, state, m.diagonal)
        self.certificate = self.point.norms.certificate(m.ridge)
        self.norm, self.stalled = self.certificate.gradient_norm, 0
        if self.certificate.distance_bound <= self.sure[1].distance_bound:
            self.sure = self.point, self.certificate
        self.refreshes, self.products = self.refreshes + 1, self.products + 2

    def outcome(self, ending: Ending, goal: Goal) -> Outcome:
        if ending in ("floor", "stalled"):
            # Where nothing is left to gain but rounding, the last step may have lost by it.
            self.best, self.certificate = self.sure
        if goal.met(self.certificate):
            ending = "met"
        elif ending == "met":
            ending = "stalled"
        return Outcome(
            point=self.best,
            certificate=self.certificate,
            ending=ending,
            solved=self.solved,
            output_share=_output_share(self.certificate, self._sizes()),
            steps=self.steps,
            iterations=self.iterations,
            products=self.products,
            residual=self.residual,
            jitter=self.jitter,
        )

    def _sizes(self) -> Any:
        if self.last is not None:
            return self.last
        f, root = self.problem.outputs(self.best.state), jnp.sqrt(self.machine.diagonal)
        return _Sizes(float(jnp.max(jnp.abs(f))), float(jnp.max(root)))


class _Sizes(NamedTuple):
    """The two fields of a `StepReport` that `_output_share` reads, where no step was taken."""

    output_size: float
    kernel_size: float


def _output_share(cert: Certificate, sizes: Any) -> float:
    """`|f(θ) − f(θ*)| ≤ √K_ii ‖θ − θ*‖`, over the largest output."""
    off = sizes.kernel_size * cert.distance_bound
    return off / max(sizes.output_size, 1e-300) if off else 0.0
