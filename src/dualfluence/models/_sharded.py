"""Any source of kernels with its work spread over a mesh: each device computes its own rows."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from .._support.compile import filter_jit
from .._support.progress import ProgressFn
from ..kernels._linearized import Linearized
from ..operators import (
    AbstractKernelOperator,
    BorderedOperator,
    DenseOperator,
    KroneckerOperator,
    MatrixFreeOperator,
    MixedOperator,
    ShardedMatrixFreeOperator,
    ShardedOperator,
)
from ..operators._layout import AXIS, Device, Layout, map_shards, on_mesh
from ._sources import AbstractSource, flatten_block

ROWS, EVERY = PartitionSpec(AXIS), PartitionSpec()


class ShardedSource(AbstractSource):
    """A source whose kernels, outputs and read-outs are computed where their rows live.

    Under `jax.distributed` every process gives the same points; each fills the rows of its own
    devices, and what is read out is the same array in every process.
    """

    inner: AbstractSource
    mesh: Mesh = eqx.field(static=True)

    @property
    def network(self) -> Linearized | None:
        return self.inner.network

    def layout(self, x: Array) -> Layout:
        return on_mesh(x.shape[0], self.mesh)

    def base_outputs(self, x: Array, num_outputs: int | None) -> Float[Array, "n c"] | None:
        if self.network is None:
            return self.inner.base_outputs(x, num_outputs)
        self.network.apply_shape(x)
        layout = self.layout(x)
        outputs = _map_rows(_base_outputs, layout, self.network, layout.place(x, "last"))
        return layout.points(outputs)

    def operator(
        self, x: Array, num_outputs: int, *, form: str, progress: bool | ProgressFn
    ) -> AbstractKernelOperator:
        layout = self.layout(x)
        if form == "matrix-free" and self.network is not None:
            rows = layout.place(x, "last")
            return ShardedMatrixFreeOperator(self.network, rows, num_outputs, layout)
        if form == "matrix-free":
            return self.inner.operator(x, num_outputs, form=form, progress=progress)  # the error
        host = layout.expand(np.asarray(x))
        return _square(self.inner, host, num_outputs, layout, progress)

    def cross_mv(
        self, xq: Array, x: Array, v: Float[Array, "n c"], progress: bool | ProgressFn = True
    ) -> Float[Array, "q c"]:
        layout = self.layout(x)
        if self.network is not None:
            rows, values = layout.place(x, "last"), layout.place(v)
            return _network_cross_mv(self.network, layout, np.asarray(xq), rows, values)
        host, v_rows = layout.expand(np.asarray(x)), layout.place(v)
        return _kernel_cross_mv(self.inner, np.asarray(xq), host, v_rows, layout)

    def pull_back(self, x: Array, v: Float[Array, "n c"]) -> PyTree:
        layout = self.layout(x)
        assert self.network is not None
        return _network_pull_back(self.network, layout, layout.place(x, "last"), layout.place(v))

    def extend(
        self,
        op: AbstractKernelOperator,
        x: Array,
        start: int,
        stop: int,
        progress: bool | ProgressFn,
    ) -> AbstractKernelOperator:
        """New points come as a border with padding of its own: rows on a mesh never move."""
        if isinstance(op, MixedOperator):
            return MixedOperator(self.extend(op.op, x, start, stop, progress))
        host = np.asarray(x)
        old, new = op.layout, on_mesh(stop - start, self.mesh)
        c = op.num_outputs
        if isinstance(op, ShardedMatrixFreeOperator):
            both = Layout((*old.blocks, *new.blocks), old.sharding)
            rows = both.place(host[:stop], "last")
            return ShardedMatrixFreeOperator(op.model, rows, c, both)
        rows, cols = old.expand(host[:start]), new.expand(host[start:stop])
        cross = _blocks(self.inner, rows, cols, c, old, progress)
        return BorderedOperator(op, cross, _square(self.inner, cols, c, new, progress))


def spread(op: AbstractKernelOperator, layout: Layout) -> AbstractKernelOperator:
    """`K` held on one device with its rows moved to those of `layout`."""
    if isinstance(op, MixedOperator):
        return MixedOperator(spread(op.op, layout))
    if isinstance(op, MatrixFreeOperator):
        rows = layout.place(op.x, "last")
        return ShardedMatrixFreeOperator(op.model, rows, op.num_outputs, layout)
    if not isinstance(op, (DenseOperator, KroneckerOperator)):
        raise ValueError(
            f"on: a {type(op).__name__} cannot be moved to other devices. Fit again with mesh=..., "
            "which computes every row where it belongs."
        )
    each = op.matrix.shape[0] // op.num_points
    points = layout.expand(np.arange(op.num_points))
    flat = (points[:, None] * each + np.arange(each)).reshape(points.size, each)

    def take(device: Device, index: slice, report: bool | ProgressFn) -> Array:
        return op.matrix[flat[index].reshape(-1)][:, flat.reshape(-1)]

    parts = _on_each_device(take, layout, False)
    matrix = jax.make_array_from_single_device_arrays((flat.size, flat.size), _rows(layout), parts)
    return ShardedOperator(replace(op, matrix=matrix), layout)


def _square(
    source: AbstractSource, rows: np.ndarray, c: int, layout: Layout, progress: bool | ProgressFn
) -> ShardedOperator:
    matrix = _blocks(source, rows, rows, c, layout, progress)
    kronecker = matrix.shape == (layout.num_rows, layout.num_rows)
    kind = KroneckerOperator if kronecker else DenseOperator
    return ShardedOperator(kind(matrix, c), layout)


def _blocks(
    source: AbstractSource,
    rows: np.ndarray,
    cols: np.ndarray,
    c: int,
    layout: Layout,
    progress: bool | ProgressFn,
) -> Array:
    """`K(rows, cols)`, flat, each device filling its own rows in memory-bounded tiles."""

    def fill(device: Device, index: slice, report: bool | ProgressFn) -> Array:
        block = _on(source, device).block(rows[index], cols, report)
        return flatten_block(block) if block.ndim == 4 else block

    parts = _on_each_device(fill, layout, progress)
    width = parts[0].shape[1]
    per_row = parts[0].shape[0] * layout.num_devices // layout.num_rows
    if (per_row, width) not in ((1, len(cols)), (c, c * len(cols))):
        raise ValueError(
            f"kernel: for {c} outputs expected blocks of shape (n1, n2) or (n1, {c}, n2, {c}), got "
            f"{per_row} rows per point and {width} columns for {len(cols)} points."
        )
    shape = (per_row * layout.num_rows, width)
    return jax.make_array_from_single_device_arrays(shape, _rows(layout), parts)


def _on_each_device(
    fn: Callable[[Device, slice, bool | ProgressFn], Array],
    layout: Layout,
    progress: bool | ProgressFn,
) -> list[Array]:
    """`fn(device, rows)` for this process's devices, in parallel; the first one reports."""
    index_map = _rows(layout).addressable_devices_indices_map((layout.num_rows,))
    work = [(device, index[0]) for device, index in index_map.items() if index is not None]

    def run(job: tuple[int, tuple[Device, slice]]) -> Array:
        place, (device, index) = job
        with jax.default_device(device):
            made = fn(device, index, progress if place == 0 else False)
        return jax.device_put(made, device)

    with ThreadPoolExecutor(max_workers=len(work)) as pool:
        return list(pool.map(run, enumerate(work)))


