"""A narrow factor of softmax has one column less per point and the same curvature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])  # up to classes whose probability is zero
def test_softmax_curvature_needs_one_column_less(scale):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        f, w = scale * rng.normal(size=(6, 4)), rng.uniform(0, 1, 6)
        w[2] = 0
        y = jnp.asarray(rng.integers(0, 4, 6))
        loss = dfl.SoftmaxCrossEntropy()
        targets = loss.prepare_targets(y, 4, jnp.float64)
        narrow = loss.hess_factor(jnp.asarray(f), targets, jnp.asarray(w)).narrow()
        e = np.exp(f - f.max(axis=1, keepdims=True))
        p = e / e.sum(axis=1, keepdims=True)
        W = w[:, None, None] * (p[:, :, None] * np.eye(4) - p[:, :, None] * p[:, None, :])
        eye = jnp.broadcast_to(jnp.eye(4), (6, 4, 4))
        assert narrow.rmv(eye).shape == (6, 3, 4)
        np.testing.assert_allclose(narrow.hess_mv(eye), W, atol=1e-12)
        np.testing.assert_allclose(narrow.hess_diagonal(), np.einsum("naa->na", W), atol=1e-12)


def test_factors_without_empty_columns_stay_as_they_are():
    f, y = jnp.zeros((3, 2)), jnp.ones((3, 2))
    factor = dfl.SquaredError().hess_factor(f, y, jnp.ones(3))
    assert factor.narrow() is factor
