"""Estimators for scikit-learn, against scikit-learn: `make frameworks`."""

import importlib
import pickle
import warnings

import equinox as eqx
import jax
import numpy as np
import pytest

import dualfluence as dfl

pytestmark = [pytest.mark.frameworks, pytest.mark.host, pytest.mark.ordinary]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 4))
LABELS = np.array(["a", "b", "c"])[np.argmax(X[:, :3] + 0.5 * RNG.normal(size=(40, 3)), axis=1)]
VALUES = X @ RNG.normal(size=4) + 1 + 0.1 * RNG.normal(size=40)
RIDGE = 0.01
SOFTMAX = dfl.SoftmaxCrossEntropy()
GONE = [3, 11, 20]
KEPT = np.setdiff1d(np.arange(40), GONE)
ONES = np.ones((40, 1))


def classifier(**options):
    return dfl.adapters.DualInfluenceClassifier(RIDGE, **options)


def regressor(**options):
    return dfl.adapters.DualInfluenceRegressor(RIDGE, **options)


def logistic(rows):
    """scikit-learn's own optimum, with the intercept as a column so that it is pulled to zero too."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(
        C=1 / (len(rows) * RIDGE), fit_intercept=False, tol=1e-10, max_iter=10_000
    )
    return model.fit(np.hstack([X, ONES])[rows], LABELS[rows]).coef_


def ridge(rows):
    from sklearn.linear_model import Ridge

    model = Ridge(alpha=len(rows) * RIDGE, fit_intercept=False, solver="cholesky")
    return model.fit(np.hstack([X, ONES])[rows], VALUES[rows]).coef_


def coefficients(model):
    return np.column_stack([np.atleast_2d(model.coef_), np.atleast_1d(model.intercept_)])


def jax_in(bits):
    """The scope of one precision of JAX, whatever the suite runs in."""
    home = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")
    return home.enable_x64(bits == 64)


@pytest.mark.parametrize(("intercept", "bits"), [(True, 32), ("free", 32), ("free", 64)])
@pytest.mark.parametrize("name", ["DualInfluenceClassifier", "DualInfluenceRegressor"])
def test_passes_every_check_of_scikit_learn(name, intercept, bits):
    from sklearn.utils.estimator_checks import check_estimator

    estimator = getattr(dfl.adapters, name)(fit_intercept=intercept)
    with jax_in(bits), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of checks that feed nonsense on purpose
        results = check_estimator(estimator, on_fail="raise", on_skip=None)
    skipped = {r["check_name"] for r in results if r["status"] != "passed"}
    # For want of pandas and of SCIPY_ARRAY_API, for any estimator.
    assert skipped <= {
        "check_sample_weights_pandas_series",
        "check_array_api_input",
        "check_regressor_data_not_an_array",
        "check_classifier_data_not_an_array",
    }


def test_coefficients_are_those_of_logistic_regression_before_and_after_unfit():
    model = classifier().fit(X, LABELS)
    # lbfgs stops at a gradient of 1e-10 in a sum of 40 losses whose curvature is at least λn.
    np.testing.assert_allclose(coefficients(model), logistic(np.arange(40)), rtol=0, atol=1e-6)
    model.unfit(GONE)
    np.testing.assert_allclose(coefficients(model), logistic(KEPT), rtol=0, atol=1e-6)
    assert model.certificate_.distance_bound < 1e-6


def test_coefficients_are_those_of_ridge_regression_before_and_after_unfit():
    model = regressor().fit(X, VALUES)
    np.testing.assert_allclose(coefficients(model)[0], ridge(np.arange(40)), rtol=0, atol=1e-9)
    model.unfit(GONE[:1]).unfit(GONE[1:])  # positions keep their meaning
    np.testing.assert_allclose(coefficients(model)[0], ridge(KEPT), rtol=0, atol=1e-9)


def default_logistic(x, y, C):
    """`LogisticRegression` as it comes, with its free intercept, solved to the end."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=C, solver="newton-cg", tol=1e-12, max_iter=10_000).fit(x, y)
    return np.column_stack([model.coef_, model.intercept_])


def wine():
    from sklearn.datasets import load_wine
    from sklearn.preprocessing import StandardScaler

    x, y = load_wine(return_X_y=True)
    return StandardScaler().fit_transform(x), y


