"""Distances, the random baseline and accuracies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualfluence import metrics

PARAMS = {"w": jnp.asarray([[3.0, 0.0], [0.0, 4.0]]), "b": np.zeros(2), "step": 7, "act": jnp.tanh}


def test_norm_counts_floating_leaves_only():
    assert metrics.tree_norm(PARAMS) == 5
    assert metrics.tree_norm({"n": jnp.arange(3)}) == 0
    assert metrics.tree_norm([jnp.full(4, 300.0, jnp.float16)]) == 600  # 4·300² is over float16


def test_distances():
    other = PARAMS | {"b": np.array([1.0, -1.0]), "step": 100}
    assert metrics.distance(other, PARAMS) == pytest.approx(np.sqrt(2))
    assert metrics.relative_distance(other, PARAMS) == pytest.approx(np.sqrt(2) / 5)
    assert metrics.relative_distance(PARAMS, other) == pytest.approx(np.sqrt(2 / 27))
    assert metrics.largest_difference(other, PARAMS) == 1


def test_distances_are_taken_in_the_wider_precision():
    """2048 − 0.5 is 2048 in float16, and 2047.5 in truth."""
    big, small = jnp.asarray([2048.0], jnp.float16), jnp.asarray([0.5], jnp.float16)
    assert metrics.distance([big], [small]) == 2047.5
    assert metrics.distance([big.astype(jnp.float32)], [small.astype(jnp.float64)]) == 2047.5


def test_distance_errors():
    with pytest.raises(ValueError, match="differ in structure"):
        metrics.distance(PARAMS, {"w": PARAMS["w"]})
    with pytest.raises(ValueError, match="differ in shape"):
        metrics.distance([jnp.ones(2)], [jnp.ones(1)])
    with pytest.raises(ValueError, match="is zero"):
        metrics.relative_distance([jnp.ones(2)], [jnp.zeros(2)])
    with pytest.raises(ValueError, match="NaN or inf"):
        metrics.tree_norm([jnp.asarray(jnp.nan)])
    with pytest.raises(ValueError, match="largest_difference: the parameters have NaN or inf"):
        metrics.largest_difference([jnp.asarray([jnp.inf])], [jnp.ones(1)])
    with pytest.raises(ValueError, match="largest_difference: floating leaves differ in shape"):
        metrics.largest_difference([jnp.ones(2)], [jnp.ones(1)])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_random_perturbation_has_the_norm_asked_for(dtype):
    params = PARAMS | {"w": jnp.zeros((40, 50), dtype), "b": np.zeros(50, dtype)}
    moved = metrics.random_perturbation(jax.random.key(0), params, 0.25)
    assert metrics.distance(moved, params) == pytest.approx(0.25, rel=1e-5)
    assert (moved["step"], moved["act"]) == (7, jnp.tanh)
    assert moved["w"].dtype == moved["b"].dtype == dtype
    # One Gaussian over all leaves: each holds its share of the squared norm, within 5 deviations.
    assert np.sum(moved["b"] ** 2) / 0.25**2 == pytest.approx(50 / 2050, rel=5 * np.sqrt(2 / 50))
    again = metrics.random_perturbation(jax.random.key(1), params, 0.25)
    assert metrics.distance(again, moved) > 0.25  # nearly orthogonal: √2 · 0.25
    assert (
        metrics.distance(metrics.random_perturbation(jax.random.key(0), params, 0.0), params) == 0
    )


def test_random_perturbation_of_leaves_in_several_precisions():
    params = [jnp.ones(5, jnp.float32), jnp.ones(7, jnp.float64)]
    moved = metrics.random_perturbation(jax.random.key(0), params, 0.5)
    assert [leaf.dtype for leaf in moved] == [jnp.float32, jnp.float64]
    assert metrics.distance(moved, params) == pytest.approx(0.5, rel=1e-5)


def test_random_perturbation_errors():
    with pytest.raises(ValueError, match="norm must be"):
        metrics.random_perturbation(jax.random.key(0), PARAMS, -1.0)
    with pytest.raises(ValueError, match="no floating leaf"):
        metrics.random_perturbation(jax.random.key(0), {"n": 3}, 1.0)


OUTPUTS = np.array([[2.0, 1.0, 0.0], [0.0, 0.5, 0.4], [0.0, 0.1, 0.2], [1.0, 0.0, 3.0]])


def test_accuracy_of_several_outputs():
    labels = np.array([0, 2, 2, 2])
    assert metrics.accuracy(OUTPUTS, labels) == 0.75
    assert metrics.accuracy(jnp.asarray(OUTPUTS), np.eye(3)[labels]) == 0.75
    assert metrics.accuracy(OUTPUTS, 0.7 * np.eye(3)[labels] + 0.1) == 0.75


def test_accuracy_of_one_output():
    f = np.array([[1.0], [-1.0], [0.0], [0.2]])
    for labels in ([1, -1, 1, -1], [1.0, 0.0, 1.0, 0.0], [[1], [0], [1], [0]]):
        assert metrics.accuracy(f, np.asarray(labels)) == 0.5
    assert metrics.accuracy(f, np.array([True, False, False, True])) == 1


@pytest.mark.parametrize(
    ("outputs", "labels", "error", "message"),
    [
        (OUTPUTS, [0, 1, 2, 3], ValueError, r"labels must be in \[0, 3\), got 3"),
        (OUTPUTS, [0, 1, 2, -1], ValueError, r"got -1"),
        (OUTPUTS, [0.0, 1.0, 2.0, 1.0], TypeError, "must be integers"),
        (OUTPUTS, [0, 1], ValueError, "expected 4 rows"),
        (OUTPUTS, np.ones((4, 3)), ValueError, "row 0 have no single largest entry"),
        (OUTPUTS, np.ones((4, 2)), ValueError, r"\(n,\) or \(n, 3\)"),
        (OUTPUTS * np.nan, [0, 1, 2, 1], ValueError, "outputs: every entry must be finite"),
        (OUTPUTS[:, 0], [0, 1, 2, 1], ValueError, r"shape \(n, c\)"),
        (np.zeros((0, 3)), [], ValueError, "not empty"),
        (OUTPUTS[:, :1], [0, 1, -1, 1], ValueError, "all -1/\\+1 or all 0/1"),
        (OUTPUTS[:, :1], [0.0, 0.5, 1.0, 1.0], ValueError, "Threshold"),
        (OUTPUTS[:, :1], np.ones((4, 2)), ValueError, r"\(n,\) or \(n, 1\)"),
    ],
)
def test_accuracy_errors(outputs, labels, error, message):
    with pytest.raises(error, match=message):
        metrics.accuracy(outputs, np.asarray(labels))


def test_unlearning_report():
    calls = []

    def predict(x):
        calls.append(len(x))
        return OUTPUTS[x]

    x, y = np.arange(4), np.array([0, 2, 2, 2])
    report = metrics.unlearning_report(predict, x, y, [1, 0], x_test=x[:1], y_test=y[:1])
    assert report == metrics.UnlearningReport(forgotten=0.5, retained=1.0, test=1.0)
    assert calls == [4, 1]
    with pytest.raises(ValueError, match=r"indices must be in \[0, 4\)"):
        metrics.unlearning_report(predict, x, y, [4], x_test=x, y_test=y)
    with pytest.raises(ValueError, match="none is retained"):
        metrics.unlearning_report(predict, x, y, x, x_test=x, y_test=y)
