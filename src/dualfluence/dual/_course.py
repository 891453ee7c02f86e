"""The course of one column of weights: when its run ends, how hard its steps are damped, and its
outcome. All of this is decided on the host, from the few numbers that each step reports. An outcome that
misses its goal raises an error here.
"""

import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from ..problem._certificate import Certificate, NotConverged, OnFailure, Stats
from ._newton import StepReport, check_finite_norm, check_report

Ending = Literal["met", "steps", "floor", "stalled"]
"""Why a run stopped: at its tolerance, after the steps asked for, where the gradient is all rounding,
or where steps no longer help although the estimate of rounding is lower."""

FLOOR_LIMIT = 0.1
"""A run that ends at its floor is refused where the certified distance is more than this share of
`‖θ − θ₀‖`. Doubled, answers with one correct digit less would pass."""

OUTPUT_LIMIT = 1e-3
"""Unless no output can be off by more than this share of the largest one, as where nothing was left
to learn and `‖θ − θ₀‖` is rounding itself."""


UNDERFLOW = 1e-100
"""Nor where the distance itself is next to underflow."""


class Outcome(NamedTuple):
    """The outcome of one column of a run.

    - `certificate`: how near the column ended to the optimum.
    - `ending`: why the column stopped.
    - `solved`: whether the last linear solve reached its residual.
    - `output_share`: the certified error of any output over the largest output.
    - `steps`, `iterations`, `products`, `residual`: as in `Stats`.
    - `jitter`: how much larger than `λ` the ridge of any step's system was.
    """

    certificate: Certificate
    ending: Ending
    solved: bool
    output_share: float
    steps: int
    iterations: int
    products: int
    residual: float
    jitter: float

    @property
    def near_floor(self) -> bool:
        """Whether rounding ended the run at an answer that is still of use."""
        cert = self.certificate
        small = cert.relative_bound <= FLOOR_LIMIT or self.output_share <= OUTPUT_LIMIT
        small = small or cert.distance_bound <= UNDERFLOW
        return self.ending in ("floor", "stalled") and small

    def notes(self, dtype: DTypeLike) -> tuple[str, ...]:
        """Notes for the stats if rounding changed a factorisation or ended the run."""
        notes = []
        if self.jitter:
            notes.append(
                f"rounding in {dtype} made a matrix indefinite: shifted by {self.jitter:.1e}"
            )
        if self.ending in ("floor", "stalled"):
            bound = self.certificate.relative_bound
            reached = f"certified to {bound:.1e} of ‖θ − θ₀‖"
            notes.append(f"stopped at the rounding floor of {dtype}, {reached}")
        return tuple(notes)

    def stats(
        self, converged: bool, seconds: float, solver: str, reason: str, notes: tuple[str, ...]
    ) -> Stats:
        return Stats(
            self.steps,
            self.iterations,
            self.products,
            converged,
            self.residual,
            seconds,
            solver,
            reason,
            notes,
        )


def check_outcome(
    stats: Stats, on_failure: OnFailure, what: str, cert: Certificate, dtype: DTypeLike
) -> None:
    """Raise unless the answer is what was asked for, or the caller wants it anyway."""
    if stats.converged or on_failure == "report":
        return
    floor = max(cert.rounding, cert.noise) / cert.ridge
    wider = "" if jnp.finfo(dtype).bits == 64 else "float64 (kernel=KernelOptions(refine=True)), "
    raise NotConverged(
        f"{what}: stopped after {stats.steps} steps and {stats.iterations} inner iterations at a "
        f"relative residual of {stats.residual:.3g} and a certified distance of "
        f"{cert.distance_bound:.3g} ({cert.relative_bound:.3g} of ‖θ − θ₀‖), of which rounding "
        f"in {dtype} accounts for {floor:.3g}. Try {wider}a larger ridge, a looser tolerance or "
        "more steps, or on_failure='report' to get this answer."
    )


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

HELPED = 0.9
"""A step that leaves more than this share of the gradient has not helped, where the objective's values
are rounding. Nearer to one, a run at its floor takes longer to say so."""


