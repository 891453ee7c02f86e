"""Takes over linear models that scikit-learn has fitted, with their penalty, and gives them back."""
# pyright: reportMissingImports=false

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax.numpy as jnp
import numpy as np

from .._support.checks import check_rows, training_weights
from .._support.options import check_flag
from ..fitted._fit import fit
from ..fitted._fitted import Fitted
from ..fitted._from_trained import from_trained
from ..fitted._update import Update
from ..kernels._linearized import linearize
from ..kernels._params import FREE_SCALE
from ..losses import AbstractLoss, Logistic, SoftmaxCrossEntropy, SquaredError
from ._adapted import need

TAKEN = ("LogisticRegression", "Ridge", "RidgeClassifier")

PULL = 1e-8
"""Share by which the ridge may reduce a free intercept. A value ten times smaller makes its scale, and
so the rounding in certificates, ten times larger."""


class _Stated(NamedTuple):
    """The objective of an estimator: loss, targets, the weight of each point, and its penalty.

    `penalty` is the factor of `½‖w‖²` in the sum with the weighted losses. `intercept` is the scale of
    the intercept in the penalty, or `None` if it is free.
    """

    loss: AbstractLoss
    targets: np.ndarray
    weights: np.ndarray
    penalty: float
    intercept: float | None


def from_sklearn(
    estimator: Any,
    X: Any,
    y: Any,
    *,
    sample_weight: Any = None,
    polish: bool = False,
    **options: Any,
) -> Fitted:
    r"""Take over a linear model that scikit-learn has fitted, ready for edits and attribution.

    `LogisticRegression` (L2), `Ridge`, `RidgeClassifier`, or a pipeline that ends in one. The
    coefficients become the parameters of `from_trained`, with scikit-learn's own objective

    $$\sum_i w_i\ell(f_i,y_i)+\tfrac{\lambda}{2}\|W\|^2,\qquad w_i = s_i/\sum_j s_j,\qquad
      \lambda = \frac{1}{C\sum_j s_j}\ \text{or}\ \frac{\alpha}{\sum_j s_j}.$$

    The ridge reduces a free intercept by at most a hundred-millionth. `certificate.distance_bound`
    includes the distance that scikit-learn's solver left to the optimum. At the default `tol=1e-4` this
    is much: give scikit-learn a smaller `tol`, or use `polish=True` here. Edits keep `λ`, and do not
    change the other steps of a pipeline (its scaler).

    **Arguments:**

    - `estimator`: the fitted model.
    - `X`, `y`, `sample_weight`: the data it was fitted on. The other steps of a pipeline transform `X`.
      Queries for the result must be transformed in the same way: `pipeline[:-1].transform(queries)`.
    - `polish`: continue to the optimum of the same objective, with `fit`.
    - `options`: `kernel`, `mesh`, `sketch` and `progress`, as in `from_trained`.

    **Returns:** `Fitted`, whose `params()` are `{"w": (p, c), "b": (c,)}`, without `b` where there is no
    intercept. For two classes there is one column `c`, that of the second class. `to_sklearn` turns it
    into a model of scikit-learn again.
    """
    need("sklearn", "from_sklearn", "sklearn")
    X = _features(estimator, X)
    model = _last(estimator)
    w = np.atleast_2d(model.coef_).T
    if X.shape[1:] != w.shape[:1]:
        raise ValueError(
            f"from_sklearn: {type(model).__name__} was fitted on {w.shape[0]} features, but X has shape "
            f"{X.shape}. Give the X that it was fitted on."
        )
    y = np.asarray(y)
    check_rows("from_sklearn: y", y, len(X), "point")
    weights = training_weights("from_sklearn", sample_weight, len(X))
    stated = _STATED[type(model).__name__](model, y, weights)
    ridge = stated.penalty / float(stated.weights.sum())
    # On the host, where all digits stay whatever JAX is set to.
    scale: dict[str, Any] = {}
    trained: dict[str, Any] = {"w": np.asarray(w, np.float64)}
    if model.fit_intercept:
        trained["b"] = np.asarray(np.atleast_1d(model.intercept_), np.float64)
        outputs = jnp.asarray(_linear(trained, np.asarray(X)), jnp.result_type(float))
        scale["b"] = stated.intercept or _free_scale(stated, outputs, ridge)
    dtype = jnp.result_type(float)
    zeros = {name: jnp.zeros(value.shape, dtype) for name, value in trained.items()}
    network = linearize(_linear, zeros, scale={"w": None} | scale)
    about: dict[str, Any] = {"loss": stated.loss, "ridge": ridge, "weights": stated.weights}
    x = np.asarray(X, np.float64)
    if check_flag("from_sklearn: polish", polish):
        return fit(network, x, stated.targets, **about, **options)
    return from_trained(network, trained, x, stated.targets, linearised=True, **about, **options)


