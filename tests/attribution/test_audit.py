"""The parts of an audit against brute force, and the findings that it was given to find."""

from types import SimpleNamespace

import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.attribution import evaluate
from dualfluence.attribution._audit import Evidence
from dualfluence.attribution._label_noise import label_noise, target_noise
from dualfluence.attribution._near import linear, nearest
from dualfluence.attribution._ridge import fit_ridge

RNG = np.random.default_rng(0)
PHI, Y = RNG.normal(size=(9, 4)), RNG.normal(size=(9, 2))


def refit(phi, y, penalty):
    """Ridge regression with a free intercept by its normal equations; a function of features."""
    A = np.column_stack([phi, np.ones(len(phi))])
    pull = penalty * np.diag([1.0] * phi.shape[1] + [0.0])
    w = np.linalg.solve(A.T @ A + pull, A.T @ y)
    return lambda q: np.column_stack([q, np.ones(len(q))]) @ w


def test_every_point_is_left_out_exactly():
    ridge = fit_ridge(PHI, Y)
    full = refit(PHI, Y, ridge.penalty)
    np.testing.assert_allclose(ridge.outputs, full(PHI), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(ridge.predict(PHI[:2] + 1), full(PHI[:2] + 1), rtol=1e-9)
    for i in range(9):
        keep = np.arange(9) != i
        without = refit(PHI[keep], Y[keep], ridge.penalty)
        np.testing.assert_allclose(ridge.left_out[i], without(PHI[[i]])[0], rtol=1e-8, atol=1e-11)
        moved = without(PHI) - full(PHI)
        size = np.sqrt(np.mean(np.sum(moved**2, axis=1)))
        np.testing.assert_allclose(ridge.effect[i], size, rtol=1e-7)
    gone = [1, 4, 5]
    keep = np.delete(np.arange(9), gone)
    want = refit(PHI[keep], Y[keep], ridge.penalty)(PHI)
    np.testing.assert_allclose(ridge.without(np.array(gone), PHI), want, rtol=1e-8, atol=1e-11)


def test_the_penalty_has_the_least_error_of_the_grid():
    grid = np.array([1e-3, 0.1, 1.0, 30.0])
    errors = []
    for penalty in grid:
        off = 0.0
        for i in range(9):
            keep = np.arange(9) != i
            off += np.sum((Y[i] - refit(PHI[keep], Y[keep], penalty)(PHI[[i]])[0]) ** 2) / 9
        errors.append(off)
    ridge = fit_ridge(PHI, Y, grid)
    assert ridge.penalty == grid[np.argmin(errors)]
    np.testing.assert_allclose(ridge.error, min(errors), rtol=1e-8)


def test_more_features_than_points_are_left_out_exactly_too():
    phi = RNG.normal(size=(5, 12))
    ridge = fit_ridge(phi, Y[:5], np.array([0.3]))
    for i in range(5):
        keep = np.arange(5) != i
        want = refit(phi[keep], Y[:5][keep], 0.3)(phi[[i]])[0]
        np.testing.assert_allclose(ridge.left_out[i], want, rtol=1e-8)


TWENTIETH = np.full((3, 3), 0.025) + 0.925 * np.eye(3)
"""One label in twenty is wrong, as the imagined ones."""

UNEVEN = np.array([[0.9, 0.1, 0.0], [0.02, 0.95, 0.03], [0.1, 0.1, 0.8]])


def noisy_labels(n, seed, Q=TWENTIETH):
    """Outputs, true classes and labels from exactly the model that `label_noise` fits."""
    rng = np.random.default_rng(seed)
    f = rng.normal(size=(n, 3)) * 0.5
    z = 6 * f + [0.0, 0.5, -0.5]
    p = np.exp(z - np.logaddexp.reduce(z, axis=1, keepdims=True))
    truth = (p.cumsum(axis=1) > rng.random((n, 1))).argmax(axis=1)
    labels = (Q[truth].cumsum(axis=1) > rng.random((n, 1))).argmax(axis=1)
    return f, p, truth, labels


def test_stated_probabilities_are_shares_of_true_errors():
    f, p, truth, labels = noisy_labels(6000, 1)
    found, wrong = label_noise(f, labels), truth != labels
    for low, high in ((0, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 1.01)):
        at = (found.wrong >= low) & (found.wrong < high)
        share = wrong[at].mean()
        by_chance = 3 * np.sqrt(share * (1 - share) / at.sum())
        assert abs(found.wrong[at].mean() - share) < 0.03 + by_chance, (low, at.sum())
    np.testing.assert_allclose(found.probabilities.sum(axis=1), 1)
    assert np.abs(found.probabilities - p @ TWENTIETH).mean() < 0.03


def test_uneven_noise_is_ranked_nearly_as_by_its_true_matrix():
    f, p, truth, labels = noisy_labels(3000, 1, UNEVEN)
    joint = p * UNEVEN[:, labels].T
    best = 1 - joint[np.arange(3000), labels] / joint.sum(axis=1)
    found, wrong = label_noise(f, labels), truth != labels
    assert evaluate.mislabel_auc(best, wrong) - evaluate.mislabel_auc(found.log_odds, wrong) < 0.02


def test_the_posterior_is_the_formula():
    f, _, _, labels = noisy_labels(200, 2)
    found = label_noise(f, labels)
    z = np.exp(found.scale * f + found.shift)
    joint = z / z.sum(axis=1, keepdims=True) * found.matrix[:, labels].T
    own = joint[np.arange(200), labels]
    np.testing.assert_allclose(found.wrong, 1 - own / joint.sum(axis=1), atol=1e-12)
    np.testing.assert_allclose(found.log_odds, np.log((joint.sum(axis=1) - own) / own), atol=1e-9)


def test_clean_labels_of_a_weak_model_are_not_called_wrong():
    """A model that is right half of the time says little about any label."""
    rng = np.random.default_rng(3)
    f = rng.normal(size=(2000, 3))
    z = 0.8 * f
    p = np.exp(z - np.logaddexp.reduce(z, axis=1, keepdims=True))
    labels = (p.cumsum(axis=1) > rng.random((2000, 1))).argmax(axis=1)
    assert np.mean(label_noise(f, labels).wrong > 0.5) < 0.01


def test_numbers_far_from_their_prediction_are_called_wrong():
    rng = np.random.default_rng(4)
    error, bad = rng.normal(size=(400, 1)), np.arange(400) % 20 == 0
    error[bad] += 12 * rng.choice([-1, 1], (20, 1))
    found = target_noise(np.zeros((400, 1)), error)
    assert np.array_equal(found.wrong > 0.5, bad)
    np.testing.assert_allclose(found.scale, error[~bad].std(), rtol=0.1)


@pytest.mark.parametrize("points", [1, 5, 33])
def test_exact_fits_of_numbers_have_no_wrong_ones(points):
    same = np.arange(points, dtype=float)[:, None]
    assert not np.any(target_noise(same, same).wrong > 0.5)


def test_nearest_points_are_those_of_all_pairs():
    x, xq, labels = RNG.normal(size=(30, 3)), RNG.normal(size=(7, 3)), np.arange(30) % 3
    among = np.arange(30) != 4
    d = np.linalg.norm(x[:, None] - x[None], axis=2) + np.where(np.eye(30), np.inf, 0)
    d[:, 4] = np.inf
    found = nearest(linear(x, None), lambda rows: labels[rows][:, None] != labels[None], among)
    np.testing.assert_array_equal(found.at, d.argmin(axis=1))
    np.testing.assert_allclose(found.distance, d.min(axis=1))
    d[labels[:, None] == labels[None]] = np.inf
    np.testing.assert_array_equal(found.other_at, d.argmin(axis=1))
    d = np.linalg.norm(xq[:, None] - x[None], axis=2)
    everywhere = np.ones(30, bool)
    found = nearest(linear(x, xq), lambda rows: np.ones((7, 30), bool)[rows], everywhere)
    np.testing.assert_allclose(found.distance, d.min(axis=1))
    assert nearest(linear(x, xq), lambda r: np.zeros((7, 30), bool)[r], ~everywhere).at[0] == -1


def spoiled(n=160, count=16):
    """Digits of the embedded set with wrong labels, a test set with copies, and where all that is."""
    data = dfl.datasets.load("mnist-small")
    rng = np.random.default_rng(0)
    order = rng.permutation(len(data.x_train))[: n + 20]
    x = np.asarray(data.x_train, float).reshape(len(data.x_train), -1)[order]
    truth = np.asarray(data.y_train)[order]
    wrong = rng.permutation(n)[:count]
    y = truth[:n].copy()
    y[wrong] = (y[wrong] + rng.integers(1, 10, count)) % 10
    x_test, y_test = np.concatenate([x[n:], x[:2]]), np.concatenate([truth[n:], truth[:2]])
    return x[:n], y, truth[:n], np.isin(np.arange(n), wrong), x_test, y_test


@pytest.fixture(scope="module")
def case():
    x, y, truth, wrong, x_test, y_test = spoiled()
    x[7] = x[3] + 1e-9  # a copy, with another label
    y[7] = (y[3] + 1) % 10
    wrong[[3, 7]] = False
    names = np.array([f"digit {k}" for k in range(10)])
    found = dfl.audit(None, x, names[y], x_test=x_test, y_test=names[y_test])
    return found, x, y, truth, wrong, names


def test_planted_errors_come_first(case):
    found, _, _, truth, wrong, names = case
    others = np.delete(np.arange(160), [3, 7])
    assert evaluate.mislabel_auc(found.suspicion[others], wrong[others]) > 0.93
    flagged = np.setdiff1d(found.flagged, [3, 7])
    assert np.mean(wrong[flagged]) > 0.4  # of 160 digits in ten classes; 0.1 by chance
    right = [f for f in found.top(20, "label") if f.split == "train" and wrong[f.index]]
    assert np.mean([f.suggested == names[truth[f.index]] for f in right]) > 0.8
    assert all("wrong with probability" in f.reason for f in right)
    assert list(found.suspicion[found.flagged]) == sorted(found.suspicion[found.flagged])[::-1]


def test_copies_with_other_labels_and_copies_in_the_test_set_are_found(case):
    found, *_ = case
    assert [(f.index, f.partner) for f in found.top(9, "conflict")] == [(3, 7)]
    leaks = {f.index: f.partner for f in found.top(99, "leak")}
    assert leaks == {20: 0, 21: 1}


def test_redundant_points_change_no_more_than_is_said(case):
    found, *_ = case
    gone = [f for f in found.findings if f.kind == "redundant"]
    assert gone
    assert not set(found.flagged) & {f.index for f in gone}
    assert f"one of {len(gone)} points" in gone[0].reason


def test_the_record_says_what_was_found(case):
    found, _, y, *_ = case
    assert found.task == "classification"
    assert repr(found).startswith("Audit of 160 training points of 10 classes")
    assert "<table>" in found._repr_html_()
    assert sum(found.counts.values()) == len(found.findings)
    assert len(found.top(3)) == 3
    mended = found.mended
    np.testing.assert_array_equal(
        np.delete(mended, found.flagged), found.classes[np.delete(y, found.flagged)]
    )
    assert np.all(mended[found.flagged] != found.classes[y[found.flagged]])
    np.testing.assert_allclose(found.label_quality, 1 - found.wrong)
    assert 0.5 <= found.expected_precision <= 1
    columns = found.scores(theirs=np.arange(160.0))
    assert {len(c) for c in columns.values()} == {160}
    np.testing.assert_array_equal(columns["theirs"], np.arange(160.0))
    for bad, words in (([1.0], "expected 160 rows"), (np.full(160, np.nan), "finite")):
        with pytest.raises(ValueError, match=words):
            found.scores(theirs=bad)
    with pytest.raises(ValueError, match="column already"):
        found.scores(wrong=np.zeros(160))
    with pytest.raises(ValueError, match="top: kind"):
        found.top(3, "nothing")


def test_probabilities_have_the_form_that_confident_learning_takes(case):
    found, *_ = case
    assert found.probabilities.shape == (160, 10)
    assert found.labels.dtype.kind == "i"
    np.testing.assert_allclose(found.probabilities.sum(axis=1), 1)
    assert found.probabilities.min() >= 0


def test_long_form_has_one_row_per_finding(case):
    found, *_ = case
    try:
        import pandas as pd
    except ImportError:
        with pytest.raises(ImportError, match="pip install pandas"):
            found.to_pandas()
        assert len(list(found.rows())) == len(found.findings)
        return
    frame = found.to_pandas()
    assert list(frame.columns[:3]) == ["kind", "split", "index"]
    assert len(frame) == len(found.findings)
    assert isinstance(found.to_pandas(theirs=np.zeros(160)), pd.DataFrame)


@pytest.fixture(scope="module")
def regression():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(120, 3))
    y = x @ [1.0, -2.0, 0.5] + 0.1 * rng.normal(size=120)
    y[[5, 50]] += [4.0, -4.0]
    return x, y, dfl.audit(None, x, y, x_test=x[:3] + 1, y_test=np.array([50.0, 0.0, 0.0]))


