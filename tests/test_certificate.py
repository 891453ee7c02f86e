"""The certificate is never below the true distance, and the check that says so can fail."""

import equinox as eqx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cases
import dualfluence as dfl
import oracles
import problems
from dualfluence.solvers import AbstractDualSolver

N, C, P = 12, 2, 30
EXAMPLES = 200

problem_settings = st.fixed_dictionaries(
    {
        "loss_name": st.sampled_from(problems.LOSS_NAMES),
        "seed": st.integers(0, 10**6),
        "ridge": st.floats(1e-3, 3.0),
        "weighted": st.booleans(),
        "steps": st.integers(1, 3),
        "gone": st.sets(st.integers(0, N - 1), min_size=1, max_size=N - 1),
    }
)


def _bound_and_distance(loss_name, seed, ridge, weighted, steps, gone):
    p = problems.linear_problem(N, C, P, loss_name, seed=seed, ridge=ridge, weighted=weighted)
    gone = np.array(sorted(gone))
    update = cases.fit(p).edit(dfl.Remove(gone), steps=steps)
    s = cases.without(p, gone)
    true = cases.retrain(p, s)
    # The oracle stops near 1e-13 itself: its own gradient bounds how far it is from the optimum.
    loss, w = oracles.LOSSES[loss_name], oracles.normalise(s)
    left = np.linalg.norm(oracles.gradient(true, p.J, p.f0, p.y, w, ridge, loss)) / ridge
    left += 10 * np.finfo(float).eps * np.linalg.norm(true)
    distance = np.linalg.norm(np.asarray(update.params()) - true)
    return float(update.certificate.distance_bound), max(distance - left, 0.0)


@pytest.mark.thorough
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problem_settings)
def test_bound_is_never_below_the_true_distance(drawn):
    bound, distance = _bound_and_distance(**drawn)
    assert distance <= bound


def test_the_check_would_catch_a_wrong_certificate():
    """A bound with λ twice too large, or half the gradient, is caught on the same problems."""
    rng = np.random.default_rng(0)
    ratios = []
    for seed in range(30):
        gone = set(rng.choice(N, 4, replace=False).tolist())
        bound, distance = _bound_and_distance("softmax", seed, 0.02, False, 1, gone)
        ratios.append(bound / distance)
    assert min(ratios) >= 1
    assert min(ratios) < 2, "a certificate of half the size would pass unnoticed"


def test_bound_is_tight_enough_to_be_useful():
    p = problems.linear_problem(N, C, P, "softmax", ridge=0.05)
    gone = [0, 1]
    update = cases.fit(p).edit(dfl.Remove(gone))
    distance = np.linalg.norm(
        np.asarray(update.params()) - cases.retrain(p, cases.without(p, gone))
    )
    assert float(update.certificate.distance_bound) < 50 * distance


def test_gradient_norm_is_the_parameter_space_gradient():
    p = problems.linear_problem(N, C, P, "logistic", ridge=0.05)
    gone = [3, 4, 5]
    update = cases.fit(p).edit(dfl.Remove(gone))
    w = oracles.normalise(cases.without(p, gone))
    theta = np.asarray(update.params())
    want = oracles.gradient(theta, p.J, p.f0, p.y, w, p.ridge, oracles.logistic)
    np.testing.assert_allclose(update.certificate.gradient_norm, np.linalg.norm(want), rtol=1e-8)
    np.testing.assert_allclose(update.certificate.parameter_norm, np.linalg.norm(theta), rtol=1e-10)


def test_float32_bound_covers_the_distance_to_the_float64_truth():
    import jax.numpy as jnp

    for seed in range(10):
        p = problems.linear_problem(N, C, P, "squared", seed=seed, ridge=0.05)
        update = cases.fit(p, dtype=jnp.float32).edit(dfl.Remove([0, 1, 2]))
        given = p.x.astype("float32").astype(float)  # the features that the fit was given
        true = cases.retrain(p, cases.without(p, [0, 1, 2]), x=given)
        distance = np.linalg.norm(np.asarray(update.params(), float) - true)
        assert distance <= float(update.certificate.distance_bound)


class Drifting(AbstractDualSolver):
    """Solves well, but misreports the product with `K` by a part in a million."""

    def solve(self, *args, **options):
        solution = dfl.CG().solve(*args, **options)
        return eqx.tree_at(lambda s: s.k_value, solution, solution.k_value * (1 + 1e-6))


def test_certificate_comes_from_a_product_of_its_own():
    """A running `Kα` that has drifted makes the loop go on; it never enters the certificate."""
    p = problems.linear_problem(N, C, P, "softmax", ridge=0.02)
    fitted = cases.fit(p, solver=Drifting())
    assert fitted.certificate.relative_bound <= 1e-10
    true = cases.retrain(p, p.sample_weights)
    distance = np.linalg.norm(np.asarray(fitted.params()) - true)
    assert distance <= 1e-10 * np.linalg.norm(true) + 1e-13
    gone = [0, 5]
    update = fitted.edit(dfl.Remove(gone), until=1e-9, solver=Drifting())
    true = cases.retrain(p, cases.without(p, gone))
    assert np.linalg.norm(np.asarray(update.params()) - true) <= 1e-9
