"""The page's numbers as plain JSON values: the fixed part, one state of the model, its scores.

The server sends them, and a saved page contains them. The modules of the page read them by these names.
"""

import base64
from datetime import UTC, datetime
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._version import __version__
from ...attribution._attribution import Attribution
from ...fitted._fitted import Fitted
from ...unlearning._payload import digest_of_model
from ..compare._machine import describe_machine
from ._limits import limits
from ._map import kernel_map
from ._pictures import drawn
from ._scene import Scene

MAX_POINTS = 5000
"""Largest number of points on one map; with twice as many, browsers become slow."""

STATEMENT = (
    "The model is at most distance_bound from the one that exact training on the edited set "
    "would give, in the norm of its parameters (for a kernel: of its function space). It is a "
    "statement about the model described here, which is linear in its parameters. If "
    "distance_bound is null, there is no bound."
)


def what_stays(scene: Scene, isolation: np.ndarray | None = None) -> dict[str, Any]:
    """The map, the pictures, and a description of the model."""
    fitted, where = scene.fitted, kernel_map(scene.fitted)
    groups = scene.named_groups
    return {
        "version": __version__,
        "name": scene.name,
        "heading": scene.heading,
        "kind": scene.kind,
        "classes": list(map(str, range(scene.num_classes))),
        "model": about(scene),
        "points": {
            "at": np.round(_unit(where[0]), 5).tolist(),
            "share": [float(s) for s in where[1]],
            "isolation": _plain(isolation),
            **drawn(fitted.x),
        },
        "queries": {
            "labels": scene.labels(scene.query_targets),
            **drawn(scene.xq),
        },
        "groups": {name: points.tolist() for name, points in groups.items()},
        "ridges": [],
        "limits": limits(fitted),
        "notes": list(scene.notes),
    }


def about(scene: Scene) -> dict[str, Any]:
    """The model in a few facts."""
    fitted = scene.fitted
    network = fitted.source.network
    return {
        "title": scene.title,
        "points": fitted.data.num_points,
        "outputs": fitted.num_outputs,
        "parameters": None if network is None else network.num_params,
        "loss": fitted.loss.__class__.__name__,
        "ridge": fitted.ridge,
        "dtype": str(fitted.alpha.dtype),
    }


def state_of(scene: Scene, fitted: Fitted, outputs: Any) -> dict[str, Any]:
    """The present training set, and the answers at the queries."""
    first, now = scene.labels(scene.fitted.data.targets), scene.labels(fitted.data.targets)
    return {
        "labels": now,
        "ridge": fitted.ridge,
        "removed": np.flatnonzero(fitted.data.sample_weights == 0).tolist(),
        "relabelled": [i for i, (a, b) in enumerate(zip(first, now, strict=True)) if a != b],
        **answers_of(scene, outputs),
        "certificate": certificate_of(fitted),
        "stats": stats_of(fitted),
    }


def answers_of(scene: Scene, outputs: Any) -> dict[str, Any]:
    """Answers and losses of the queries."""
    return {
        "answers": scene.answers(outputs).tolist(),
        "losses": scene.losses(outputs).tolist(),
    }


def certificate_of(model: Any) -> dict[str, Any]:
    """The certificate of a fit or an update; a missing bound is `None`."""
    cert = model.certificate
    names = ("gradient_norm", "rounding", "parameter_norm", "ridge", "gap", "certified")
    return {
        "distance_bound": cert.distance_bound if cert.certified else None,
        "relative_bound": cert.relative_bound if cert.certified else None,
        **{name: getattr(cert, name) for name in names},
        "summary": cert.summary(),
    }


def stats_of(model: Any) -> dict[str, Any]:
    """Steps and time of the last run."""
    stats = model.stats
    names = ("steps", "products", "converged", "seconds", "solver", "edits")
    return {**{name: getattr(stats, name) for name in names}, "notes": list(stats.notes)}


def scores_of(scene: Scene, fitted: Fitted, result: Attribution) -> dict[str, Any]:
    """Effects of leaving each point out on each query, and the answer for the point itself without it.

    - `effects`: change of the loss, `(q, n)` in float32 as base64; so that a saved page is small.
    - `own`: self-influence.
    - `without`: loss of the point under the model trained without it.
    - `said`: the class that this model gives instead.
    - `harm`: mean over the queries of how much the point raises their loss.
    """
    outputs, values = jnp.asarray(result.outputs_without), np.asarray(result.values)
    shown = values[: len(scene.xq)]
    said = np.asarray(scene.answers(outputs)).argmax(axis=1) if scene.num_classes else None
    return {
        "effects": base64.b64encode(np.asarray(shown, "<f4").tobytes()).decode(),
        "own": _plain(result.self_influence()),
        "without": _plain(fitted.loss.value(outputs, fitted.data.targets)),
        "said": _plain(said),
        "harm": _plain(-values.mean(axis=0)),
        "notes": list(result.notes),
    }


def groups_of(result: Any) -> dict[str, Any]:
    """Effects of leaving whole groups out: mean over the queries, and for each query."""
    return {
        "names": list(result.names),
        "sizes": list(result.sizes),
        "mean": _plain(result.values.mean(axis=0)),
        "sums": _plain(result.sums.mean(axis=0)),
        "effects": np.asarray(result.values).tolist(),
    }


def document_of(scene: Scene, fitted: Fitted, history: list[dict[str, Any]]) -> dict[str, Any]:
    """A certificate as a separate document: the bound, the model it is about, and the edits."""
    return {
        "format": "dualfluence-explore-certificate",
        "version": 1,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "statement": STATEMENT,
        "data": scene.name,
        "model": {**about(scene), "ridge": fitted.ridge, "sha256": digest_of_model(fitted)},
        "removed": np.flatnonzero(fitted.data.sample_weights == 0).tolist(),
        "history": history,
        "certificate": certificate_of(fitted),
        "stats": stats_of(fitted),
        "machine": describe_machine(),
    }


def action_of(what: str, fitted: Fitted, **more: Any) -> dict[str, Any]:
    """A line of the history: the edit, its time, and the bound after it."""
    bound = certificate_of(fitted)["relative_bound"]
    return {"what": what, **more, "seconds": fitted.stats.seconds, "relative_bound": bound}


def _plain(array: Any) -> list[Any] | None:
    """As a list; none where there is no array or not every number is one."""
    if array is None or not np.isfinite(np.asarray(array)).all():
        return None
    return np.asarray(array).tolist()


def _unit(points: np.ndarray) -> np.ndarray:
    """Into a square of side one, both axes by one scale, so that distances compare."""
    low, high = points.min(axis=0), points.max(axis=0)
    size = max(float((high - low).max()), np.finfo(float).tiny)
    return (points - (low + high) / 2) / size + 0.5
