"""Measures of forgetting against their definitions, and the order that methods must come in."""

import math

import numpy as np
import pytest

import cases
import dualfluence as dfl
import problems
from dualfluence.unlearning import _forget_linear, _forget_network, _metrics


def test_margins_are_those_of_the_definition():
    z = np.array([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]])
    want = [2 - math.log(math.exp(1) + math.exp(0.5)), 0 - math.log(math.exp(-1) + math.exp(3))]
    np.testing.assert_allclose(dfl.unlearning.margins(z, np.array([1, 0])), want)
    assert dfl.unlearning.margins(np.array([[2.0], [2.0]]), np.array([1, 0])).tolist() == [2, -2]


def test_klom_is_the_divergence_of_two_histograms():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(100, 1)), rng.normal(0.5, size=(100, 1))
    edges = np.linspace(min(a.min(), b.min()), max(a.max(), b.max()), 21)
    p, q = (np.histogram(each, edges)[0] / 100 for each in (a, b))
    q = np.maximum(q, 1e-5)
    want = sum(pi * math.log(pi / qi) for pi, qi in zip(p, q, strict=True) if pi > 0)
    np.testing.assert_allclose(dfl.unlearning.klom(a, b), [want])


def test_klom_of_the_same_is_zero_and_far_apart_is_the_floor():
    a = np.random.default_rng(0).normal(size=(50, 3))
    np.testing.assert_array_equal(dfl.unlearning.klom(a, a), 0)
    # All mass where the other has the floor: log(1e5), less what the spread over a bin gives back.
    far = dfl.unlearning.klom(np.full((50, 1), 1e9), np.full((50, 1), -1e9))
    np.testing.assert_allclose(far, math.log(1e5))
    np.testing.assert_array_equal(dfl.unlearning.klom(np.ones((5, 1)), np.ones((5, 1))), 0)
    with pytest.raises(ValueError, match="same points"):
        dfl.unlearning.klom(np.zeros((5, 2)), np.zeros((5, 3)))


def test_auc_counts_pairs():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 9, 30), rng.integers(0, 9, 40)
    want = np.mean((a[:, None] > b[None, :]) + 0.5 * (a[:, None] == b[None, :]))
    np.testing.assert_allclose(dfl.unlearning.membership_auc(a, b), want)


def test_ours_is_nearer_to_retraining_than_the_baselines():
    p = problems.linear_problem(24, 2, 30, "softmax", ridge=0.05)
    y = p.labels
    fitted = dfl.fit(
        cases.model(p), p.x, y, loss=dfl.SoftmaxCrossEntropy(), ridge=0.05, progress=False
    )
    setting = _metrics.Setting(np.array([1, 2, 3]), p.x_q, y, np.array([0, 1, 0]))
    exact = fitted.retrain(dfl.Remove(setting.forgotten), progress=False)
    names = ("retraining", *_forget_linear.METHODS)
    found = {name: [_forget_linear.forget_linear(fitted, exact, setting, name)] for name in names}
    away = {name: each[0].distance for name, each in found.items()}
    assert away["retraining"] < 1e-9
    assert away["ours, two steps"] < away["ours, one step"] < 0.2
    # On a linearised model the step in parameter space is the same step.
    np.testing.assert_allclose(away["parameter space"], away["ours, one step"], rtol=1e-3)
    np.testing.assert_allclose(away["no unlearning"], 1)
    for name in ("gradient ascent", "fine-tuning"):
        assert away["ours, one step"] < away[name]
    rows = [
        _metrics.measure_forgetting(name, found[name], found["retraining"], setting)
        for name in names
    ]
    assert rows[0].klom_forgotten == (0, 0)
    table = dfl.unlearning.forgetting_table(rows)
    assert len(table.splitlines()) == 2 + len(names)
