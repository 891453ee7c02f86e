"""The memory policy: how much memory there is, and how much of it a kernel and other work may take.

Every large array of the library is either a kernel, whose size the caller can foresee, or work space
that is divided into pieces of the sizes below.
"""

import os

import jax

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
    if stats is None:
        return TILE_BYTES
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
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
