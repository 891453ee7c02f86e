"""`audit`: from a model, data and labels of any supported kind to findings."""
# pyright: reportMissingImports=false

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .._support.checks import check_number
from .._support.options import check_choice, check_function, maybe
from .._support.points import count_points, is_tree
from ..attribution._audit import Evidence, examine
from ..attribution._audit_own import EXACT, from_features, from_kernel, from_ridge
from ..attribution._audit_record import Audit
from ..attribution._near import linear
from ..attribution._ridge import fit_ridge
from ..fitted._audit import from_fitted
from ..fitted._fit import fit
from ..fitted._fitted import Fitted
from ..fitted._update import Update
from ..losses import Logistic, SoftmaxCrossEntropy, SquaredError
from ..models._sources import AbstractSource, as_source
from ._from_sklearn import TAKEN, from_sklearn
from ._tables import as_labels, as_matrix, is_table, is_text, table_reader

FEWEST = 3
"""Points below which nothing can be said about any of them."""

MOST_UNKNOWNS = 6000
"""Points times outputs up to which a network or a logistic regression is audited with its own loss. Doubled,
leaving out every point takes eight times as long."""

CHOSEN_ON = 600
"""Points times outputs on which the ridge of a network is chosen."""

WHOLE_NUMBERS = 20
"""Distinct whole numbers up to which they are classes without a word."""


@dataclass(frozen=True, eq=False)
class _Data:
    """Points and targets after reading, also of the test set: targets are numbers of classes, or
    values."""

    x: Any
    targets: np.ndarray
    classes: np.ndarray | None
    xq: Any
    test_targets: np.ndarray | None

    def test(self) -> tuple[Any, np.ndarray | None]:
        return self.xq, self.test_targets


def audit(
    model: Any = None,
    x: Any = None,
    y: Any = None,
    *,
    x_test: Any = None,
    y_test: Any = None,
    encoder: Any = None,
    task: str | None = None,
    ridge: float | None = None,
    threshold: float = 0.5,
    near: float = 0.25,
    classes: Any = None,
) -> Audit:
    r"""Look in a training set for wrong labels, duplicates, leaks, points that alone determine their
    prediction, and points that change nothing.

    Every point is predicted by a model that was trained without it. One factorisation gives all of these
    models, each trained without exactly one point; tools that train by folds leave out a tenth or a fifth
    at once.
    The predictions tell how likely each label is wrong and which label would fit better.

    ```python
    import numpy as np
    import dualfluence as dfl

    data = dfl.datasets.load("mnist-small")
    found = dfl.audit(None, data.x_train[:150], data.y_train[:150])
    print(found)
    ```

    **Arguments:**

    - `model`: `None` takes an infinitely wide network with squared error, whose leave-one-out is exact.
      A `Fitted` is audited as it is, with its own points. Others are a network (`linearize`, `adapters`)
      or a kernel as for `fit`, an estimator of `adapters`, and an estimator or pipeline of scikit-learn
      that ends in `LogisticRegression`, `Ridge` or `RidgeClassifier`.
    - `x`, `y`: points and their labels, as arrays, lists or data frames. Labels may be strings.
    - `x_test`, `y_test`: a test set, to look for leaks and, with `y_test`, wrong labels there.
    - `encoder`: a frozen function from the points (texts, pictures) to an array `(n, d)`.
    - `task`: `"classification"` or `"regression"`. By default it follows from the estimator; if there is
      none, targets with fractional parts mean `"regression"`.
    - `ridge`: the ridge of a network; by default the ridge with the least leave-one-out loss on a part
      of the points.
    - `threshold`: probability from which a label is called wrong.
    - `near`: the distance below which points are near duplicates. The unit is the median distance of a
      point to its nearest neighbour.
    - `classes`: names of the outputs of a `Fitted`.

    **Returns:** `attribution.Audit`.
    """
    start = time.perf_counter()
    maybe(check_choice, "audit: task", task, choices=("classification", "regression"))
    threshold = _share("audit: threshold", threshold)
    near = _not_negative("audit: near", near)
    maybe(check_function, "audit: encoder", encoder, form="from points to an array (n, d)")
    if isinstance(model, Update):
        raise TypeError("audit: expected a model, got an Update. Give update.commit().")
    if isinstance(model, Fitted):
        evidence = _fitted(model, x, y, x_test, y_test, encoder, classes)
    else:
        evidence = _given(model, x, y, x_test, y_test, encoder, task, ridge, classes)
    found = examine(evidence, threshold=threshold, near=near)
    return replace(found, stats={"seconds": time.perf_counter() - start})


