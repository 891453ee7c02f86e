"""A float32 kernel with float64 residuals reaches what float64 reaches on the same kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.operators import DenseOperator, MixedOperator


def problem(n=60, c=3, seed=0):
    rng = np.random.default_rng(seed)
    # Eigenvalues from 1e3 down to 1e-2: float32 rounding of the largest is comparable to λ = 1e-4.
    basis = np.linalg.qr(rng.normal(size=(n * c, n * c)))[0]
    K = ((basis * np.logspace(3, -2, n * c)) @ basis.T).astype(np.float32)
    return 0.5 * (K + K.T), rng.integers(0, c, n)


@pytest.mark.thorough
@pytest.mark.parametrize("solver", [dfl.CG(), dfl.Cholesky()], ids=["cg", "cholesky"])
def test_refinement_reaches_1e_6_where_float32_stalls(solver):
    K, y = problem()
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 1e-4}
    options |= {"solver": solver, "on_failure": "report"}
    kernel = dfl.PrecomputedKernel(jnp.asarray(K.reshape(60, 3, 60, 3)))
    x = np.arange(60)
    narrow, refine = (dfl.KernelOptions(num_outputs=3, refine=refine) for refine in (False, True))
    plain = dfl.fit(kernel, x, y, kernel=narrow, **options)
    refined = dfl.fit(kernel, x, y, kernel=refine, **options)
    wide = dfl.PrecomputedKernel(jnp.asarray(K.reshape(60, 3, 60, 3), jnp.float64))
    truth = dfl.fit(wide, x, y, kernel=narrow, **{**options, "solver": dfl.Cholesky()})
    assert float(plain.certificate.relative_bound) > 1e-4
    assert float(refined.certificate.relative_bound) < 1e-6
    assert "refined" in refined.stats.solver
    assert refined.kernel_op.num_bytes == K.nbytes
    # Both are within their certified distance of the same optimum, 1e-9 of its norm at most.
    np.testing.assert_allclose(refined.outputs, truth.outputs, atol=1e-6)
    update = refined.edit(
        dfl.Remove([0, 1, 2]), until=1e-6 * float(truth.certificate.parameter_norm)
    )
    want = truth.edit(dfl.Remove([0, 1, 2]), until=1e-9 * float(truth.certificate.parameter_norm))
    assert update.state.alpha.dtype == jnp.float64
    np.testing.assert_allclose(update.outputs, want.outputs, atol=1e-3)


def test_mixed_product_is_the_float64_product_of_the_stored_entries(monkeypatch):
    monkeypatch.setattr("dualfluence._support.memory.PANEL_BYTES", 8 * 180 * 7)
    K, _ = problem()
    v = np.random.default_rng(1).normal(size=(60, 3))
    got = MixedOperator(DenseOperator(jnp.asarray(K), 3)).mv(jnp.asarray(v))
    want = (K.astype(np.float64) @ v.ravel()).reshape(60, 3)
    # Float64 rounding of sums of 180 terms; float32 products would be off by 1e-7.
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12 * np.abs(want).max())


def test_a_matrix_free_kernel_is_refined_by_its_network_in_float64():
    """It has no entries to multiply in float64, but a network that computes them."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(9, k)).astype(np.float32) for k in (4, 1))
    model = dfl.linearize(lambda p, x: x @ p, jnp.ones((4, 1), jnp.float32))
    kernel = dfl.KernelOptions(form="matrix-free", refine=True)
    options = {"loss": dfl.SquaredError(), "ridge": 1e-3, "progress": False}
    got = dfl.fit(model, x, y, kernel=kernel, **options)
    x, y = x.astype(float), y.astype(float)
    ones = np.ones((4, 1))
    want = np.linalg.solve(x.T @ x / 9 + 1e-3 * np.eye(4), x.T @ y / 9 + 1e-3 * ones)
    # The parameters themselves are handed out in float32.
    np.testing.assert_allclose(got.params(), want, rtol=0, atol=2e-7 * np.abs(want).max())
    np.testing.assert_allclose(got.predict(x), x @ want, rtol=0, atol=1e-9 * np.abs(want).max())


@pytest.mark.thorough
def test_cheaper_products_are_measured():
    K, y = problem()
    fitted = dfl.fit(
        K.reshape(len(y), 3, len(y), 3),
        None,
        y,
        loss=dfl.SoftmaxCrossEntropy(),
        ridge=1.0,
        kernel=dfl.KernelOptions(num_outputs=3, precision=jax.lax.Precision.DEFAULT),
        on_failure="report",
    )
    assert any("DEFAULT precision, off by" in note for note in fitted.stats.notes)


@pytest.mark.thorough
def test_refined_fits_of_float32_networks_read_out():
    """Dual variables in float64, parameters in float32: every read-out goes through."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 4)).astype(np.float32)
    params = jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)
    model = dfl.linearize(lambda p, x: jnp.tanh(x) @ p, params)
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 1e-2, "progress": False}
    y = rng.integers(0, 3, 12)
    fitted = dfl.fit(model, x, y, kernel=dfl.KernelOptions(refine=True), **options)
    update = fitted.edit(dfl.Remove([0, 3]), until=1e-6)
    wide = dfl.linearize(lambda p, x: jnp.tanh(x) @ p, params.astype(jnp.float64))
    want = dfl.fit(wide, x.astype(np.float64), y, **options).edit(dfl.Remove([0, 3]), until=1e-10)
    assert update.params().dtype == jnp.float32
    np.testing.assert_allclose(update.params(), want.params(), atol=2e-6)
    np.testing.assert_allclose(update.predict(x[:5]), want.predict(x[:5]), atol=5e-6)
    np.testing.assert_allclose(
        update.delta_loss(x[:5], y[:5]), want.delta_loss(x[:5].astype(float), y[:5]), atol=5e-6
    )
