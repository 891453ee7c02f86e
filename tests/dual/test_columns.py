"""Many columns of weights take the Newton steps that a single one takes, with the same guards."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.dual._reweighted import reweighted
from dualfluence.problem._objective import State


def _fit(n, c, ridge, *, targets=None, loss=None, weights=None, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 20))
    y = rng.normal(size=(n, c)) if targets is None else targets
    model = dfl.linearize(lambda theta, x: x @ theta, jnp.zeros((20, c)))
    options = {"loss": loss or dfl.SquaredError(), "ridge": ridge, "kernel": "dense"}
    return dfl.fit(model, x, y, weights=weights, progress=False, **options)


def _without(fitted, groups):
    weights = np.repeat(np.asarray(fitted.data.sample_weights)[:, None], len(groups), axis=1)
    for column, group in enumerate(groups):
        weights[group, column] = 0
    return weights


def _retrained(fitted, weights):
    """Parameters trained without a group in closed form, for squared error."""
    x, y = np.asarray(fitted.x), np.asarray(fitted.data.targets)
    w = weights / weights.sum()
    A = x.T @ (w[:, None] * x) + fitted.ridge * np.eye(x.shape[1])
    return np.linalg.solve(A, x.T @ (w[:, None] * y))


@pytest.mark.parametrize(
    ("ridge", "most"), [pytest.param(1e-3, 1.3, marks=pytest.mark.thorough), (1e-6, 2)]
)
def test_bounds_of_one_step_are_those_of_an_edit_with_hundreds_of_points(ridge, most):
    fitted, groups = _fit(300, 2, ridge), [[0], list(range(10)), list(range(150))]
    # A committed edit leaves a sum of products behind, whose rounding later bounds have to carry.
    fitted = fitted.edit(dfl.Reweight([299], [2.0])).commit()
    weights = _without(fitted, groups)
    got = reweighted(fitted, weights)
    for j, group in enumerate(groups):
        one = fitted.edit(dfl.Remove(group), solver=dfl.CG())
        # The same iteration with sums in another order. At the small ridge most of the bound is what CG
        # leaves at its tolerance, divided by the ridge. A compiler's option changed that by a factor of 1.4.
        near = got.distance_bound[j] / one.certificate.distance_bound
        assert 1 / most <= near <= most
        off = fitted.x.T @ got.alpha[:, :, j] - _retrained(fitted, weights[:, j])
        assert np.linalg.norm(off) <= got.distance_bound[j]


def test_a_run_in_a_batch_takes_the_steps_of_a_single_one():
    rng = np.random.default_rng(1)
    fitted = _fit(60, 3, 1e-3, targets=rng.integers(0, 3, 60), loss=dfl.SoftmaxCrossEntropy())
    groups = [[0], list(range(20)), list(range(40))]
    got = reweighted(fitted, _without(fitted, groups), until=1e-8)
    assert got.converged.all()
    assert (got.distance_bound <= 1e-8).all()
    for j, group in enumerate(groups):
        one = fitted.edit(dfl.Remove(group), until=1e-9)
        off = np.asarray(fitted.x).T @ np.asarray(got.alpha[:, :, j] - one.alpha)
        assert np.linalg.norm(off) <= 1.1e-8


def test_weights_whose_sum_overflows_are_normalised_like_those_of_a_fit():
    fitted = _fit(12, 1, 1e-2)
    weights = _without(fitted, [[0], [1]])
    want = reweighted(fitted, weights)
    got = reweighted(fitted, weights * 1.5e308)
    np.testing.assert_allclose(got.alpha, want.alpha, rtol=1e-13)


@pytest.mark.parametrize("until", [None, 1e-6])
def test_a_gradient_that_is_not_finite_is_the_error_of_a_fit(until):
    fitted = _fit(12, 1, 1e-2)
    broken = replace(fitted, state=State(fitted.state.alpha, fitted.state.k_alpha * np.nan))
    with pytest.raises(dfl.NotFinite, match="attribute: the gradient is not finite"):
        reweighted(broken, _without(fitted, [[0], [1]]), until=until)


def test_a_right_hand_side_of_zero_is_solved():
    # α = 0 is the optimum for any weights, so that nothing is left for a step to do.
    fitted = _fit(12, 1, 1e-3, targets=np.zeros((12, 1)))
    got = reweighted(fitted, _without(fitted, [[0], [1]]))
    assert got.converged.all()
    np.testing.assert_array_equal(got.alpha, 0)