def _fitted(
    model: Fitted, x: Any, y: Any, x_test: Any, y_test: Any, encoder: Any, classes: Any
) -> Evidence:
    if x is not None or y is not None:
        raise ValueError(
            "audit: x and y cannot be given with a Fitted, which is audited on the points that it was "
            "fitted on; leave out x and y, or give the model from which it was fitted."
        )
    if encoder is not None:
        raise ValueError(
            "audit: encoder= cannot be used with a Fitted, which has features already. Give x_test in the "
            "form of its features."
        )
    _check_pair(x_test, y_test)
    count = np.count_nonzero(model.data.sample_weights)
    if count < FEWEST:
        raise ValueError(f"audit: expected at least {FEWEST} points with a weight, got {count}.")
    return from_fitted(model, classes, x_test, y_test)


def _given(
    model: Any,
    x: Any,
    y: Any,
    x_test: Any,
    y_test: Any,
    encoder: Any,
    task: str | None,
    ridge: float | None,
    classes: Any,
) -> Evidence:
    if y is None or (x is None and not _is_matrix(model)):
        raise ValueError("audit: expected x and y, the points and their labels, or a Fitted.")
    if classes is not None:
        raise ValueError(
            "audit: classes= is only for a Fitted, where classes name the outputs of the model. Here the "
            "names are read from y: leave classes out."
        )
    _check_pair(x_test, y_test)
    if task is None and _is_estimator(model):
        task = _task_of_estimator(model, y)
    targets, names, test_targets = _targets(y, y_test, task)
    if _is_estimator(model):
        if encoder is not None:
            raise ValueError(
                "audit: encoder= cannot be used with an estimator. Put the encoder in front of its pipeline, "
                "or give model=None."
            )
        _check_length(len(targets), _length(x), "x")
        return _estimator(model, x, y, x_test, targets, names, test_targets)
    points, asked = _points(model, x, x_test, encoder)
    n = len(targets) if points is None else count_points(points)
    _check_length(len(targets), n, "x")
    if asked is not None and test_targets is not None:
        _check_length(len(test_targets), count_points(asked), "x_test")
    data = _Data(points, targets, names, asked, test_targets)
    if points is not None:
        _check_variety(points)
    if model is None:
        assert points is not None
        return from_features(points, targets, names, *data.test())
    source = as_source(model, points)
    if source.network is not None:
        return _network(model, source, data, ridge)
    if points is None:
        points = np.arange(n)
    return from_kernel(source, points, targets, names, *data.test())


def _points(model: Any, x: Any, x_test: Any, encoder: Any) -> tuple[Any, Any]:
    """Arrays of points; for a network or a kernel they keep their shape."""
    if encoder is not None:
        encoded = [
            None if p is None else _encoded(encoder, p, what)
            for p, what in ((x, "x"), (x_test, "x_test"))
        ]
        return encoded[0], encoded[1]
    if is_table(x):
        read = table_reader(x, "audit: x")
        if x_test is not None and not is_table(x_test):
            raise TypeError("audit: x_test: expected a table like x, got an array.")
        return read(x, "audit: x"), None if x_test is None else read(x_test, "audit: x_test")
    if model is not None and not is_text(x):
        return x, x_test
    asked = None if x_test is None else as_matrix(x_test, "audit: x_test")
    points = as_matrix(x, "audit: x")
    if asked is not None and asked.shape[1] != points.shape[1]:
        raise ValueError(
            f"audit: x_test: expected {points.shape[1]} features like x, got {asked.shape[1]}."
        )
    return points, asked


