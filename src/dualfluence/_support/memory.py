"""How much memory there is for a kernel."""

import os

import jax

SHARE = 0.4
"""Share of the memory that a dense kernel may take; Cholesky needs about as much again."""


def total_memory() -> int:
    """Bytes of the default device, or of the host for a CPU."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_budget() -> int:
    """Bytes that a dense kernel may take before `form="auto"` goes matrix-free."""
    return int(SHARE * total_memory())