@pytest.mark.thorough
def test_wrong_numbers_are_found_in_both_splits(regression):
    _, y, found = regression
    assert set(found.flagged[:2]) == {5, 50}
    first = next(f for f in found.findings if (f.split, f.index) == ("train", 5))
    assert abs(first.suggested - (y[5] - 4)) < 1.5
    assert "typical errors away" in first.reason
    assert any((f.split, f.index) == ("test", 0) for f in found.top(9, "label"))
    assert found.mended.shape == y.shape
    assert abs(found.mended[5] - (y[5] - 4)) < 1.5


def test_leverage_is_the_diagonal_of_the_smoother():
    x = RNG.normal(size=(40, 3))
    y = x @ RNG.normal(size=3) + RNG.normal(size=40)
    model = dfl.linearize(lambda p, x: x @ p, np.zeros((3, 1)))
    fitted = dfl.fit(model, x, y[:, None], loss=dfl.SquaredError(), ridge=0.05, progress=False)
    found = dfl.audit(fitted)
    # Leaving a point out renormalises the mean loss: 39 points share the weight.
    for i in (0, 17):
        keep = np.arange(40) != i
        w = np.linalg.solve(x[keep].T @ x[keep] + 39 * 0.05 * np.eye(3), x[keep].T @ y[keep])
        np.testing.assert_allclose(found.left_out[i, 0], x[i] @ w, rtol=1e-7)
        share = 1 - abs(y[i] - fitted.outputs[i, 0]) / abs(y[i] - x[i] @ w)
        np.testing.assert_allclose(found.leverage[i], max(share, 0), atol=1e-7)


