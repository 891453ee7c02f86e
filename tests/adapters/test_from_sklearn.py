"""Fitted models of scikit-learn taken over, against scikit-learn's own refits: `make frameworks`."""

import warnings

import numpy as np
import pytest

import dualfluence as dfl

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore:.*deprecated in version 1.8"),
    pytest.mark.filterwarnings("ignore:Inconsistent values"),
]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)) * [1, 5, 0.2, 1] + 3
SCORES = X @ RNG.normal(size=(4, 3)) + 0.3 * RNG.normal(size=(60, 3))
BINARY = np.where(SCORES[:, 0] > np.median(SCORES[:, 0]), "yes", "no")
THREE = np.array(["a", "b", "c"])[np.argmax(SCORES - SCORES.mean(axis=0), axis=1)]
GONE = [2, 17, 40]
KEPT = np.setdiff1d(np.arange(60), GONE)
COUNTS = RNG.integers(1, 4, size=60).astype(float)


def linear_model(name, **options):
    from sklearn import linear_model

    if name == "LogisticRegression" and "solver" not in options:
        options["solver"] = "newton-cg"
    if name == "LogisticRegression":
        options = {"tol": 1e-12, "max_iter": 10_000} | options
    return getattr(linear_model, name)(**options)


def less(model, share):
    """The same estimator with the penalty that leaves `λ` as it is at this share of the weight."""
    name = "C" if "C" in model.get_params() else "alpha"
    old = model.get_params()[name]
    return model.set_params(**{name: old / share if name == "C" else old * share})


CASES = [
    ("LogisticRegression", BINARY, {"C": 0.3}),
    ("LogisticRegression", THREE, {"C": 2.0}),
    ("LogisticRegression", BINARY, {"fit_intercept": False}),
    ("LogisticRegression", BINARY, {"class_weight": {"yes": 3.0}}),
    (
        "LogisticRegression",
        BINARY,
        {"solver": "liblinear", "intercept_scaling": 2.0, "random_state": 0},
    ),
    ("Ridge", SCORES[:, 0], {"alpha": 0.5}),
    ("Ridge", SCORES, {"alpha": [2.0, 2.0, 2.0]}),
    ("Ridge", SCORES, {"fit_intercept": False}),
    ("RidgeClassifier", BINARY, {"alpha": 0.1}),
    ("RidgeClassifier", THREE, {"class_weight": {"a": 2.0, "b": 0.5}}),
]


@pytest.mark.parametrize("weights", [None, COUNTS], ids=["plain", "weighted"])
@pytest.mark.parametrize(("name", "y", "options"), CASES)
def test_an_edit_gives_the_refit_of_scikit_learn(name, y, options, weights):
    s = np.ones(60) if weights is None else weights
    model = linear_model(name, **options).fit(X, y, sample_weight=s)
    before = model.coef_.copy()
    fitted = dfl.adapters.from_sklearn(model, X, y, sample_weight=weights)
    update = fitted.edit(dfl.Remove(GONE), steps=8)
    by_class = options.get("class_weight", {})
    each = s * [by_class.get(k, 1.0) for k in (y.tolist() if by_class else s)]
    options = {**options, "alpha": 2.0} if isinstance(options.get("alpha"), list) else options
    refit = less(linear_model(name, **options), each[KEPT].sum() / each.sum())
    refit.fit(X[KEPT], y[KEPT], sample_weight=s[KEPT])
    ours = dfl.adapters.to_sklearn(update, model)
    # liblinear stops at 1e-6 or so, whatever it is asked.
    atol = 1e-4 if options.get("solver") == "liblinear" else 1e-6
    assert ours.coef_.shape == refit.coef_.shape
    np.testing.assert_allclose(ours.coef_, refit.coef_, rtol=0, atol=atol)
    np.testing.assert_allclose(ours.intercept_, refit.intercept_, rtol=0, atol=atol)
    assert (ours.predict(X) == refit.predict(X)).all() or name == "Ridge"
    np.testing.assert_array_equal(model.coef_, before)  # the estimator given stays as it is
    away = np.linalg.norm(ours.coef_ - refit.coef_)
    assert update.certificate.certified
    # The refit of liblinear is not the optimum itself.
    own = atol if options.get("solver") == "liblinear" else 0
    assert away <= update.certificate.distance_bound + own


def test_queries_of_a_pipeline_go_through_its_other_steps():
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    pipe = make_pipeline(StandardScaler(), linear_model("LogisticRegression")).fit(X, BINARY)
    fitted = dfl.adapters.from_sklearn(pipe, X, BINARY)
    outputs = fitted.predict(pipe[:-1].transform(X))
    np.testing.assert_allclose(outputs[:, 0], pipe.decision_function(X), rtol=0, atol=1e-9)
    again = dfl.adapters.to_sklearn(fitted, pipe)
    np.testing.assert_allclose(again.predict_proba(X), pipe.predict_proba(X), rtol=0, atol=1e-9)


