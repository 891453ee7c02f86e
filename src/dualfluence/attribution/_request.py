"""A request to a trajectory: its checked data, its options, what its result says."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array

from .._support.archive import digest_of_all
from .._support.checks import check_queries, check_rows
from .._support.compile import filter_jit
from .._support.points import Form, common_dtype, enter_points, form_of, shown
from .._support.types import Inputs, Numbers
from ..kernels._linearized import Linearized
from ..losses import AbstractLoss
from ..problem._quantity import Quantity, as_quantity
from ._attribution import Attribution
from ._points import point_notes
from ._probes import Probes, said_of

PROJECTED_NOTE = (
    "gradients projected on random directions: entries of K are off by about 1/√rank of their size"
)

SHRUNK_NOTE = ("entries on which checkpoints and runs disagree are drawn towards zero",)


@dataclass(frozen=True)
class Options:
    """How a request is scored."""

    loss: AbstractLoss
    method: str
    probes: Probes | None
    leverage: bool
    combine: str
    rank: int
    mesh: Mesh | None = None
    tokens: bool = False
    question: str = "subset"


@dataclass(frozen=True, eq=False)
class Data:
    """Checked arrays of a request."""

    x: Array
    targets: Array
    xq: Array
    quantity: Quantity
    num_outputs: int
    yq: Numbers | None
    form: Form | None
    dtype: DTypeLike


def check_data(
    run: Any,
    x: Inputs,
    y: Numbers,
    xq: Inputs,
    yq: Numbers | None,
    loss: AbstractLoss,
    of: Any,
) -> Data:
    form = form_of("x", x)
    features = enter_points("x", x, form)
    queries = check_queries(xq, features, form=form)
    model = run.model(0).reading(form)
    c = model.apply_shape(features[:1])[1]
    # Float64 points make float64 outputs of float32 parameters.
    dtype = common_dtype(model.dtype, jax.eval_shape(model.base_outputs, features[:1]).dtype)
    targets = loss.prepare_targets(y, c, dtype)
    check_rows("y", targets, features.shape[0], "point of x")
    quantity = as_quantity(of, loss, yq, queries.shape[0], c, dtype)
    return Data(features, targets, queries, quantity, c, yq, form, model.dtype)


@filter_jit
def _finite_outputs(model: Linearized, x: Array) -> Array:
    return jax.lax.map(lambda row: jnp.isfinite(model.base_outputs(row[None])).all(), x)


def check_outputs_finite(name: str, model: Linearized, data: Data) -> None:
    """Raise for the first point whose outputs are not finite."""
    for what, points in (("x", data.x), ("xq", data.xq)):
        bad = np.flatnonzero(~np.asarray(_finite_outputs(model, points)))
        if bad.size:
            raise ValueError(
                f"{name}: the network's outputs for point {bad[0]} of {what} are not finite ({bad.size} bad "
                f"of {points.shape[0]}). A token number beyond the vocabulary gives NaN, and so does "
                "overflow in half precision."
            )


def result_of(
    values: np.ndarray,
    runs: Sequence[Any],
    data: Data,
    options: Options,
    why: str,
    beside: np.ndarray,
    seconds: float,
) -> Attribution:
    steps = ", ".join(str(s) for s in np.asarray(runs[0].steps))
    point = options.question == "point"
    notes: tuple[str, ...] = (
        "scores are scaled to one size per query and checkpoint and averaged: they rank "
        "training points for one query, and have no unit",
        f"{len(runs)} run(s), checkpoints after {steps} steps, λ = 1/({runs[0].kappa:g}·η·steps)",
        "closed-form leave-one-out" if options.leverage else "first-order effects",
        *SHRUNK_NOTE[: options.combine == "shrunk"],
        *([PROJECTED_NOTE] if options.method == "projected" else []),
    )
    if point:
        notes = point_notes(len(runs), steps)
    notes = (*notes, *said_of(options.probes, why, *beside))
    return Attribution(
        values=values,
        of=data.quantity.name,
        direction=data.quantity.direction,
        unit="change of the quantity" if point else None,
        notes=notes,
        stats={
            "seconds": seconds,
            "method": options.method,
            "probes": None if options.probes is None else repr(options.probes),
            "left_out": float(beside[0]),
            "agreement": float(beside[1]),
            "leverage": options.leverage,
            "combine": None if point else options.combine,
            "question": options.question,
            "runs": len(runs),
        },
        x=shown(data.x, data.form),
        y=np.asarray(data.targets),
        xq=shown(data.xq, data.form),
        yq=None if data.yq is None else np.asarray(data.yq),
    )


def fingerprint(data: Data, options: Options) -> str:
    said = [
        repr(options.loss),
        data.quantity.name,
        options.method,
        options.probes,
        options.leverage,
        options.rank if options.method == "projected" else 0,
        options.tokens,
        *([options.question] if options.question != "subset" else []),
    ]
    arrays = (data.x, data.targets, data.xq, data.quantity.targets)
    return json.dumps([digest_of_all(arrays), *map(str, said)])