class Goal(NamedTuple):
    """When a run ends.

    - `distance`: bound on `‖θ − θ*‖` to reach, or `None`.
    - `relative`: bound on `‖θ − θ*‖ / ‖θ − θ₀‖` to reach, or `None`.
    - `max_steps`: the largest number of steps; without a bound, the exact number of steps.
    - `by_default`: whether `relative` is the default tolerance of the dtype, not a choice of the caller.
    - `min_steps`: the smallest number of steps. An edit takes at least one, because the model before it,
      however near, is not the answer.
    """

    distance: float | None
    relative: float | None
    max_steps: int
    by_default: bool = False
    min_steps: int = 0

    def in_dtype(self, dtype: DTypeLike) -> "Goal":
        """The same goal for a run in this dtype."""
        return self._replace(relative=default_tolerance(dtype)) if self.by_default else self

    def met(self, cert: Certificate) -> bool:
        by_distance = self.distance is not None and cert.distance_bound <= self.distance
        return by_distance or (self.relative is not None and cert.relative_bound <= self.relative)

    @property
    def counts_steps(self) -> bool:
        return self.distance is None and self.relative is None


def fit_goal(tolerance: float | None, max_steps: int, dtype: DTypeLike) -> Goal:
    """The goal of a fit: a relative distance, by default the tolerance of this dtype."""
    relative = default_tolerance(dtype) if tolerance is None else tolerance
    return Goal(None, relative, max_steps, tolerance is None)


def default_tolerance(dtype: DTypeLike) -> float:
    """Relative certified distance that a fit aims for."""
    return 1e-10 if jnp.finfo(dtype).bits == 64 else 1e-5


def default_rtol(dtype: DTypeLike) -> float:
    """Relative residual of linear solves: near the limit in float64, larger to be safe in float32."""
    return 1e-11 if jnp.finfo(dtype).bits == 64 else 1e-5