def _on(source: AbstractSource, device: Device) -> AbstractSource:
    """The source with its arrays (parameters) on `device`."""
    arrays, static = eqx.partition(source, eqx.is_array)
    local = jax.tree.map(lambda a: jax.device_put(np.asarray(a), device), arrays)
    return eqx.combine(local, static)


def _rows(layout: Layout) -> NamedSharding:
    assert layout.sharding is not None
    return layout.sharding


def _base_outputs(model: Linearized, x: Array) -> Array:
    return model.base_outputs(x)


@filter_jit
def _map_rows(fn: Callable[..., Array], layout: Layout, model: Linearized, x: Array) -> Array:
    params, static = eqx.partition(model, eqx.is_array)
    local = map_shards(lambda p, xs: fn(eqx.combine(p, static), xs), layout, (EVERY, ROWS), ROWS)
    return local(params, x)


@filter_jit
def _network_pull_back(model: Linearized, layout: Layout, x: Array, v: Array) -> PyTree:
    params, static = eqx.partition(model, eqx.is_array)

    def local(params: PyTree, x: Array, v: Array) -> PyTree:
        return jax.lax.psum(eqx.combine(params, static).vjp(x, v), AXIS)

    return map_shards(local, layout, (EVERY, ROWS, ROWS), EVERY)(params, x, v)


@filter_jit
def _network_cross_mv(
    model: Linearized, layout: Layout, xq: Any, x: Array, v: Array
) -> Float[Array, "q c"]:
    move = model.jvp(jnp.asarray(xq), _network_pull_back(model, layout, x, v))
    return jax.lax.with_sharding_constraint(move, layout.replicated)


def _kernel_cross_mv(
    source: AbstractSource, xq: np.ndarray, rows: np.ndarray, v: Array, layout: Layout
) -> Array:
    """`Σ_d K(xq, x_d) v_d`, each term on device `d`."""
    shards = {shard.device: shard.data for shard in v.addressable_shards}

    def term(device: Device, index: slice, report: bool | ProgressFn) -> Array:
        local = _on(source, device)
        return local.cross_mv(jnp.asarray(xq), jnp.asarray(rows[index]), shards[device])[None]

    parts = _on_each_device(term, layout, False)
    shape = (layout.num_devices, *parts[0].shape[1:])
    terms = jax.make_array_from_single_device_arrays(shape, _rows(layout), parts)
    return jax.jit(partial(jnp.sum, axis=0), out_shardings=layout.replicated)(terms)
