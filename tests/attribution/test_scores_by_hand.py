"""Scores of a linear softmax model, and measures of scores, against NumPy written out: the quick part."""

import jax.numpy as jnp
import numpy as np
import pytest

from dualfluence import attribution
from dualfluence.attribution import evaluate

RNG = np.random.default_rng(0)
N, Q, P, C = 5, 2, 3, 3
X, XQ = RNG.normal(size=(N, P)), RNG.normal(size=(Q, P))
Y, YQ = np.array([0, 1, 2, 1, 0]), np.array([2, 0])
THETAS = [RNG.normal(size=(P, C)) * s for s in (0.3, 1.0)]


def linear(params, x):
    return x @ params


def probabilities(theta, x):
    e = np.exp(x @ theta)
    return e / e.sum(axis=1, keepdims=True)


def loss_gradients(theta, x, y):
    """`(n, p·c)`: gradient of each point's cross-entropy in the parameters."""
    g = probabilities(theta, x) - np.eye(C)[y]
    return np.einsum("np,nc->npc", x, g).reshape(len(x), -1)


def margin_gradients(theta, x, y):
    """Of the own output less the log-sum-exp of the others."""
    rows = []
    for f, k in zip(x @ theta, y, strict=True):
        others = np.where(np.arange(C) == k, 0, np.exp(f))
        rows.append(np.eye(C)[k] - others / others.sum())
    return np.einsum("np,nc->npc", x, np.array(rows)).reshape(len(x), -1)


def products(theta):
    return loss_gradients(theta, XQ, YQ) @ loss_gradients(theta, X, Y).T / N


def test_gradient_products():
    theta = THETAS[0]
    dots = attribution.GradDot(linear, jnp.asarray(theta)).attribute(X, Y, XQ, YQ)
    np.testing.assert_allclose(dots.values, products(theta), rtol=1e-10)
    # A near and helpful point: leaving it out raises the loss, so that its own product is positive.
    assert (np.diag(attribution.gradient_dot(linear, theta, X, Y, X, Y)) > 0).all()
    a, b = loss_gradients(theta, XQ, YQ), loss_gradients(theta, X, Y)
    cosines = (a @ b.T) / np.linalg.norm(a, axis=1)[:, None] / np.linalg.norm(b, axis=1)
    found = attribution.GradCos(linear, jnp.asarray(theta)).attribute(X, Y, XQ, YQ)
    np.testing.assert_allclose(found.values, cosines, rtol=1e-10)


def test_products_along_a_run_are_summed_with_their_rates():
    rates = [0.5, 0.1]
    found = attribution.TracIn(linear, [*map(jnp.asarray, THETAS)], rates).attribute(X, Y, XQ, YQ)
    want = sum(rate * products(theta) for rate, theta in zip(rates, THETAS, strict=True))
    np.testing.assert_allclose(found.values, want, rtol=1e-10)


def test_trak_averages_both_factors_over_models():
    damping, left, right = 0.05, 0, 0
    for theta in THETAS:
        phi, phi_q = margin_gradients(theta, X, Y), margin_gradients(theta, XQ, YQ)
        K = phi @ phi.T
        K = K + damping * np.mean(np.diag(K)) * np.eye(N)
        left = left + phi_q @ phi.T @ np.linalg.inv(K) / 2
        right = right + (1 - probabilities(theta, X)[np.arange(N), Y]) / 2
    found = attribution.TRAK(linear, [*map(jnp.asarray, THETAS)], damping=damping)
    np.testing.assert_allclose(found.attribute(X, Y, XQ, YQ).values, left * right, rtol=1e-8)


def influence(theta, ridge):
    """`w_i ∇ℓ_q·(H + λI)⁻¹∇ℓ_i`, with root mean square one for each query."""
    p = probabilities(theta, X)
    H = ridge * np.eye(P * C)
    for x, q in zip(X, p, strict=True):
        J = np.kron(x[None], np.eye(C))  # (c, p·c)
        H = H + J.T @ (np.diag(q) - np.outer(q, q)) @ J / N
    S = loss_gradients(theta, XQ, YQ) @ np.linalg.solve(H, loss_gradients(theta, X, Y).T) / N
    return S / np.sqrt((S**2).mean(axis=1, keepdims=True))


def run(**options):
    steps, rate = [4, 10], [0.2, 0.1]
    return attribution.Trajectory(
        linear, [*map(jnp.asarray, THETAS)], steps=steps, learning_rate=rate, **options
    )


