"""Third stage: a run of Newton steps on a model, which `fit`, `edit` and `retrain` share.

If float32 rounding stops a run, the run continues with the same model in float64. This module makes that
model.
"""

from dataclasses import dataclass, replace
from typing import Any, Generic
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from .._support.compile import NotFinite, double, widened
from .._support.memory import memory_budget
from .._support.options import Clock
from .._support.points import enter_points
from .._support.types import Inputs, Numbers
from ..dual._course import Ending, Goal, check_outcome, default_rtol
from ..dual._fidelity import still_linear
from ..dual._model import Reference, Trained, TrainedModel
from ..dual._newton import op_diagonal, op_mv
from ..dual._train import Machine, take_one_step, train
from ..models._passes import outputs_at
from ..models._sources import AbstractSource, as_source
from ..operators import AbstractKernelOperator, widen
from ..problem._certificate import Certificate, NotConverged
from ..problem._objective import State, TrainingSet
from ..solvers import resolve
from ._options import Settings
from ._setup import widens

AT_ONCE = 20.0
"""If the mean diagonal entry of `K` is more than this many times `λ`, float32 is not tried on a CPU. The
relative bound of a float32 fit is then about this many rounding units or more, above the tolerance of
such fits. With twice this value, some fits are made twice."""

SMALL = 2048
"""Up to this many unknowns, float64 costs little on a CPU. With more unknowns a product with `K` takes
twice as long, and float64 is used only after float32 is refused, as on an accelerator. With twice this
value, requests of 4,000 unknowns are slower."""

LOOSE = 1e-5
"""A float32 answer that is limited by rounding is computed again on a CPU if its relative bound is above
this value. A hundredth of this value is about the accuracy of float32."""

WIDENED = "float32 data, residuals and dual variables in float64"


def can_widen(model: TrainedModel) -> bool:
    """Whether this model computes in float32 and could continue in float64."""
    return (
        model.offset.dtype == jnp.float32
        and model.widening != "never"
        and widens(model.source, model.kernel_op)
    )


def starts_wide(model: TrainedModel, any_ridge: bool = False) -> bool:
    """Whether to skip float32 and start in float64: on a CPU, where float64 costs at most twice as much.

    `any_ridge`: true for a fit that tries many ridges, including small ones.
    """
    if not can_widen(model):
        return False
    if model.widening == "at once":
        return True
    large = any_ridge or float(jnp.mean(model.kernel_diagonal)) > AT_ONCE * model.ridge
    return _is_cheap(model) and large


def as_given(model: Trained, kernel: object, x: Inputs, y: Numbers) -> Trained:
    """The model with points, targets and kernel in the precision that the caller gave: NumPy arrays may
    have 64 bits."""
    data, source = model.data, model.source
    with double():
        targets = model.loss.prepare_targets(y, model.num_outputs, jnp.dtype("float64"))
        points = data.x if data.form is not None or x is None else enter_points("x", x, None)
        if source.network is None:
            source = source.placing(as_source(kernel, points))
        return replace(model, data=replace(data, x=points, targets=targets), source=source)


def falls_short(model: TrainedModel, certificate: Certificate, met: bool) -> bool:
    """Whether a float32 answer that would be accepted is worth a second one in float64.

    On accelerators a second answer is not worth its cost: float64 may take many times longer, and the
    bound shows how good the float32 answer is.
    """
    bound = certificate.relative_bound
    loose = certificate.at_floor and certificate.certified and bound > LOOSE
    return loose and not met and _is_cheap(model)


def widened_model(model: Trained) -> Trained:
    """The same model in float64; made once, however many edits need it."""
    known: Any = _WIDE.get(model)
    if known is None:
        known = _WIDE[model] = _widened(model)
    return known