def _encoded(encoder: Callable[[Any], Any], points: Any, what: str) -> np.ndarray:
    given = points.tolist() if hasattr(points, "tolist") and is_text(points) else points
    rows = as_matrix(encoder(given), f"audit: encoder({what})")
    _check_length(_length(points), len(rows), f"encoder({what})")
    return rows


def _targets(
    y: Any, y_test: Any, task: str | None
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Numbers of classes and their names, or values `(n, c)` and `None`; then the targets of the test
    set."""
    labels = as_labels(y, "audit: y")
    asked = None if y_test is None else as_labels(y_test, "audit: y_test")
    if len(labels) < FEWEST:
        raise ValueError(f"audit: expected at least {FEWEST} points, got {len(labels)}.")
    if (task or _task_of(labels)) == "regression":
        if labels.dtype.kind not in "iuf":
            raise TypeError(f"audit: y: expected numbers for regression, got {labels.dtype}.")
        values = labels.reshape(len(labels), -1).astype(float)
        if np.all(values == values[0]):
            raise ValueError(f"audit: y: every target is {values[0].tolist()}; nothing to predict.")
        test = None if asked is None else asked.reshape(len(asked), -1).astype(float)
        return values, None, test
    if labels.ndim != 1:
        raise ValueError(
            f"audit: y: expected one label per point, got shape {labels.shape}. Audit one column at a "
            "time, or give task='regression' for several numbers."
        )
    names, numbers = np.unique(labels, return_inverse=True)
    if len(names) < 2:
        raise ValueError(f"audit: y: expected at least two classes, got one: {names.tolist()}.")
    if len(names) == len(labels):
        raise ValueError(
            f"audit: y: every one of the {len(labels)} labels comes once, so that none can be checked "
            "against others. Are these names of the points?"
        )
    return numbers, names, None if asked is None else _numbered(asked, names)


def _numbered(labels: np.ndarray, names: np.ndarray) -> np.ndarray:
    new = np.setdiff1d(labels, names)
    if new.size:
        raise ValueError(
            f"audit: y_test: expected the classes of y, {names[:10].tolist()}, got {new[:5].tolist()} too."
        )
    return np.searchsorted(names, labels)


def _task_of(labels: np.ndarray) -> str:
    """Fractions mean numbers, names and few whole numbers mean classes; what is unclear is an error."""
    if labels.dtype.kind not in "iuf":
        return "classification"
    if np.any(labels != np.round(labels)):
        return "regression"
    if labels.ndim == 2:
        return "classification"
    found = len(np.unique(labels))
    if found <= WHOLE_NUMBERS or (labels.dtype.kind in "iu" and found <= len(labels) / 5):
        return "classification"
    raise ValueError(
        f"audit: y: {found} different whole numbers for {len(labels)} points may be classes or amounts. Say "
        "which: task='classification' or task='regression', --task on the command line."
    )


def _task_of_estimator(model: Any, y: Any) -> str | None:
    """The task of an estimator; a regressor cannot predict labels that are names."""
    from sklearn.base import is_classifier, is_regressor

    if is_classifier(model):
        return "classification"
    numbers = as_labels(y, "audit: y").dtype.kind in "iuf"
    return "regression" if is_regressor(model) and numbers else None


def _network(model: Any, source: AbstractSource, data: _Data, ridge: float | None) -> Evidence:
    """A network with its own outputs: softmax or logistic loss for classes, squared error for numbers."""
    network = source.network
    assert network is not None
    c = network.apply_shape(source_points(source, data.x))[1]
    n, names = len(data.targets), data.classes
    loss: Any = SquaredError()
    y, test = data.targets, data.test_targets
    if names is not None:
        if c not in (len(names), 1) or (c == 1 and len(names) != 2):
            raise ValueError(
                f"audit: the network has {c} outputs for {len(names)} classes. It needs one for each, in the "
                "order of the sorted labels, or one alone for two classes."
            )
        loss = SoftmaxCrossEntropy() if c > 1 else Logistic()
        if c == 1:
            y = y[:, None].astype(float)
            test = None if test is None else test[:, None].astype(float)
    if n * c > MOST_UNKNOWNS:
        raise ValueError(
            f"audit: with the network's own loss, {n} points and {c} outputs make {n * c} unknowns; at most "
            f"{MOST_UNKNOWNS} are possible. Give the network's features as encoder= with model=None, or fit "
            "a low-rank model (dualfluence.low_rank) and audit it."
        )
    note = "ridge as given"
    if ridge is None:
        ridge, note = _chosen_ridge(model, data.x, y, loss, c)
    fitted = fit(model, data.x, y, loss=loss, ridge=ridge, progress=False, on_failure="report")
    evidence = from_fitted(fitted, names, data.xq, test)
    return replace(
        evidence, notes=(f"{network_words(c)}, ridge {ridge:.3g} ({note})", *evidence.notes)
    )


def network_words(c: int) -> str:
    return f"the network linearised at its parameters, {c} output{'s' * (c > 1)}"


def source_points(source: AbstractSource, x: Any) -> Any:
    """Points as the network of a source takes them: packed if they are a tree."""
    return x if source.form is None else source.form.pack("audit: x", x)


def _chosen_ridge(model: Any, x: Any, y: np.ndarray, loss: Any, c: int) -> tuple[float, str]:
    import jax

    n = len(y)
    m = min(n, max(CHOSEN_ON // c, FEWEST))
    rows = np.linspace(0, n - 1, m).astype(int)
    part = jax.tree.map(lambda a: np.asarray(a)[rows], x) if is_tree(x) else np.asarray(x)[rows]
    small = fit(model, part, y[rows], loss=loss, ridge="auto", progress=False, on_failure="report")
    # The loss is a mean: with more points the same penalty on their sum is a smaller ridge.
    return small.ridge * m / n, f"least leave-one-out loss on {m} points"


def _estimator(
    model: Any,
    x: Any,
    y: Any,
    x_test: Any,
    targets: np.ndarray,
    names: np.ndarray | None,
    test_targets: np.ndarray | None,
) -> Evidence:
    """Evidence from an estimator of scikit-learn or of `adapters`, which is fitted first if
    necessary."""
    from sklearn.base import clone, is_regressor
    from sklearn.exceptions import NotFittedError
    from sklearn.pipeline import Pipeline
    from sklearn.utils.validation import check_is_fitted

    from ._sklearn import _DualEstimator

    labels, steps = as_labels(y, "audit: y"), ()
    if names is not None and labels.dtype.kind not in "biuf" and is_regressor(model):
        raise TypeError(
            f"audit: y: {type(model).__name__} predicts numbers, got names: {names[:3].tolist()}. Give a "
            "classifier, e.g. RidgeClassifier."
        )
    if not isinstance(model, Pipeline) and is_text(x):
        as_matrix(x, "audit: x")  # says what to do with text
    try:
        check_is_fitted(model)
    except NotFittedError:
        copy: Any = clone(model)
        model = copy.fit(x, labels)
        steps = ("the estimator was not fitted: a copy of it was",)
    last = model[-1] if isinstance(model, Pipeline) else model
    if not isinstance(last, _DualEstimator) and type(last).__name__ not in TAKEN:
        raise TypeError(
            f"audit: expected an estimator that ends in {', '.join(TAKEN)} or one of dualfluence.adapters, "
            f"got {type(last).__name__}. Give what comes before it as encoder=, e.g. "
            "pipeline[:-1].transform, with model=None."
        )
    change = model[:-1].transform if isinstance(model, Pipeline) and len(model) > 1 else None
    seen = _transformed(change, x, "x")
    asked = None if x_test is None else _transformed(change, x_test, "x_test")
    _check_variety(seen)
    if isinstance(last, _DualEstimator):
        with last.precision():
            yq = None if test_targets is None else last._targets(as_labels_of(names, test_targets))
            found = from_fitted(last.fitted_, names, asked, yq)
        return replace(found, notes=(*steps, *found.notes))
    data = _Data(seen, targets, names, asked, test_targets)
    found = _linear(last, model, x, labels, data)
    return replace(found, notes=(*steps, *found.notes))


def as_labels_of(names: np.ndarray | None, numbers: np.ndarray) -> np.ndarray:
    return numbers if names is None else names[numbers]


def _transformed(change: Any, x: Any, what: str) -> np.ndarray:
    if change is not None:
        return as_matrix(change(x), f"audit: {what}")
    if is_table(x):
        return table_reader(x, f"audit: {what}")(x, f"audit: {what}")
    return as_matrix(x, f"audit: {what}")


def _linear(last: Any, model: Any, x: Any, labels: np.ndarray, data: _Data) -> Evidence:
    """Evidence from a linear estimator: squared error with its own penalty in closed form, or a logistic
    regression if it is small."""
    kind, names, targets = type(last).__name__, data.classes, data.targets
    wanted = targets if names is None else np.eye(len(names))[targets]
    near = linear(data.x, None), None if data.xq is None else linear(data.x, data.xq)
    plain = last.fit_intercept and getattr(last, "class_weight", None) is None
    logistic = kind == "LogisticRegression"
    small = len(targets) * (1 if len(wanted[0]) == 2 else len(wanted[0])) <= MOST_UNKNOWNS
    if not logistic and plain and np.unique(np.asarray(last.alpha, float)).size == 1:
        penalty = np.atleast_1d(np.asarray(last.alpha, float))[:1]
        ridge = fit_ridge(data.x, wanted, penalty)
        note = f"{kind} with its own penalty, {EXACT}"
    elif logistic and not small:
        ridge = fit_ridge(data.x, wanted)
        note = "LogisticRegression of this size by squared error on its features"
    else:
        fitted = from_sklearn(model, x, labels, polish=True, progress=False)
        test = data.test_targets
        if test is not None and names is not None:
            test = _coded(fitted, test, len(names))
        return from_fitted(fitted, names, data.xq, test)
    found = from_ridge(ridge, data.xq, targets, names, data.test_targets, near, ())
    return replace(found, notes=(note, f"penalty {ridge.penalty:.3g}"))


def _coded(fitted: Fitted, labels: np.ndarray, count: int) -> np.ndarray:
    """Labels as `from_sklearn` gives them to the loss."""
    if isinstance(fitted.loss, SquaredError):
        ones = labels[:, None] == (np.arange(count) if count > 2 else 1)
        return np.where(ones, 1.0, -1.0)
    return labels if count > 2 else labels[:, None].astype(float)


def _is_estimator(model: Any) -> bool:
    return hasattr(model, "get_params") and hasattr(model, "fit")


def _is_matrix(model: Any) -> bool:
    return (
        getattr(model, "ndim", None) == 2 and getattr(model, "shape", (0, 1))[0] == model.shape[1]
    )


def _length(x: Any) -> int:
    return len(x) if not hasattr(x, "shape") else int(x.shape[0])


def _check_length(labels: int, points: int, what: str) -> None:
    if labels != points:
        raise ValueError(
            f"audit: {what} has {points} rows for {labels} labels; one each is needed."
        )


def _check_pair(x_test: Any, y_test: Any) -> None:
    if x_test is None and y_test is not None:
        raise ValueError("audit: y_test came without x_test. Give both, or x_test alone.")


def _check_variety(x: Any) -> None:
    """Raise if all points are equal. Only arrays are checked; points in other forms are left to the
    model."""
    if is_tree(x) or is_text(x):
        return
    array = np.asarray(x)
    if len(array) and np.all(array == array[:1]):
        raise ValueError(
            f"audit: x: all {len(array)} points are equal, so that nothing tells them apart."
        )


def _share(name: str, value: Any) -> float:
    number = check_number(name, value)
    if not 0 < number <= 1:
        raise ValueError(f"{name} must be a probability above 0 and at most 1, got {number}.")
    return number


def _not_negative(name: str, value: Any) -> float:
    number = check_number(name, value)
    if not 0 <= number < np.inf:
        raise ValueError(f"{name} must be 0 or a positive distance, got {number}.")
    return number
