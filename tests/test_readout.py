"""Predictions, changes of outputs and losses, and committing updates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import oracles
import problems


@pytest.fixture(scope="module", params=["softmax", "squared"])
def case(request):
    p = problems.linear_problem(20, 3, 120, request.param, ridge=0.05)
    fitted = cases.fit(p)
    return p, fitted, fitted.edit(dfl.Remove([2, 3, 7]))


def test_delta_outputs_is_equation_8(case):
    p, _, update = case
    want = oracles.paper_eq8(p.K_qn, np.asarray(update.delta_alpha))
    np.testing.assert_allclose(update.delta_outputs(p.x_q), want, rtol=1e-9)
    by_params = p.J_q @ (np.asarray(update.params()) - np.asarray(update.before.params()))
    np.testing.assert_allclose(update.delta_outputs(p.x_q), by_params, rtol=1e-8)


@pytest.mark.parametrize("with_ridge", [True, False])
def test_delta_loss_is_equations_9_and_13(case, with_ridge):
    p, fitted, update = case
    loss = oracles.LOSSES[p.loss_name]
    arguments = (
        p.K_qn,
        p.K,
        np.asarray(fitted.alpha),
        np.asarray(fitted.predict(p.x_q)),
        p.y_q,
        np.asarray(update.delta_alpha),
        p.ridge,
        loss,
    )
    want = oracles.paper_eq13(*arguments, with_ridge=with_ridge)
    got = update.delta_loss(p.x_q, p.y_q, first_order=True, include_ridge=with_ridge)
    np.testing.assert_allclose(got, want, rtol=1e-8)


@pytest.mark.parametrize("with_ridge", [True, False])
def test_delta_loss_is_the_difference_of_losses(case, with_ridge):
    p, fitted, update = case

    def total(theta):
        value = oracles.LOSSES[p.loss_name](oracles.outputs(theta, p.J_q, p.f0_q), p.y_q)[0]
        return value + (0.5 * p.ridge * theta @ theta if with_ridge else 0)

    want = total(np.asarray(update.params())) - total(np.asarray(fitted.params()))
    got = update.delta_loss(p.x_q, p.y_q, include_ridge=with_ridge)
    np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-12)


def test_delta_loss_of_the_network_itself():
    rng = np.random.default_rng(0)
    x, y, x_q, y_q = (rng.normal(size=s) for s in ((12, 4), (12, 2), (5, 4), (5, 2)))
    model = dfl.linearize(cases.mlp, cases.mlp_params(jax.random.key(0), (4, 6, 2)))
    fitted = dfl.fit(model, x, y, loss=dfl.SquaredError(), ridge=0.05, progress=False)
    update = fitted.edit(dfl.Remove([0, 5]))
    before, after = (np.asarray(cases.mlp(f.params(), x_q)) for f in (fitted, update))
    value, grad, _ = oracles.squared(before, y_q)
    want = oracles.squared(after, y_q)[0] - value
    got = update.delta_loss(x_q, y_q, linearised=False)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    got = update.delta_loss(x_q, y_q, linearised=False, first_order=True)
    np.testing.assert_allclose(got, (grad * (after - before)).sum(1), rtol=1e-9, atol=1e-12)
    linear = update.delta_loss(x_q, y_q)
    assert np.abs(want - linear).max() > 1e-3  # the network is not its linearisation


def test_an_update_can_be_edited_again(case):
    _, _, update = case
    got, want = (
        update.edit(dfl.Remove([5]), steps=2),
        update.commit().edit(dfl.Remove([5]), steps=2),
    )
    np.testing.assert_array_equal(got.alpha, want.alpha)
    np.testing.assert_array_equal(np.flatnonzero(got.data.sample_weights == 0), [2, 3, 5, 7])


def test_empty_limit_and_removing_all_but_one(case):
    p, fitted, _ = case
    same = fitted.edit(dfl.Reweight([4], [1.0]))
    np.testing.assert_allclose(same.delta_alpha, 0, atol=1e-9)
    left = fitted.edit(dfl.Remove(np.arange(19)), until=1e-9)
    want = cases.retrain(p, cases.without(p, np.arange(19)))
    assert cases.relative(left.params(), want) < 1e-7


def test_removal_equals_weight_zero(case):
    _, fitted, update = case
    other = fitted.edit(dfl.Reweight([2, 3, 7], [0.0, 0.0, 0.0]))
    np.testing.assert_array_equal(update.delta_alpha, other.delta_alpha)


def test_committed_updates_chain_to_one_retraining(case):
    p, fitted, _ = case
    chained = fitted.edit(dfl.Remove([1, 2]), until=1e-9).commit().edit(dfl.Remove([5]), until=1e-9)
    want = cases.retrain(p, cases.without(p, [1, 2, 5]))
    assert cases.relative(chained.params(), want) < 1e-8
    with pytest.raises(ValueError, match="not in the training set"):
        chained.commit().edit(dfl.Remove([2]))


def test_chaining_over_an_addition(case):
    p, fitted, _ = case
    added = fitted.edit(dfl.Add(p.x_q, p.y_q), until=1e-9).commit()
    got = added.edit(dfl.Remove([20, 21, 22]), until=1e-9)
    assert cases.relative(got.params(), fitted.params()) < 1e-8


def test_kernel_function_and_matrix_give_the_same_fit():
    p, sigma, sigma_qn = problems.kronecker_problem(20, 3, 40, "logistic", ridge=0.05)
    phi = np.asarray(p.x)[:, 0, :40]  # the first output's Jacobian holds the shared features

    def kernel(a, b):
        return a @ b.T

    by_function = dfl.fit(kernel, jnp.asarray(phi), p.y, loss=dfl.Logistic(), ridge=p.ridge)
    by_matrix = dfl.fit(jnp.asarray(sigma), None, p.y, loss=dfl.Logistic(), ridge=p.ridge)
    np.testing.assert_allclose(by_function.alpha, by_matrix.alpha, rtol=1e-8)
    got = by_function.predict(jnp.asarray(p.x_q[:, 0, :40]))
    np.testing.assert_allclose(got, sigma_qn @ np.asarray(by_matrix.alpha), rtol=1e-8)


def test_kernels_without_parameters_say_so():
    fitted = dfl.fit(jnp.eye(4), None, np.ones(4), loss=dfl.SquaredError(), ridge=1.0)
    with pytest.raises(TypeError, match="without parameters"):
        fitted.params()


def test_outputs_that_overflow_are_an_error():
    rng = np.random.default_rng(0)
    model = dfl.linearize(lambda p, x: jnp.exp(x) @ p, jnp.ones((3, 1), jnp.float32))
    x = rng.normal(size=(6, 3)).astype(np.float32)
    options = {"loss": dfl.SquaredError(), "ridge": 0.1, "progress": False}
    fitted = dfl.fit(model, x, x[:, :1], kernel=dfl.KernelOptions(refine=False), **options)
    with pytest.raises(ValueError, match="predict: every entry must be finite"):
        fitted.predict(np.full((1, 3), 200.0, np.float32))
