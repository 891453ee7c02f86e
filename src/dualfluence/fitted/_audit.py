"""What an audit looks at, of a `Fitted`: its own loss, kernel and leave-one-out predictions."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._support.types import Inputs, Numbers
from ..attribution._audit import Evidence
from ..attribution._audit_own import kernel_distances, over_outputs
from ..attribution._near import Distances, linear
from ..losses import Logistic, SoftmaxCrossEntropy, SquaredError
from ..problem._edits import Remove
from ._fitted import Fitted

PROBED = 400
"""Training points whose losses say how far predictions move without a point. The largest part of the time."""

STEPS = 2
"""Newton steps of a set of redundant points that is left out."""


def from_fitted(fitted: Fitted, classes: Any, xq: Inputs, yq: Numbers | None) -> Evidence:
    """What an audit needs to know about the labels, computed from a model that is already fitted.

    **Arguments:**

    - `classes`: names of the classes, in the order of the outputs; numbers by default.
    - `xq`, `yq`: test points or `None`; labels as the model takes them.
    """
    with fitted.precision():
        fitted = fitted.without_spare_rows()
        targets, as_outputs = _read_targets(fitted, np.asarray(fitted.data.targets))
        is_classes = np.issubdtype(targets.dtype, np.integer)
        active = np.asarray(fitted.data.sample_weights) > 0
        if is_classes and len(np.unique(targets[active])) < 2:
            raise ValueError(
                "audit: expected points of at least two classes in the Fitted, got only class "
                f"{targets[active][0]}."
            )
        n, x = fitted.data.num_points, fitted.data.x
        probed = np.unique(np.linspace(0, n - 1, min(n, PROBED)).astype(int))
        scores = fitted.attribute(x[probed], fitted.data.targets[probed], progress=False)
        asked = None if xq is None else fitted.data.queries(xq)
        everywhere = [x] if asked is None else [x, asked]
        test_targets = None
        if yq is not None:
            prepared = fitted.loss.prepare_targets(yq, fitted.num_outputs, fitted.offset.dtype)
            test_targets = _read_targets(fitted, np.asarray(prepared))[0]
        return Evidence(
            classes=_names(classes, as_outputs(np.asarray(fitted.outputs)).shape[1])
            if is_classes
            else None,
            targets=targets,
            outputs=as_outputs(np.asarray(fitted.outputs)),
            left_out=as_outputs(np.asarray(scores.outputs_without)),
            effect=np.sqrt(np.mean(np.asarray(scores.values, float) ** 2, axis=0)),
            near=_distances(fitted, None),
            active=active,
            without=_leave_out(fitted, everywhere, as_outputs),
            on_scale=_probabilities if _has_logits(fitted) else np.asarray,
            test_targets=test_targets,
            test_outputs=None if asked is None else as_outputs(np.asarray(fitted.predict(asked))),
            test_near=None if asked is None else _distances(fitted, asked),
            notes=scores.notes,
        )


def _leave_out(
    fitted: Fitted, everywhere: list[Any], as_outputs: Callable[[np.ndarray], np.ndarray]
) -> Callable[[np.ndarray], np.ndarray]:
    def without(points: np.ndarray) -> np.ndarray:
        with fitted.precision():
            update = fitted.edit(Remove(points), steps=STEPS, on_failure="report", progress=False)
            parts = [as_outputs(np.asarray(update.predict(x))) for x in everywhere]
        return np.concatenate(parts)

    return without


def _has_logits(fitted: Fitted) -> bool:
    return isinstance(fitted.loss, Logistic | SoftmaxCrossEntropy)


def _read_targets(
    fitted: Fitted, given: np.ndarray
) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Numbers of classes `(n,)` or values `(n, c)`, and outputs with one column per class."""
    given, loss = given.reshape(len(given), -1).astype(float), fitted.loss
    one_hot = bool(np.all(np.isin(given, (0, 1))))
    if isinstance(loss, Logistic) and given.shape[1] == 1 and one_hot:
        return given[:, 0].astype(int), lambda f: np.concatenate([-f / 2, f / 2], axis=1)
    if one_hot and given.shape[1] > 1 and bool(np.all(given.sum(axis=1) == 1)):
        return given.argmax(axis=1), lambda f: np.asarray(f, float)
    if not isinstance(loss, SquaredError):
        raise ValueError(
            f"audit: a model with {type(loss).__name__} needs one class for each point, got targets that "
            "are probabilities or several labels. Audit one label at a time, or give the model numbers "
            "with SquaredError."
        )
    if bool(np.all(np.isin(given, (-1, 1)))):  # as scikit-learn codes classes for squared error
        if given.shape[1] == 1:
            columns = lambda f: np.concatenate([1 - f, 1 + f], axis=1) / 2  # noqa: E731
            return (given[:, 0] > 0).astype(int), columns
        if bool(np.all(given.sum(axis=1) == 2 - given.shape[1])):
            return given.argmax(axis=1), lambda f: (1 + np.asarray(f, float)) / 2
    return given, lambda f: np.asarray(f, float)


def _names(classes: Any, count: int) -> np.ndarray:
    if classes is None:
        return np.arange(count)
    names = np.asarray(classes)
    if names.shape != (count,):
        raise ValueError(
            f"audit: classes must be {count} names, one per output of the model, got shape {names.shape}."
        )
    return names


def _distances(fitted: Fitted, asked: Any) -> Distances:
    x, source = fitted.data.x, fitted.source
    if source.has_features:
        rows = [np.asarray(source.features(p), float) for p in (x, asked) if p is not None]
        flat = [r.reshape(len(r), -1) for r in rows]
        return linear(flat[0], None if asked is None else flat[1])
    op = fitted.kernel_op.narrow
    if asked is not None or not op.has_entries:
        return kernel_distances(source, x, asked)
    K, n, c = np.asarray(op.entries()), op.num_points, op.num_outputs
    K = K if op.is_kronecker else over_outputs(K.reshape(n, c, n, c))
    own = np.diagonal(K).astype(float)
    return Distances(lambda rows: K[rows], own, own, True)


def _probabilities(outputs: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.softmax(np.asarray(outputs), axis=1), float)