def test_attribution_is_the_change_on_refitting_without_a_point():
    model = linear_model("Ridge", alpha=0.7).fit(X, SCORES[:, 0])
    fitted = dfl.adapters.from_sklearn(model, X, SCORES[:, 0])
    values = fitted.attribute(X[:3], SCORES[:3, :1]).values
    for i in GONE:
        kept = np.setdiff1d(np.arange(60), [i])
        without = linear_model("Ridge", alpha=0.7 * 59 / 60).fit(X[kept], SCORES[kept, 0])
        after = 0.5 * (without.predict(X[:3]) - SCORES[:3, 0]) ** 2
        before = 0.5 * (model.predict(X[:3]) - SCORES[:3, 0]) ** 2
        np.testing.assert_allclose(values[:, i], after - before, rtol=0, atol=1e-7)


def test_a_solver_that_stopped_early_is_counted_and_polish_ends_it():
    model = linear_model("LogisticRegression", solver="lbfgs", tol=1e-2).fit(X, BINARY)
    end = linear_model("LogisticRegression").fit(X, BINARY)
    away = np.linalg.norm(model.coef_ - end.coef_)
    assert away > 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dfl.FidelityWarning)
        left = dfl.adapters.from_sklearn(model, X, BINARY)
    assert left.certificate.gap > away
    np.testing.assert_allclose(left.params()["w"].T, model.coef_, rtol=0, atol=1e-9)
    ended = dfl.adapters.from_sklearn(model, X, BINARY, polish=True)
    assert ended.certificate.distance_bound < 0.01
    np.testing.assert_allclose(ended.params()["w"].T, end.coef_, rtol=0, atol=1e-5)


REFUSED = [
    (
        "LogisticRegression",
        BINARY,
        {"solver": "saga", "penalty": "l1", "tol": 1e-3},
        "penalty='l1'",
    ),
    ("LogisticRegression", BINARY, {"C": np.inf}, r"C=inf|penalty=None"),
    ("LogisticRegression", THREE, {"class_weight": "balanced"}, r"class_weight=\{'a': "),
    ("RidgeClassifier", BINARY, {"class_weight": "balanced"}, r"class_weight=\{'no': "),
    ("Ridge", SCORES[:, 0], {"positive": True}, "positive=True"),
    ("Ridge", SCORES, {"alpha": [1.0, 2.0, 3.0]}, "one positive number for all targets"),
    ("Ridge", SCORES, {"alpha": 0.0}, "one positive number for all targets"),
]


@pytest.mark.parametrize(("name", "y", "options", "words"), REFUSED)
def test_an_option_that_cannot_be_honoured_is_refused_by_name(name, y, options, words):
    model = linear_model(name, **options).fit(X, y)
    with pytest.raises(ValueError, match=words):
        dfl.adapters.from_sklearn(model, X, y)


def test_other_estimators_and_other_data_are_refused():
    from sklearn.exceptions import NotFittedError

    fitted = linear_model("Ridge").fit(X, SCORES[:, 0])
    calls = [
        (linear_model("Lasso"), X, SCORES[:, 0], TypeError, "ends in one, got Lasso"),
        (type(fitted), X, SCORES[:, 0], TypeError, "got the class Ridge"),
        (linear_model("RidgeCV").fit(X, SCORES[:, 0]), X, SCORES[:, 0], TypeError, "got RidgeCV"),
        (linear_model("Ridge"), X, SCORES[:, 0], NotFittedError, "not fitted"),
        (fitted, X[:, :2], SCORES[:, 0], ValueError, "fitted on 4 features"),
        (fitted, X, SCORES[:5, 0], ValueError, "expected 60 rows"),
    ]
    for model, x, y, kind, words in calls:
        with pytest.raises(kind, match=words):
            dfl.adapters.from_sklearn(model, x, y)
    classes = linear_model("LogisticRegression").fit(X, BINARY)
    with pytest.raises(ValueError, match=r"\['maybe'\] in y are no classes"):
        dfl.adapters.from_sklearn(classes, X, np.where(np.arange(60) == 3, "maybe", BINARY))


def test_sparse_features_are_refused_by_name():
    from scipy.sparse import csr_matrix

    model = linear_model("Ridge").fit(csr_matrix(X), SCORES[:, 0])
    with pytest.raises(TypeError, match="sparse matrix of shape"):
        dfl.adapters.from_sklearn(model, csr_matrix(X), SCORES[:, 0])