class Course:
    """What is known of one column on the host.

    - `certificate`: at the point of the smallest gradient so far, or after the last fresh product.
    - `sure`: the certificate with the smallest bound among the points with a fresh product.
    - `damping`: of the next step, in units of what rounding alone asks for.
    - `ended`: why the column has stopped, or `None` while it takes steps.
    - `confirmed`: whether a fresh product has confirmed the end.
    """

    def __init__(self, ridge: float, what: str, certificate: Certificate) -> None:
        check_finite_norm(certificate.distance_bound, what)
        self.ridge, self.what = ridge, what
        self.certificate = self.sure = certificate
        self.first = self.norm = certificate.gradient_norm
        self.stalled = self.steps = self.iterations = self.refreshes = 0
        self.products, self.residual, self.jitter = 1, 0.0, 0.0
        self.last: StepReport | None = None
        self.damping = 1.0
        self.ended: Ending | None = None
        self.confirmed = False

    def tolerance(self, goal: Goal, rtol: float) -> float:
        """Relative residual of the next linear solve.

        Newton's method squares the error near the optimum, so a tighter solve gains nothing. It gains
        nothing either once a hundredth of the gradient that `goal` allows is left.
        """
        if self.ended:
            # Its right-hand side is rounding, which no iteration should be spent on.
            return math.inf
        if goal.counts_steps:
            return rtol
        # A gradient of zero would divide by zero; 1e-300 is below every other one, and a number in float64.
        norm = max(self.norm, 1e-300)
        share = min(1.0, norm / max(self.first, 1e-300))
        asked = 0.0 if goal.distance is None else LOOSEST * goal.distance * self.ridge / norm
        return max(rtol, LOOSEST * min(1.0, max(share, asked)))

    def take(self, report: StepReport, dtype: DTypeLike) -> bool:
        """Count a step. Returns whether it led to the best point so far."""
        self.last = report
        # First of all: nothing below may compare with NaN.
        check_report(report, dtype, self.what)
        self.steps, self.iterations = self.steps + 1, self.iterations + report.iterations
        self.products, self.residual = self.products + report.products, report.residual
        self.norm = report.gradient_norm
        self.jitter = max(self.jitter, report.jitter)
        # While the objective still falls nothing has stalled, whatever the gradient does. It does not
        # where no step was taken, with as much damping as there is.
        stuck = report.step_size == 0 and self.damping >= MAX_DAMPING
        falls = not report.settled and not stuck
        helped = falls or self.norm <= HELPED * self.certificate.gradient_norm
        # A failed solve is not the end while a larger ridge can still make it easier.
        unsolved = not report.converged and report.residual > UNSOLVED
        helped = helped or (unsolved and self.damping < MAX_DAMPING)
        # A direction that is all rounding leads nowhere; more damping turns it towards the gradient.
        failed = unsolved or report.step_size == 0
        changed = self.damping * HARDER if failed else self.damping / EASIER
        # Never below what rounding asks for, never beyond where more changes nothing.
        self.damping = min(max(1.0, changed), MAX_DAMPING)
        self.stalled = 0 if helped else self.stalled + 1
        # Below its rounding a gradient says nothing, and a step still brings `α` to `-g/λ`, where it rounds
        # as the optimum does.
        seen = max(self.certificate.gradient_norm, self.certificate.noise)
        better = self.norm <= seen or not report.settled or report.lighter
        if better:
            self.certificate = report.certificate(self.ridge)
        return better

    @property
    def solved(self) -> bool:
        """Whether the linear solve of the last step converged; earlier steps only give its start. If
        rounding raised the ridge of a step, the step is not a precise Newton step but a direction, which
        the line search has tested.
        """
        last = self.last
        # A run that took no step had nothing to solve.
        if last is None or last.converged:
            return True
        return last.jitter > 0 and last.residual <= UNSOLVED

    def ending(self, goal: Goal) -> Ending | None:
        """The ending according to the running sums, or `None` if the run must continue."""
        # The order counts: a goal that is met on the last step is met, and where rounding ends a run that is
        # said rather than that it has stalled.
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

        The estimate of the gradient's rounding is cautious. While the objective falls, the run
        continues. It also continues until a whole step was taken: before that, if effects of points
        nearly cancel, `α` can be far from `-g/λ` although the gradient is small, and then `α` has more
        rounding than at the optimum.
        """
        if self.last is None or self.last.step_size < 1:
            return False
        left = self.norm**2 / (2 * self.ridge)
        return self.last.settled or left <= self.last.value_noise

    def refreshed(self, certificate: Certificate) -> bool:
        """Take the certificate of a fresh product. Returns whether its bound is the smallest so far."""
        # Stalling is counted from here on: the steps before were judged by a sum that had drifted.
        self.certificate, self.norm, self.stalled = certificate, certificate.gradient_norm, 0
        self.refreshes, self.products = self.refreshes + 1, self.products + 2
        # By the bound, not by the gradient: rounding is part of what a run promises.
        surer = certificate.distance_bound <= self.sure.distance_bound
        if surer:
            self.sure = certificate
        return surer

    def confirm(self, goal: Goal) -> None:
        """Whether the column is still done after a fresh product; if not, it continues from this
        product."""
        cert = self.certificate
        still = {
            "met": goal.met(cert),
            "floor": cert.gradient_norm <= FLOOR_SLACK * cert.noise and self._flat,
            "steps": True,
            "stalled": True,
        }
        # Steps from a fresh product may help again where the drift of the sum had stopped them.
        self.confirmed = still[self.ended or "steps"] or self.refreshes >= MAX_REFRESHES
        if not self.confirmed:
            self.ended = None

    @property
    def settles(self) -> bool:
        """Whether the column returns the point with the smallest bound: if only rounding is left, the
        last step may have made the point worse."""
        return self.ended in ("floor", "stalled")

    def outcome(self, goal: Goal, output_size: float, kernel_size: float) -> Outcome:
        """The outcome of the column, given the largest `|f|` and the largest `√K_ii`."""
        certificate = self.sure if self.settles else self.certificate
        ending = self.ended or "steps"
        # The surest point may keep a promise that the last one missed, and the other way round: the ending is
        # that of the point which is returned.
        if goal.met(certificate):
            ending = "met"
        elif ending == "met":
            ending = "stalled"
        return Outcome(
            certificate=certificate,
            ending=ending,
            solved=self.solved,
            output_share=output_share(certificate, output_size, kernel_size),
            steps=self.steps,
            iterations=self.iterations,
            products=self.products,
            residual=self.residual,
            jitter=self.jitter,
        )


def output_share(cert: Certificate, output_size: float, kernel_size: float) -> float:
    """`|f(θ) − f(θ*)| ≤ √K_ii ‖θ − θ*‖`, over the largest output."""
    off = kernel_size * cert.distance_bound
    return off / max(output_size, 1e-300) if off else 0.0
