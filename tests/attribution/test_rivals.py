"""The rivals against their definitions, by Jacobians in NumPy."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

import cases
from dualfluence.attribution import gradient_dot, trak

N, Q, C, D = 8, 3, 3, 4


def _case():
    rng = np.random.default_rng(0)
    data = (
        rng.normal(size=(N, D)),
        rng.integers(0, C, N),
        rng.normal(size=(Q, D)),
        rng.integers(0, C, Q),
    )
    return data, [cases.mlp_params(jax.random.key(k), (D, 5, C)) for k in range(2)]


def _terms(params, x, y):
    """Gradients of the margin and of the loss, `(n, p)`, and `1 − p`."""
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    f = lambda t: cases.mlp(unravel(t), jnp.asarray(x))  # noqa: E731
    log_p = lambda t: jax.nn.log_softmax(f(t))[np.arange(len(y)), y]  # noqa: E731
    margin = lambda t: log_p(t) - jnp.log1p(-jnp.exp(log_p(t)))  # noqa: E731
    return (
        np.asarray(jax.jacobian(margin)(flat)),
        -np.asarray(jax.jacobian(log_p)(flat)),
        1 - np.exp(np.asarray(log_p(flat))),
    )


def test_gradient_dot_is_the_product_of_gradients():
    (x, y, xq, yq), (params, _) = _case()
    _, train, _ = _terms(params, x, y)
    _, query, _ = _terms(params, xq, yq)
    got = gradient_dot(cases.mlp, params, x, y, xq, yq)
    np.testing.assert_allclose(got, query @ train.T / N, rtol=1e-9, atol=1e-12)


def test_trak_averages_over_models_before_it_multiplies():
    (x, y, xq, yq), models = _case()
    total, missing = 0.0, 0.0
    for params in models:
        phi, _, short = _terms(params, x, y)
        phi_q, _, _ = _terms(params, xq, yq)
        K = phi @ phi.T
        total = total + phi_q @ phi.T @ np.linalg.inv(K + 0.1 * np.trace(K) / N * np.eye(N))
        missing = missing + short
    got = trak(cases.mlp, models, x, y, xq, yq, damping=0.1)
    np.testing.assert_allclose(got, total * missing / 4, rtol=1e-7, atol=1e-10)
