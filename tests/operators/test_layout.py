"""Rows are points and padding, on one device or on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualfluence.operators._base import Layout, as_mesh, every_row, on_mesh, rows_for

TWO = Layout(((3, 4), (2, 5)))
VALUES = np.arange(5.0)


def test_points_come_first_in_every_block():
    assert (TWO.num_points, TWO.num_rows, TWO.num_devices) == (5, 9, 1)
    np.testing.assert_array_equal(TWO.expand(VALUES), [0, 1, 2, 2, 3, 4, 4, 4, 4])
    np.testing.assert_array_equal(TWO.expand(VALUES, "zero"), [0, 1, 2, 0, 3, 4, 0, 0, 0])
    np.testing.assert_array_equal(TWO.place(VALUES), TWO.expand(VALUES, "zero"))
    np.testing.assert_array_equal(TWO.place(VALUES, "last"), TWO.expand(VALUES))
    pairs = np.arange(10.0).reshape(5, 2)
    np.testing.assert_array_equal(TWO.expand(pairs)[3:6], pairs[[2, 3, 4]])


def test_room_for_more_points():
    assert every_row(4) == Layout(((4, 4),))
    assert every_row(4).holding(3) == Layout(((3, 4),))
    assert every_row(4).holding(4) == every_row(4)
    assert every_row(4).extended(2) == Layout(((4, 4), (2, 2)))
    rows = jnp.asarray([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_array_equal(Layout(((3, 4),)).points(rows), [1, 2, 3])
    assert every_row(4).points(rows) is rows
    np.testing.assert_array_equal(every_row(6).grow(rows, 6), [1, 2, 3, 4, 0, 0])
    np.testing.assert_array_equal(every_row(6).grow(rows[:, None], 5), [[1], [2], [3], [4], [0]])
    assert every_row(4).grow(rows, 4) is rows
    assert every_row(4).scalar(0.5, jnp.float32).dtype == jnp.float32


def test_a_stream_of_points_meets_few_shapes():
    rows = {(5, 8): 8, (8, 8): 8, (9, 8): 41, (801, 800): 901, (10_001, 10_000): 10_257}
    assert {key: rows_for(*key) for key in rows} == rows


def test_a_mesh_of_one_device_is_a_mesh():
    layout = on_mesh(3, jax.devices()[:1])
    assert layout.blocks == ((3, 3),)
    assert layout.extended(2).blocks == ((3, 3), (2, 2))
    assert layout.holding(2) is layout
    assert (layout.num_devices, layout.replicated is None) == (1, False)
    placed = layout.place(np.arange(3.0))
    assert placed.sharding == layout.sharding
    np.testing.assert_array_equal(layout.points(placed), [0, 1, 2])
    grown = layout.extended(2).grow(placed, 5)
    np.testing.assert_array_equal(grown, [0, 1, 2, 0, 0])
    two = Layout(((2, 3), (2, 2)), layout.sharding)
    np.testing.assert_array_equal(two.points(grown), [0, 1, 0, 0])
    assert float(layout.scalar(0.5, jnp.float32)) == 0.5
    assert as_mesh(as_mesh(jax.devices()[:1])).size == 1


@pytest.mark.parametrize(("mesh", "error"), [([], ValueError), ([3], TypeError)])
def test_other_meshes_are_refused(mesh, error):
    with pytest.raises(error, match="mesh: expected"):
        as_mesh(mesh)
