"""Tiles, bands, derivatives, finite networks and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualfluence import infinite
from dualfluence.infinite import _network, _quadrature


def normal(*size, seed=0):
    return np.random.default_rng(seed).normal(size=size)


def mlp(*activations):
    layers = [infinite.Dense(W_std=1.5, b_std=0.1)]
    for activation in activations:
        layers += [activation, infinite.Dense(W_std=1.5, b_std=0.1)]
    return infinite.serial(*layers)


def cnn(*end):
    conv = (infinite.Conv(W_std=1.5, b_std=0.1), infinite.Relu())
    end = end or (infinite.Flatten(),)
    return infinite.serial(*conv, infinite.AvgPool((2, 2)), *conv, *end, infinite.Dense(W_std=1.2))


POOLED = infinite.serial(*cnn().layers[:3], infinite.Flatten(), infinite.Dense(W_std=1.2))


def test_tiles_and_symmetry_equal_one_block():
    net, x = mlp(infinite.Relu()), normal(13, 5)
    whole = net.kernel_block(x, x)
    # 600 bytes hold 2x2 tiles: 13 is not a multiple, so padding is exercised too.
    for kernel in (
        net.kernel(x, tile_bytes=600, progress=False),
        net.kernel(x, x, tile_bytes=600),
        net.kernel(x, out="host"),
    ):
        # Rounding on the scale of the kernel, which is about 1: some entries nearly cancel.
        np.testing.assert_allclose(kernel, whole, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(net.diagonal(x), np.diag(whole), rtol=1e-13)


@pytest.mark.thorough
def test_image_tiles_equal_one_block():
    net, x = POOLED, normal(5, 6, 6, 2)
    whole = net.kernel_block(x, x[:3])
    columns = 2 * (_network.LIVE_PAIRS + _network.LIVE_COLUMNS)
    small = int(columns * 8 * net.pair_entries(x.shape))
    assert net.tile_shape(x.shape, 3, 8, small, False) == ((2, 2), 1)
    tiled = net.kernel(x, x[:3], tile_bytes=small)
    np.testing.assert_allclose(tiled, whole, rtol=1e-13, atol=1e-14)


def banded(padding):
    return (
        infinite.Conv((3, 2), W_std=1.5, b_std=0.1),
        infinite.LayerNorm(),
        infinite.Cos(),  # not 0 at 0: pixels outside the image must be masked
        infinite.AvgPool((3, 2), (2, 1), padding, normalize_edges=True),
        infinite.Conv((1, 2), W_std=1.2, b_std=0.1),
        infinite.residual(
            infinite.serial(infinite.Relu(), infinite.Conv((3, 3), W_std=1.3, b_std=0.2))
        ),
        infinite.Relu(),
        infinite.SumPool((2, 2), padding=padding),
        infinite.Flatten(),
        infinite.Dense(W_std=1.1, b_std=0.1),
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("padding", "size", "drop", "need"),
    [
        ("SAME", (5, 6), (1, 5), (4, 2)),
        pytest.param("SAME", (7, 6), (), (4, 2), marks=pytest.mark.slow),
        pytest.param("VALID", (9, 6), (), (4, 2), marks=pytest.mark.slow),
    ],
)
def test_the_band_equals_all_pairs(monkeypatch, padding, size, drop, need):
    net = infinite.serial(*[x for i, x in enumerate(banded(padding)) if i not in drop])
    x = normal(3, *size, 2)
    spec = _network.input_spec(x.shape)
    results = []
    for band in (net.need((0, 0), spec), None):
        monkeypatch.setattr(infinite.Network, "_band", lambda self, spec, band=band: band)
        jax.clear_caches()
        _network._layout.cache_clear()
        results.append(net.kernel_block(x, x[:2], "both"))
    assert net.need((0, 0), spec) == need
    for narrow, full in zip(*results, strict=True):
        np.testing.assert_allclose(narrow, full, rtol=1e-12)


@pytest.mark.thorough
def test_the_band_of_three_pools():
    net = infinite.serial(
        *[infinite.Conv(), infinite.Relu(), infinite.AvgPool((2, 2))] * 3, infinite.Flatten()
    )
    bands = net.bands((0, 0), _network.input_spec((1, 32, 32, 3)))
    assert [bands[i] for i in (0, 3, 6, 9)] == [(7, 7), (3, 3), (1, 1), (0, 0)]
    assert "displacements up to 7x7" in net.describe((32, 32, 3))


def test_equal_images_meet_exactly_in_a_pooled_network():
    net, x = cnn(infinite.GlobalAvgPool()), normal(2, 8, 8, 1).astype(np.float32)
    pair = np.asarray(net.kernel_block(x, x[::-1]))
    # Rounding only: without the bound on pooled distances this is 1e-4 off.
    np.testing.assert_allclose(np.diag(pair[:, ::-1]), net.diagonal(x), rtol=2e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "net",
    [
        mlp(infinite.Relu()),
        POOLED,
        pytest.param(mlp(infinite.Relu(), infinite.Relu()), marks=pytest.mark.slow),
        pytest.param(mlp(infinite.Erf(), infinite.Abs()), marks=pytest.mark.slow),
        pytest.param(cnn(), marks=pytest.mark.slow),
    ],
)
def test_derivatives_are_finite_at_equal_and_zero_points(net):
    images = isinstance(net.layers[0], infinite.Conv)
    x = normal(3, 4, 4, 1) if images else normal(3, 5)
    x[2] = 0

    def total(x):
        return jnp.sum(net.kernel_block(x, x))

    value, grad = jax.jit(jax.value_and_grad(total))(x)
    assert np.isfinite(value)
    assert np.isfinite(grad).all()
    assert np.abs(grad[:2]).max() > 0


def test_derivative_matches_finite_differences_off_the_diagonal():
    net, x, y = mlp(infinite.Relu()), normal(1, 4), normal(1, 4, seed=1)
    direction = normal(1, 4, seed=2)
    _, slope = jax.jvp(lambda x: net.kernel_block(x, y)[0, 0], (x,), (direction,))
    h = 1e-5  # central differences: h^2 plus rounding/h, about 1e-10
    ends = [net.kernel_block(x + sign * h * direction, y)[0, 0] for sign in (1, -1)]
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * h), rtol=1e-7)


def test_zero_points_are_finite():
    x = np.zeros((2, 5))
    assert np.array_equal(infinite.serial(infinite.Dense(W_std=1.5)).kernel(x), np.zeros((2, 2)))
    assert np.isfinite(mlp(infinite.Relu(), infinite.Sign()).kernel(x)).all()


def wide(kind, form):
    weights = {"W_std": 1.4, "b_std": 0.3, "parameterization": form}
    if kind == "dense":
        dense = (infinite.Dense(**weights, width=256), infinite.Relu())
        return infinite.serial(*dense, *dense, infinite.Dense(**weights)), normal(3, 6)
    net = infinite.serial(
        infinite.Conv(**weights, width=128),
        infinite.Erf(),
        infinite.AvgPool((2, 2), padding="SAME", normalize_edges=True),
        infinite.Conv((2, 2), (1, 1), "CIRCULAR", **weights, width=128),
        infinite.Relu(),
        infinite.Flatten(),
        infinite.Dense(**weights),
    )
    return net, normal(3, 5, 4, 2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("dense", "ntk"),
        pytest.param("dense", "standard", marks=pytest.mark.slow),
        pytest.param("conv", "standard", marks=pytest.mark.slow),
        pytest.param("conv", "ntk", marks=pytest.mark.slow),
    ],
)
def test_many_finite_networks_converge_to_the_kernels(kind, form):
    jax.config.update("jax_disable_most_optimizations", False)  # runs longer than it compiles
    net, x = wide(kind, form)
    num, outputs = 128 if kind == "dense" else 64, 256
    x32 = jnp.asarray(x, jnp.float32)

    def sample(key):
        params = net.init(key, x.shape[1:], outputs=outputs)
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        f = net.apply(params, x32)
        J = jax.jacrev(lambda p: net.apply(p, x32)[:, 0])(params)
        return f @ f.T / outputs, sum(
            jnp.tensordot(leaf, leaf, (tuple(range(1, leaf.ndim)),) * 2)
            for leaf in jax.tree.leaves(J)
        )

    keys = jax.random.split(jax.random.key(1), num)
    draws = jax.jit(lambda keys: jax.lax.map(sample, keys, batch_size=8))(keys)
    for values, want in zip(draws, net.kernel_block(x, x, "both"), strict=True):
        scale = np.abs(want).max()
        noise = 4 * np.asarray(values).std(0) / np.sqrt(num)
        # Four standard errors of the mean, and 2 % for the O(1/width) bias of finite networks.
        error = np.abs(np.asarray(values).mean(0) - want)
        assert (error < noise + 0.02 * scale).all(), error / scale
        # So a factor of 1.1 in the largest entry would be noticed.
        assert (noise < 0.08 * scale).all(), noise / scale


def test_init_gives_the_outputs_asked_for():
    net = mlp(infinite.Relu())
    params = net.init(jax.random.key(0), (5,), width=7, outputs=3)
    assert params[0]["W"].shape == (5, 7)
    assert net.apply(params, np.ones((2, 5))).shape == (2, 3)
    with pytest.raises(ValueError, match="must end in Dense"):
        infinite.serial(infinite.Dense(), infinite.Relu()).init(jax.random.key(0), (5,))


def check_quadrature(by_quadrature, closed, x, **tolerance):
    pairs = (net.kernel_block(x, x, "both") for net in (by_quadrature, closed))
    for got, want in zip(*pairs, strict=True):
        np.testing.assert_allclose(got, want, **tolerance)


def test_quadrature_agrees_with_closed_forms_and_says_so():
    by_quadrature = mlp(infinite.Activation(jax.scipy.special.erf))
    # Variances up to 0.8: (1.6/2.6)^64 = 3e-14.
    check_quadrature(by_quadrature, mlp(infinite.Erf()), normal(4, 5) / 2, rtol=1e-11)
    assert "Gauss-Hermite quadrature, 64 nodes" in by_quadrature.describe()
    assert "quadrature" not in mlp(infinite.Erf()).describe()


@pytest.mark.slow
def test_quadrature_at_large_variances_and_kinks():
    x = normal(4, 5)
    # Variances up to 3.4: (6.8/7.8)^160 = 3e-10 at equal points, and less at others.
    by_quadrature = mlp(infinite.Activation(jax.scipy.special.erf, nodes=160))
    check_quadrature(by_quadrature, mlp(infinite.Erf()), x, rtol=1e-9)
    relu = mlp(infinite.Activation(jax.nn.relu, nodes=100)).kernel_block(x, x, "nngp")
    want = np.asarray(mlp(infinite.Relu()).kernel_block(x, x, "nngp"))
    np.testing.assert_allclose(relu, want, rtol=0, atol=want.max() / 100)  # order 1/nodes


IMAGE = np.ones((2, 4, 4, 1))


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: mlp().kernel(np.ones((2, 3)), np.ones((2, 4))), ValueError, "same shape"),
        (lambda: mlp().kernel(np.ones(3)), ValueError, "leading axis"),
        (lambda: mlp().kernel(np.full((2, 3), np.nan)), ValueError, "2 of 2 points"),
        (lambda: mlp().kernel(np.ones((2, 3)), kind="ntg"), ValueError, "'ntk' or 'nngp'"),
        (lambda: mlp().kernel(np.ones((2, 3), complex)), TypeError, "real numbers"),
        (lambda: infinite.serial(infinite.Conv()).kernel(IMAGE), ValueError, "Add Flatten"),
        (
            lambda: infinite.serial(infinite.AvgPool((5, 5)), infinite.Flatten()).kernel(IMAGE),
            ValueError,
            "larger than the image",
        ),
        (
            lambda: infinite.serial(
                infinite.AvgPool((5, 5), padding="SAME"), infinite.Flatten()
            ).kernel(IMAGE),
            ValueError,
            "larger than the image",
        ),
        (lambda: infinite.serial(infinite.Conv()).kernel(np.ones((2, 3))), ValueError, "images"),
        (lambda: infinite.serial(infinite.Relu()).kernel(np.ones((2, 3))), ValueError, "Gaussian"),
        (
            lambda: infinite.serial(infinite.Dense(), infinite.residual(infinite.Relu())).kernel(
                np.ones((2, 3))
            ),
            ValueError,
            "without weights",
        ),
        (lambda: infinite.serial(jnp.tanh), TypeError, "Activation"),
        (lambda: infinite.Dropout(0.0), ValueError, "keeping"),
        (lambda: infinite.AvgPool((0, 2)), ValueError, "window"),
        (lambda: infinite.SumPool((2, 2), strides=(1, -1)), ValueError, "strides"),
        (
            lambda: infinite.serial(
                infinite.Dense(), infinite.Dense(parameterization="standard")
            ).kernel(np.ones((2, 3))),
            ValueError,
            "finite width",
        ),
    ],
)
def test_bad_input_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_integers_and_half_precision():
    net = mlp(infinite.Relu())
    ints = np.array([[1, 2, 3], [0, 1, 0]])
    np.testing.assert_array_equal(*(net.kernel_block(x, x) for x in (ints, ints.astype(float))))
    half = normal(3, 4).astype(np.float16)
    with pytest.warns(UserWarning, match="float32"):
        kernel = net.kernel_block(half, half)
    assert kernel.dtype == jnp.float32
    double = half.astype(float)
    np.testing.assert_allclose(kernel, net.kernel_block(double, double), rtol=2e-6)


def test_dropout_in_training_adds_to_variances_alone():
    """In closed form, between two sets: the first layer of arc cosines, of units that are kept with 0.6."""
    rng = np.random.default_rng(0)
    x, x2, keep = rng.normal(size=(5, 4)), rng.normal(size=(3, 4)), 0.6
    network = infinite.serial(
        infinite.Dense(W_std=1.3),
        infinite.Dropout(keep, "train"),
        infinite.Relu(),
        infinite.Dense(),
    )
    cov = 1.3**2 * x @ x2.T / 4
    size = 1.3 * np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(x2, axis=1)) * 1.3 / 4 / keep
    angle = np.arccos(cov / size)
    nngp = size * (np.sin(angle) + (np.pi - angle) * np.cos(angle)) / (2 * np.pi)
    ntk = nngp + cov * (np.pi - angle) / (2 * np.pi)
    found = network.kernel(jnp.asarray(x), jnp.asarray(x2))
    np.testing.assert_allclose(found, ntk, rtol=1e-10)


@pytest.mark.parametrize("nodes", [2, 3, 9])
def test_hermite_coefficients_of_hermite_polynomials_are_ones(nodes):
    z, weights = _quadrature._hermite(nodes)
    factorials = np.cumprod([1.0, *range(1, nodes)])
    polynomials = np.polynomial.hermite_e.hermevander(z, nodes - 1) / np.sqrt(factorials)
    np.testing.assert_allclose(weights @ polynomials, np.eye(nodes), atol=1e-12)