def _free_scale(stated: _Stated, outputs: Any, ridge: float) -> float:
    """The smallest scale at which the ridge hardly changes the intercept.

    At its optimum a ridge `λ/P` takes the share `λ/(P h)` of an intercept whose loss has the curvature `h`.
    """
    c, dtype = outputs.shape[1], outputs.dtype
    targets = stated.loss.prepare_targets(stated.targets, c, dtype)
    weights = jnp.asarray(stated.weights / stated.weights.sum(), dtype)
    curvature = stated.loss.hess_factor(outputs, targets, weights).hess_diagonal()
    least = float(jnp.min(jnp.sum(curvature, axis=0)))
    return FREE_SCALE if least <= 0 else min(max(ridge / (least * PULL), 1.0), FREE_SCALE)


def to_sklearn(model: Fitted | Update[Any], estimator: Any) -> Any:
    """A copy of a fitted estimator with the coefficients of a model from `from_sklearn`.

    **Arguments:**

    - `model`: the result of `from_sklearn`, or an update of it.
    - `estimator`: the estimator or pipeline given to `from_sklearn`; it is not changed.
    """
    need("sklearn", "to_sklearn", "sklearn")
    params = model.params()
    restored = copy.deepcopy(estimator)
    last = _last(restored)
    w = np.asarray(params["w"], np.float64)
    if w.T.size != last.coef_.size:
        raise ValueError(
            f"to_sklearn: the model has weights of shape {w.shape}, the estimator coefficients "
            f"of shape {last.coef_.shape}. Give the estimator from which from_sklearn made the "
            "model."
        )
    last.coef_ = w.T.reshape(last.coef_.shape)
    if "b" in params:
        b = np.asarray(params["b"], np.float64)
        last.intercept_ = b if np.ndim(last.intercept_) else float(b[0])
    return restored


def _linear(params: dict[str, Any], x: Any) -> Any:
    outputs = jnp.dot(x, params["w"], precision="highest")
    return outputs + params["b"] if "b" in params else outputs


def _last(estimator: Any) -> Any:
    """The fitted linear model itself, at the end of a pipeline or alone."""
    from sklearn.pipeline import Pipeline
    from sklearn.utils.validation import check_is_fitted

    model = estimator[-1] if isinstance(estimator, Pipeline) else estimator
    home = type(model).__module__.split(".")[0]
    if home != "sklearn" or type(model).__name__ not in TAKEN:
        name = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(
            f"from_sklearn: estimator must be a fitted {', '.join(TAKEN)} or a pipeline that ends in one, "
            f"got {name}. If you searched over penalties (as LogisticRegressionCV does), fit a plain "
            "estimator of this list with the best penalty."
        )
    check_is_fitted(model)
    return model


def _features(estimator: Any, X: Any) -> np.ndarray:
    """The features at the last step of a pipeline, dense."""
    from sklearn.pipeline import Pipeline

    _last(estimator)
    if isinstance(estimator, Pipeline) and len(estimator.steps) > 1:
        X = estimator[:-1].transform(X)
    if hasattr(X, "toarray"):
        raise TypeError(
            f"from_sklearn: the features are a sparse matrix of shape {X.shape}. Call "
            "from_sklearn with the last step itself and X.toarray(), if it fits in memory."
        )
    return np.asarray(X)


