"""What a fitted model and an update print: points, objective, kernel, run and certificate."""

from typing import Any

import numpy as np

from .._support.show import Table, count
from ..dual._model import TrainedModel
from ..models._sources import AbstractSource


def fitted_table(fitted: TrainedModel) -> Table:
    """One screen about a model."""
    ref = fitted.reference
    claimed = " (gap and linearity claimed by the file)" if ref is not None and ref.claimed else ""
    rows = [*_rows(fitted, fitted), ("certificate", fitted.certificate.summary() + claimed)]
    if fitted.fidelity is not None:
        f = fitted.fidelity
        text = f"‖∇L‖ {f.gradient_norm:.2g}, gaps {f.parameter_gap:.2g} (θ), {f.output_gap:.2g} (f)"
        rows.append(("fidelity", text))
    return "Fitted", rows


def update_table(update: Any) -> Table:
    """One screen about a model after an edit."""
    delta = np.asarray(update.delta_alpha)
    moved = int((delta != 0).any(axis=1).sum())
    rows = _rows(update, update.before)
    rows.append(("change", f"dual variables of {count(moved, 'point')} moved"))
    rows.append(("certificate", update.certificate.summary()))
    return "Update", rows


def _rows(model: Any, base: TrainedModel) -> list[tuple[str, str]]:
    data = model.data
    used, shape = int((data.sample_weights > 0).sum()), _point(data)
    removed = data.num_points - used
    gone = f", {removed:,} more of weight zero" if removed else ""
    return [
        ("points", f"{used:,} of shape {shape}{gone}"),
        ("outputs", f"{base.num_outputs:,}"),
        ("model", _model(base.source)),
        ("loss", f"{type(base.loss).__name__}, ridge {base.ridge:.3g}"),
        ("kernel", f"{type(base.kernel_op).__name__}, {base.offset.dtype}"),
        ("solver", f"{model.stats.solver} ({model.stats.reason})"),
        ("run", model.stats.summary()),
    ]


def _point(data: Any) -> str:
    if data.form is None:
        return str(tuple(data.x.shape[1:]))
    return ", ".join(f"{shape} {dtype}" for shape, dtype in data.form.leaves)


def _model(source: AbstractSource) -> str:
    if source.network is None:
        return "kernel without parameters"
    return f"network with {count(source.network.num_params, 'parameter')}"
