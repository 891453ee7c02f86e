"""Measures of forgetting against their definitions, and the order that methods must come in."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmark
import cases
import dualfluence as dfl
import problems
from users import ordinary

benchmark.load("forgetting")

from forgetting import linear, measures, network  # noqa: E402


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


@pytest.mark.thorough
def test_ours_is_nearer_to_retraining_than_the_baselines():
    p = problems.linear_problem(24, 2, 30, "softmax", ridge=0.05)
    y = p.labels
    fitted = dfl.fit(
        cases.model(p), p.x, y, loss=dfl.SoftmaxCrossEntropy(), ridge=0.05, progress=False
    )
    setting = measures.Setting(np.array([1, 2, 3]), p.x_q, y, np.array([0, 1, 0]))
    exact = fitted.retrain(dfl.Remove(setting.forgotten), progress=False)
    names = ("retraining", *linear.METHODS)
    found = {name: [linear.forget_linear(fitted, exact, setting, name)] for name in names}
    away = {name: each[0].distance for name, each in found.items()}
    assert away["retraining"] < 1e-9
    assert away["ours, two steps"] < away["ours, one step"] < 0.2
    # On a linearised model the step in parameter space is the same step.
    np.testing.assert_allclose(away["parameter space"], away["ours, one step"], rtol=1e-3)
    np.testing.assert_allclose(away["no unlearning"], 1)
    for name in ("gradient ascent", "fine-tuning"):
        assert away["ours, one step"] < away[name]
    rows = [
        measures.measure_forgetting(name, found[name], found["retraining"], setting)
        for name in names
    ]
    assert rows[0].klom_forgotten == (0, 0)
    table = measures.forgetting_table(rows)
    assert len(table.splitlines()) == 2 + len(names)


@ordinary
def _net(params, x):
    (W, b), (V, c) = params
    return jax.nn.tanh(x @ W + b) @ V + c


def _starts(keys, sizes=(3, 5, 3)):
    def one(key):
        inner, outer = jax.random.split(key)
        W = jax.random.normal(inner, sizes[:2]) / sizes[0] ** 0.5
        V = jax.random.normal(outer, sizes[1:]) / sizes[1] ** 0.5
        return [(W, jnp.zeros(sizes[1])), (V, jnp.zeros(sizes[2]))]

    return jax.vmap(one)(keys)


@functools.cache
def _trained(models=6):
    """Small networks that memorise random labels, so that forgetting shows."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 3)), rng.integers(0, 3, 20)
    setting = measures.Setting(
        np.array([0, 5, 11, 14]), rng.normal(size=(30, 3)), y, rng.integers(0, 3, 30)
    )
    loss = dfl.SoftmaxCrossEntropy()
    nets = network.Networks(_net, x, y, loss, 0.02, epochs=150, batch=5, rate=0.1)
    keys = jax.random.split(jax.random.key(0), 2 * models)
    params, gone = _starts(keys), nets.weights(setting.forgotten)
    exact = network.unstack(network.train(nets, params, keys, gone))
    first = jax.tree.map(lambda leaf: leaf[:models], params)
    before = network.train(nets, first, keys[:models], nets.weights())
    return nets, setting, network.unstack(before), exact[:models], exact[models:], keys


@pytest.mark.thorough
def test_networks_trained_together_are_those_of_plain_sgd():
    nets, setting, _, exact, _, keys = _trained()
    weights = nets.weights(setting.forgotten) * 20 / 16
    (W, b), (V, c) = [tuple(np.array(leaf[2]) for leaf in pair) for pair in _starts(keys)]
    p, v, done = [W, b, V, c], [0.0] * 4, 0
    for key in jax.random.split(keys[2], nets.epochs):
        for rows in np.array(jax.random.permutation(key, 20)).reshape(4, 5):
            W, b, V, c = p
            h = np.tanh(nets.x[rows] @ W + b)
            z = h @ V + c
            soft = np.exp(z) / np.exp(z).sum(1, keepdims=True)
            g = weights[rows][:, None] * (soft - np.eye(3)[nets.y[rows]]) / 5
            inner = (g @ V.T) * (1 - h**2)
            slopes = [nets.x[rows].T @ inner, inner.sum(0), h.T @ g, g.sum(0)]
            rate = 0.05 * (1 + math.cos(math.pi * done / (4 * nets.epochs)))
            v = [0.9 * a + s + 0.02 * q for a, s, q in zip(v, slopes, p, strict=True)]
            p, done = [q - rate * a for q, a in zip(p, v, strict=True)], done + 1
    # Float64 on both sides; 600 steps that contract amplify rounding little.
    for got, want in zip(jax.tree.leaves(exact[2]), p, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-8)


