"""The memory policy: how much memory there is, and how much of it a kernel and other work may take.

Every large array of the library is either a kernel, whose size the caller can foresee, or work space
that is divided into pieces of the sizes below. `fill_kernel` fills a kernel matrix tile by tile: bounded
memory, half the work when symmetric, progress.
"""

import os
from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array

from .compile import jit
from .options import ProgressFn, Ticker
from .types import AnyArray, KernelArray

SHARE = 0.4
"""Share of the memory that a dense kernel may take; Cholesky needs about as much again."""

HARD_SHARE = 0.9
"""A kernel that would take more than this share of the memory is refused, even if the caller asks for
it."""

PANEL_BYTES = 64 * 2**20
"""One panel of rows of a kernel that is read or converted piece by piece. Larger panels mean fewer
pieces, but more work space for checks and for float64 products with a float32 kernel."""

TILE_BYTES = 256 * 2**20
"""Default work space of one kernel tile (features and products)."""

LARGE_TILE_BYTES = 2**30
"""The same on an accelerator with enough memory: smaller tiles leave it waiting for the host."""

FREE_SHARE = 8
"""On an accelerator, the free memory divided by this number limits the work space of a tile. So does
the size of its kernel divided by this number, if the kernel is larger than `LARGE_TILE_BYTES`."""

STORED_TILE_BYTES = 64 * 2**20
"""One tile of a kernel on disk; a product holds a few."""

BATCH_BYTES = 128 * 2**20
"""Largest activation of one batch of points in a Jacobian product."""

GRADIENT_BYTES = 256 * 2**20
"""Gradients of single points held at once, counted in float64."""


def total_memory() -> int:
    """Bytes of the default device, or of the host for a CPU."""
    stats = _device_stats()
    if stats is not None:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_budget() -> int:
    """Bytes that a dense kernel may take before `kernel="auto"` goes matrix-free."""
    return int(SHARE * total_memory())


def tile_budget(result_bytes: int) -> int:
    """Work space for the tiles of a kernel of that size.

    A power of two: the free memory changes from call to call, and a tile of another size would have to
    be compiled again.
    """
    stats = _device_stats()
    free = None if stats is None else stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return tile_room(result_bytes, free)


