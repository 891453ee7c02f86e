"""Networks that the user trained, linear models anchored at zero, nonlinear networks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import problems

SIZES = (5, 40, 3)
N = 20


def _network(seed=0):
    params = cases.mlp_params(jax.random.key(seed), SIZES)
    rng = np.random.default_rng(seed)
    return params, jnp.asarray(rng.normal(size=(N, 5))), jnp.asarray(rng.normal(size=(N, 3)))


def _train(theta_0, x, y, ridge, weights, steps=4000, rate=0.1):
    """Plain gradient descent on the nonlinear objective, independent of the library."""

    def risk(theta):
        f = cases.mlp(theta, x)
        pull = sum(jnp.sum((a - b) ** 2) for a, b in zip(theta, theta_0, strict=True))
        return jnp.sum(weights * 0.5 * jnp.sum((f - y) ** 2, axis=1)) + 0.5 * ridge * pull

    def step(theta, _):
        return jax.tree.map(lambda t, g: t - rate * g, theta, jax.grad(risk)(theta)), None

    return jax.lax.scan(step, theta_0, None, length=steps)[0]


def _flat(tree):
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)])


def test_a_trained_linear_model_is_taken_over_exactly():
    p = problems.linear_problem(N, 3, 80, "softmax", ridge=0.05)
    fitted = cases.fit(p)
    taken = dfl.from_trained(
        cases.model(p),
        fitted.params(),
        jnp.asarray(p.x),
        p.y,
        loss=dfl.SoftmaxCrossEntropy(),
        ridge=p.ridge,
    )
    np.testing.assert_allclose(taken.alpha, fitted.alpha, atol=1e-9)
    assert taken.fidelity.gradient_norm < 1e-9
    assert taken.fidelity.parameter_gap < 1e-8
    assert taken.fidelity.output_gap < 1e-12
    a, b = (f.edit(dfl.Remove([1, 5])) for f in (taken, fitted))
    assert cases.relative(a.params(), b.params()) < 1e-9
    np.testing.assert_allclose(a.predict(p.x_q), b.predict(p.x_q), rtol=1e-8)


@pytest.mark.parametrize("tangent", ["initial", "trained"])
def test_unlearning_from_a_nonlinear_network_beats_doing_nothing(tangent):
    theta_0, x, y = _network()
    ridge = 3.0  # large enough that the network stays near its linearisation
    model = dfl.linearize(cases.mlp, theta_0)
    theta = _train(theta_0, x, y, ridge, jnp.full(N, 1 / N))
    gone = np.arange(6)
    fitted = dfl.from_trained(
        model, theta, x, y, loss=dfl.SquaredError(), ridge=ridge, tangent=tangent
    )
    update = fitted.edit(dfl.Remove(gone))
    weights = jnp.asarray(np.where(np.isin(np.arange(N), gone), 0, 1 / (N - 6)))
    want = _flat(_train(theta_0, x, y, ridge, weights))
    before = np.linalg.norm(_flat(theta) - want)
    after = np.linalg.norm(_flat(update.params()) - want)
    assert fitted.fidelity.gradient_norm < 1e-8  # gradient descent converged
    assert after < 0.25 * before
    np.testing.assert_allclose(fitted.predict(x), cases.mlp(theta, x), rtol=1e-9, atol=1e-12)
    network = update.predict(x, linearised=False)
    np.testing.assert_allclose(network, cases.mlp(update.params(), x), rtol=1e-9)


def test_the_trained_tangent_represents_a_stationary_point_exactly():
    theta_0, x, y = _network(1)
    theta = _train(theta_0, x, y, 0.3, jnp.full(N, 1 / N))
    options = {"loss": dfl.SquaredError(), "ridge": 0.3}
    model = dfl.linearize(cases.mlp, theta_0)
    fitted = dfl.from_trained(model, theta, x, y, tangent="trained", **options)
    rebuilt = jax.tree.map(jnp.add, theta_0, fitted.network.vjp(x, fitted.alpha))
    assert cases.relative(_flat(rebuilt), _flat(theta)) < 1e-8
    assert fitted.fidelity.parameter_gap < 1e-7
    at_start = dfl.from_trained(model, theta, x, y, tangent="initial", **options)
    assert at_start.fidelity.parameter_gap > 1e-2


def test_fidelity_tells_an_undertrained_network():
    theta_0, x, y = _network()
    model = dfl.linearize(cases.mlp, theta_0)
    weights = jnp.full(N, 1 / N)
    options = {"loss": dfl.SquaredError(), "ridge": 0.3}
    early = dfl.from_trained(model, _train(theta_0, x, y, 0.3, weights, steps=5), x, y, **options)
    late = dfl.from_trained(model, _train(theta_0, x, y, 0.3, weights), x, y, **options)
    assert early.fidelity.gradient_norm > 1e3 * late.fidelity.gradient_norm
    assert early.fidelity.parameter_gap > late.fidelity.parameter_gap


def test_anchor_zero_is_ridge_regression_on_theta():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(15, 6)), rng.normal(size=(15, 2))
    model = dfl.linearize(lambda w, v: v @ w, jnp.asarray(rng.normal(size=(6, 2))), anchor="zero")
    fitted = dfl.fit(model, x, y, loss=dfl.SquaredError(), ridge=0.1)
    update = fitted.edit(dfl.Remove([0, 3]))
    keep = np.setdiff1d(np.arange(15), [0, 3])
    for got, rows in ((fitted.params(), np.arange(15)), (update.params(), keep)):
        want = np.linalg.solve(
            x[rows].T @ x[rows] + 0.1 * len(rows) * np.eye(6), x[rows].T @ y[rows]
        )
        np.testing.assert_allclose(got, want, rtol=1e-9)


def test_anchor_zero_refuses_a_nonlinear_network():
    theta_0, x, y = _network()
    model = dfl.linearize(cases.mlp, theta_0, anchor="zero")
    with pytest.raises(ValueError, match="linear in its parameters"):
        dfl.fit(model, x, y, loss=dfl.SquaredError(), ridge=0.1)


def test_integer_leaves_and_chosen_leaves():
    rng = np.random.default_rng(0)
    params = {
        "w": jnp.asarray(rng.normal(size=(4, 6))),
        "v": jnp.asarray(rng.normal(size=(6, 2))),
        "k": 3,
    }

    def net(p, x):
        return jnp.tanh(x @ p["w"]) @ p["v"] * p["k"]

    x, y = rng.normal(size=(10, 4)), rng.normal(size=(10, 2))
    last = dfl.linearize(net, params, trainable=lambda path, _: "v" in str(path))
    fitted = dfl.fit(last, x, y, loss=dfl.SquaredError(), ridge=0.1)
    new = fitted.params()
    assert new["k"] == 3
    np.testing.assert_array_equal(new["w"], params["w"])
    assert not np.allclose(new["v"], params["v"])
    np.testing.assert_allclose(net(new, x), fitted.outputs, rtol=1e-9)  # linear in v: exact


def test_batches_do_not_change_the_answer():
    theta_0, x, y = _network()
    options = {"loss": dfl.SquaredError(), "ridge": 0.1, "form": "matrix-free"}
    whole = dfl.fit(dfl.linearize(cases.mlp, theta_0), x, y, **options)
    pieces = dfl.fit(dfl.linearize(cases.mlp, theta_0, batch_size=7), x, y, **options)
    assert cases.relative(_flat(pieces.params()), _flat(whole.params())) < 1e-10
    np.testing.assert_allclose(pieces.kernel_diagonal, whole.kernel_diagonal, rtol=1e-10)
    dense = dfl.fit(dfl.linearize(cases.mlp, theta_0), x, y, **{**options, "form": "dense"})
    np.testing.assert_allclose(dense.kernel_diagonal, whole.kernel_diagonal, rtol=1e-10)
