"""A kernel filled in tiles is the kernel, and its block function sees whole tiles only."""

import jax.numpy as jnp
import numpy as np
import pytest

from dualfluence._support.memory import even_size, fill_kernel, pad_rows

SIZES = [(1, None), (5, None), (8, None), (1, 7), (7, 1), (5, 3)]
TILES = [(3, 3), (8, 8), (2, 3), (16, 1), (5, 16)]
TAILS = [(), (2,)]


def points(n, start):
    return start + np.arange(2.0 * n).reshape(n, 2)


def entries(x1, x2, tail):
    """A symmetric kernel `(n1, *tail, n2, *tail)` in which no two entries are alike."""
    K = x1 @ x2.T + 0.01 * np.sin(x1[:, :1] * x2[:, :1].T)
    if not tail:
        return K
    outputs = np.array([[1.0, 0.3], [0.3, 2.0]])
    return np.einsum("ij,ab->iajb", K, outputs) + np.einsum("ia,jb->iajb", x1, x2)


@pytest.mark.parametrize("out", ["device", "host"])
@pytest.mark.parametrize("tail", TAILS)
def test_every_size_in_every_tile(tail, out):
    for n1, n2 in SIZES:
        for tile in TILES:
            if n2 is None and tile[0] != tile[1]:
                continue
            x1, x2 = points(n1, 1), None if n2 is None else points(n2, 30)
            want = entries(x1, x1 if x2 is None else x2, tail)
            done = []

            def block(a, b, tile=tile):
                assert (len(a), len(b)) == tile
                return jnp.asarray(entries(np.asarray(a), np.asarray(b), tail))

            options = {"tail": tail, "dtype": float, "tile": tile, "out": out, "label": "tiles"}
            for flat in (False, True):
                got = fill_kernel(
                    block,
                    x1,
                    x2,
                    flat=flat,
                    progress=lambda *args, done=done: done.append(args),
                    **options,
                )
                assert isinstance(got, np.ndarray) == (out == "host")
                side = 2 if tail else 1
                shape = (n1 * side, -1) if flat else want.shape
                np.testing.assert_allclose(got, want.reshape(shape), rtol=1e-14)
            rows, cols = -(-n1 // tile[0]), -(-(n2 or n1) // tile[1])
            tiles = rows * (rows + 1) // 2 if n2 is None else rows * cols
            assert done[-1] == (tiles, tiles, "tiles")


def test_a_symmetric_kernel_in_oblong_tiles_is_refused():
    with pytest.raises(ValueError, match=r"square tiles, got \(2, 3\)"):
        fill_kernel(lambda a, b: a, points(4, 0), None, tail=(), dtype=float, tile=(2, 3))


def test_a_kernel_that_fills_its_one_tile_is_not_copied():
    x, made = jnp.asarray(points(4, 1)), []

    def block(a, b):
        assert a is x
        assert b is x
        made.append(jnp.asarray(entries(np.asarray(a), np.asarray(b), ())))
        return made[0]

    got = fill_kernel(block, x, None, tail=(), dtype=float, tile=(4, 4), progress=False)
    assert got.unsafe_buffer_pointer() == made[0].unsafe_buffer_pointer()


def test_rows_are_padded_with_the_last():
    x = points(5, 0)
    np.testing.assert_array_equal(pad_rows(x, 0, 5), x)
    np.testing.assert_array_equal(pad_rows(x, 1, 3), x[1:4])
    np.testing.assert_array_equal(pad_rows(x, 3, 4), x[[3, 4, 4, 4]])
    np.testing.assert_array_equal(pad_rows(x, 0, 7), x[[0, 1, 2, 3, 4, 4, 4]])


def test_even_sizes():
    assert [even_size(10, size) for size in (1, 3, 4, 6, 9, 10, 20)] == [1, 3, 4, 5, 5, 10, 10]
