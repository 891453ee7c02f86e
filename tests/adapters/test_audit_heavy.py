"""Audits of scikit-learn's models, of pandas' tables, and beside cleanlab: `make frameworks`."""

import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.attribution import evaluate

pytestmark = [pytest.mark.frameworks, pytest.mark.host]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(80, 4)) * [1, 10, 0.1, 1] + 3
TRUE = (X[:, 0] + X[:, 1] / 10 - 6 > 0).astype(int) + (X[:, 3] > 3.5)
NAMES = np.array(["low", "middle", "high"])
BAD = np.array([2, 30, 55, 71])
LABELS = NAMES[np.where(np.isin(np.arange(80), BAD), (TRUE + 1) % 3, TRUE)]
VALUES = X @ [1.0, -0.1, 3.0, 0.5] + 0.1 * RNG.normal(size=80) + 5.0 * np.isin(np.arange(80), BAD)
FEW = [0, 13, 30, 79]


def area(found):
    return evaluate.mislabel_auc(found.suspicion, np.isin(np.arange(80), BAD))


def pipeline(last):
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), last)


def without(model, x, y, i):
    """The last step fitted again without one point, on the features as they were."""
    from sklearn.base import clone

    features = model[:-1].transform(x)
    again = clone(model[-1]).fit(np.delete(features, i, axis=0), np.delete(y, i))
    return again, features[[i]]


def test_logistic_regression_without_each_point_is_that_of_a_refit():
    from sklearn.linear_model import LogisticRegression

    model = pipeline(LogisticRegression(C=0.5, tol=1e-10, max_iter=2000)).fit(X, LABELS)
    found = dfl.audit(model, X, LABELS, x_test=X[:2], y_test=LABELS[:2])
    assert area(found) > 0.9
    assert {f.partner for f in found.top(9, "leak")} == {0, 1}
    for i in FEW:
        again, row = without(model, X, LABELS, i)
        want = np.log(again.predict_proba(row)[0])
        got = found.left_out[i] - np.logaddexp.reduce(found.left_out[i])
        order = [list(again.classes_).index(name) for name in found.classes]
        # One Newton step of a leave-one-out: off by the square of the change.
        np.testing.assert_allclose(got, want[order], atol=0.1)


def test_ridge_without_each_point_is_that_of_a_refit():
    from sklearn.linear_model import Ridge

    model = pipeline(Ridge(alpha=2.0)).fit(X, VALUES)
    found = dfl.audit(model, X, VALUES)
    assert set(found.flagged) == set(BAD)
    for i in FEW:
        again, row = without(model, X, VALUES, i)
        np.testing.assert_allclose(found.left_out[i], again.predict(row), rtol=1e-8)


def test_a_ridge_classifier_that_was_not_fitted_is_fitted_first():
    from sklearn.linear_model import RidgeClassifier
    from sklearn.utils.validation import check_is_fitted

    model = pipeline(RidgeClassifier())
    found = dfl.audit(model, X, LABELS)
    assert "a copy of it was" in found.notes[0]
    assert area(found) > 0.9
    with pytest.raises(ValueError, match="not fitted"):
        check_is_fitted(model[-1])


def test_our_own_estimators_and_others():
    from sklearn.tree import DecisionTreeClassifier

    ours = dfl.adapters.DualInfluenceClassifier(0.02).fit(X / 3, LABELS)
    assert area(dfl.audit(ours, X / 3, LABELS, x_test=X[:2] / 3, y_test=LABELS[:2])) > 0.8
    tree = pipeline(DecisionTreeClassifier()).fit(X, LABELS)
    with pytest.raises(TypeError, match="encoder="):
        dfl.audit(tree, X, LABELS)
    assert area(dfl.audit(None, X, LABELS, encoder=tree[:-1].transform)) > 0.9


def test_tables_of_pandas_in_and_out():
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame(X, columns=list("abcd"))
    table["colour"] = pd.Series(np.where(TRUE > 0, "red", "blue")).astype("category")
    found = dfl.audit(None, table, pd.Series(LABELS), x_test=table.iloc[:3])
    assert area(found) > 0.9
    long = found.to_pandas()
    assert list(long.columns[:4]) == ["kind", "split", "index", "reason"]
    assert (long["kind"] == "leak").sum() == 3
    for column, words in (("a", "column 'a'"), ("colour", "column 'colour'")):
        holes = table.copy()
        holes.loc[5, column] = None
        with pytest.raises(ValueError, match=words):
            dfl.audit(None, holes, LABELS)
    with pytest.raises(ValueError, match=r"1 of 80 \(at 4\) is missing"):
        dfl.audit(None, table, pd.Series(LABELS).where(np.arange(80) != 4))


@pytest.mark.filterwarnings("ignore")
def test_confident_learning_takes_the_probabilities():
    filters = pytest.importorskip("cleanlab.filter")
    from cleanlab.rank import get_label_quality_scores

    found = dfl.audit(None, X, LABELS)
    flagged = filters.find_label_issues(labels=found.labels, pred_probs=found.probabilities)
    assert np.isin(BAD, np.flatnonzero(flagged)).sum() >= 3
    theirs = get_label_quality_scores(found.labels, found.probabilities)
    both = found.to_pandas(theirs=theirs)
    assert list(both["theirs"]) == list(theirs)
    assert both[["wrong", "theirs"]].corr("spearman").iloc[0, 1] < -0.9


@pytest.mark.filterwarnings("ignore")
def test_datalab_takes_the_probabilities():
    pytest.importorskip("datasets")
    datalab = pytest.importorskip("cleanlab.datalab.datalab")
    found = dfl.audit(None, X, LABELS)
    lab = datalab.Datalab({"x": list(range(80)), "y": LABELS.tolist()}, label_name="y", verbosity=0)
    lab.find_issues(pred_probs=found.probabilities)
    issues = lab.get_issues("label")
    assert issues["is_label_issue"][BAD].mean() >= 0.5
    assert len(found.to_pandas(theirs=issues["label_score"].to_numpy())) == 80


BAD_INPUT = [
    ("Ridge", np.eye(6), ["a", "b"] * 3, TypeError, "predicts numbers, got names: .'a', 'b'"),
    ("LogisticRegression", ["word"] * 6, [0, 1] * 3, TypeError, "expected numbers, got strings"),
    ("LogisticRegression", np.ones((6, 2)), [0, 1] * 3, ValueError, "6 points are equal"),
    ("Ridge", np.ones((6, 2)), np.arange(6) / 7, ValueError, "6 points are equal"),
]


@pytest.mark.parametrize(("name", "x", "y", "error", "words"), BAD_INPUT)
def test_bad_input_to_an_estimator_is_said_clearly(name, x, y, error, words):
    from sklearn import linear_model

    with pytest.raises(error, match=words):
        dfl.audit(getattr(linear_model, name)(), x, y)


def test_an_estimator_says_which_task_it_is_for():
    """Whole numbers could be classes; to a regressor they are amounts."""
    from sklearn.linear_model import Ridge, RidgeClassifier

    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3))
    amounts = np.round(50 * x @ [1.0, -2.0, 0.5])
    found = dfl.audit(Ridge(alpha=1.0), x, amounts)
    assert found.task == "regression"
    assert dfl.audit(Ridge(alpha=1.0), x, (amounts > 0).astype(int)).task == "regression"
    assert dfl.audit(RidgeClassifier(), x, (amounts > 0).astype(int)).task == "classification"
    with pytest.raises(TypeError, match="predicts numbers, got names"):
        dfl.audit(Ridge(), x, np.where(amounts > 0, "up", "down"))