def test_the_default_logistic_regression_can_be_stated_and_edited():
    x, y = wine()
    n, gone = len(y), [3, 50, 60, 100, 150]
    kept = np.setdiff1d(np.arange(n), gone)
    model = classifier(fit_intercept="free").set_params(ridge=1 / n).fit(x, y)
    np.testing.assert_allclose(coefficients(model), default_logistic(x, y, 1.0), rtol=0, atol=1e-6)
    model.unfit(gone)
    # The mean over what is left keeps λ = 1/(nC): scikit-learn says C = n/n' for that.
    want = default_logistic(x[kept], y[kept], n / len(kept))
    np.testing.assert_allclose(coefficients(model), want, rtol=0, atol=1e-6)


def test_the_default_logistic_regression_can_be_taken_over_from_its_coefficients():
    """The checkpoint of a user of scikit-learn: `from_trained`, certified, and edited."""
    x, y = wine()
    n, gone = len(y), [3, 50, 60]
    kept = np.setdiff1d(np.arange(n), gone)
    theta = default_logistic(x, y, 1.0)
    linear = dfl.linearize(
        lambda t, x: x @ t["w"] + t["b"],
        {"w": np.zeros((13, 3)), "b": np.zeros(3)},
        scale={"w": None, "b": "free"},
    )
    trained = {"w": theta[:, :-1].T, "b": theta[:, -1]}
    fitted = dfl.from_trained(linear, trained, x, y, loss=dfl.SoftmaxCrossEntropy(), ridge=1 / n)
    update = fitted.edit(dfl.Remove(gone), steps=6)
    want = default_logistic(x[kept], y[kept], n / len(kept))
    got = update.params()
    np.testing.assert_allclose(got["w"].T, want[:, :-1], rtol=0, atol=1e-5)
    np.testing.assert_allclose(got["b"], want[:, -1], rtol=0, atol=1e-5)
    assert update.certificate.certified
    # What the certificate promises of weights, and that it promises next to nothing of the intercept.
    bound = update.certificate.distance_bound
    assert np.linalg.norm(got["w"].T - want[:, :-1]) <= bound < 0.01
    assert np.sqrt(1e7) * bound > 1


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", ["breast_cancer", "digits"])
def test_the_documented_recipe_gives_the_logistic_regression_of_scikit_learn(name, bits):
    """`ridge = 1/(nC)`, for two classes and for ten, in shapes and in numbers."""
    from sklearn import datasets
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    x, y, C = StandardScaler().fit_transform(x)[:400], y[:400], 0.5
    want = LogisticRegression(C=C, solver="newton-cg", tol=1e-12, max_iter=10_000).fit(x, y)
    with jax_in(bits):
        model = classifier(fit_intercept="free").set_params(ridge=1 / (len(y) * C)).fit(x, y)
        for call in ("decision_function", "predict_proba"):
            ours, theirs = getattr(model, call)(x), getattr(want, call)(x)
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(model.predict(x), want.predict(x))
    assert model.coef_.shape == want.coef_.shape
    assert model.intercept_.shape == want.intercept_.shape
    np.testing.assert_allclose(model.coef_, want.coef_, rtol=0, atol=1e-5)
    np.testing.assert_allclose(model.intercept_, want.intercept_, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bits", [32, 64])
def test_the_documented_recipe_gives_the_ridge_regression_of_scikit_learn(bits):
    from sklearn.datasets import load_diabetes
    from sklearn.linear_model import Ridge

    x, y = load_diabetes(return_X_y=True, scaled=False)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    want = Ridge(alpha=3.0).fit(x, y)
    with jax_in(bits):
        model = regressor(fit_intercept="free").set_params(ridge=3.0 / len(y)).fit(x, y)
        outputs = model.predict(x)
    assert (model.coef_.shape, outputs.dtype) == (want.coef_.shape, np.float64)
    # Targets near 150: the last digit that the pull on the intercept, a ten-millionth, takes away.
    np.testing.assert_allclose(outputs, want.predict(x), rtol=1e-6)
    np.testing.assert_allclose(model.coef_, want.coef_, rtol=1e-6)


@pytest.mark.parametrize("bits", [32, 64])
def test_every_call_computes_in_float64_whatever_jax_is_set_to(bits):
    y = (LABELS == "a").astype(int)
    with jax_in(bits):
        model = pickle.loads(pickle.dumps(classifier().fit(X, y).unfit(GONE[:1])))
        model.unfit(GONE[1:])
        rows = np.hstack([X, ONES])[KEPT]
        theirs = newton(C=1 / (len(KEPT) * RIDGE), fit_intercept=False).fit(rows, y[KEPT])
        np.testing.assert_allclose(coefficients(model), theirs.coef_, rtol=0, atol=1e-7)
        scores = model.attribute(X[:2], y[:2], of="margin", progress=False)
        assert isinstance(scores, dfl.attribution.Attribution)
        assert scores.values.dtype == model.predict_proba(X).dtype == np.float64
        assert model.label_scores().dtype == np.float64
        with model.precision():
            assert (
                model.fitted_.edit(dfl.Relabel([0], [[1.0]]), progress=False).alpha.dtype == float
            )
        if bits == 32:
            with pytest.raises(RuntimeError, match=r"with estimator\.precision\(\)"):
                _ = model.fitted_


def newton(**options):
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(solver="newton-cg", tol=1e-12, max_iter=10_000, **options)


def test_a_network_with_one_output_serves_two_classes_and_with_two_it_has_one_for_each():
    y = (LABELS == "a").astype(int)
    for width in (1, 2):
        net = eqx.nn.MLP(4, width, 5, 1, key=jax.random.key(0))
        model = classifier(model=dfl.adapters.from_equinox(net)).fit(X, y)
        assert model.decision_function(X).shape == (40,)
        shares = model.predict_proba(X)
        np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(model.predict(X), shares.argmax(axis=1))
        loss, targets = (dfl.Logistic(), y[:, None] * 1.0) if width == 1 else (SOFTMAX, y)
        own = dfl.fit(model.model, X, targets, loss=loss, ridge=RIDGE).predict(X)
        want = own[:, 0] if width == 1 else own[:, 1] - own[:, 0]
        np.testing.assert_allclose(model.decision_function(X), want, rtol=0, atol=1e-7)
    with pytest.raises(ValueError, match=r"2 outputs for 3 classes, \['a', 'b', 'c'\]"):
        classifier(model=dfl.adapters.from_equinox(net)).fit(X, LABELS)


@pytest.mark.parametrize("classes", [2, 3])
def test_a_kernel_serves_any_number_of_classes(classes):
    y = (LABELS == "a").astype(int) if classes == 2 else LABELS
    own = classifier(model=lambda a, b: a @ b.T + 1).fit(X, y)
    np.testing.assert_allclose(
        own.decision_function(X), classifier().fit(X, y).decision_function(X), rtol=0, atol=1e-9
    )


def test_label_scores_are_the_losses_of_labels_under_models_trained_without_them():
    y = VALUES.copy()
    y[[4, 30]] += 5
    scores = regressor().fit(X, y).label_scores()
    rows = np.hstack([X, ONES])
    for i in range(40):
        kept = np.setdiff1d(np.arange(40), [i])
        A = rows[kept].T @ rows[kept] + 39 * RIDGE * np.eye(5)
        left = y[i] - rows[i] @ np.linalg.solve(A, rows[kept].T @ y[kept])
        np.testing.assert_allclose(scores[i], 0.5 * left**2, rtol=1e-8)
    assert set(np.argsort(-scores)[:2]) == {4, 30}


@pytest.mark.parametrize("labels", [LABELS, (LABELS == "a").astype(int)])
def test_refined_label_scores_are_those_of_retrained_classifiers(labels):
    model = classifier().fit(X, labels).unfit(GONE)
    scores = model.label_scores(refine=1e-6)
    assert (scores[GONE] == 0).all()
    for i in KEPT[:5]:
        without = classifier().fit(X[np.setdiff1d(KEPT, [i])], labels[np.setdiff1d(KEPT, [i])])
        share = without.predict_proba(X[[i]])[0, list(model.classes_).index(labels[i])]
        np.testing.assert_allclose(scores[i], -np.log(share), rtol=0, atol=1e-5)


def test_ridge_regression_with_a_free_intercept():
    from sklearn.linear_model import Ridge

    model = regressor(fit_intercept="free").fit(X, VALUES).unfit(GONE)
    want = Ridge(alpha=len(KEPT) * RIDGE).fit(X[KEPT], VALUES[KEPT])
    np.testing.assert_allclose(model.coef_, want.coef_, rtol=0, atol=1e-6)
    np.testing.assert_allclose(model.intercept_, want.intercept_, rtol=0, atol=1e-6)


def test_an_intercept_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="True, False or 'free', got 'loose'"):
        classifier(fit_intercept="loose").fit(X, LABELS)


