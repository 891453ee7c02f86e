"""Work on each device of a mesh, and arrays from its parts."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding
from jaxtyping import Array

from .._support.progress import ProgressFn
from .._support.wide import has_float64, types_of_64_bits
from ._layout import Device, Layout

T = TypeVar("T")


def on_each_device(
    fn: Callable[[Device, slice, Any], T],
    layout: Layout,
    progress: bool | ProgressFn = False,
) -> list[T]:
    """`fn(device, rows, progress)` for this process's devices, in parallel; the first one reports."""
    index_map = rows_on(layout).addressable_devices_indices_map((layout.num_rows,))
    work = [(device, index[0]) for device, index in index_map.items() if index is not None]
    wide = has_float64()  # a scope holds in one thread only: the threads below enter their own

    def run(job: tuple[int, tuple[Device, slice]]) -> T:
        place, (device, index) = job
        with jax.default_device(device), types_of_64_bits(wide):
            made = fn(device, index, progress if place == 0 else False)
        return jax.device_put(made, device)

    with ThreadPoolExecutor(max_workers=len(work)) as pool:
        return list(pool.map(run, enumerate(work)))


def from_parts(parts: list[Array], layout: Layout, shape: tuple[int, ...]) -> Array:
    """One array whose rows are on the devices that made them."""
    return jax.make_array_from_single_device_arrays(shape, rows_on(layout), parts)


def rows_on(layout: Layout) -> NamedSharding:
    """The devices of a layout on a mesh."""
    assert layout.sharding is not None
    return layout.sharding
