"""Forgetting removed points for good: what holds their rows, and what stands there instead.

A purged row becomes a copy of a point that stays, with weight zero and `α = 0`. So positions keep their
meaning, shapes and compiled programs stay, every network and kernel can evaluate the row (zeros might
divide by zero), and `K` on these rows is still a kernel.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..dual._model import Trained
from ..dual._newton import op_mv
from ..operators import AbstractKernelOperator, UnsupportedStructure
from ..problem._objective import State, TrainingSet
from ..solvers import CG
from ._options import Sketch
from ._setup import make_preconditioner

NEGLIGIBLE = 1e3
"""Dual variables of a removed point up to this many units in the last place count as zero."""


def purged(model: Trained) -> Trained:
    """See `Fitted.purge`."""
    gone = np.flatnonzero(model.data.sample_weights == 0)
    if gone.size == 0:
        return model
    base, rows = model.without_spare_rows(), stand_ins(model.data)
    data = purged_data(model.data, rows)
    op = purged_operator(base.kernel_op, data.x, rows)
    source = model.source.purged(model.data.x, model.data.sample_weights > 0, data.x)
    check_settled(base.state.alpha, base.kernel_diagonal, gone)
    alpha = jnp.where((data.sample_weights > 0)[:, None], base.state.alpha, 0)
    reference, pre = model.reference, model.preconditioner
    if reference is not None:
        reference = replace(reference, params=model._entered_params(), alpha=alpha)
    if pre.sketch is not None:
        again = Sketch(pre.sketch.shape[2])
        pre, _, _ = make_preconditioner(source, data.x, op, CG(), again)
    return replace(
        model,
        source=source,
        data=data,
        state=State(alpha, op_mv(op, alpha)),
        reference=reference,
        kernel_op=op,
        offset=base.offset[rows],
        kernel_diagonal=base.kernel_diagonal[rows],
        preconditioner=pre,
    )


def stand_ins(data: TrainingSet) -> np.ndarray:
    """For each row, the index of the row whose data it holds after a purge: its own, or that of the
    first point with a weight."""
    kept = data.sample_weights > 0
    return np.where(kept, np.arange(kept.size), np.argmax(kept)).astype(np.int32)


def purged_data(data: TrainingSet, rows: np.ndarray) -> TrainingSet:
    gone = np.flatnonzero(data.sample_weights == 0)
    return TrainingSet(data.x[rows], data.targets[rows], data.sample_weights, gone, data.form)


def purged_operator(op: AbstractKernelOperator, x: Array, rows: np.ndarray) -> Any:
    """`K` between the rows that are left, in the same structure; `x` are the purged features."""
    if op.layout.sharding is not None:
        raise UnsupportedStructure(
            "purge: rows on a mesh cannot be purged. Save, load, purge, then spread the rows "
            "again with on(mesh)."
        )
    if op.follows_points:
        return op.at_points(x, op.layout)
    try:
        return op.take(rows)
    except UnsupportedStructure as error:
        where = "" if op.in_memory else " (on disk)"
        raise UnsupportedStructure(
            f"purge: a {type(op.narrow).__name__} keeps entries of removed points that purge "
            f"cannot change{where}. Make K of the remaining points, fit them, and delete the old "
            "one."
        ) from error


def check_settled(
    alpha: Float[Array, "n c"], diagonal: Float[Array, "n c"], gone: np.ndarray
) -> None:
    """Raise if removed points still influence the model, that is, if their `α` is larger than
    rounding."""
    share = jnp.maximum(diagonal, 0) * alpha**2
    part = float(jnp.sqrt(jnp.sum(share[gone]) / jnp.maximum(jnp.sum(share), 1e-300)))
    if part > NEGLIGIBLE * float(jnp.finfo(alpha.dtype).eps):
        raise ValueError(
            f"purge: removed points still contribute {part:.2g} of the model, because the edit "
            "that removed them stopped early. Finish it first: fitted.edit([], "
            "until=...).commit()."
        )