def test_points_that_were_removed_are_no_finding():
    x, y, *_ = spoiled(20, 2)
    net = dfl.infinite.serial(dfl.infinite.Dense(), dfl.infinite.Relu(), dfl.infinite.Dense())
    fitted = dfl.fit(net, x, y % 2, loss=dfl.SoftmaxCrossEntropy(), ridge=1e-3, progress=False)
    gone = fitted.edit(dfl.Remove([0, 1, 2])).commit()
    found = dfl.audit(gone, classes=["even", "odd"])
    assert set(found.classes) == {"even", "odd"}
    assert not {0, 1, 2} & {f.index for f in found.findings}
    np.testing.assert_array_equal(found.wrong[:3], 0)
    assert not {0, 1, 2} & set(found.neighbour)


def forms_of_labels(two):
    """Two classes as models take them: targets, number of outputs and loss."""
    eye = np.eye(2)[two]
    return {
        "one probability": (two[:, None].astype(float), 1, dfl.Logistic()),
        "one sign": (np.where(two, 1.0, -1.0)[:, None], 1, dfl.SquaredError()),
        "zeros and ones": (eye, 2, dfl.SquaredError()),
        "signs": (2 * eye - 1, 2, dfl.SquaredError()),
        "numbers": (two, 2, dfl.SoftmaxCrossEntropy()),
        "soft": (0.8 * eye + 0.1, 2, dfl.SoftmaxCrossEntropy()),
    }


