"""Kernel gradient descent against eq. 14 in NumPy, against parameters, and against `fit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import oracles
import problems

N, C, P = 9, 3, 40


def _descent(p, **options):
    settings = {"rate": 0.3, "epochs": 60, "progress": False} | options
    return dfl.kernel_gradient_descent(
        cases.model(p),
        jnp.asarray(p.x),
        p.y,
        loss=cases.LOSSES[p.loss_name],
        ridge=p.ridge,
        **settings,
    )


@pytest.mark.parametrize("loss_name", problems.LOSS_NAMES)
def test_outputs_follow_equation_14(loss_name):
    p = problems.linear_problem(N, C, P, loss_name)
    got = _descent(p, x_query=jnp.asarray(p.x_q))
    w = np.full(N, 1 / N)
    loss = oracles.LOSSES[loss_name]
    want = oracles.kernel_gradient_descent(p.K, p.f0, p.y, w, p.ridge, loss, 0.3, 60)
    np.testing.assert_allclose(got.outputs, want, rtol=1e-11, atol=1e-12)
    alpha = -w[:, None] * loss(want, p.y)[1] / p.ridge
    np.testing.assert_allclose(got.alpha, alpha, rtol=1e-10, atol=1e-12)
    moved = oracles.paper_eq8(p.K_qn, np.asarray(got.coordinates))
    np.testing.assert_allclose(got.query_outputs, p.f0_q + moved, rtol=1e-11)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("loss_name", ["squared", "softmax"])
def test_it_is_gradient_descent_on_the_parameters(loss_name, momentum):
    p = problems.linear_problem(N, C, P, loss_name)
    got = _descent(p, rate=0.1, momentum=momentum, record_every=20)
    theta, velocity, norms = np.zeros(P), np.zeros(P), []
    w = np.full(N, 1 / N)
    for _ in range(60):
        args = (theta, p.J, p.f0, p.y, w, p.ridge, oracles.LOSSES[loss_name])
        gradient = oracles.gradient(*args)
        norms.append(np.linalg.norm(gradient))
        velocity = momentum * velocity + gradient
        theta = theta - 0.1 * velocity
    np.testing.assert_allclose(
        np.einsum("ncp,nc->p", p.J, got.coordinates), theta, rtol=1e-9, atol=1e-12
    )
    np.testing.assert_allclose(got.gradient_norms[:-1], norms, rtol=1e-8)
    assert got.recorded_epochs.tolist() == [0, 20, 40, 60]
    np.testing.assert_array_equal(got.recorded[-1], got.coordinates)
    assert not got.recorded[0].any()


@pytest.mark.parametrize("loss_name", problems.LOSS_NAMES)
def test_it_meets_the_newton_fit_at_the_optimum(loss_name):
    p = problems.linear_problem(N, C, P, loss_name, ridge=0.2)
    got, want = _descent(p, rate=0.5, epochs=1500), cases.fit(p)
    np.testing.assert_allclose(got.outputs, want.outputs, atol=1e-9)
    np.testing.assert_allclose(got.alpha, want.alpha, atol=1e-9)
    np.testing.assert_allclose(got.coordinates, want.alpha, atol=1e-9)
    assert float(got.gradient_norms[-1]) < 1e-9


def test_a_retained_subset_is_training_without_the_rest():
    p = problems.linear_problem(N, C, P, "softmax")
    keep = np.array([0, 2, 3, 7])
    mask = np.isin(np.arange(N), keep)
    whole = _descent(p, retain=keep, x_query=jnp.asarray(p.x_q))
    loss = oracles.LOSSES["softmax"]
    w = np.full(len(keep), 1 / len(keep))
    part = oracles.kernel_gradient_descent(
        p.K[np.ix_(keep, range(C), keep, range(C))],
        p.f0[keep],
        p.y[keep],
        w,
        p.ridge,
        loss,
        0.3,
        60,
    )
    np.testing.assert_allclose(whole.outputs[keep], part, rtol=1e-11, atol=1e-12)
    assert not np.asarray(whole.coordinates)[~mask].any()
    for same in (mask, mask.astype(float) * 2):
        np.testing.assert_allclose(_descent(p, retain=same).outputs, whole.outputs, rtol=1e-12)


def test_infinitely_wide_networks_start_from_zero_or_from_given_outputs():
    net = dfl.infinite.serial(
        dfl.infinite.Dense(W_std=1.0, b_std=0.1), dfl.infinite.Relu(), dfl.infinite.Dense()
    )
    rng = np.random.default_rng(0)
    x, xq = jnp.asarray(rng.normal(size=(N, 4))), jnp.asarray(rng.normal(size=(2, 4)))
    y = rng.integers(0, C, N)
    settings = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 0.1, "rate": 0.2, "epochs": 50}
    start = rng.normal(size=(N, C))
    sigma = np.asarray(net.kernel(x, progress=False))
    K = np.kron(sigma, np.eye(C))
    one_hot = np.eye(C)[y]
    for f0 in (np.zeros((N, C)), start):
        got = dfl.kernel_gradient_descent(
            net, x, one_hot, **settings, initial_outputs=f0, x_query=xq, progress=False
        )
        want = oracles.kernel_gradient_descent(
            K, f0, one_hot, np.full(N, 1 / N), 0.1, oracles.softmax_ce, 0.2, 50
        )
        np.testing.assert_allclose(got.outputs, want, rtol=1e-11, atol=1e-13)
    cross = np.asarray(net.kernel(xq, x, progress=False))
    np.testing.assert_allclose(got.query_outputs, cross @ np.asarray(got.coordinates), rtol=1e-11)


def test_a_kernel_that_is_there_is_not_computed_again():
    p = problems.linear_problem(N, C, P, "squared")
    fitted = cases.fit(p)
    a, b = _descent(p, kernel=fitted.kernel_op), _descent(p)
    np.testing.assert_array_equal(a.outputs, b.outputs)
    with pytest.raises(ValueError, match="kernel is an operator for 9 points"):
        dfl.kernel_gradient_descent(
            cases.model(p), jnp.asarray(p.x[:4]), p.y[:4], loss=dfl.SquaredError(), ridge=0.1,
            rate=0.1, epochs=2, kernel=fitted.kernel_op, progress=False,
        )  # fmt: skip


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_divergence_names_the_bound(momentum):
    p = problems.linear_problem(N, C, P, "squared")
    top = np.linalg.eigvalsh(oracles.as_matrix(p.K) / N)[-1]
    bound = 2 * (1 + momentum) / (p.ridge + top)
    with pytest.raises(FloatingPointError, match=r"rate .* is too large") as error:
        _descent(p, rate=3 * bound, epochs=4000, momentum=momentum)
    assert f"{bound:.3g}" in str(error.value)
    _descent(p, rate=0.95 * bound, epochs=500, momentum=momentum)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rate": 0.0}, "rate must be a positive number"),
        ({"epochs": 0}, "epochs must be a whole number, at least 1"),
        ({"momentum": 1.0}, "momentum must be in"),
        ({"record_every": 0}, "record_every"),
        ({"retain": [0, 99]}, "retain: indices must be in"),
        ({"retain": [0.5, 0.5]}, "retain: expected 9 rows"),
        ({"initial_outputs": np.zeros((N, 1))}, "initial_outputs: expected shape"),
    ],
)
def test_bad_settings_are_named(options, text):
    p = problems.linear_problem(N, C, P, "squared")
    with pytest.raises(ValueError, match=text):
        _descent(p, **options)


def test_progress_counts_epochs():
    p = problems.linear_problem(N, C, P, "squared")
    seen = []
    _descent(p, epochs=600, progress=lambda done, total, label: seen.append((done, total, label)))
    assert [s for s in seen if s[2] == "kernel gradient descent"][-1][:2] == (600, 600)
    assert jax.tree.leaves(seen)