def test_outputs_follow_from_the_coefficients():
    model = classifier().fit(X, LABELS)
    outputs = X @ model.coef_.T + model.intercept_
    np.testing.assert_allclose(model.decision_function(X), outputs, rtol=0, atol=1e-10)
    shares = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(model.predict_proba(X), shares, rtol=0, atol=1e-10)
    np.testing.assert_array_equal(model.predict(X), model.classes_[outputs.argmax(axis=1)])


def test_without_an_intercept_there_is_none():
    model = regressor(fit_intercept=False).fit(X, VALUES)
    want = np.linalg.solve(X.T @ X + 40 * RIDGE * np.eye(4), X.T @ VALUES)
    np.testing.assert_allclose(model.coef_, want, rtol=0, atol=1e-10)
    assert model.intercept_ == 0


def test_attribution_is_the_change_of_loss_on_leaving_a_point_out():
    model = regressor().fit(X, VALUES)
    scores = model.attribute(X[:2], VALUES[:2]).values
    before = 0.5 * (model.predict(X[:2]) - VALUES[:2]) ** 2
    for i in GONE:
        weights = ridge(np.setdiff1d(np.arange(40), [i]))
        after = 0.5 * (np.hstack([X, ONES])[:2] @ weights - VALUES[:2]) ** 2
        np.testing.assert_allclose(scores[:, i], after - before, rtol=0, atol=1e-9)


