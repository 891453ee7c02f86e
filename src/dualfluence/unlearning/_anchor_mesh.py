r"""The explicit inverse of an anchor whose rows of `K` are on a mesh.

`N` is symmetric. Each device holds some of its columns, so that the row that a removal reads is in every
device's part. `N` is made a block of columns at a time, from a factor with its rows on the devices.
"""

from math import ceil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from .._support.compile import HIGHEST, filter_jit
from .._support.memory import memory_budget
from .._support.shards import AXIS, EVERY, ROWS, on_shards
from .._support.types import AnyArray
from ..attribution._spread_system import SpreadSystem, by_rows, over_outputs, share_of_memory
from ..fitted._fitted import Fitted
from ..linalg import SpreadCholesky
from ..losses import AbstractFactor
from ..operators._base import Layout, map_shards, rows_on

COLUMNS = PartitionSpec(None, AXIS)
"""How `N` and the rows read from it lie on the devices."""

MESH_MATRICES = 8
"""Matrices of the size of `K` that all devices together hold while they make `N`."""

COLUMNS_AT_ONCE = 1024
"""Columns of `N` that are made at once. Twice as many take twice the memory and half of the steps."""


def fits_on_mesh(fitted: Fitted) -> bool:
    """Whether `K` has its entries on a mesh, and every device has room for its part of the inverse."""
    op = fitted.kernel_op
    if op.narrow.entries_on_mesh is None:
        return False
    size = op.num_points * op.num_outputs
    num_bytes = size**2 * op.dtype.itemsize * share_of_memory(op.layout)
    return MESH_MATRICES * num_bytes <= memory_budget()


def invert_on_mesh(fitted: Fitted, factor: AbstractFactor) -> tuple[Array, Array, Array]:
    """`N`, and the blocks of `W₀` and `R`."""
    op, layout, c = fitted.kernel_op, fitted.layout, fitted.num_outputs
    K = op.narrow.entries_on_mesh
    assert K is not None
    K = K.astype(op.dtype)
    K = over_outputs(K, c, layout) if op.is_kronecker else K
    system = SpreadSystem(K, factor.narrow(), c, layout)
    chol = system.cholesky(fitted.ridge)
    N = _symmetric(_columns_of_inverse(system, chol, np.asarray(fitted.ridge, op.dtype)), layout)
    return N, *_blocks(factor, np.eye(c, dtype=op.dtype), layout)


@filter_jit
def _columns_of_inverse(
    system: SpreadSystem, chol: SpreadCholesky, ridge: Float[AnyArray, ""]
) -> Float[Array, "m m"]:
    """`(K − KRB⁻¹RᵀK)/λ`, with its rows on the devices."""
    c, layout, factor, size = system.c, system.layout, system.factor, system.K.shape[1]
    n, specs = size // c, by_rows(factor)
    each = ceil(n / ceil(size / COLUMNS_AT_ONCE))

    def some(first: Array) -> Array:
        points = jnp.minimum(first + jnp.arange(each), n - 1)
        columns = (points[:, None] * c + jnp.arange(c)[None, :]).reshape(-1)

        def sides(own: AbstractFactor, K: Array) -> Array:
            chosen = K[:, columns]
            return own.rmv(chosen.reshape(-1, c, each * c)).reshape(-1, each * c)

        def unfold(own: AbstractFactor, z: Array) -> Array:
            return own.mv(z.reshape(n // layout.num_devices, -1, each * c))

        def rest(K: Array, v: Array) -> Array:
            taken = jnp.dot(K, v.reshape(size, -1), precision=HIGHEST)
            return (K[:, columns] - taken) / ridge

        z = chol.solve(map_shards(sides, layout, (specs, ROWS), ROWS)(factor, system.K))
        r_z = map_shards(unfold, layout, (specs, ROWS), ROWS)(factor, z)
        return map_shards(rest, layout, (ROWS, EVERY), ROWS)(system.K, r_z)

    parts = jax.lax.map(some, jnp.arange(0, n, each))

    def joined(parts: Array) -> Array:
        return jnp.moveaxis(parts, 0, 1).reshape(parts.shape[1], -1)[:, :size]

    spec = PartitionSpec(None, AXIS)
    return map_shards(joined, layout, spec, ROWS)(parts)


@filter_jit
def _symmetric(N: Float[Array, "m m"], layout: Layout) -> Float[Array, "m m"]:
    """The mean of `N` and its transpose, which differ by rounding, with columns on the devices."""
    devices = layout.num_devices

    def local(N: Array) -> Array:
        own = N.shape[0]
        parts = N.reshape(own, devices, own)
        columns = jax.lax.all_to_all(parts, AXIS, split_axis=1, concat_axis=0)
        return 0.5 * (columns.reshape(-1, own) + N.T)

    return map_shards(local, layout, ROWS, COLUMNS)(N)


@filter_jit
def _blocks(
    factor: AbstractFactor, eye: Float[AnyArray, "c c"], layout: Layout
) -> tuple[Float[Array, "n c c"], Float[Array, "n c c"]]:
    """`W₀` and `R` of every point."""

    def local(own: AbstractFactor) -> tuple[Array, Array]:
        eyes = jnp.broadcast_to(eye, (layout.num_rows // layout.num_devices, *eye.shape))
        return own.hess_mv(eyes), own.mv(eyes)

    return map_shards(local, layout, (by_rows(factor),), ROWS)(factor)


def columns_at(
    rows: Float[Array, "kc nc"], start: Int[Array, ""], c: int, layout: Layout
) -> Float[Array, "kc c"]:
    """`rows[:, start:start + c]`, the same on every device, where columns are on the devices."""

    def local(rows: Array) -> Array:
        width = rows.shape[1]
        first = start - jax.lax.axis_index(AXIS).astype(start.dtype) * width
        # A point's columns are on one device.
        inside = (first >= 0) & (first < width)
        part = jax.lax.dynamic_slice_in_dim(rows, jnp.clip(first, 0, width - c), c, axis=1)
        return jax.lax.psum(jnp.where(inside, part, 0), AXIS)

    return on_shards(local, rows_on(layout).mesh, (COLUMNS,), EVERY)(rows)


class Places(NamedTuple):
    """Where the arrays of a removal lie: rows read from `N`, arrays by point, and small ones."""

    columns: NamedSharding
    rows: NamedSharding
    every: NamedSharding

    @staticmethod
    def of(layout: Layout) -> "Places":
        rows = rows_on(layout)
        return Places(NamedSharding(rows.mesh, COLUMNS), rows, NamedSharding(rows.mesh, EVERY))
