"""One procedure for every run: from zero (`fit`, `retrain`) or from the optimum before (`edit`), for one
column of weights or for many at once (`reweighted`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .._support.options import ProgressFn, Ticker
from ..operators import AbstractKernelOperator
from ..problem._objective import Problem, State
from ..solvers import AbstractDualSolver, AbstractPreconditioner
from ._course import UNSOLVED, Course, Goal, Outcome, output_share
from ._newton import (
    Point,
    StepReport,
    as_columns,
    check_report,
    choose,
    influence_step,
    inspect_jit,
    newton_step,
    op_mv,
)


@dataclass(frozen=True)
class Machine:
    """What takes steps: `K`, its diagonal, a linear solver with its preconditioner.

    - `what`: the name of the calling function, for messages.
    """

    op: AbstractKernelOperator
    diagonal: Float[Array, "n c"]
    solver: AbstractDualSolver
    preconditioner: AbstractPreconditioner
    ridge: float
    what: str


def take_one_step(
    machine: Machine, problem: Problem, state: State, rtol: float
) -> tuple[Point, list[Outcome]]:
    """The influence function: one undamped step, one compiled program, one transfer."""
    dtype, m = state.alpha.dtype, machine
    tol: Any = np.full(problem.weights.shape[1:], rtol, dtype)
    point, packed = influence_step(
        m.op, problem, state, m.diagonal, m.solver, m.preconditioner, tol
    )
    outcomes = [_one_step(m, report, dtype) for report in StepReport.unpack(packed)]
    # Where the system is beyond the dtype, a damped step is what can be had, and its note says so.
    failed = [not o.solved and o.residual > UNSOLVED for o in outcomes]
    # Only then a second run: it compiles another program, and most requests need none.
    if any(failed):
        damped, others = train(m, problem, state, Goal(None, None, 1), rtol=rtol, progress=False)
        point = _pick(failed, damped, point)
        outcomes = [b if f else a for f, a, b in zip(failed, outcomes, others, strict=True)]
    return point, outcomes


def _one_step(machine: Machine, report: StepReport, dtype: DTypeLike) -> Outcome:
    check_report(report, dtype, machine.what)
    cert = report.certificate(machine.ridge)
    return Outcome(
        certificate=cert,
        ending="steps",
        # Where all that is left of the gradient is rounding, so is the residual of the solve.
        solved=report.converged or cert.at_floor,
        output_share=output_share(cert, report.output_size, report.kernel_size),
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
) -> tuple[Point, list[Outcome]]:
    """Damped Newton from `start` until `goal`, or until rounding ends it.

    Every step lowers the objective, which is convex, so that the run converges from anywhere. The
    gradient norm need not fall on the way and is only consulted where the objective's decrease has
    gone below its rounding. Early linear solves are loose, later ones reach `rtol`. A run
    of a given number of steps solves each of them to `rtol`.

    The certificate that is returned comes from a product `Kα` of its own, not from the running sum
    of steps: where that sum had drifted and the goal is missed after all, the run goes on.

    With weights `(n, k)` each of the `k` columns takes its own steps and stops changing once it has met
    the goal or its rounding floor. Products with `K` are made for all of them at once.
    """
    run = _Run(machine, problem, start)
    with Ticker(goal.max_steps, machine.what, progress) as ticker:
        while True:
            # The running sums decide, because they cost nothing; a fresh product has the last word.
            if run.goes_on(goal):
                run.step(goal, rtol)
                ticker.tick()
            elif run.confirms(goal):
                return run.outcome(goal)


class _Run:
    """Where a run stands: points on the device, and the course of every column on the host.

    `best` is the point with the smallest gradient so far. `sure` is the point with the smallest bound
    among the points with a fresh product.
    """

    def __init__(self, machine: Machine, problem: Problem, start: State) -> None:
        self.machine, self.problem = machine, problem
        self.point = inspect_jit(machine.op, problem, start, machine.diagonal)
        self.best = self.sure = self.point
        certificates = self.point.norms.certificates(machine.ridge)
        self.columns = [Course(machine.ridge, machine.what, cert) for cert in certificates]

    def goes_on(self, goal: Goal) -> bool:
        """Whether some column has not come to its end, as far as the running sums say."""
        for column in self.columns:
            column.ended = column.ended or column.ending(goal)
        return any(column.ended is None for column in self.columns)

    def step(self, goal: Goal, rtol: float) -> None:
        m, dtype, columns = self.machine, self.point.rho.dtype, self.columns
        self.point, packed = newton_step(
            m.op,
            self.problem,
            self.point,
            m.diagonal,
            m.solver,
            m.preconditioner,
            self._each([c.tolerance(goal, rtol) for c in columns], dtype),
            self._each([c.damping for c in columns], dtype),
            self._each([c.steps == 0 for c in columns], bool),
            # A single column that has ended takes no step, so that nothing has to be held back.
            self._each([c.ended is None for c in columns], bool) if self._many else None,
        )
        better = [
            c.ended is None and c.take(report, dtype)
            for c, report in zip(columns, StepReport.unpack(packed), strict=True)
        ]
        self.best = _pick(better, self.point, self.best)

    @property
    def _many(self) -> bool:
        return self.problem.weights.ndim > 1

    def _each(self, values: Sequence[Any], dtype: DTypeLike) -> Any:
        """One value for each column, or the only one."""
        return np.asarray(values if self._many else values[0], dtype)

    def confirms(self, goal: Goal) -> bool:
        """Whether a fresh product confirms that all columns are done. A column that is not done goes on
        from this product."""
        waiting = [c for c in self.columns if not c.confirmed]
        # Before the first step `Kα` is as fresh as it gets: a second product would be the same.
        if any(c.steps for c in waiting):
            self._refresh()
        for column in waiting:
            column.confirm(goal)
        return all(c.confirmed for c in waiting)

    def _refresh(self) -> None:
        m, alpha = self.machine, self.best.state.alpha
        k_alpha = op_mv(m.op, alpha)
        state = as_columns(alpha, k_alpha) if self._many else State(alpha, k_alpha)
        self.point = self.best = inspect_jit(m.op, self.problem, state, m.diagonal)
        surer = [
            not c.confirmed and c.refreshed(certificate)
            for c, certificate in zip(
                self.columns, self.point.norms.certificates(m.ridge), strict=True
            )
        ]
        self.sure = _pick(surer, self.point, self.sure)

    def outcome(self, goal: Goal) -> tuple[Point, list[Outcome]]:
        point = _pick([c.settles for c in self.columns], self.sure, self.best)
        return point, [c.outcome(goal, *self._sizes(c, j)) for j, c in enumerate(self.columns)]

    def _sizes(self, course: Course, column: int) -> tuple[float, float]:
        """The largest `|f|` and `√K_ii`, also where no step was taken that reports them."""
        if course.last is not None:
            return course.last.output_size, course.last.kernel_size
        k_alpha = self.best.state.k_alpha
        f = self.problem.offset + (k_alpha[..., column] if self._many else k_alpha)
        return float(jnp.max(jnp.abs(f))), float(jnp.max(jnp.sqrt(self.machine.diagonal)))


def _pick(flags: Sequence[bool], yes: Point, no: Point) -> Point:
    """`yes` for the columns with a flag; nothing is copied where all of them agree."""
    if all(flags):
        return yes
    return choose(np.asarray(flags), yes, no) if any(flags) else no
