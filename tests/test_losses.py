"""Losses against the NumPy oracles and finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import oracles
import problems

CONVEX_SOFTMAX = dfl.Convex(lambda f, y: jax.nn.logsumexp(f) - jnp.sum(y * f))
ALL = {**cases.LOSSES, "convex": CONVEX_SOFTMAX}


def _data(name, n=6, c=4, scale=3.0):
    rng = np.random.default_rng(1)
    oracle = "softmax" if name == "convex" else name
    return scale * rng.normal(size=(n, c)), problems.make_targets(rng, n, c, oracle), oracle


@pytest.mark.parametrize("name", ALL)
def test_value_gradient_and_hessian_are_the_oracles(name):
    f, y, oracle = _data(name)
    loss = ALL[name]
    targets = loss.prepare_targets(y, 4, jnp.float64)
    value, grad, hess = oracles.LOSSES[oracle](f, y)
    np.testing.assert_allclose(loss.value(jnp.asarray(f), targets), value, rtol=1e-12)
    np.testing.assert_allclose(loss.grad(jnp.asarray(f), targets), grad, rtol=1e-12, atol=1e-14)
    v = np.random.default_rng(2).normal(size=f.shape)
    want = np.einsum("nab,nb->na", hess, v)
    got = loss.hess_mv(jnp.asarray(f), targets, jnp.asarray(v))
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ALL)
def test_factor_squares_to_the_weighted_hessian(name):
    f, y, oracle = _data(name)
    w = np.array([0.0, 0.1, 0.5, 2.0, 1.0, 1e-8])
    loss = ALL[name]
    targets = loss.prepare_targets(y, 4, jnp.float64)
    factor = loss.hess_factor(jnp.asarray(f), targets, jnp.asarray(w))
    hess = w[:, None, None] * oracles.LOSSES[oracle](f, y)[2]
    eye = jnp.broadcast_to(jnp.eye(4), (6, 4, 4))
    # Roots of the block amplify rounding of small eigenvalues: absolute, not relative.
    np.testing.assert_allclose(factor.hess_mv(eye), hess, atol=1e-14)
    np.testing.assert_allclose(
        np.broadcast_to(factor.hess_diagonal(), (6, 4)), np.einsum("naa->na", hess), atol=1e-14
    )
    R = np.asarray(factor.mv(eye))
    np.testing.assert_allclose(factor.rmv(eye), np.swapaxes(R, 1, 2), atol=1e-14)


def test_softmax_takes_indices_or_probabilities():
    loss = dfl.SoftmaxCrossEntropy()
    by_index = loss.prepare_targets(np.array([2, 0]), 3, jnp.float32)
    by_row = loss.prepare_targets(np.array([[0, 0, 1.0], [1, 0, 0]]), 3, jnp.float32)
    np.testing.assert_array_equal(by_index, by_row)


@pytest.mark.parametrize("name", ["softmax", "logistic"])
def test_extreme_outputs_stay_finite(name):
    f = jnp.asarray([[1e4, -1e4, 0.0]])
    loss = cases.LOSSES[name]
    y = loss.prepare_targets(np.array([[0.0, 1.0, 0.0]]), 3, jnp.float64)
    factor = loss.hess_factor(f, y, jnp.ones(1))
    for value in (loss.value(f, y), loss.grad(f, y), factor.mv(f), factor.rmv(f)):
        assert bool(jnp.isfinite(value).all())


@pytest.mark.parametrize(
    ("loss", "targets", "words"),
    [
        (dfl.SoftmaxCrossEntropy(), np.array([0, 3]), r"labels must be in \[0, 3\), got 3"),
        (dfl.SoftmaxCrossEntropy(), np.array([-1, 0]), r"got -1"),
        (dfl.SoftmaxCrossEntropy(), np.array([[0.5, 0.1, 0.1]]), "sum to one"),
        (dfl.SoftmaxCrossEntropy(), np.array([[1.5, -0.5, 0.0]]), "non-negative"),
        (dfl.SoftmaxCrossEntropy(), np.array([[1.0, 0.0]]), r"shape \(n, 3\)"),
        (dfl.Logistic(), np.array([[-1.0, 0, 1]]), r"\[0, 1\]"),
        (dfl.SquaredError(), np.array([[np.nan, 0, 0]]), "finite"),
        (dfl.SquaredError(), np.zeros((2, 2)), r"shape \(n, 3\)"),
    ],
)
def test_bad_targets_are_explained(loss, targets, words):
    with pytest.raises(ValueError, match=words):
        loss.prepare_targets(targets, 3, jnp.float64)


def test_float_labels_are_refused():
    with pytest.raises(TypeError, match="integers"):
        dfl.SoftmaxCrossEntropy().prepare_targets(np.array([0.0, 1.0]), 3, jnp.float64)
