"""What only an accelerator can get wrong: precision of products and convolutions, and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence._support.compile import jit
from dualfluence.operators import DenseOperator, KroneckerOperator, LowRankOperator

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(0)


def error(got, want):
    return np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_have_the_full_precision_of_their_dtype(dtype):
    """TF32 would be off by 1e-3, and a float32 product of float64 operands by 1e-7."""
    A = RNG.normal(size=(600, 600)).astype(dtype)
    K, v = A @ A.T, RNG.normal(size=(300, 2)).astype(dtype)
    wide = K.astype(np.float64)
    slack = 40 * np.finfo(dtype).eps  # sums of 600 terms
    dense = jit(lambda K, v: DenseOperator(K, 2).mv(v))(K, v)
    assert error(dense, (wide @ v.ravel().astype(np.float64)).reshape(300, 2)) < slack
    kronecker = jit(lambda K, v: KroneckerOperator(K, 2).mv(v))(K[:300, :300], v)
    assert error(kronecker, wide[:300, :300] @ v) < slack
    phi = RNG.normal(size=(300, 2, 50)).astype(dtype)
    flat = phi.reshape(600, 50).astype(np.float64)
    low = jit(lambda p, v: LowRankOperator(p).mv(v))(phi, v)
    assert error(low, (flat @ (flat.T @ v.ravel())).reshape(300, 2)) < slack


def convolution(params, x):
    y = jax.lax.conv_general_dilated(
        x, params["W"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    y = jax.nn.relu(1.5 / np.sqrt(27) * y + 0.1 * params["b"])
    return jnp.mean(y, axis=(1, 2)) @ params["out"]


def numpy_convolution(params, x):
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    y = sum(
        padded[:, i : i + x.shape[1], j : j + x.shape[2]] @ params["W"][i, j]
        for i in range(3)
        for j in range(3)
    )
    y = np.maximum(1.5 / np.sqrt(27) * y + 0.1 * params["b"], 0)
    return y.mean((1, 2)) @ params["out"]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scaled_convolutions_have_the_full_precision_of_their_dtype(dtype, record_property):
    shapes = {"W": (3, 3, 3, 8), "b": (8,), "out": (8, 2)}
    params = {name: RNG.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    x = RNG.normal(size=(16, 9, 7, 3)).astype(dtype)
    wide = {name: value.astype(np.float64) for name, value in params.items()}
    want = numpy_convolution(wide, x.astype(np.float64))
    plain = error(jax.jit(convolution)(params, x), want)
    record_property("error of plain jax.jit", float(plain))
    slack = 100 * np.finfo(dtype).eps
    ours = error(jit(convolution)(params, x), want)
    assert ours < slack, f"ours {ours:.1e}, plain jax.jit {plain:.1e}"
    model = dfl.linearize(convolution, jax.tree.map(jnp.asarray, params))
    K = model.kernel(jnp.asarray(x), progress=False)
    J = jax.jacfwd(lambda p: numpy_like(p, x))(jax.tree.map(jnp.asarray, wide))
    rows = np.concatenate([np.asarray(j).reshape(32, -1) for j in jax.tree.leaves(J)], axis=1)
    gap = error(np.asarray(K).reshape(32, 32), rows @ rows.T)
    assert gap < 4 * slack, f"kernel {gap:.1e}, plain jax.jit {plain:.1e}"


def numpy_like(params, x):
    """The network without a convolution: shifted products, in float64 on any device."""
    padded = jnp.pad(jnp.asarray(x, jnp.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
    y = sum(
        jnp.matmul(
            padded[:, i : i + x.shape[1], j : j + x.shape[2]],
            params["W"][i, j],
            precision="highest",
        )
        for i in range(3)
        for j in range(3)
    )
    y = jax.nn.relu(1.5 / np.sqrt(27) * y + 0.1 * params["b"])
    return jnp.matmul(jnp.mean(y, axis=(1, 2)), params["out"], precision="highest")


def test_a_fit_peaks_near_the_size_of_its_kernel():
    """8.1 GB of float32: the allocator's peak since the process began, which held no more before."""
    n, c = 4500, 10
    x = jnp.asarray(RNG.normal(size=(n, 20)), jnp.float32)
    params = [jnp.asarray(RNG.normal(size=s) / 4, jnp.float32) for s in ((20, 64), (64, c))]
    model = dfl.linearize(lambda p, x: jnp.tanh(x @ p[0]) @ p[1], params)
    device = jax.local_devices()[0]
    before = device.memory_stats()["bytes_in_use"]
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 1e-2, "on_failure": "report"}
    fitted = dfl.fit(model, x, RNG.integers(0, c, n), kernel="dense", progress=False, **options)
    fitted.edit(dfl.Remove(np.arange(0, n, 10)), on_failure="report").params()
    peak = device.memory_stats()["peak_bytes_in_use"] - before
    assert peak <= 1.2 * fitted.kernel_op.num_bytes
