"""One run of Newton steps on a model: what `fit`, `edit` and `retrain` have in common."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .._support.checks import check_fraction
from .._support.compile import NotFinite, double, widened
from .._support.options import ProgressFn, check_on_failure, check_progress, check_solver
from ..dual._course import Goal, default_rtol
from ..dual._fidelity import still_linear
from ..dual._model import Trained, TrainedModel
from ..dual._newton import op_mv
from ..dual._outcome import Ending, check_outcome
from ..dual._train import Machine, take_one_step, train
from ..problem._edits import TrainingSet
from ..problem._objective import State
from ..problem._record import NOT_DONE, Clock, NotConverged, OnFailure
from ..solvers import AbstractDualSolver, Auto, resolve
from ._update import Update
from ._wide import WIDENED, can_widen, falls_short, widened_model

AUTO = Auto()

BENT = (
    "no certificate: at this answer the network is not linear, although it was found linear "
    "before. The edit applies to its linearisation"
)


class Settings(NamedTuple):
    """How a run is asked for.

    - `what`: who asks, for messages.
    - `solver`: of the linear systems.
    - `rtol`: relative residual of the last of them; `None` for the dtype's own.
    - `on_failure`: whether an answer short of its goal is an error.
    - `progress`: where to report.
    """

    what: str
    solver: AbstractDualSolver | Auto
    rtol: float | None
    on_failure: OnFailure
    progress: bool | ProgressFn


def settings(what: str, solver: Any, rtol: Any, on_failure: Any, progress: Any) -> Settings:
    """Checked settings, `Auto` where no solver was given."""
    check_solver(what, solver, (AbstractDualSolver, Auto))
    check_fraction(f"{what}: rtol", rtol)
    check_on_failure(what, on_failure)
    check_progress(what, progress)
    return Settings(what, solver or AUTO, rtol, on_failure, progress)


def zero(model: TrainedModel) -> State:
    """`α = 0`."""
    shape = (model.data.num_points, model.num_outputs)
    nothing = model.layout.place(np.zeros(shape, model.offset.dtype))
    return State(nothing, nothing)


def run(
    model: Trained,
    data: TrainingSet,
    start: State,
    goal: Goal,
    how: Settings,
    clock: Clock,
    notes: tuple[str, ...] = (),
) -> Update[Trained]:
    """Newton steps on `data` from `start`, with the kernel, ridge and preconditioner of `model`.

    Where rounding of float32 leaves an answer short, the run is repeated in float64 from where it came to.
    """
    if not can_widen(model):
        with double(model.is_wide):
            return _run(model, data, start, goal, how, clock, notes)[0]
    try:
        update, ending = _run(
            model, data, start, goal, how._replace(on_failure="report"), clock, notes
        )
    except NotFinite:
        alpha = start.alpha
    else:
        cert, stats = update.certificate, update.stats
        # A run that came to the end of its steps was not stopped by rounding.
        refused = not stats.converged and (goal.counts_steps or ending != "steps")
        if not refused and not falls_short(model, cert, goal.met(cert)):
            check_outcome(stats, how.on_failure, how.what, cert, model.offset.dtype)
            return update
        # A step that was asked for starts where the fit ended; a run goes on from where it is.
        alpha = start.alpha if goal.counts_steps else update.state.alpha
    wide = widened_model(model)
    with double():
        alpha = widened(wide.layout.points(alpha))
        again = State(alpha, op_mv(wide.kernel_op, alpha))
        data = replace(data, targets=widened(data.targets))
        goal = goal.in_dtype(alpha.dtype)
        return _run(wide, data, again, goal, how, clock, (*notes, WIDENED))[0]


def _run(
    model: Trained,
    data: TrainingSet,
    start: State,
    goal: Goal,
    how: Settings,
    clock: Clock,
    notes: tuple[str, ...],
) -> tuple[Update[Trained], Ending]:
    """A run in the precision of the model, and why it ended."""
    dtype, problem = model.offset.dtype, model.problem(data)
    rtol = default_rtol(dtype) if how.rtol is None else how.rtol
    weights = model.layout.expand(data.sample_weights, "zero")  # none for spare rows
    picked = resolve(how.solver, model.kernel_op, weights)
    machine = Machine(
        model.kernel_op,
        model.kernel_diagonal,
        picked.solver,
        model.preconditioner,
        model.ridge,
        how.what,
    )
    if goal.counts_steps and goal.max_steps == 1:
        point, (outcome,) = take_one_step(machine, problem, start, rtol)
    else:
        point, (outcome,) = train(machine, problem, start, goal, rtol=rtol, progress=how.progress)
    update = Update(
        source=model.source,
        data=data,
        state=point.state,
        reference=model.reference,
        before=model,
        certificate=model._widened(outcome.certificate),
        stats=NOT_DONE,
    )
    # A distance that was asked for must be reached; without one, the limit of the dtype will do.
    reached = outcome.ending == "met" or (goal.distance is None and outcome.near_floor)
    at_end = outcome.solved or outcome.near_floor
    if _bends(update):
        update = replace(update, certificate=replace(update.certificate, certified=False))
        reached, notes = False, (*notes, BENT)
        if how.on_failure == "raise" and not goal.counts_steps:
            raise NotConverged(
                f"{how.what}: {BENT}. Use steps=... to get that edit, or retrain the network."
            )
    stats = outcome.stats(
        at_end if goal.counts_steps else reached,
        clock.stop(point),
        type(picked.solver).describe(picked.solver, model.kernel_op),  # bound, it takes 0.1 ms
        picked.reason,
        notes + outcome.notes(dtype),
    )
    check_outcome(stats, how.on_failure, how.what, update.certificate, dtype)
    return replace(update, stats=stats), outcome.ending


def _bends(update: Update[Any]) -> bool:
    """Whether a network that was linear wherever it was tried is not linear at this answer."""
    ref = update.reference
    if ref is None or ref.proven or not ref.certified:
        return False
    params = update._network.enter(update.params())
    return not still_linear(update._network, params, update.data.x, update.outputs)
