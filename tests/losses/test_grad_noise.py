"""What rounding can add to a gradient: the curvature carries the outputs' noise, and the terms round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import oracles
import problems

CONVEX = dfl.Convex(lambda f, y: jax.nn.logsumexp(f) - jnp.sum(y * f))
ALL = {**cases.LOSSES, "convex": CONVEX}
N, C = 40, 4


def problem(name, scale=2.0):
    rng = np.random.default_rng(0)
    oracle = "softmax" if name == "convex" else name
    f, y = scale * rng.normal(size=(N, C)), problems.make_targets(rng, N, C, oracle)
    targets = ALL[name].prepare_targets(y, C, jnp.float64)
    return f, np.asarray(targets), oracle, rng.uniform(0.5, 2, (N, C))


@pytest.mark.parametrize("name", ALL)
def test_noise_of_the_outputs_is_carried_by_the_absolute_curvature(name):
    f, y, oracle, noise = problem(name)
    args = jnp.asarray(f), jnp.asarray(y)
    got = ALL[name].grad_noise(*args, jnp.asarray(noise))
    hess = np.abs(oracles.LOSSES[oracle](f, y)[2])
    # The rest is rounding, a few 1e-15 of terms up to ten.
    np.testing.assert_allclose(got, np.einsum("nab,nb->na", hess, noise), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ALL)
def test_the_noise_without_noisy_outputs_is_what_float32_rounds(name):
    f, y, oracle, _ = problem(name)
    f, y = f.astype(np.float32), y.astype(np.float32)
    args = jnp.asarray(f), jnp.asarray(y)
    bound = np.asarray(ALL[name].grad_noise(*args, jnp.zeros_like(args[0])), float)
    exact = oracles.LOSSES[oracle](f.astype(float), y.astype(float))[1]
    error = np.abs(np.asarray(ALL[name].grad(*args), float) - exact)
    # An elementary function may be off by a few units more than the terms themselves.
    assert (error <= 4 * bound).all()
    eps = np.finfo(np.float32).eps
    units = 80 if name == "convex" else 8  # Convex knows nothing of its function
    assert (bound <= units * eps * (1 + np.abs(f).max(1, keepdims=True))).all()
    assert (bound > 0).all()


def test_a_single_class_has_no_gradient_and_no_noise():
    zero = jnp.zeros((2, 1))
    noise = dfl.SoftmaxCrossEntropy().grad_noise(zero, jnp.ones((2, 1)), zero)
    assert np.array_equal(noise, np.zeros((2, 1)))


def test_a_gradient_that_underflows_has_noise():
    far = jnp.asarray([[800.0, -800.0]])
    for name, target in (("softmax", [[1.0, 0.0]]), ("logistic", [[1.0, 0.0]])):
        noise = ALL[name].grad_noise(far, jnp.asarray(target), jnp.zeros((1, 2)))
        assert (noise > 0).all()
        assert (noise < 1e-200).all()


@pytest.mark.parametrize(
    ("fn", "low"),
    [
        (lambda f, y: (f[0] - y[0]) ** 2 + 0.25 * (f[1] - y[1]) ** 2, 0.25),
        (lambda f, y: (f[0] - y[0]) ** 2 - 0.5 * f[1] ** 2, -0.5),
    ],
)
def test_a_convex_loss_says_how_convex_it_is(fn, low):
    f, y = jnp.asarray([[0.3, -0.2], [0.1, 0.4]]), jnp.asarray([[0.5, 0.1], [0.2, 0.3]])
    factor = dfl.Convex(fn).hess_factor(f, y, jnp.ones(2))
    np.testing.assert_allclose(factor.min_curvature, low, atol=1e-15)


def test_curvature_that_cancels_is_measured_against_the_slope():
    # Far from its target, sqrt(1 + r²) has a curvature of r⁻³ beside terms of size 1/r.
    fn = dfl.Convex(lambda f, y: jnp.sum(jnp.sqrt(1 + (f - y) ** 2)))
    for f, y in ((1e3, 0.0), (0.0, 1e3)):
        factor = fn.hess_factor(jnp.asarray([[f]]), jnp.asarray([[y]]), jnp.ones(1))
        np.testing.assert_allclose(factor.min_curvature, 1e-9 / 1e-3, rtol=1e-3)
