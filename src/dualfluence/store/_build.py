"""Compute a kernel tile by tile into a store, resuming whatever is already there."""

import hashlib
import math
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._support.memory import STORED_TILE_BYTES
from .._support.progress import ProgressFn, Ticker
from .._support.tiles import pad_rows
from ..models._sources import AbstractSource, as_source
from ._format import (
    STORAGE,
    Header,
    Store,
    StoreError,
    digest,
    numpy_dtype,
    open_store,
    write_record,
)

IN_FLIGHT = 2
"""Tiles being written while the next is computed: what a kill can cost."""


def build(
    model: Any,
    x: Any,
    path: Any,
    *,
    num_outputs: int | None = None,
    tile: int | None = None,
    dtype: str | None = None,
    verify: bool = True,
    progress: bool | ProgressFn = True,
) -> Store:
    """Compute `K(x, x)` into the folder `path`, or finish what an earlier call began.

    Tiles are written as they are computed; a kill or Ctrl-C at any moment costs at most the tiles
    in flight, and calling again completes a bit-identical kernel. Only the upper triangle is
    computed and stored.

    **Arguments:**

    - `model`, `x`: as for `fit`.
    - `path`: a folder; one that holds another model's or other points' kernel is refused.
    - `num_outputs`: `c`, for kernels of shape `(n1, n2)` that serve several outputs.
    - `tile`: points per side of a tile, by default such that a tile has 64 MiB.
    - `dtype`: of storage: `"float16"` or `"bfloat16"` halve the disk, `store.error` says at what
      price; by default that of the kernel.
    - `verify`: check the tiles that are already there against their checksums, and recompute those
      that do not match.

    **Returns:** `Store`; `store.operator()` goes to `fit(..., kernel_op=...)`.
    """
    source = as_source(model, x)
    points = np.asarray(x)
    path = Path(path)
    header = _header(source, points, num_outputs, tile, dtype)
    if (path / "header.json").exists():
        store = open_store(path)
        differences = store.header.differences(header)
        if differences:
            raise StoreError(
                f"store: {path} holds another kernel: {', '.join(differences)} differ. Give another "
                "path, or delete that folder."
            )
    else:
        store = Store(path, header)
        write_record(path / "header.json", asdict(header))
    missing = [t for t in header.tiles if not _is_done(store, t, verify)]
    _fill(source, points, store, missing, progress)
    return store


def _is_done(store: Store, tile: tuple[int, int], verify: bool) -> bool:
    return store.is_sound(tile) if verify else store.record_path(tile).exists()


def _fill(
    source: AbstractSource,
    x: np.ndarray,
    store: Store,
    missing: list[tuple[int, int]],
    progress: bool | ProgressFn,
) -> None:
    pending: deque[tuple[tuple[int, int], Any, dict[str, Any]]] = deque()

    def finish() -> None:
        tile, future, record = pending.popleft()
        future.result()
        write_record(store.record_path(tile), record)

    with Ticker(len(missing), f"kernel tiles to {store.path}", progress) as ticker:
        try:
            for tile in missing:
                # A tile that failed its checksum must not look finished while it is rewritten.
                store.record_path(tile).unlink(missing_ok=True)
                value, record = _tile(source, x, store.header, tile)
                i, j = (store.header.rows(k) for k in tile)
                target = store.array[i.start : i.stop, j.start : j.stop]
                pending.append((tile, target.write(value), record))
                if len(pending) >= IN_FLIGHT:
                    finish()
                    ticker.tick()
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"store: {store.path} can be resumed by the same call of build.")
            raise
        finally:
            while pending:
                finish()
                ticker.tick()


def _tile(
    source: AbstractSource, x: np.ndarray, header: Header, tile: tuple[int, int]
) -> tuple[np.ndarray, dict[str, Any]]:
    """The tile as stored, and its checksum and storage error."""
    size = min(header.tile, header.num_points)
    parts = [pad_rows(x, k * header.tile, size) for k in tile]
    block = np.asarray(source.block(parts[0], parts[1], False))
    side = size * header.per_point
    rows, cols = (header.rows(k) for k in tile)
    exact = block.reshape(side, side)[: rows.stop - rows.start, : cols.stop - cols.start]
    if not np.isfinite(exact).all():
        raise FloatingPointError(f"store: tile {tile} of the kernel is not finite.")
    stored = np.ascontiguousarray(exact.astype(numpy_dtype(header.storage_dtype)))
    gap = exact.astype(np.float64) - stored.astype(np.float64)
    if not np.isfinite(gap).all():
        raise StoreError(
            f"store: entries up to {np.abs(exact).max():.3g} overflow {header.storage_dtype}. Store "
            "in bfloat16 or float32."
        )
    norm = float(np.sum(exact.astype(np.float64) ** 2))
    return stored, {"sha256": digest(stored), "error": float(np.sum(gap**2)), "norm": norm}


def _header(
    source: AbstractSource,
    x: np.ndarray,
    num_outputs: int | None,
    tile: int | None,
    dtype: str | None,
) -> Header:
    probe = np.asarray(source.block(jnp.asarray(x[:2]), jnp.asarray(x[:2]), False))
    per_point = 1 if probe.ndim == 2 else probe.shape[1]
    storage = str(probe.dtype) if dtype is None else str(dtype)
    if storage not in STORAGE:
        raise ValueError(f"store: dtype must be one of {STORAGE}, got {storage!r}.")
    entry = per_point**2 * probe.dtype.itemsize
    size = tile or max(1, math.isqrt(STORED_TILE_BYTES // entry))
    if size < 1:
        raise ValueError(f"store: tile must be at least one point, got {size}.")
    if probe.ndim == 4 and num_outputs not in (None, per_point):
        raise ValueError(f"store: the kernel has {per_point} outputs, not {num_outputs}.")
    return Header(
        num_points=x.shape[0],
        num_outputs=per_point if probe.ndim == 4 else (num_outputs or 1),
        per_point=per_point,
        tile=min(size, x.shape[0]),
        dtype=str(probe.dtype),
        storage_dtype=storage,
        fingerprint=fingerprint(source, x),
        probe=tuple(float(v) for v in probe.ravel()[:64]),
    )


def fingerprint(source: AbstractSource, x: np.ndarray) -> str:
    """SHA-256 of the points and of every array (parameters) that the kernel is made of."""
    total = hashlib.sha256()
    for array in [x, *jax.tree.leaves(eqx.filter(source, eqx.is_array_like))]:
        value = np.ascontiguousarray(np.asarray(array))
        total.update(f"{value.shape}{value.dtype}".encode())
        total.update(value.tobytes())
    return total.hexdigest()