def test_checkpoints_of_a_run_are_influence_with_the_ridge_of_stopped_training():
    own = run(momentum=0.5, kappa=2.0)
    ridges = [(1 - 0.5) / (2 * 0.2 * 4), (1 - 0.5) / (2 * 0.1 * 10)]
    np.testing.assert_allclose([own.ridge(k) for k in range(2)], ridges, rtol=1e-12)
    each = [influence(theta, ridge) for theta, ridge in zip(THETAS, ridges, strict=True)]
    found = own.attribute(X, Y, XQ, YQ, combine="mean", progress=False).values
    np.testing.assert_allclose(found, np.mean(each, axis=0), rtol=1e-8)
    # Three independent draws: m·m²/(m² + v/3).
    mean, noise = np.mean(each, axis=0), np.var(each, axis=0) / 3
    found = own.attribute(X, Y, XQ, YQ, progress=False).values
    np.testing.assert_allclose(found, mean**3 / (mean**2 + noise), rtol=1e-8)


def ranks(values):
    """Mean rank of equal values."""
    return np.array(
        [np.mean([*range(int((values < v).sum()), int((values <= v).sum()))]) for v in values]
    )


def test_the_linear_datamodelling_score():
    masks = evaluate.random_masks(6, 7, seed=1)
    assert (masks.sum(axis=1) == 3).all()
    scores = RNG.normal(size=(3, 6))
    scores[0] = [1, 1, 1, 2, 2, 2]  # predictions with ties
    targets = RNG.normal(size=(7, 3))
    targets[:, 2] = 4.0  # a query that does not vary
    found = evaluate.lds(scores, masks, targets)
    want = []
    for q in range(2):
        predicted = [-sum(scores[q][i] for i in range(6) if row[i]) for row in masks]
        want.append(np.corrcoef(ranks(np.array(predicted)), ranks(targets[:, q]))[0, 1])
    np.testing.assert_allclose(found.per_query[:2], want, rtol=1e-12)
    assert np.isnan(found.per_query[2])
    np.testing.assert_allclose(found.value, np.mean(want), rtol=1e-12)
    assert found.interval[0] <= found.value <= found.interval[1]
    assert found.notes == ("1 queries do not vary and are left out",)


def test_the_noise_ceiling_of_two_repeats():
    repeats = RNG.normal(size=(1, 9, 2)) + 0.5 * RNG.normal(size=(2, 9, 2))
    r = [np.corrcoef(*(ranks(row) for row in repeats[:, :, q]))[0, 1] for q in range(2)]
    want = np.sqrt([2 * v / (1 + v) for v in r])
    np.testing.assert_allclose(evaluate.noise_ceiling(repeats).per_query, want, rtol=1e-12)
    same = np.repeat(repeats[:1], 4, axis=0)
    assert evaluate.noise_ceiling(same).value == pytest.approx(1, abs=1e-12)


def test_correlation_with_leaving_one_out_and_the_area_under_the_curve():
    a, b = RNG.normal(size=(2, 6)), RNG.normal(size=(2, 6))
    plain = [np.corrcoef(a[q], b[q])[0, 1] for q in range(2)]
    ranked = [np.corrcoef(ranks(a[q]), ranks(b[q]))[0, 1] for q in range(2)]
    np.testing.assert_allclose(evaluate.loo_correlation(a, b).per_query, plain, rtol=1e-12)
    found = evaluate.loo_correlation(a, b, rank=True)
    np.testing.assert_allclose(found.per_query, ranked, rtol=1e-12)
    suspicion, wrong = np.array([3.0, 1, 2, 2, 0]), np.array([1, 0, 1, 0, 0])
    pairs = [(3, 1), (3, 2), (3, 0), (2, 1), (2, 2), (2, 0)]
    want = np.mean([(s > t) + 0.5 * (s == t) for s, t in pairs])
    assert evaluate.mislabel_auc(suspicion, wrong) == pytest.approx(want, abs=1e-12)


def test_removal_curves_of_effects_that_add_up():
    """The loss of a query rises by a point's score when the point goes: known at every count."""
    effects = np.array([3.0, -1, 0.5, 2])
    curve = evaluate.removal_curve(
        np.stack([effects, effects]), lambda masks: (~masks) @ np.stack([effects] * 3).T, [0, 1, 3]
    )
    np.testing.assert_allclose(curve.helpful, [0, 3, 5.5], rtol=1e-12)
    np.testing.assert_allclose(curve.harmful, [0, -1, 1.5], rtol=1e-12)
    assert curve.random[0] == 0
    assert -1 <= curve.random[1] <= 3
