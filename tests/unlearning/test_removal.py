"""Published models cannot be told from retrained ones better than claimed, and almost as well."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import problems
from dualfluence.unlearning import _removal

DRAWS = 200_000


def test_the_curve_is_that_of_two_gaussians():
    """`δ(ε)` against the integral `∫ max(p − e^ε q, 0)`."""
    t = np.linspace(-12, 14, 400_001)
    for mu in (0.1, 1.0, 3.0):
        p, q = (np.exp(-((t - m) ** 2) / 2) / math.sqrt(2 * math.pi) for m in (mu, 0))
        for epsilon in (0.1, 1.0, 4.0):
            want = np.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), t)
            # The trapezoid's error at this spacing.
            assert abs(dfl.unlearning.delta_of(epsilon, mu) - want) < 1e-9


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_calibration_inverts_the_curve(epsilon):
    mu = dfl.unlearning.mu_of(epsilon, 1e-5)
    np.testing.assert_allclose(dfl.unlearning.delta_of(epsilon, mu), 1e-5, rtol=1e-6)
    np.testing.assert_allclose(dfl.unlearning.epsilon_of(mu, 1e-5), epsilon, rtol=1e-6)
    assert dfl.unlearning.sigma_of(2.0, epsilon, 1e-5) == 2.0 / mu
    classic = 2.0 * math.sqrt(2 * math.log(1.25e5)) / epsilon
    if epsilon <= 1:
        assert 2.0 / mu < classic


def distinguish(first, second, start, end, epsilon):
    """Largest `P(S) − e^ε Q(S)` that draws show for the likelihood ratio's own set `S`."""
    along = (end - start) / np.linalg.norm(end - start)
    a, b = ((draws - start) @ along for draws in (first, second))
    best = 0.0
    for cut in np.quantile(a, np.linspace(0.005, 0.995, 199)):
        for sign in (1, -1):
            inside = [np.mean(sign * draws > sign * cut) for draws in (a, b)]
            best = max(best, inside[0] - math.exp(epsilon) * inside[1])
    return best


@pytest.fixture(scope="module")
def tight():
    """A ridge that outweighs the loss's curvature: the certificate is nearly the distance itself."""
    p = problems.linear_problem(12, 1, 6, "logistic", ridge=5.0)
    fitted = cases.fit(p)
    update = fitted.edit(dfl.Remove([2]), progress=False)
    theta = np.asarray(fitted.params()), cases.retrain(p, cases.without(p, [2]))
    return p, fitted, update, theta


@pytest.mark.parametrize("epsilon", [0.5, 1.0])
def test_the_claim_holds_is_close_and_half_the_noise_is_caught(tight, epsilon):
    """The model before the removal stands for an answer that is late: its certificate says how late."""
    _, fitted, _, (late, exact) = tight
    problem = fitted.problem(dfl.Remove([2]).apply(fitted.data, fitted.loss, 1))
    rho = np.asarray(problem.residual(fitted.state))
    K = np.asarray(fitted.kernel_op.dense())
    bound = math.sqrt(rho.ravel() @ K @ rho.ravel()) / fitted.ridge
    assert np.linalg.norm(late - exact) <= bound <= 1.1 * np.linalg.norm(late - exact)
    delta = 0.05
    sigma = dfl.unlearning.sigma_of(bound, epsilon, delta)
    rng = np.random.default_rng(0)

    def draws(center, noise):
        return center + noise * rng.standard_normal((DRAWS, center.size))

    shown = distinguish(draws(late, sigma), draws(exact, sigma), exact, late, epsilon)
    # Four standard errors of a difference of two shares, the second weighed by e^ε.
    slack = 4 * math.sqrt((1 + math.exp(epsilon) ** 2) * 0.25 / DRAWS)
    assert shown <= delta + slack
    assert shown >= 0.7 * delta
    half = distinguish(draws(late, sigma / 2), draws(exact, sigma / 2), exact, late, epsilon)
    assert half > delta + 10 * slack


def test_perturbed_parameters_have_the_stated_noise():
    rng = np.random.default_rng(0)
    params = {"a": jnp.zeros((300, 300)), "n": 3}
    noisy = _removal.perturbed(params, 0.5, rng)
    assert noisy["n"] == 3
    # A standard deviation of 90,000 numbers is within 4/√180,000 of the truth.
    assert abs(np.std(noisy["a"]) / 0.5 - 1) < 4 / math.sqrt(2 * 90_000)


@pytest.mark.thorough
def test_outputs_get_noise_of_the_kernel():
    p, sigma_nn, _ = problems.kronecker_problem(12, 2, 20, "squared", ridge=0.1)
    kernel = dfl.PrecomputedKernel(jnp.asarray(sigma_nn))
    options = {"loss": dfl.SquaredError(), "ridge": 0.1, "progress": False}
    fitted = dfl.fit(kernel, np.arange(12), p.y, **options)
    rng, xq = np.random.default_rng(0), np.array([0, 3, 5])
    K = np.kron(sigma_nn[np.ix_(xq, xq)], np.eye(2))
    mean = np.asarray(fitted.predict(xq)).ravel()
    root_draws = 2000
    noise = np.stack(
        [
            np.asarray(_removal.perturbed_outputs(fitted, xq, 0.3, rng)).ravel() - mean
            for _ in range(root_draws)
        ]
    )
    scale = 0.09 * np.abs(K).max()
    # Entries of a covariance of 2,000 draws: four standard errors of √(2/2000).
    np.testing.assert_allclose(
        noise.T @ noise / root_draws, 0.09 * K, atol=4 * scale * math.sqrt(1e-3)
    )


def test_the_budget_adds_up_survives_and_asks_for_retraining(tmp_path):
    p = problems.linear_problem(16, 2, 24, "softmax", ridge=0.1)
    fitted = cases.fit(p)
    with dfl.unlearning.open(tmp_path, fitted) as desk:
        desk.remove([3])
        bound = desk.certificate.distance_bound
        sigma = bound / (0.7 * dfl.unlearning.mu_of(1.0, 1e-3))
        publisher = dfl.unlearning.Publisher(desk, epsilon=1.0, delta=1e-3, sigma=sigma)
        first, second = publisher.params(), publisher.params()
        assert not first.retrained
        assert not second.retrained
        np.testing.assert_allclose(second.mu_total, math.sqrt(2) * first.mu)
        third = publisher.params()
        assert third.retrained
        assert third.epsilon <= 1.0
        assert desk.certificate.distance_bound < 1e-6 * bound
        spent, digest = publisher.spent, desk.model_digest
    with dfl.unlearning.open(tmp_path, fitted) as desk:
        assert desk.model_digest == digest
        publisher = dfl.unlearning.Publisher(desk, epsilon=1.0, delta=1e-3, sigma=sigma)
        assert publisher.spent == spent
        tiny = dfl.unlearning.Publisher(desk, epsilon=1.0, delta=1e-3, sigma=1e-30)
        with pytest.raises(dfl.unlearning.BudgetSpent, match="even after"):
            tiny.params()


def test_a_model_without_certificate_is_not_published(tmp_path):
    p = problems.linear_problem(16, 2, 24, "softmax", ridge=0.1)
    fitted = cases.fit(p)
    wild = dataclasses.replace(fitted.certificate, certified=False)
    fitted = dataclasses.replace(fitted, certificate=wild)
    with dfl.unlearning.open(tmp_path, fitted) as desk:
        publisher = dfl.unlearning.Publisher(desk, epsilon=1.0, delta=1e-3, sigma=1.0)
        with pytest.raises(ValueError, match="no certificate"):
            publisher.params()