def tile_room(result_bytes: int, free: int | None) -> int:
    """The same with that many free bytes on an accelerator; `None` for a CPU."""
    if free is None:
        return TILE_BYTES
    room = min(free // FREE_SHARE, max(LARGE_TILE_BYTES, result_bytes // FREE_SHARE))
    return max(TILE_BYTES, 1 << (max(room, 1).bit_length() - 1))


def panel_rows(rows: int, row_bytes: int) -> int:
    """Rows of one panel, at least one."""
    return min(rows, max(1, PANEL_BYTES // max(row_bytes, 1)))


def _device_stats() -> dict[str, int] | None:
    """The statistics of an accelerator's allocator, if they include its limit; `None` on a CPU."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats if stats and "bytes_limit" in stats else None


def even_size(n: int, size: int) -> int:
    """The smallest size that divides `n` into as many pieces as `size` does, so that the last piece
    needs little padding."""
    return ceil(n / ceil(n / size))


def pad_rows(x: AnyArray, start: int, size: int) -> Array:
    """Rows `start:start+size` of `x`. Past the end the last row is repeated, so that all blocks have
    one shape and compile once."""
    if start == 0 and size == x.shape[0]:
        return jnp.asarray(x)
    rows = x[start : start + size]
    missing = size - rows.shape[0]
    if missing == 0:
        return jnp.asarray(rows)
    return jnp.concatenate([jnp.asarray(rows), jnp.repeat(jnp.asarray(rows[-1:]), missing, axis=0)])


def _cut(tile: Array, rows: int, cols: int) -> Array:
    """The first `rows` and `cols` of a tile; the others belong to copies of the last point."""
    for axis, size in ((0, rows), (tile.ndim // 2, cols)):
        if size < tile.shape[axis]:
            tile = lax.slice_in_dim(tile, 0, size, axis=axis)
    return tile


@partial(jit, donate_argnums=0)
def _put(result: Array, tile: Array, row: Array, col: Array) -> Array:
    """`tile` written into `result` in place. Each program does one update, because two in one program
    may copy the result."""
    zeros = [jnp.zeros_like(row)] * (result.ndim // 2 - 1)
    return lax.dynamic_update_slice(result, tile, (row, *zeros, col, *zeros))


@jit
def _turned(tile: Array) -> Array:
    """The mirror image of `tile` across the diagonal."""
    half = tile.ndim // 2
    return jnp.transpose(tile, (*range(half, 2 * half), *range(half)))


def fill_kernel(
    block: Callable[[Array, Array], Array],
    x1: AnyArray,
    x2: AnyArray | None,
    *,
    tail: tuple[int, ...],
    dtype: DTypeLike,
    tile: tuple[int, int],
    flat: bool = False,
    out: Literal["device", "host"] = "device",
    label: str = "kernel tiles",
    progress: bool | ProgressFn = True,
) -> KernelArray:
    r"""Evaluate `block(x1, x2)` of shape `(n1, *tail, n2, *tail)` in tiles.

    **Arguments:**

    - `block`: a jitted function of two batches. They always have exactly `tile[0]` and `tile[1]` rows:
      a batch that extends past the last point is filled up with copies of it, and the entries of the
      copies are cut off.
    - `x1`, `x2`: inputs with the points on axis 0; `x2=None` means `x2 = x1`, a symmetric kernel:
      only tiles on and above the diagonal are computed, the rest are their transposes.
    - `tail`: output axes per point, `()` or `(c,)`.
    - `tile`: rows and columns of one tile; must be equal when `x2` is `None`.
    - `flat`: fill a matrix of `(n1·c, n2·c)` instead, because reshaping a kernel afterwards would hold
      it twice.
    - `out`: `"device"` fills a preallocated array by donated updates, `"host"` a NumPy array.

    **Returns:** the kernel, a `jax.Array` or, for `out="host"`, a NumPy array.
    """
    symmetric = x2 is None
    if symmetric and tile[0] != tile[1]:
        raise ValueError(f"fill_kernel: a symmetric kernel needs square tiles, got {tile}.")
    right = x1 if x2 is None else x2
    n1, n2 = x1.shape[0], right.shape[0]
    each = int(np.prod(tail)) if flat else 1
    half = 1 if flat else 1 + len(tail)
    shape = (n1 * each, n2 * each) if flat else (n1, *tail, n2, *tail)
    if out == "device" and tile[0] >= n1 and tile[1] >= n2:
        return _only_tile(block, x1, x2, tile, label, progress).reshape(shape)
    result: Any = np.empty(shape, dtype) if out == "host" else jnp.empty(shape, dtype)
    starts = [
        (i, j)
        for i in range(0, n1, tile[0])
        for j in range(0, n2, tile[1])
        if not symmetric or j >= i
    ]

    def put_on_host(value: np.ndarray, i: int, j: int) -> None:
        idx = (slice(i, i + value.shape[0]), *[slice(None)] * (half - 1))
        result[(*idx, slice(j, j + value.shape[half]))] = value

    with Ticker(len(starts), label, progress) as ticker:
        for i, j in starts:
            value = block(pad_rows(x1, i, tile[0]), pad_rows(right, j, tile[1]))
            value = _cut(value, n1 - i, n2 - j)
            if flat:
                value = value.reshape(value.shape[0] * each, -1)
            mirrored = symmetric and i != j
            row, col = i * each, j * each
            if out == "device":
                at = jnp.asarray(row), jnp.asarray(col)
                result = _put(result, value, *at)
                result = _put(result, _turned(value), *at[::-1]) if mirrored else result
            else:
                entries = np.asarray(value)
                put_on_host(entries, row, col)
                if mirrored:
                    put_on_host(entries.transpose(*range(half, 2 * half), *range(half)), col, row)
            # Waiting keeps one tile in flight, which is what the byte budget promises.
            jax.block_until_ready(result)
            ticker.tick()
    return result


def _only_tile(
    block: Callable[[Array, Array], Array],
    x1: AnyArray,
    x2: AnyArray | None,
    tile: tuple[int, int],
    label: str,
    progress: bool | ProgressFn,
) -> Array:
    """A kernel that is a single tile, without a copy, which would hold it twice."""
    with Ticker(1, label, progress) as ticker:
        left = pad_rows(x1, 0, tile[0])
        right = left if x2 is None else pad_rows(x2, 0, tile[1])
        value = _cut(block(left, right), x1.shape[0], (x1 if x2 is None else x2).shape[0])
        jax.block_until_ready(value)
        ticker.tick()
    return value
