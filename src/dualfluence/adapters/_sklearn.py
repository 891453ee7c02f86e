"""Estimators for scikit-learn that can forget training points after they were fitted."""
# pyright: reportMissingImports=false

import math
import tempfile
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from .._support.compile import double
from ..attribution._attribution import Attribution
from ..dual._course import FLOOR_LIMIT, default_tolerance
from ..fitted._fit import fit
from ..fitted._fitted import Fitted
from ..fitted._io import load
from ..fitted._options import KernelOptions
from ..kernels._params import FREE, FREE_SCALE
from ..losses import AbstractLoss, Logistic, SoftmaxCrossEntropy, SquaredError
from ..models._sources import as_source
from ..problem._edits import Remove


class _Linear(eqx.Module):
    """`x1·x2 + P`: the kernel of a linear model whose intercept has the scale `P` in the ridge."""

    scale: float = eqx.field(static=True)

    def kernel(self, x1: Any, x2: Any) -> Float[Array, "n1 n2"]:
        product = jnp.dot(jnp.asarray(x1), jnp.asarray(x2).T, precision="highest")
        return product + self.scale


class _DualEstimator(BaseEstimator):
    """Common part of the classifier and the regressor: a fitted model and its removals."""

    _kinds: ClassVar[dict[str, bool]] = {}
    """Options for scikit-learn's check of targets."""

    # Any values: scikit-learn wants them kept as given, and checked when fitting.
    def __init__(self, ridge: Any = 1e-2, *, fit_intercept: Any = True, model: Any = None) -> None:
        self.ridge = ridge
        self.fit_intercept = fit_intercept
        self.model = model

    def precision(self) -> AbstractContextManager[Any]:
        """The scope in which every method runs; use it when you work with `fitted_` directly.

        Linear features are computed in float64, as in scikit-learn, whatever the setting of JAX. A
        `model` of your own is computed in the precision of JAX's setting.
        """
        return double(self.model is None)

    @property
    def fitted_(self) -> Fitted:
        """The `Fitted` of the estimator, for every other edit and read-out."""
        fitted: Fitted = self._fitted
        wide = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
        if self.model is None and not wide:
            raise RuntimeError(
                f"{type(self).__name__}.fitted_ holds float64 arrays, which JAX in float32 would "
                "round. Use it inside its scope: with estimator.precision(): "
                "estimator.fitted_.edit(...)."
            )
        return fitted

    def unfit(self, indices: Any) -> Any:
        """Forget training points, exactly: as if fitted again without them.

        The rows of these points are overwritten too. Positions are those of the `X` given to `fit`,
        also after earlier calls; a point that was removed already raises an error.

        **Returns:** itself, changed.
        """
        check_is_fitted(self)
        with self.precision():
            limit = default_tolerance(self.fitted_.offset.dtype)
            update = self.fitted_.edit(
                Remove(indices), drift=limit, on_failure="report", progress=False
            )
            self._keep(update.commit().purge())
        return self

    def attribute(self, X: Any, y: Any = None, **options: Any) -> Attribution:
        """How much leaving out each training point would add to the loss of each query.

        **Arguments:**

        - `X`, `y`: queries and their targets; without targets, the predictions of the model are used.
        - `options`: options of `Fitted.attribute`, such as `of="margin"` or `refine=1e-6`.

        **Returns:** `Attribution`, whose `values` have the shape `(q, n)`.
        """
        check_is_fitted(self)
        y = self.predict(X) if y is None else y
        with self.precision():
            X, y = self._validated(X, y, reset=False, **self._kinds)
            return self.fitted_.attribute(X, self._targets(y), **{"progress": False} | options)

    def label_scores(self, *, refine: float | None = None) -> np.ndarray:
        r"""How suspicious the label of each training point is, `(n,)`; `dualfluence audit` sorts by it.

        $$s_i = \ell(f_{-i}(x_i), y_i),$$

        the loss of the point's label under the model trained without the point. The largest scores are
        the labels to look at first. Points that were forgotten have the score 0.

        **Arguments:**

        - `refine`: by default a point is removed by one Newton step, which is exact for squared error.
          With `refine`, steps continue until this certified distance to exact retraining.
        """
        check_is_fitted(self)
        with self.precision():
            fitted, data = self.fitted_, self.fitted_.data
            first = {"xq": data.x[:1], "yq": data.targets[:1]}  # only the effect on itself is read
            result = fitted.attribute(**first, refine=refine, progress=False)
            scores = fitted.loss.value(jnp.asarray(result.outputs_without), data.targets)
            return np.where(np.asarray(data.sample_weights) > 0, np.asarray(scores), 0)

    def __getstate__(self) -> dict[str, Any]:
        """The state; the model is in it as the bytes of a saved file with checksums."""
        given: Any = super().__getstate__()
        state: dict[str, Any] = dict(given)
        if "_fitted" in state:
            with self.precision(), tempfile.TemporaryDirectory() as folder:
                state["_fitted"].save(path := Path(folder) / "model")
                state["_fitted"] = path.read_bytes()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_fitted" in state:
            with self.precision(), tempfile.TemporaryDirectory() as folder:
                (path := Path(folder) / "model").write_bytes(state["_fitted"])
                self._fitted = load(path, self._model(), progress=False)

    def _model(self) -> Any:
        return _Linear(self._intercept_scale) if self.model is None else self.model

    @property
    def _intercept_scale(self) -> float:
        """`P` of the intercept: 0 leaves it out."""
        if not isinstance(self.fit_intercept, str):
            return float(bool(self.fit_intercept))
        if self.fit_intercept != FREE:
            raise ValueError(
                f"{type(self).__name__}: fit_intercept must be True, False or 'free', got "
                f"{self.fit_intercept!r}."
            )
        return FREE_SCALE

    def _learn(
        self,
        X: np.ndarray,
        targets: np.ndarray,
        loss: AbstractLoss,
        num_outputs: int | None,
        sample_weight: Any,
    ) -> None:
        fitted = fit(
            self._model(),
            X,
            targets,
            loss=loss,
            ridge=self.ridge,
            weights=sample_weight,
            kernel=KernelOptions(num_outputs=num_outputs),
            on_failure="report",
            progress=False,
        )
        self._keep(fitted)

    def _keep(self, fitted: Fitted) -> None:
        """Store a fit and the attributes of linear models."""
        cert = fitted.certificate
        # A free intercept raises the floor of rounding above the tolerance: no fault while it is of use.
        at_end = cert.at_floor and cert.relative_bound <= FLOOR_LIMIT
        if not fitted.stats.converged and not at_end:
            warnings.warn(
                f"{type(self).__name__} stopped at a certified distance of "
                f"{cert.distance_bound:.1e} from its optimum: {fitted.stats.reason}. "
                "Scale the features, or give a larger ridge.",
                ConvergenceWarning,
                stacklevel=4,
            )
        self._fitted = fitted
        self.certificate_ = cert
        if self.model is None:
            alpha = np.asarray(fitted.alpha)
            self.coef_ = (np.asarray(fitted.x).T @ alpha).T
            self.intercept_: Any = self._intercept_scale * alpha.sum(axis=0)

    def _outputs(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        with self.precision():
            X = self._validated(X, reset=False)
            return np.asarray(self.fitted_.predict(X))

    def _validated(self, X: Any, y: Any = "no_validation", **options: Any) -> Any:
        """Features checked by scikit-learn; a model of your own may take points of any shape."""
        kind = jax.dtypes.canonicalize_dtype(np.float64)
        wanted: dict[str, Any] = {"dtype": kind, "allow_nd": self.model is not None} | options
        return validate_data(self, X, y, **wanted)

    def predict(self, X: Any) -> np.ndarray:
        raise NotImplementedError

    def _targets(self, y: np.ndarray) -> np.ndarray:
        raise NotImplementedError


def _own_outputs(model: Any, X: np.ndarray) -> int:
    """Number of outputs of a model; 1 for a kernel that serves any number."""
    source = as_source(model, X)
    base = source.base_outputs(jnp.asarray(X[:1]), None)
    if base is not None:
        return base.shape[1]
    return 1 if source.has_features else math.isqrt(source.block(X[:1], X[:1], False).size)


class DualInfluenceClassifier(ClassifierMixin, _DualEstimator):
    r"""Logistic regression that forgets points exactly and reports the effect of each.

    Minimises $\frac1n\sum_i\ell_i + \frac{\lambda}{2}\|\theta\|^2$ in float64. The loss is that of
    scikit-learn: softmax cross-entropy with a row of coefficients for each class, and for two classes
    the logistic loss with one row, that of the second class. So this is
    `LogisticRegression(C=1/(n*ridge), fit_intercept=False)` with a column of ones: the ridge pulls the
    intercept to zero like every other parameter. `fit_intercept="free"` leaves it free, as scikit-learn
    does: then it is `LogisticRegression(C=1/(n*ridge))`. Removing points keeps `λ`, so the equivalent
    `C` changes with the number of remaining points.

    **Arguments:**

    - `ridge`: `λ`.
    - `fit_intercept`: `True`, `False`, or `"free"` for one that the ridge hardly pulls: its scale is
      1e7, see `linearize`. The certificate then bounds the change of the intercept only by the root of
      that scale times `distance_bound`.
    - `model`: a network of `adapters` or `linearize`, or a kernel, instead of linear features. It is
      computed in the precision of JAX's setting. A network needs one output per class, in the order of
      the sorted labels; for two classes it may have one.

    **Attributes:** `classes_`, `coef_` and `intercept_` (linear features only), `fitted_` (the
    `Fitted`, for every other edit), `certificate_` (of the distance to the optimum).
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "DualInfluenceClassifier":
        with self.precision():
            X, y = self._validated(X, y)
            check_classification_targets(y)
            self.classes_, labels = np.unique(y, return_inverse=True)
            if len(self.classes_) < 2:
                raise ValueError(
                    "DualInfluenceClassifier: expected at least two classes, got one class: "
                    f"{self.classes_.tolist()}."
                )
            self._columns = self._count_columns(X)
            loss = Logistic() if self._columns == 1 else SoftmaxCrossEntropy()
            self._learn(X, self._coded(labels), loss, self._columns, sample_weight)
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Scores per class, `(q, c)`; for two classes the score of the second less that of the first,
        `(q,)`."""
        outputs = self._outputs(X)
        if len(self.classes_) > 2:
            return outputs
        return outputs[:, 0] if self._columns == 1 else outputs[:, 1] - outputs[:, 0]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities per class, `(q, c)`."""
        with self.precision():
            scores = jnp.asarray(self.decision_function(X))
            if scores.ndim == 2:
                return np.asarray(jax.nn.softmax(scores, axis=1))
            return np.asarray(jax.nn.sigmoid(jnp.stack([-scores, scores], axis=1)))

    def predict(self, X: Any) -> np.ndarray:
        """The likeliest class of each query."""
        scores = self.decision_function(X)
        return self.classes_[
            scores.argmax(axis=1) if scores.ndim == 2 else (scores > 0).astype(int)
        ]

    def _targets(self, y: np.ndarray) -> np.ndarray:
        unknown = np.setdiff1d(y, self.classes_)
        if unknown.size:
            raise ValueError(f"attribute: {unknown.tolist()} are no classes of this model.")
        return self._coded(np.searchsorted(self.classes_, y))

    def _coded(self, labels: np.ndarray) -> np.ndarray:
        """Positions of classes in the form that the loss takes."""
        return labels[:, None].astype(float) if self._columns == 1 else labels

    def _count_columns(self, X: np.ndarray) -> int:
        """Number of outputs to train: one for two classes, unless the model has one for each."""
        classes = len(self.classes_)
        own = 1 if self.model is None else _own_outputs(self.model, X)
        if own == 1:
            is_network = self.model is not None and as_source(self.model, X).network is not None
            own = classes if classes > 2 and not is_network else 1
        if own != classes and (own, classes) != (1, 2):
            raise ValueError(
                f"DualInfluenceClassifier: the model has {own} outputs for {classes} classes, "
                f"{self.classes_.tolist()}. It needs one for each class, or a single one for two "
                "classes."
            )
        return own


class DualInfluenceRegressor(MultiOutputMixin, RegressorMixin, _DualEstimator):
    r"""Ridge regression that forgets points exactly and reports the effect of each.

    Minimises $\frac1n\sum_i\frac12\|f_i-y_i\|^2 + \frac{\lambda}{2}\|\theta\|^2$ in float64. That is
    `Ridge(alpha=n*ridge, fit_intercept=False)` with a column of ones: the ridge pulls the intercept to
    zero like every other parameter. With `fit_intercept="free"` it is `Ridge(alpha=n*ridge)`.

    **Arguments:** as for `DualInfluenceClassifier`; a network needs one output per target.

    **Attributes:** `coef_`, `intercept_`, `fitted_`, `certificate_`.
    """

    _kinds: ClassVar[dict[str, bool]] = {"y_numeric": True, "multi_output": True}

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "DualInfluenceRegressor":
        with self.precision():
            X, y = self._validated(X, y, **self._kinds)
            self.flat_ = y.ndim == 1
            targets = self._targets(y)
            c = targets.shape[1] if self.model is None else None
            self._learn(X, targets, SquaredError(), c, sample_weight)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Outputs, in the shape of the targets."""
        outputs = self._outputs(X)
        return outputs[:, 0] if self.flat_ else outputs

    def _keep(self, fitted: Fitted) -> None:
        super()._keep(fitted)
        if self.model is None and self.flat_:
            self.coef_, self.intercept_ = self.coef_[0], float(self.intercept_[0])

    def _targets(self, y: np.ndarray) -> np.ndarray:
        y = np.asarray(y, jax.dtypes.canonicalize_dtype(np.float64))
        return y[:, None] if y.ndim == 1 else y
