"""A model in float64, made from one in float32 that rounding has stopped."""

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp

from .._support.memory import memory_budget
from .._support.points import enter_points
from .._support.wide import double, widened
from ..dual._model import Trained, TrainedModel, Widening
from ..dual._newton import op_diagonal, op_mv
from ..dual._readout import Reference
from ..models._options import KernelOptions
from ..models._passes import outputs_at
from ..models._sharded import ShardedSource
from ..models._sources import AbstractSource, as_source
from ..operators import AbstractKernelOperator, widen
from ..problem._certificate import Certificate
from ..problem._objective import State
from ._setup import widens

AT_ONCE = 20.0
"""Mean kernel entry over `λ` from which float32 is not tried on a CPU. The relative bound of a float32 fit
is then about this many rounding units or more, above the tolerance of such fits. Doubled, some fits are
made twice."""

SMALL = 2048
"""Unknowns up to which a CPU does not mind float64. Past them a product with `K` takes twice as long, and
float64 waits until float32 is refused, as on an accelerator. Doubled, requests of 4,000 unknowns are
slower."""

LOOSE = 1e-5
"""Relative bound above which a float32 answer that is all rounding is computed again on a CPU. A hundredth
of it is about what float32 can tell from the truth."""

WIDENED = "float32 data, residuals and dual variables in float64"


def is_wide(op: AbstractKernelOperator | None) -> bool:
    """Whether an operator that was handed in multiplies in float64."""
    return op is not None and op.dtype == jnp.float64


def can_widen(model: TrainedModel) -> bool:
    """Whether rounding of float32 is what limits this model, and float64 is to be had."""
    return (
        model.offset.dtype == jnp.float32
        and model.widening != "never"
        and widens(model.source, model.kernel_op)
    )


def widening(options: KernelOptions) -> Widening:
    """What becomes of `K` where float32 is not enough, from what the caller said of `K`."""
    if options.refine is not None:
        return "at once" if options.refine else "never"
    return "computed anew" if options.operator is None else "as stored"


def start_norm(source: AbstractSource) -> float:
    """`‖θ₀‖` in the norm of the ridge, or of the parameters that `J` is taken at; 0 without any."""
    return 0.0 if source.network is None else float(source.network.size)


def starts_wide(model: TrainedModel, any_ridge: bool = False) -> bool:
    """Whether float32 is not worth a try: on a CPU, where float64 costs twice as much at most.

    `any_ridge` is a fit that tries many, small ones among them.
    """
    if not can_widen(model):
        return False
    if model.widening == "at once":
        return True
    large = any_ridge or float(jnp.mean(model.kernel_diagonal)) > AT_ONCE * model.ridge
    return _is_cheap(model) and large


def as_given(model: Trained, kernel: Any, x: Any, y: Any) -> Trained:
    """The model with points, targets and kernel in the digits that the caller gave: NumPy's have 64 bits."""
    data, source = model.data, model.source
    with double():
        targets = model.loss.prepare_targets(y, model.num_outputs, jnp.dtype("float64"))
        points = data.x if data.form is not None or x is None else enter_points("x", x, None)
        if source.network is None:
            source = _on_mesh_of(source, as_source(kernel, points))
        return replace(model, data=replace(data, x=points, targets=targets), source=source)


def falls_short(model: TrainedModel, certificate: Certificate, met: bool) -> bool:
    """Whether a float32 answer that would be accepted is worth a second one in float64.

    On accelerators it is not: the bound says what it is worth, and float64 may cost many times more.
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
"""Models in float64 by those in float32 that they were made from."""


def _widened(model: Trained) -> Trained:
    """The same model with `K`, outputs and dual variables in float64.

    `K` is computed anew in float64 where that fits in memory. Otherwise, and where it was handed in, it
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
    """`K` in float32 with float64 products, where it is not to be computed anew; in a `double` scope."""
    own = model.kernel_op
    if own.follows_points:
        return None
    # Processes have their own budgets, and all have to decide alike.
    room = model.source.num_devices * memory_budget() if jax.process_count() == 1 else 0
    keep = model.widening in ("as stored", "at once") or 2 * own.num_bytes > room
    return widen(own) if keep else None


def _on_mesh_of(old: AbstractSource, new: AbstractSource) -> AbstractSource:
    """The new source with its rows on the devices of the old one."""
    return replace(old, inner=new) if isinstance(old, ShardedSource) else new


def _operator(model: TrainedModel, source: AbstractSource) -> AbstractKernelOperator:
    """`K` in float64, or the one in float32 with wide products."""
    form = "matrix-free" if model.kernel_op.follows_points else "dense"
    kept = kept_operator(model)
    if kept is not None:
        return kept
    return source.operator(model.data.x, model.num_outputs, form=form, progress=False)


def _reference(model: TrainedModel, source: AbstractSource) -> Reference | None:
    """The trained parameters as the widened network takes them."""
    ref, network = model.reference, model.source.network
    if ref is None or network is None or source.network is None:
        return None
    params = source.network.enter(network.leave(ref.params))
    return replace(ref, params=params, alpha=widened(ref.alpha))


def _is_cheap(model: TrainedModel) -> bool:
    small = model.data.num_points * model.num_outputs <= SMALL
    return small and jax.default_backend() == "cpu"
