"""Kernels of infinitely wide networks on images, of any number of images, as they are called."""

import numpy as np
import pytest

import cases
import dualfluence as dfl
from dualfluence import infinite
from dualfluence.infinite import Conv, Dense, Flatten, Relu

PLAIN = infinite.serial(Conv(), Relu(), Flatten(), Dense())
SIZES = (1, 2, 3, 5, 17, 33)
QUERIES = ((1, 1), (1, 33), (33, 1), (3, 5), (2, 17))
NETWORKS = {
    "plain": (PLAIN, (8, 8, 3)),
    "strided": (
        infinite.serial(
            Conv((3, 2), (2, 1), "VALID", W_std=1.4, b_std=0.1), infinite.Erf(), Flatten(), Dense()
        ),
        (5, 4, 2),
    ),
    "torus": (
        infinite.serial(
            Conv(padding="CIRCULAR"), infinite.Gelu(), infinite.AvgPool(), Flatten(), Dense()
        ),
        (4, 4, 1),
    ),
    "global": (infinite.serial(Conv(), Relu(), infinite.GlobalAvgPool(), Dense()), (4, 5, 2)),
    "norm": (
        infinite.serial(
            Conv(),
            infinite.LayerNorm(),
            Relu(),
            infinite.SumPool(padding="SAME"),
            Flatten(),
            Dense(),
        ),
        (4, 4, 2),
    ),
    "attention": (
        infinite.serial(Conv(), Relu(), infinite.GlobalSelfAttention(), Flatten(), Dense()),
        (3, 4, 2),
    ),
    "residual": (
        infinite.serial(
            Conv(), infinite.residual(infinite.serial(Relu(), Conv())), Relu(), Flatten(), Dense()
        ),
        (3, 3, 1),
    ),
    "flat": (infinite.serial(Flatten(), Dense(), Relu(), Dense()), (4, 3, 2)),
}


def images(n, shape, dtype, seed=0):
    return np.random.default_rng(seed).normal(size=(n, *shape)).astype(dtype)


def check(got, want, dtype):
    assert got.shape == want.shape
    assert got.dtype == dtype
    # Rounding of sums of a few hundred terms, next to which small entries are what is left of them.
    size = np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=64 * np.finfo(dtype).eps * size)


def check_every_size(net, shape, dtype, kind="ntk", sizes=SIZES, queries=QUERIES):
    """Default arguments, as a user calls it, against one block of all points."""
    x, q = images(33, shape, dtype), images(33, shape, dtype, seed=1)
    own, cross = net.kernel_block(x, x, kind), net.kernel_block(q, x, kind)
    for n in sizes:
        check(net.kernel(x[:n], kind=kind), own[:n, :n], dtype)
    for n1, n2 in queries:
        check(net.kernel(q[:n1], x[:n2], kind=kind), cross[:n1, :n2], dtype)
    host = net.kernel(q[:3], x[:5], kind=kind, out="host")
    assert isinstance(host, np.ndarray)
    check(host, cross[:3, :5], dtype)


def test_any_number_of_images_with_default_arguments():
    some = {"sizes": (1, 5, 33), "queries": ((1, 33), (3, 5))}
    check_every_size(*NETWORKS["plain"], np.float32, **some)


def test_any_number_of_images_in_small_tiles():
    net, shape = NETWORKS["strided"]
    x, q = images(9, shape, np.float64), images(3, shape, np.float64, seed=1)
    small = 8 * net.pair_entries(x.shape) * 110
    # 8 x 8 images a tile, worked on row by row.
    assert net.tile_shape(x.shape, 9, 8, small, True) == ((8, 8), 1)
    own, cross = net.kernel_block(x, x), net.kernel_block(q, x)
    for n in (1, 5, 9):
        for out in ("device", "host"):
            check(net.kernel(x[:n], tile_bytes=small, out=out), own[:n, :n], np.float64)
            check(net.kernel(q, x[:n], tile_bytes=small, out=out), cross[:, :n], np.float64)
    check(net.kernel(x[:3], tile_bytes=1), own[:3, :3], np.float64)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["ntk", "nngp"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", NETWORKS)
def test_any_number_of_images_in_any_network(name, dtype, kind):
    check_every_size(*NETWORKS[name], dtype, kind)


FITS = ((1, 1), (2, 3), (3, 1), (5, 2), (17, 1), (33, 3))
"""Training points and queries."""


def ridge_regression(K, Q, y, ridge):
    return Q @ np.linalg.solve(K + ridge * len(K) * np.eye(len(K)), y)


@pytest.mark.parametrize(
    ("name", "dtype", "sizes"),
    [
        pytest.param("strided", np.float32, ((5, 2),), marks=pytest.mark.thorough),
        pytest.param("global", np.float32, FITS, marks=pytest.mark.thorough),
        pytest.param("strided", np.float64, FITS, marks=pytest.mark.thorough),
    ],
)
def test_fits_of_few_images(name, dtype, sizes):
    net, shape = NETWORKS[name]
    x, q, y = images(34, shape, dtype), images(3, shape, dtype, 1), images(34, (2,), dtype, 2)
    x64, q64 = x.astype(float), q.astype(float)
    K, Q = net.kernel_block(x64, x64), net.kernel_block(q64, x64)
    close = 1e-4 if dtype == np.float32 else 1e-9

    def predicted(points, num):
        points = np.asarray(points)
        return ridge_regression(K[np.ix_(points, points)], Q[:num, points], y[points], 0.1)

    for n, num in sizes:
        fitted = dfl.fit(net, x[:n], y[:n], loss=dfl.SquaredError(), ridge=0.1, progress=False)
        assert cases.relative(fitted.predict(q[:num]), predicted(range(n), num)) < close
        if n == 5:
            update = fitted.edit(dfl.Add(x[33:], y[33:]))
            assert cases.relative(update.predict(q), predicted([*range(5), 33], 3)) < close
            update = fitted.edit(dfl.Remove([0]))
            assert cases.relative(update.predict(q), predicted(range(1, 5), 3)) < close
            values = fitted.attribute(q[:num], y[:num], of="loss").values
            losses = [
                np.sum((predicted([j for j in range(5) if j != i], num) - y[:num]) ** 2, 1) / 2
                for i in (None, *range(5))
            ]
            want = np.transpose(np.subtract(losses[1:], losses[0]))
            assert cases.relative(values, want) < 10 * close
