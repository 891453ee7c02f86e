"""A ReLU at a rounding's distance from its kink must not make a kernel asymmetric or indefinite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence import kernels
from dualfluence.attribution import Trajectory, _checkpoint
from dualfluence.kernels import _empirical

POINTS, INPUTS, HIDDEN, OUTPUTS = 64, 64, 48, 3


def network(params, x):
    return jax.nn.relu(x @ params["w"]) @ params["v"]


@pytest.fixture(scope="module")
def kinked():
    """Inputs of hidden units are zero but for the rounding of a sum whose order depends on the batch."""
    rng = np.random.default_rng(0)
    order = rng.permutation(INPUTS)
    x = np.tile(rng.normal(size=(POINTS, INPUTS // 2)), 2)[:, order]
    w = rng.normal(size=(INPUTS // 2, HIDDEN))
    v = rng.normal(size=(HIDDEN, OUTPUTS))
    params = {"w": np.concatenate([w, -w])[order], "v": v}
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)
    return params, jnp.asarray(x, jnp.float32)


def smallest_share(K):
    """The smallest eigenvalue over the largest of a matrix that must be symmetric but for rounding."""
    K = np.asarray(K, np.float64).reshape(POINTS * OUTPUTS, -1)
    np.testing.assert_allclose(K, K.T, rtol=0, atol=1e-6 * np.abs(K).max())
    values = np.linalg.eigvalsh(0.5 * (K + K.T))
    return values[0] / values[-1]


def in_blocks(params, x, rows):
    K = np.zeros((POINTS, OUTPUTS, POINTS, OUTPUTS), np.float32)
    for start, block in kernels.kernel_rows(network, params, x, rows):
        K[start : start + rows] = block
    return K


@pytest.mark.parametrize("rows", [1, 7, 33, POINTS])
@pytest.mark.parametrize("budget", [2**28, 400_000])
def test_blocks_of_rows_make_one_symmetric_kernel(kinked, rows, budget, monkeypatch):
    monkeypatch.setattr(_empirical, "tile_budget", lambda size: budget)
    # With units switched by rounding the smallest eigenvalue is a quarter of the largest below zero.
    assert smallest_share(in_blocks(*kinked, rows)) > -1e-6


def test_blocks_of_rows_are_the_kernel(kinked):
    params, x = kinked
    want = kernels.empirical_kernel(network, params, x + 0.1, progress=False).value
    got = in_blocks(params, x + 0.1, 7)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("tile_bytes", [None, 400_000, 200_000])
def test_tiles_of_a_symmetric_kernel_agree_on_every_point(kinked, tile_bytes):
    options = {"tile_bytes": tile_bytes, "progress": False}
    assert smallest_share(kernels.empirical_kernel(network, *kinked, **options).value) > -1e-6


def test_tiles_on_disk_agree_on_every_point(kinked, tmp_path):
    params, x = kinked
    model = dfl.linearize(network, params)
    held = dfl.store.build(model, x, tmp_path / "kernel", tile=7, progress=False)
    eye = jnp.eye(POINTS * OUTPUTS, dtype=jnp.float32).reshape(POINTS, OUTPUTS, -1)
    assert smallest_share(held.operator().mm(eye)) > -1e-6


@pytest.mark.parametrize("probes", [None, 1])
def test_scores_of_a_checkpoint_do_not_fail_where_rounding_switches_units(
    kinked, probes, monkeypatch
):
    params, x = kinked
    monkeypatch.setattr(_checkpoint, "rows_at_once", lambda n, c, dtype: 7)
    run = Trajectory(network, [params], steps=[10_000], learning_rate=0.1)
    y = np.arange(POINTS) % OUTPUTS
    options = {"probes": probes, "progress": False}
    assert np.isfinite(run.attribute(x, y, x[:5] + 0.1, y[:5], **options).values).all()
