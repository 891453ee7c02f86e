"""Rows for points that an edit adds: in the kernel, the outputs, the dual variables."""

from dataclasses import replace

import jax
import numpy as np

from .._support.options import ProgressFn
from ..dual._model import Trained
from ..dual._newton import op_diagonal, op_mv
from ..operators._base import rows_for
from ..problem._objective import State, TrainingSet


def extended(model: Trained, data: TrainingSet, progress: bool | ProgressFn) -> Trained:
    """`model` with rows for the points that `data` appends: `α = 0`, weight 0 before the edit.

    New points go into spare rows; where there are none, the kernel grows by more than it needs.
    A mesh gets a border instead.
    """
    old, new = model.data.num_points, data.num_points
    if old == new:
        return model
    x, targets = np.asarray(data.x), np.asarray(data.targets)
    x_new = jax.device_put(x[old:])
    on_mesh = model.layout.sharding is not None
    rows = new if on_mesh else rows_for(new, model.kernel_op.num_points)
    spare = np.repeat(x[-1:], rows - new, axis=0)
    all_x = jax.device_put(np.concatenate([x, spare]))
    op = model.source.extend(model.kernel_op, all_x, old, new, progress)
    layout = op.layout.holding(new)
    alpha = layout.grow(model.state.alpha, op.num_points)
    state = State(alpha, op_mv(op, alpha))
    k_alpha = jax.device_put(np.asarray(layout.points(state.k_alpha))[old:])
    # `f − Kα`: the base outputs, or the trained network's less its dual part.
    offset = np.concatenate([model.layout.points(model.offset), model.predict(x_new) - k_alpha])
    before = TrainingSet(
        data.x,
        jax.device_put(np.concatenate([model.data.targets, targets[old:]])),
        np.pad(model.data.sample_weights, (0, new - old)),
        model.data.purged,
        data.form,
    )
    return replace(
        model,
        data=before,
        kernel_op=op,
        state=state,
        offset=layout.place(offset, "last"),
        kernel_diagonal=op_diagonal(op),
        preconditioner=model.preconditioner.on_rows(lambda L: layout.grow(L, op.num_points)),
    )