@pytest.mark.parametrize(
    "form",
    [
        "one probability",
        "one sign",
        *(
            pytest.param(form, marks=pytest.mark.thorough)
            for form in ("zeros and ones", "signs", "numbers", "soft")
        ),
    ],
)
def test_all_kinds_of_class_targets_are_read(form):
    two = np.arange(20) % 3 % 2
    x = np.random.default_rng(5).normal(size=(20, 4)) + two[:, None]
    targets, outputs, loss = forms_of_labels(two)[form]
    model = dfl.linearize(lambda p, x: x @ p, np.zeros((4, outputs)))
    fitted = dfl.fit(model, x, targets, loss=loss, ridge=0.1, progress=False)
    if form == "soft":
        with pytest.raises(ValueError, match="one class for each point"):
            dfl.audit(fitted)
        return
    found = dfl.audit(fitted)
    np.testing.assert_array_equal(found.labels, two)
    assert found.left_out.shape == (20, 2)
    if form == "one sign":  # the output without the point, as shares of the two classes
        np.testing.assert_allclose(found.left_out.sum(axis=1), 1, rtol=1e-12)
        f = [
            fitted.edit(dfl.Remove([i]), progress=False).predict(x[i : i + 1])[0, 0]
            for i in range(3)
        ]
        np.testing.assert_allclose(found.left_out[:3, 1], (1 + np.array(f)) / 2, rtol=1e-6)


def test_targets_keep_the_form_in_which_they_came():
    evidence = SimpleNamespace(classes=None)
    assert Evidence.name(evidence, np.array([2.5])) == 2.5
    assert isinstance(Evidence.name(evidence, np.array([2.5])), float)
    assert Evidence.name(evidence, np.array([2.5, 1.0])).tolist() == [2.5, 1.0]
    assert Evidence.name(SimpleNamespace(classes=np.array(["a", "b"])), 1) == "b"