def test_attribution_without_labels_asks_about_the_prediction():
    model = classifier().fit(X, LABELS)
    np.testing.assert_array_equal(
        model.attribute(X[:3]).values, model.attribute(X[:3], model.predict(X[:3])).values
    )
    with pytest.raises(ValueError, match=r"\['z'\] are no classes"):
        model.attribute(X[:1], ["z"])


def test_a_pickled_model_forgets_as_before():
    model = classifier().fit(X, LABELS)
    twin = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(
        coefficients(twin.unfit(GONE)), coefficients(model.unfit(GONE)), rtol=0, atol=1e-12
    )


def test_a_network_takes_the_place_of_linear_features():
    net = eqx.nn.MLP(4, 3, 5, 1, key=jax.random.key(0))
    adapted = dfl.adapters.from_equinox(net)
    model = classifier(model=adapted).fit(X, LABELS).unfit(GONE)
    _, labels = np.unique(LABELS, return_inverse=True)
    want = dfl.fit(
        adapted, X[KEPT], labels[KEPT], loss=dfl.SoftmaxCrossEntropy(), ridge=RIDGE
    ).predict(X)
    np.testing.assert_allclose(model.decision_function(X), want, rtol=0, atol=1e-7)


def test_it_works_in_a_pipeline_and_a_search():
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    grid = {"dualinfluenceregressor__ridge": [1e-3, 10.0]}
    search = GridSearchCV(make_pipeline(StandardScaler(), regressor()), grid, cv=2)
    search.fit(X, VALUES)
    assert search.best_params_ == {"dualinfluenceregressor__ridge": 1e-3}


def test_a_floor_of_no_use_is_warned_of():
    """Large features, a small ridge and equal points: all of the answer may be rounding."""
    from sklearn.exceptions import ConvergenceWarning

    rng = np.random.default_rng(0)
    X, y = np.repeat(rng.normal(size=(3, 2)), 4, axis=0) * 100, rng.normal(size=12) * 40
    with pytest.warns(ConvergenceWarning, match="certified distance"):
        model = dfl.adapters.DualInfluenceRegressor(ridge=1e-6, fit_intercept="free").fit(X, y)
    assert model.certificate_.at_floor
    assert model.certificate_.relative_bound > 0.1