@pytest.mark.thorough
def test_forgotten_points_leave_no_trace_in_retraining():
    nets, setting, _, exact, _, keys = _trained()
    labels = nets.y.copy()
    labels[setting.forgotten] = (labels[setting.forgotten] + 1) % 3
    other = dataclasses.replace(nets, y=labels)
    gone = nets.weights(setting.forgotten)
    again = network.unstack(network.train(other, _starts(keys), keys, gone))
    for a, b in zip(jax.tree.leaves(again[0]), jax.tree.leaves(exact[0]), strict=True):
        np.testing.assert_array_equal(a, b)


def _rows(found, reference, nets, setting):
    held = network.judge(nets, reference, reference, found["retraining"][1], setting)
    return {
        name: measures.measure_forgetting(name, judged, held, setting)
        for name, (judged, _) in found.items()
    }


@pytest.mark.thorough
def test_no_unlearning_lies_above_the_floor_of_retraining():
    nets, setting, before, exact, reference, _ = _trained()
    judged = {
        "retraining": (network.judge(nets, exact, before, exact, setting), exact),
        "no unlearning": (network.judge(nets, before, before, exact, setting), exact),
    }
    rows = _rows(judged, reference, nets, setting)
    floor, nothing = rows["retraining"], rows["no unlearning"]
    assert floor.klom_forgotten[0] < nothing.klom_forgotten[0]
    assert floor.membership_auc < nothing.membership_auc
    assert floor.distance == 0
    np.testing.assert_allclose(nothing.distance, 1)


@pytest.mark.thorough
def test_a_method_that_returns_the_retrained_outputs_gets_the_floor():
    nets, setting, before, exact, reference, _ = _trained()
    floor = network.judge(nets, exact, before, exact, setting)
    perfect = [measures.Judged(each.train.copy(), each.test.copy(), 0.0) for each in floor]
    rows = _rows(
        {"retraining": (floor, exact), "perfect": (perfect, exact)}, reference, nets, setting
    )
    assert rows["perfect"]._replace(method="retraining") == rows["retraining"]
    assert measures.margin_error(perfect, floor, setting) == 0


@pytest.mark.thorough
def test_one_step_of_ours_is_the_gauss_newton_step_of_parameter_space_where_training_has_converged():
    nets, setting, before, _, _, keys = _trained()
    long = dataclasses.replace(nets, epochs=1500, batch=20, rate=0.3)
    params = network.train(long, network.stack(before[:1]), keys[:1], nets.weights())
    found = network.forget_one(long, network.unstack(params)[0], setting)
    ours, theirs = found["ours, one step"], found["parameter space"]
    # What is left of the gradient, over λ, is how far the two may be apart.
    left = ours.facts["gradient_norm"] / nets.ridge
    assert left < 1e-3
    assert dfl.metrics.distance(ours.params, theirs.params) < 2 * left + 1e-5


@pytest.mark.thorough
def test_methods_on_a_network_come_nearer_to_retraining_than_nothing_does():
    nets, setting, before, exact, _, keys = _trained()
    truth = network.judge(nets, exact, before, exact, setting)
    nothing = network.judge(nets, before, before, exact, setting)
    limit = measures.margin_error(nothing, truth, setting)
    judged, facts = network.forget_one_by_one(nets, before, exact, setting, 0.1)
    assert set(judged) == set(network.ONE_BY_ONE)
    for name in ("ours, one step", "parameter space", "parameter space, exact Hessian"):
        assert measures.margin_error(judged[name], truth, setting) < limit, name
    assert facts["ours, one step"]["parameter_gap"] < 0.5
    for name, rate in (("gradient ascent", 0.05), ("fine-tuning", 0.1)):
        moved = network.forget_by_gradients(
            nets, network.stack(before), keys[:6], setting.forgotten, name, rate
        )
        after = network.judge(nets, network.unstack(moved), before, exact, setting)
        assert measures.margin_error(after, truth, setting) < limit, name


@pytest.mark.thorough
def test_intervals_hold_the_value_and_are_the_same_again():
    nets, setting, before, exact, reference, _ = _trained()
    found = {"retraining": (network.judge(nets, before, before, exact, setting), exact)}
    row, again = (_rows(found, reference, nets, setting)["retraining"] for _ in range(2))
    assert row == again
    for name, (low, high) in row.intervals.items():
        value = getattr(row, name)
        assert low <= (value[0] if isinstance(value, tuple) else value) <= high
