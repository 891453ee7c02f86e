"""The rows of an `(n, c)` array: which are points and which padding, and on which devices they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from .._support.shards import AXIS as AXIS
from .._support.shards import on_shards

MIN_SPARE, MAX_SPARE = 32, 256
"""Spare rows of a kernel that has to grow. With more of them a stream of additions compiles less often,
but empty rows take more memory; 256 rows are 5 % of a kernel of 10,000 points."""

Device = Any
"""A `jax.Device`; JAX exports the class in a form that type checkers do not follow."""


def as_mesh(mesh: "Mesh | Sequence[Device]") -> Mesh:
    """One axis over the devices of a mesh of any shape, or over a list of devices.

    Checked here: Other objects are refused, because JAX ends the process if a mesh contains them.
    """
    if isinstance(mesh, Mesh):
        devices = list(mesh.devices.flat)
    elif isinstance(mesh, (list, tuple, np.ndarray)):
        devices = list(np.ravel(np.asarray(mesh, dtype=object)))
    else:
        raise TypeError(f"mesh: expected a list of devices, e.g. jax.devices(), got {mesh!r}.")
    if not devices:
        raise ValueError("mesh: expected at least one device, got none. Try jax.devices().")
    for device in devices:
        if not isinstance(device, jax.Device):
            raise TypeError(
                f"mesh: expected devices, e.g. jax.devices(), got {device!r} among them. For "
                "devices of one kind use jax.devices('gpu')."
            )
    if len(set(devices)) != len(devices):
        raise ValueError(f"mesh: expected every device once, got {devices}.")
    return Mesh(np.array(devices, dtype=object), (AXIS,))


@dataclass(frozen=True)
class Layout:
    """Which rows are training points, and on which devices the rows are.

    `blocks` are pairs `(points, rows)`, one after another; in each the points come first and the
    other rows are padding, so that rows divide evenly among devices. A padding row is a point of
    weight zero: its dual variables stay exactly zero and no result depends on it.
    """

    blocks: tuple[tuple[int, int], ...]
    sharding: NamedSharding | None = None

    @property
    def num_points(self) -> int:
        return sum(points for points, _ in self.blocks)

    @property
    def num_rows(self) -> int:
        return sum(rows for _, rows in self.blocks)

    @property
    def replicated(self) -> NamedSharding | None:
        """The same array on every device."""
        return None if self.sharding is None else NamedSharding(self.sharding.mesh, PartitionSpec())

    @property
    def num_devices(self) -> int:
        return 1 if self.sharding is None else self.sharding.mesh.size

    def holding(self, num_points: int) -> "Layout":
        """The same rows; the first `num_points` are points and the others are spare."""
        if self.sharding is not None or num_points == self.num_points:
            return self
        return Layout(((num_points, self.num_rows),))

    def extended(self, num_points: int) -> "Layout":
        """Room for more points after the existing rows."""
        rows = num_points + -num_points % self.num_devices
        return Layout((*self.blocks, (num_points, rows)), self.sharding)

    def expand(self, values: np.ndarray, padding: Literal["zero", "last"] = "last") -> np.ndarray:
        """One entry per row from one per point, on the host; padding repeats the last entry of a block."""
        parts, start = [], 0
        for points, rows in self.blocks:
            part = values[start : start + points]
            tail = np.repeat(part[-1:], rows - points, axis=0)
            parts += [part, tail if padding == "last" else np.zeros_like(tail)]
            start += points
        return np.concatenate(parts)

    def place(self, values: Any, padding: Literal["zero", "last"] = "zero") -> Array:
        """One entry per point as an array of rows on the devices."""
        if self.sharding is None and self.num_rows == self.num_points:
            return jnp.asarray(values)
        host = self.expand(np.asarray(values), padding)
        if self.sharding is None:
            return jax.device_put(host)
        host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
        return jax.make_array_from_callback(host.shape, self.sharding, lambda index: host[index])

    def scalar(self, value: float, dtype: Any) -> Array:
        """A number on every device."""
        if self.replicated is None:
            return jnp.asarray(value, dtype)
        host = np.asarray(value, dtype)
        return jax.make_array_from_callback((), self.replicated, lambda _: host)

    def points(self, rows: Array) -> Array:
        """The entries of the points, in order and without padding, the same on every device."""
        if self.sharding is not None:
            return _gather_points(self)(rows)
        if rows.shape[0] == self.num_points:
            return rows
        # On the host: a slice on the device, and `jnp.asarray` too, would compile anew for every
        # number of points.
        return jax.device_put(np.asarray(rows)[: self.num_points])

    def grow(self, rows: Array, num_rows: int) -> Array:
        """Zero rows appended, up to `num_rows`; `self` is the layout afterwards."""
        if num_rows == rows.shape[0]:
            return rows
        widths = ((0, num_rows - rows.shape[0]), *[(0, 0)] * (rows.ndim - 1))
        if self.sharding is None:
            return jnp.pad(rows, widths)
        return _grower(widths, self.sharding)(rows)


def rows_for(num_points: int, num_rows: int) -> int:
    """The number of rows for so many points: the present one, or a larger one with some spare rows.

    A stream of single points then meets few shapes, each of which is compiled once.
    """
    if num_points <= num_rows:
        return num_rows
    return num_points + min(max(num_points // 8, MIN_SPARE), MAX_SPARE)


def whole(num_points: int) -> Layout:
    """Every row a point, on the default device."""
    return Layout(((num_points, num_points),))


def on_mesh(num_points: int, mesh: "Mesh | Sequence[Device]") -> Layout:
    """Points in order, then padding up to a multiple of the number of devices."""
    mesh = as_mesh(mesh)
    rows = num_points + -num_points % mesh.size
    return Layout(((num_points, rows),), NamedSharding(mesh, PartitionSpec(AXIS)))


def map_shards(
    fn: Callable[..., Any], layout: Layout, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """A function of the rows of each device of the layout."""
    assert layout.sharding is not None
    return on_shards(fn, layout.sharding.mesh, in_specs, out_specs)


@lru_cache(maxsize=256)
def _gather_points(layout: Layout) -> Callable[[Array], Array]:
    def gather(rows: Array) -> Array:
        parts, start = [], 0
        for points, num_rows in layout.blocks:
            parts.append(rows[start : start + points])
            start += num_rows
        return jnp.concatenate(parts)

    return jax.jit(gather, out_shardings=layout.replicated)


@lru_cache(maxsize=256)
def _grower(widths: Any, sharding: NamedSharding) -> Callable[[Array], Array]:
    return jax.jit(partial(jnp.pad, pad_width=widths), out_shardings=sharding)
