"""Networks with a reverse rule of their own: one Jacobian, the rule's, in every call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl

RNG = np.random.default_rng(0)
X, XQ = RNG.normal(size=(8, 4)), RNG.normal(size=(3, 4))
Y = RNG.normal(size=(8, 2))
PARAMS = {"W": jnp.asarray(RNG.normal(size=(4, 5))), "O": jnp.asarray(RNG.normal(size=(5, 2)))}
OPTIONS = {"loss": dfl.SquaredError(), "ridge": 0.1, "progress": False}


@jax.custom_vjp
def halved(h):
    return h


# Not the derivative, on purpose: the rule must win.
halved.defvjp(lambda h: (h, None), lambda _, g: (0.5 * g,))


@jax.custom_vjp
def clipped(h):
    return h


clipped.defvjp(lambda h: (h, None), lambda _, g: (jnp.clip(g, -1, 1),))


def net(p, x):
    return halved(jnp.tanh(x @ p["W"])) @ p["O"]


def outputs(x):
    return np.tanh(x @ np.asarray(PARAMS["W"])) @ np.asarray(PARAMS["O"])


def jacobian(x):
    """`(n, c, p)` in NumPy, with the rule's half."""
    W, O = np.asarray(PARAMS["W"]), np.asarray(PARAMS["O"])
    h = np.tanh(x @ W)
    to_O = np.einsum("nh,ca->nahc", h, np.eye(2))
    to_W = 0.5 * np.einsum("ni,nh,ha->naih", x, 1 - h**2, O)
    return np.concatenate([to_O.reshape(len(x), 2, -1), to_W.reshape(len(x), 2, -1)], axis=2)


def ridge_regression(x, y):
    """`(θ − θ₀, outputs at queries)`."""
    J, J_q = jacobian(x).reshape(2 * len(x), -1), jacobian(XQ).reshape(6, -1)
    A = J.T @ J / len(x) + 0.1 * np.eye(J.shape[1])
    move = np.linalg.solve(A, J.T @ (y - outputs(x)).reshape(-1) / len(x))
    return move, outputs(XQ) + (J_q @ move).reshape(3, 2)


@pytest.fixture(scope="module")
def model():
    return dfl.linearize(net, PARAMS)


def test_products_are_those_of_the_rule(model):
    J = jacobian(X)
    move, v = RNG.normal(size=J.shape[2]), RNG.normal(size=(8, 2))
    tangent = {"O": jnp.asarray(move[:10].reshape(5, 2)), "W": jnp.asarray(move[10:].reshape(4, 5))}
    x = jnp.asarray(X)
    np.testing.assert_allclose(model.jvp(x, tangent), J @ move, atol=1e-12)
    for size in (None, 3):
        pulled = dfl.linearize(net, PARAMS, batch_size=size).vjp(x, jnp.asarray(v))
        flat = np.concatenate([np.ravel(pulled["O"]), np.ravel(pulled["W"])])
        np.testing.assert_allclose(flat, np.einsum("nap,na->p", J, v), atol=1e-12)
    np.testing.assert_allclose(model.kernel_diagonal(x), np.einsum("nap,nap->na", J, J), atol=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["dense", "matrix-free"])
def test_fit_predict_add_and_parameters(model, form):
    fitted = dfl.fit(model, X[:6], Y[:6], kernel=form, **OPTIONS)
    np.testing.assert_allclose(fitted.predict(XQ), ridge_regression(X[:6], Y[:6])[1], atol=1e-7)
    update = fitted.edit(dfl.Add(X[6:], Y[6:]))
    move, want = ridge_regression(X, Y)
    np.testing.assert_allclose(update.predict(XQ), want, atol=1e-7)
    moved = np.ravel(update.params()["O"]) - np.ravel(PARAMS["O"])
    np.testing.assert_allclose(moved, move[:10], atol=1e-7)


@pytest.mark.thorough
def test_random_features_from_trained_and_primal(model):
    narrow = dfl.low_rank(model, X, 5, method="random-features")
    assert np.isfinite(dfl.fit(narrow, X, Y, **OPTIONS).predict(XQ)).all()
    trained = dfl.fit(model, X, Y, **OPTIONS).params()
    taken = dfl.from_trained(model, trained, X, Y, linearised=True, **OPTIONS)
    want = ridge_regression(X[1:], Y[1:])
    np.testing.assert_allclose(taken.edit(dfl.Remove([0])).predict(XQ), want[1], atol=1e-6)
    step = dfl.primal.influence(
        model, trained, X, Y, dfl.Remove([0]), loss=OPTIONS["loss"], ridge=0.1
    )
    moved = np.ravel(step.params()["O"]) - np.ravel(PARAMS["O"])
    np.testing.assert_allclose(moved, want[0][:10], atol=1e-6)


def test_a_rule_without_a_jacobian_is_refused_in_words():
    model = dfl.linearize(lambda p, x: clipped(x @ p["W"]) @ p["O"], PARAMS)
    with pytest.raises(ValueError, match="not linear in the cotangent"):
        dfl.fit(model, X, Y, kernel="matrix-free", **OPTIONS)
    with pytest.raises(ValueError, match="not linear in the cotangent"):
        dfl.fit(model, X, Y, kernel="dense", **OPTIONS)
