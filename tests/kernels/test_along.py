"""The kernel along one direction per point is the whole kernel, folded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualfluence.kernels import _along, empirical_kernel
from dualfluence.kernels._along import kernel_along
from dualfluence.kernels._prepare import Prepared, prepare_kernel
from users import ordinary


@ordinary
def _dense(params, x):
    return jnp.tanh(x @ params["a"] + params["b"]) @ params["c"] * params["s"]


@ordinary
def _shared(params, x):
    """One matrix used at two positions: several pairs of positions, and a leaf in whole rows."""
    h = jnp.tanh(x.reshape(x.shape[0], 2, -1) @ params["a"][:2])
    return jnp.sum(jnp.sin(h), axis=1) @ params["c"] * params["s"] ** 2


def _params():
    rng = np.random.default_rng(0)
    shapes = {"a": (4, 5), "b": (5,), "c": (5, 3), "s": (3,)}
    return {k: jnp.asarray(rng.normal(size=s)) for k, s in shapes.items()}


@pytest.mark.parametrize("fn", [_dense, _shared])
@pytest.mark.parametrize("budget", [None, 4096])
def test_the_folded_kernel_is_the_kernel_folded(fn, budget, monkeypatch):
    with jax.enable_x64(True):
        if budget is not None:  # some points at a time, in parts of unequal length
            monkeypatch.setattr(_along, "tile_budget", lambda result: budget)
        rng = np.random.default_rng(1)
        x1, x2, v = (rng.normal(size=s) for s in ((7, 4), (11, 4), (7, 3)))
        params = _params()
        whole = np.asarray(empirical_kernel(fn, params, x1, x2, progress=False).value)
        thin = kernel_along(fn, params, x1, jnp.asarray(v), x2)
        np.testing.assert_allclose(
            thin, np.einsum("qa,qanb->qnb", v, whole), rtol=1e-10, atol=1e-10
        )


def test_features_of_few_points_are_held_at_once(monkeypatch):
    """A quarter of the budget for the features of `x1`, and no part above it."""
    parts = []
    features = Prepared.features

    def watched(self, leaves, rest, x, chunk):
        parts.append((len(x), chunk))
        return features(self, leaves, rest, x, chunk)

    monkeypatch.setattr(Prepared, "features", watched)
    rng = np.random.default_rng(1)
    x, v = rng.normal(size=(40, 4)), jnp.ones((40, 3))
    prepared, *_ = prepare_kernel(_dense, _params(), x, None, "auto", None)
    size = prepared.feature_bytes
    budget = max(4 * 8 * size, 2 * 8 * prepared.workspace_bytes)
    kernel_along(_dense, _params(), x, v, x, tile_bytes=budget)
    assert max(n * size for n, _ in parts) <= budget // 4
    assert max(chunk * prepared.workspace_bytes for _, chunk in parts) <= budget // 2
    assert sum(n for n, _ in parts) == 80


def test_points_without_finite_derivatives_are_named():
    def broken(params, x):
        return jnp.sqrt(x @ params["a"])[:, :2]

    params, x = {"a": jnp.ones((4, 5))}, np.ones((3, 4))
    x[1] = 0  # the root has no derivative there
    with pytest.raises(ValueError, match=r"not finite at 1 points of x2: \[1\]"):
        kernel_along(broken, params, np.ones((2, 4)), jnp.ones((2, 2)), x)