def _logistic(model: Any, y: np.ndarray, weights: np.ndarray) -> _Stated:
    given, penalty = model.get_params(), model.get_params().get("penalty", "l2")
    if penalty not in ("l2", "deprecated"):
        _refuse(
            model, "penalty", penalty, "Only the L2 penalty has a Hessian that edits can follow."
        )
    if penalty == "deprecated" and given["l1_ratio"]:
        _refuse(model, "l1_ratio", given["l1_ratio"], "Only the L2 penalty, l1_ratio=0, is smooth.")
    if not np.isfinite(model.C):
        _refuse(
            model, "C", model.C, "Without a penalty there is no ridge; fit with a large finite C."
        )
    count, scheme = len(model.classes_), given.get("multi_class", "auto")
    if scheme not in ("auto", "deprecated", "multinomial" if count > 2 else "ovr"):
        _refuse(
            model, "multi_class", scheme, "Leave it out, so that the loss is scikit-learn's own."
        )
    if model.solver == "liblinear" and count > 2:
        _refuse(model, "solver", "liblinear", "For more than two classes use another solver.")
    labels = _labels(model, y)
    targets = labels if count > 2 else labels[:, None].astype(float)
    # liblinear has the intercept as a feature of this size, pulled like any other.
    free = None if model.solver != "liblinear" else float(model.intercept_scaling) ** 2
    weights = weights * _class_weights(model, labels)
    loss = SoftmaxCrossEntropy() if count > 2 else Logistic()
    return _Stated(loss, targets, weights, 1 / float(model.C), free)


def _ridge(model: Any, y: np.ndarray, weights: np.ndarray) -> _Stated:
    if model.positive:
        _refuse(model, "positive", True, "Edits do not keep signs; fit without it.")
    alpha = np.unique(np.asarray(model.alpha, float))
    if alpha.size != 1 or not alpha[0] > 0:
        _refuse(model, "alpha", model.alpha, "It must be one positive number for all targets.")
    targets = y.astype(float)[:, None] if y.ndim == 1 else y.astype(float)
    return _Stated(SquaredError(), targets, weights, float(alpha[0]), None)


def _ridge_classifier(model: Any, y: np.ndarray, weights: np.ndarray) -> _Stated:
    """Squared error to targets of ±1."""
    labels, count = _labels(model, y), len(model.classes_)
    ones = labels[:, None] == (np.arange(count) if count > 2 else 1)
    stated = _ridge(model, np.where(ones, 1.0, -1.0), weights)
    return stated._replace(weights=weights * _class_weights(model, labels))


_STATED: dict[str, Callable[[Any, np.ndarray, np.ndarray], _Stated]] = {
    "LogisticRegression": _logistic,
    "Ridge": _ridge,
    "RidgeClassifier": _ridge_classifier,
}


def _labels(model: Any, y: np.ndarray) -> np.ndarray:
    """Positions of labels among the sorted classes."""
    if y.ndim != 1:
        raise ValueError(
            f"from_sklearn: y of {type(model).__name__} must be one label per point, got shape "
            f"{y.shape}. For several labels per point use Ridge, with targets of ±1."
        )
    unknown = np.setdiff1d(y, model.classes_)
    if unknown.size:
        raise ValueError(
            f"from_sklearn: {unknown[:5].tolist()} in y are no classes of this model, "
            f"{model.classes_.tolist()}. Give the y that it was fitted on."
        )
    return np.searchsorted(model.classes_, y)


def _class_weights(model: Any, labels: np.ndarray) -> np.ndarray:
    """The weight of each point after `class_weight`."""
    given = model.class_weight
    if given is None:
        return np.ones(len(labels))
    if not isinstance(given, dict):
        sizes = np.bincount(labels, minlength=len(model.classes_))
        balanced = {
            k: len(labels) / (len(sizes) * s)
            for k, s in zip(model.classes_.tolist(), sizes, strict=True)
            if s
        }
        _refuse(
            model,
            "class_weight",
            given,
            "Its weights would change with every edit. Fit with the numbers themselves, without sample "
            f"weights class_weight={balanced}.",
        )
    return np.array([float(given.get(k, 1.0)) for k in model.classes_.tolist()])[labels]


def _refuse(model: Any, name: str, value: Any, what_to_do: str) -> NoReturn:
    raise ValueError(
        f"from_sklearn: {type(model).__name__}({name}={value!r}) cannot be taken over. {what_to_do}"
    )