_WIDE: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Models in float64, by the float32 models that they were made from."""


def _widened(model: Trained) -> Trained:
    """The same model with `K`, outputs and dual variables in float64.

    `K` is computed again in float64 if it then fits in memory. Otherwise, or if `K` was handed in, `K`
    stays as it is and its products accumulate in float64.
    """
    model = model.without_spare_rows()
    x, c = model.data.x, model.num_outputs
    with double():
        source = model.source.widened(x)
        op = _operator(model, source)
        alpha = widened(model.state.alpha)
        state = State(alpha, op_mv(op, alpha))
        reference = _reference(model, source)
        if reference is None:
            base = source.base_outputs(x, c)
            offset = jnp.zeros_like(alpha) if base is None else op.layout.place(base, "last")
        else:
            assert source.network is not None
            start = op.layout.grow(reference.alpha, op.num_points)
            outputs = outputs_at(source.network, reference.params, x, reference.linearised)
            offset = op.layout.place(outputs, "last") - op_mv(op, start)
        pre = model.preconditioner
        if op.narrow is op:
            pre = widened(pre)
        return replace(
            model,
            source=source,
            data=replace(model.data, targets=widened(model.data.targets)),
            state=state,
            reference=reference,
            kernel_op=op,
            offset=offset.astype(alpha.dtype),
            kernel_diagonal=op_diagonal(op),
            preconditioner=pre,
            epsilon=source.narrow_eps,
            stats=model.stats._replace(notes=(*model.stats.notes, WIDENED)),
        )


def kept_operator(model: TrainedModel) -> AbstractKernelOperator | None:
    """`K` kept in float32 with products in float64, or `None` if `K` is to be computed again. Call it in
    a `double` scope."""
    own = model.kernel_op
    if own.follows_points:
        return None
    # Processes have their own budgets, and all have to decide alike.
    room = model.source.num_devices * memory_budget() if jax.process_count() == 1 else 0
    keep = model.widening in ("as stored", "at once") or 2 * own.num_bytes > room
    return widen(own) if keep else None


def _operator(model: TrainedModel, source: AbstractSource) -> AbstractKernelOperator:
    """`K` in float64, or the `K` in float32 with products in float64."""
    form = "matrix-free" if model.kernel_op.follows_points else "dense"
    kept = kept_operator(model)
    if kept is not None:
        return kept
    return source.operator(model.data.x, model.num_outputs, form=form, progress=False)


def _reference(model: TrainedModel, source: AbstractSource) -> Reference | None:
    """The trained parameters in the form that the float64 network takes."""
    ref, network = model.reference, model.source.network
    if ref is None or network is None or source.network is None:
        return None
    params = source.network.enter(network.leave(ref.params))
    return replace(ref, params=params, alpha=widened(ref.alpha))


def _is_cheap(model: TrainedModel) -> bool:
    small = model.data.num_points * model.num_outputs <= SMALL
    return small and jax.default_backend() == "cpu"


BENT = (
    "no certificate: at this answer the network is not linear, although it was found linear "
    "before. The edit applies to its linearisation"
)


@dataclass(frozen=True, eq=False)
class Done(Generic[Trained]):
    """The result of a run: the starting model (in the precision in which the run ended), the final
    model, and the reason why the run ended."""

    before: Trained
    after: Trained
    ending: Ending


def zero(model: TrainedModel) -> State:
    """`α = 0`."""
    shape = (model.data.num_points, model.num_outputs)
    nothing = model.layout.place(np.zeros(shape, model.offset.dtype))
    return State(nothing, nothing)


@dataclass(frozen=True, eq=False)
class Task(Generic[Trained]):
    """Newton steps on `data` from `start` to `goal`, with the kernel, ridge and preconditioner of `model`.

    In the `stats` of the run, `notes` come before the notes of the run itself.
    """

    model: Trained
    data: TrainingSet
    start: State
    goal: Goal
    how: Settings
    clock: Clock
    notes: tuple[str, ...] = ()


def run(task: Task[Trained]) -> Done[Trained]:
    """Take the steps of a task.

    If float32 rounding stops a run before its goal, the run continues in float64 from where it is; a run
    of a given number of steps is repeated from its start.
    """
    model, start, goal, how = task.model, task.start, task.goal, task.how
    if not can_widen(model):
        with double(model.is_wide):
            return _run(task)
    try:
        done = _run(replace(task, how=how._replace(on_failure="report")))
    except NotFinite:
        alpha = start.alpha
    else:
        cert, stats = done.after.certificate, done.after.stats
        # A run that came to the end of its steps was not stopped by rounding.
        refused = not stats.converged and (goal.counts_steps or done.ending != "steps")
        if not refused and not falls_short(model, cert, goal.met(cert)):
            check_outcome(stats, how.on_failure, how.what, cert, model.offset.dtype)
            return done
        # A step that was asked for starts where the fit ended; a run goes on from where it is.
        alpha = start.alpha if goal.counts_steps else done.after.state.alpha
    wide = widened_model(model)
    with double():
        alpha = wide.layout.place(widened(wide.layout.points(alpha)))
        again = State(alpha, op_mv(wide.kernel_op, alpha))
        data = replace(task.data, targets=widened(task.data.targets))
        goal, notes = goal.in_dtype(alpha.dtype), (*task.notes, WIDENED)
        return _run(Task(wide, data, again, goal, how, task.clock, notes))


def _run(task: Task[Trained]) -> Done[Trained]:
    """A run in the precision of the model."""
    model, data, start, goal = task.model, task.data, task.start, task.goal
    how, clock, notes = task.how, task.clock, task.notes
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
    certificate = model._widened(outcome.certificate)
    after = replace(model, data=data, state=point.state, certificate=certificate)
    # A distance that was asked for must be reached; without one, the limit of the dtype will do.
    reached = outcome.ending == "met" or (goal.distance is None and outcome.near_floor)
    at_end = outcome.solved or outcome.near_floor
    if _bends(after):
        certificate = replace(certificate, certified=False)
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
    check_outcome(stats, how.on_failure, how.what, certificate, dtype)
    return Done(model, replace(after, certificate=certificate, stats=stats), outcome.ending)


def _bends(model: TrainedModel) -> bool:
    """Whether a network that was found linear in earlier tests is not linear at this answer."""
    ref = model.reference
    if ref is None or ref.proven or not ref.certified:
        return False
    params = model._network.enter(model.params())
    return not still_linear(model._network, params, model.data.x, model.outputs)
