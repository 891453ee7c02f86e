"""No compiled stage of a fit or of a removal holds a second `K`.

Small kernels with the proportions of large ones: tiles, panels and the sketch are cut down with `K`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from measured import compiled_peaks

import dualfluence as dfl
from dualfluence._support import memory
from dualfluence.operators import DenseOperator, KroneckerOperator

pytestmark = [pytest.mark.thorough, pytest.mark.host]

SIZE = 2400
LOSS = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 1e-2, "progress": False}
OPTIONS = LOSS | {"on_failure": "report", "sketch": dfl.Sketch(8), "solver": dfl.CG()}


def network(params, x):
    return jnp.tanh(x @ params["inner"]) @ params["outer"]


def rbf(a, b):
    return jnp.exp(-jnp.sum(a**2, 1)[:, None] - jnp.sum(b**2, 1)[None] + 2 * a @ b.T)


def problem(n, c):
    rng = np.random.default_rng(0)
    params = {"inner": rng.normal(size=(5, 8)), "outer": rng.normal(size=(8, c))}
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)
    x = rng.normal(size=(n, 5)).astype(np.float32)
    return dfl.linearize(network, params), x, rng.integers(0, c, n)


@pytest.fixture(autouse=True)
def proportions(monkeypatch):
    bytes_of_k = SIZE**2 * 4
    monkeypatch.setattr(memory, "TILE_BYTES", bytes_of_k // 16)
    monkeypatch.setattr(memory, "PANEL_BYTES", bytes_of_k // 64)
    monkeypatch.setattr("dualfluence.operators._checks.TILE_SIDE", SIZE // 16)
    return bytes_of_k


@pytest.mark.parametrize("outputs", [10, 100])
def test_fit_and_removal_of_a_dense_kernel(outputs, proportions):
    n = SIZE // outputs
    model, x, y = problem(n, outputs)
    with compiled_peaks() as peaks:
        fitted = dfl.fit(model, x, y, kernel="dense", **OPTIONS)
    assert fitted.kernel_op.num_bytes == proportions
    assert {"_put", "_entries", "newton_step"} <= {name for name, _ in peaks} | {
        name.lstrip("_") for name, _ in peaks
    }
    for name, peak in peaks:
        assert peak <= 1.2 * proportions, name
    with compiled_peaks() as peaks:
        fitted.edit(dfl.Remove(np.arange(0, n, 10)), solver=dfl.CG(), on_failure="report").params()
    assert len(peaks) >= 2
    for name, peak in peaks:
        assert peak <= 1.1 * proportions, name


def test_fit_of_a_kernel_with_equal_outputs(proportions):
    _, x, y = problem(SIZE, 3)
    with compiled_peaks() as peaks:
        fitted = dfl.fit(rbf, x, y, kernel=dfl.KernelOptions(num_outputs=3), **OPTIONS)
        fitted.edit(dfl.Remove(np.arange(0, SIZE, 10)), solver=dfl.CG(), on_failure="report")
    assert fitted.kernel_op.num_bytes == proportions
    for name, peak in peaks:
        assert peak <= 1.2 * proportions, name


def test_a_given_matrix_is_not_copied():
    K = jnp.eye(30, dtype=jnp.float64)
    fitted = dfl.fit(K, None, np.arange(30) % 2, kernel=dfl.KernelOptions(num_outputs=2), **LOSS)
    assert fitted.kernel_op.matrix is K


def test_refined_products_hold_a_panel_in_float64(proportions):
    model, x, y = problem(SIZE // 10, 10)
    with compiled_peaks() as peaks:
        dfl.fit(model, x, y, kernel=dfl.KernelOptions(form="dense", refine=True), **OPTIONS)
    for name, peak in peaks:
        assert peak <= 1.2 * proportions, name


@pytest.mark.parametrize("kind", [DenseOperator, KroneckerOperator])
def test_a_block_is_copied_panel_by_panel(kind, proportions):
    """A removal of half of the points solves on a quarter of `K`, and holds no more than that."""
    c = 10 if kind is DenseOperator else 1
    rows = jax.ShapeDtypeStruct((SIZE // c // 2,), jnp.int32)
    K = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    jax.config.update("jax_disable_most_optimizations", False)
    found = jax.jit(lambda K, rows: kind(K, c).take(rows).matrix).lower(K, rows).compile()
    assert found.memory_analysis().temp_size_in_bytes <= 0.1 * proportions
    values = np.random.default_rng(0).normal(size=(60, 60))
    some = np.asarray([0, 3, 4])
    flat = (some[:, None] * c + np.arange(c)).reshape(-1)
    got = kind(jnp.asarray(values), c).take(some).matrix
    np.testing.assert_array_equal(got, values[np.ix_(flat, flat)])
