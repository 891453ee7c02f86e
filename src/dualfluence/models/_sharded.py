"""Any source of kernels with its work spread over a mesh: each device computes its own rows."""

from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree

from .._support.compile import filter_jit
from .._support.options import ProgressFn
from .._support.shards import EVERY, ROWS
from .._support.types import Inputs
from ..kernels._linearized import Linearized
from ..operators import (
    AbstractKernelOperator,
    BorderedOperator,
    DenseOperator,
    KroneckerOperator,
    ShardedMatrixFreeOperator,
    ShardedOperator,
)
from ..operators._base import AXIS, Device, Layout, from_parts, map_shards, on_each_device, on_mesh
from ._sources import AbstractSource, flatten_block


class ShardedSource(AbstractSource):
    """A source that computes kernels, outputs and read-outs on the devices that hold their rows.

    Under `jax.distributed` every process gives the same points; each fills the rows of its devices, and
    read-outs are the same array in every process.
    """

    inner: AbstractSource
    mesh: Mesh = eqx.field(static=True)

    @property
    def network(self) -> Linearized | None:
        return self.inner.network

    @property
    def _tangent(self) -> Linearized | None:
        """The network, if its own tangent kernel is `K` and not an approximation by features."""
        return None if self.inner.has_features else self.network

    @property
    def num_devices(self) -> int:
        return self.mesh.size

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
        if form == "matrix-free" and self._tangent is not None:
            rows = layout.place(x, "last")
            return ShardedMatrixFreeOperator(self._tangent, rows, num_outputs, layout)
        if form == "matrix-free" and not self.inner.has_features:
            return self.inner.operator(x, num_outputs, form=form, progress=progress)  # the error
        host = layout.expand(np.asarray(x))
        return _square(self.inner, host, num_outputs, layout, progress)

    def cross_mv(
        self, xq: Array, x: Array, v: Float[Array, "n c"], progress: bool | ProgressFn = True
    ) -> Float[Array, "q c"]:
        layout = self.layout(x)
        if self._tangent is not None:
            rows, values = layout.place(x, "last"), layout.place(v)
            return _network_cross_mv(self._tangent, layout, np.asarray(xq), rows, values)
        host, v_rows, queries = layout.expand(np.asarray(x)), layout.place(v), np.asarray(xq)

        def product(local: AbstractSource, rows: Array, v: Array) -> Array:
            return local.cross_mv(jnp.asarray(queries), rows, v)

        return _sum_over_devices(self.inner, product, host, v_rows, layout)

    def pull_back(self, x: Array, v: Float[Array, "n c"]) -> PyTree:
        layout = self.layout(x)
        assert self.network is not None
        if self._tangent is not None:
            rows, values = layout.place(x, "last"), layout.place(v)
            return _network_pull_back(self._tangent, layout, rows, values)
        host, v_rows = layout.expand(np.asarray(x)), layout.place(v)

        def product(local: AbstractSource, rows: Array, v: Array) -> PyTree:
            return local.pull_back(rows, v)

        return _sum_over_devices(self.inner, product, host, v_rows, layout)

    def rows_block(self, x: Array, xq: Array, num_outputs: int, layout: Layout) -> Array:
        """`K(x, xq)` as a matrix, with the rows of `x` on the devices of `layout`."""
        rows, cols = layout.expand(np.asarray(x)), np.asarray(xq)
        return _blocks(self.inner, rows, cols, num_outputs, layout, False)

    def rows_along(
        self, x: Array, xq: Array, v: Float[Array, "q c"], layout: Layout
    ) -> Float[Array, "n q c"]:
        """`v_qᵀ K(xq, x)`, with the rows of `x` on the devices of `layout`."""
        rows, queries, along = layout.expand(np.asarray(x)), np.asarray(xq), np.asarray(v)

        def fill(device: Device, index: slice, report: bool | ProgressFn) -> Array:
            given = tuple(jnp.asarray(a) for a in (queries, along, rows[index]))
            return _on(self.inner, device).along(*given).swapaxes(0, 1)

        parts = on_each_device(fill, layout)
        return from_parts(parts, layout, (layout.num_rows, *parts[0].shape[1:]))

    def placing(self, other: AbstractSource) -> AbstractSource:
        return ShardedSource(other, self.mesh)

    @property
    def can_widen(self) -> bool:
        return self.inner.can_widen

    def widened(self, x: Array) -> "ShardedSource":
        return ShardedSource(self.inner.widened(x), self.mesh)

    def extend(
        self,
        op: AbstractKernelOperator,
        x: Array,
        start: int,
        stop: int,
        progress: bool | ProgressFn,
    ) -> AbstractKernelOperator:
        """New points go into a border with its own padding, because rows on a mesh never move."""
        host = np.asarray(x)
        old, new = op.layout, on_mesh(stop - start, self.mesh)
        if op.follows_points:
            both = Layout((*old.blocks, *new.blocks), old.sharding)
            return op.at_points(host[:stop], both)
        rows, cols, c = old.expand(host[:start]), new.expand(host[start:stop]), op.num_outputs

        def border(narrow: AbstractKernelOperator) -> AbstractKernelOperator:
            cross = _blocks(self.inner, rows, cols, c, old, progress)
            return BorderedOperator(narrow, cross, _square(self.inner, cols, c, new, progress))

        return op.map_narrow(border)


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
        here, there = jnp.asarray(rows[index]), jnp.asarray(cols)
        block = _on(source, device).block(here, there, report)
        return flatten_block(block) if block.ndim == 4 else block

    parts = on_each_device(fill, layout, progress)
    width = parts[0].shape[1]
    per_row = parts[0].shape[0] * layout.num_devices // layout.num_rows
    if (per_row, width) not in ((1, len(cols)), (c, c * len(cols))):
        raise ValueError(
            f"kernel: for {c} outputs expected blocks of shape (n1, n2) or (n1, {c}, n2, {c}), got "
            f"{per_row} rows per point and {width} columns for {len(cols)} points."
        )
    shape = (per_row * layout.num_rows, width)
    return from_parts(parts, layout, shape)


def _on(source: AbstractSource, device: Device) -> AbstractSource:
    """The source with its arrays (parameters) on `device`."""
    arrays, static = eqx.partition(source, eqx.is_array)
    local = jax.tree.map(lambda a: jax.device_put(np.asarray(a), device), arrays)
    return eqx.combine(local, static)


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
    model: Linearized, layout: Layout, xq: Inputs, x: Array, v: Array
) -> Float[Array, "q c"]:
    move = model.jvp(jnp.asarray(xq), _network_pull_back(model, layout, x, v))
    return jax.lax.with_sharding_constraint(move, layout.replicated)


def _sum_over_devices(
    source: AbstractSource,
    product: Callable[[AbstractSource, Array, Array], PyTree],
    rows: np.ndarray,
    v: Array,
    layout: Layout,
) -> PyTree:
    """`Σ_d product(x_d, v_d)`, each term on device `d`."""
    shards = {shard.device: shard.data for shard in v.addressable_shards}

    def term(device: Device, index: slice, report: bool | ProgressFn) -> PyTree:
        made = product(_on(source, device), jnp.asarray(rows[index]), shards[device])
        return jax.tree.map(lambda a: a[None], made)

    parts = on_each_device(term, layout, False)
    total = jax.jit(partial(jnp.sum, axis=0), out_shardings=layout.replicated)

    def add(*terms: Array) -> Array:
        shape = (layout.num_devices, *terms[0].shape[1:])
        return total(from_parts(list(terms), layout, shape))

    return jax.tree.map(add, *parts)
