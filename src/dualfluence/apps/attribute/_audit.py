"""Suspicious labels, harmful points, isolated points and the effect of groups."""

import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._support.compile import in_own_precision
from ...fitted._fitted import Fitted
from ...metrics import accuracy
from ._data import Data, fit_model


def audit(
    model: Any,
    data: Data,
    *,
    ridge: float,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Rank training points: by how suspicious their labels are, how harmful they are, and how isolated.

    - `suspicion`: loss of each point's label under the model trained without it.
    - `predicted`: the class that this model gives instead.
    - `harm`: how much the point raises the loss of the queries, on average; positive is harmful.
    - `isolation`: one minus the largest kernel correlation with any other point.
    - `groups`: effect of leaving out each class, or each group that the data names.
    - `members`: positions by group.
    - `fitted`, `attribution`: the model, and the effect of each point on each query.
    """
    start = time.perf_counter()
    report(f"fitting {len(data.x)} points")
    fitted = fit_model(model, data, ridge)
    report(f"leaving out each of {len(data.x)} points")
    result = fitted.attribute(data.xq, data.yq, progress=False)
    outputs = jnp.asarray(result.outputs_without)
    answers, groups = fitted.predict(data.xq), _groups(data)
    report(f"leaving out {len(groups)} groups")
    grouped = fitted.attribute_groups(groups, data.xq, data.yq, progress=False)
    return {
        "suspicion": np.asarray(fitted.loss.value(outputs, fitted.data.targets)),
        "predicted": np.asarray(outputs.argmax(axis=1)) if data.is_classes else None,
        "harm": -np.asarray(result.values).mean(axis=0),
        "isolation": isolation(fitted),
        "groups": grouped,
        "fitted": fitted,
        "attribution": result,
        "members": groups,
        "data": data,
        "notes": result.notes,
        "ridge": ridge,
        "query_loss": float(jnp.mean(fitted.loss.value(answers, _targets(fitted, data.yq)))),
        "accuracy": accuracy(answers, data.yq) if data.is_classes else None,
        "seconds": time.perf_counter() - start,
    }


@in_own_precision
def isolation(fitted: Fitted) -> np.ndarray:
    """`1 − max_j |k(i, j)|/√(k(i, i) k(j, j))` over other points, traces over outputs."""
    op = fitted.kernel_op.narrow
    n, c = op.num_points, op.num_outputs
    if not op.has_entries:
        return np.full(n, np.nan)
    K = op.entries()
    if not op.is_kronecker:
        K = jnp.einsum("iaja->ij", K.reshape(n, c, n, c))
    root = jnp.sqrt(jnp.maximum(jnp.diagonal(K), jnp.finfo(K.dtype).tiny))
    likeness = jnp.abs(K) / root[:, None] / root[None, :]
    return 1 - np.asarray(jnp.max(likeness - 2 * jnp.eye(n, dtype=K.dtype), axis=1))


def _groups(data: Data) -> dict[str, np.ndarray]:
    if data.groups is not None:
        return {str(g): np.flatnonzero(data.groups == g) for g in np.unique(data.groups)}
    if data.is_classes:
        return {f"class {k}": np.flatnonzero(data.y == k) for k in np.unique(data.y)}
    half = data.y.reshape(len(data.y), -1)[:, 0] > np.median(data.y)
    return {"targets above the median": np.flatnonzero(half), "the rest": np.flatnonzero(~half)}


@in_own_precision
def _targets(fitted: Fitted, yq: np.ndarray) -> Any:
    return fitted.loss.prepare_targets(yq, fitted.num_outputs, fitted.offset.dtype)
