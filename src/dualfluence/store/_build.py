"""Compute a kernel tile by tile into a store, and continue one that an earlier call began."""

import hashlib
import math
import re
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._support.archive import digest_of_array
from .._support.files import FileError, in_words, locked, remove_stale, system_error
from .._support.memory import STORED_TILE_BYTES, pad_rows
from .._support.options import (
    ProgressFn,
    Ticker,
    check_choice,
    check_count,
    check_flag,
    check_path,
    check_progress,
    check_worker,
    maybe,
)
from .._support.points import form_of
from .._support.rows import DiskRows, Rows, as_rows, blocks
from .._support.types import AnyPath, Inputs
from ..models._sources import AbstractSource, as_source
from ._format import (
    HEADER,
    LOCK,
    SHARES,
    STORAGE,
    Header,
    Record,
    StoreError,
    numpy_dtype,
    write_header,
    write_sealed,
)
from ._store import Store, open_store

IN_FLIGHT = 2
"""Tiles that may be being written while the next one is computed; a kill can lose them."""


def build(
    model: object,
    x: Inputs,
    path: AnyPath,
    *,
    num_outputs: int | None = None,
    tile: int | None = None,
    dtype: str | None = None,
    verify: bool = True,
    wait: bool = True,
    worker: tuple[int, int] | None = None,
    progress: bool | ProgressFn = True,
) -> Store:
    """Compute `K(x, x)` into the folder `path`, or finish what an earlier call began.

    Tiles are written as they are computed; a kill or Ctrl-C at any moment loses at most the tiles that
    are being written, and another call completes the kernel, identical in every bit. Only the upper
    triangle is computed and stored. Several processes may call this with the same path: one builds, the
    others wait for it, and one of them continues if it dies.

    Several processes share the work with `worker`: call `build` in each with its own share, on one
    machine or on several with a common folder, in any order. A share that was killed is started
    again and continues. Then call `build` without `worker`: it compares every tile with its checksum
    and computes what is missing.

    **Arguments:**

    - `model`, `x`: as for `fit`. An array on disk (`np.load(path, mmap_mode="r")`, TensorStore, zarr,
      HDF5) is read a block of rows at a time; `spool` writes batches to such an array.
    - `path`: a folder, new, empty or with a store of the same model and points; any other is refused.
    - `num_outputs`: `c`, for kernels of shape `(n1, n2)` that serve several outputs.
    - `tile`: points per side of a tile, by default such that a tile has 64 MiB.
    - `dtype`: of storage: by default that of the kernel. `"float16"` or `"bfloat16"` take half the
      disk, with an error that `store.error` states.
    - `verify`: compare existing tiles with their checksums, and recompute those that do not match.
    - `wait`: `False` raises `StoreError` at once if another process is building this store.
    - `worker`: `(i, N)` computes the share `i` of `N`, counted from 0: every `N`-th tile.

    **Returns:** `Store`; pass `store.operator()` to `fit(..., kernel=...)`. It lacks the tiles of other
    shares until these are done.
    """
    path = check_path("store", path)
    num_outputs = maybe(check_count, "store: num_outputs", num_outputs)
    tile = maybe(check_count, "store: tile", tile)
    maybe(check_choice, "store: dtype", dtype, choices=STORAGE)
    check_flag("store: verify", verify)
    check_flag("store: wait", wait)
    check_progress("store", progress)
    share = maybe(check_worker, "store", worker)
    form = form_of("store: x", x)
    source = as_source(model, x)
    points = as_rows("store: x", x if form is None else form.pack("store: x", x))
    header = _header(source, points, num_outputs, tile, dtype)
    is_done = Store.is_sound if verify else Store.is_recorded
    store = _find(path, header)
    # Records are looked at first: what is not complete is verified under the lock, once.
    if store is not None and store.complete and all(is_done(store, t) for t in header.tiles):
        return store  # nothing to write: a complete store may be read-only
    with ExitStack() as held:
        with _alone(path, LOCK, wait, progress):
            store = _find(path, header)
            if store is None:
                with _in_words(path):
                    write_header(path, header)
                store = Store(path, header)
            if share is None:
                # Shares that are still being computed are waited for; then no other process writes.
                for lock in sorted(path.glob(SHARES)):
                    held.enter_context(_alone(path, lock.name, wait, progress))
                _clean(store)
                _complete(source, points, store, header.tiles, is_done, progress)
                return store
            held.enter_context(_alone(path, _share_lock(path, share), wait, progress))
            store.can_open()  # writes the description of the array
        tiles = header.tiles[share[0] :: share[1]]
        _complete(source, points, store, tiles, is_done, progress)
    return store


def _complete(
    source: AbstractSource,
    x: Rows,
    store: Store,
    tiles: list[tuple[int, int]],
    is_done: Callable[[Store, tuple[int, int]], bool],
    progress: bool | ProgressFn,
) -> None:
    """Compute the tiles that are not done."""
    missing = [tile for tile in tiles if not is_done(store, tile)]
    _check_space(store, missing)
    _fill(source, x, store, missing, progress)


def _share_lock(path: Path, share: tuple[int, int]) -> str:
    """The name of a share's lock file; an error while shares of another number are being computed."""
    number, shares = share
    name = SHARES.replace("*", str(number), 1).replace("*", str(shares))

    def refuse(process: str) -> None:
        raise StoreError(
            f"store: process {process} computes a share of {path}, and its number of shares is not {shares}. "
            "Give every worker=(i, N) the same N, or wait for that process."
        )

    for lock in path.glob(SHARES):
        if not lock.name.endswith(f"-of-{shares}.lock"):
            with _in_words(path), locked(lock, refuse):
                pass
    return name


def _find(path: Path, header: Header) -> Store | None:
    """The store in `path`, if there is one; an error if the store or the folder belongs to something
    else."""
    if not (path / HEADER).exists():
        _check_empty(path)
        return None
    store = open_store(path)
    differences = store.header.differences(header)
    if differences:
        raise StoreError(
            f"store: {path} holds another kernel: {', '.join(differences)} differ. Give another "
            "path, or delete that folder."
        )
    return store


def _check_empty(path: Path) -> None:
    """Raise for a folder with other files in it, because a store writes thousands of files."""
    if path.exists() and not path.is_dir():
        raise StoreError(f"store: {path} is a file. Give the path of a folder for the kernel.")
    names = sorted(p.name for p in path.iterdir()) if path.exists() else []
    foreign = [n for n in names if n != LOCK and not n.startswith(f".{HEADER}.")]
    if foreign:
        raise StoreError(
            f"store: {path} is not a kernel store but holds other files ({', '.join(foreign[:3])}). Give "
            "a new or empty folder."
        )


@contextmanager
def _alone(path: Path, lock: str, wait: bool, progress: bool | ProgressFn) -> Iterator[None]:
    """The only process that holds this lock of the store, or `StoreError`."""

    def busy(process: str) -> None:
        words = f"store: {path} is being built by process {process}"
        if not wait:
            raise StoreError(f"{words}. Wait for it, or call build with wait=True.")
        if progress is True and sys.stderr.isatty():
            print(f"{words}; waiting for it.", file=sys.stderr, flush=True)

    with ExitStack() as stack:
        with _in_words(path):
            path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(path / lock, busy))
        yield


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    """Turn errors of the system, such as full disks and read-only folders, into a `StoreError`."""
    try:
        yield
    except FileError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(
            f"store: {error} Finished tiles stay; the same call resumes the build."
        ) from error
    except OSError as error:
        raise StoreError(
            f"store: cannot write to {path}: {in_words(error)}. Finished tiles stay; the same call "
            "resumes the build."
        ) from error


def _clean(store: Store) -> None:
    """Remove the files of a killed build, and a damaged description of the array."""
    kernel = store.path / "kernel"
    with _in_words(store.path):
        remove_stale(store.path)
        remove_stale(store.path / "tiles")
        for left in kernel.glob("*.__lock"):  # TensorStore's own temporary files
            left.unlink(missing_ok=True)
        if not store.can_open():
            (kernel / ".zarray").unlink(missing_ok=True)  # the header has all that it says


def _check_space(store: Store, missing: list[tuple[int, int]]) -> None:
    """Raise, before any work, unless the missing tiles fit on the disk."""
    header = store.header
    chunk = header.tile_bytes((0, 0))  # chunks at the edge are as large as the others
    files = [store.chunk_path(tile) for tile in missing]
    needed = sum(chunk - file.stat().st_size if file.exists() else chunk for file in files)
    free = shutil.disk_usage(store.path).free
    if needed > free:
        raise StoreError(
            f"store: the disk of {store.path} is full: {needed / 2**30:.3g} GiB must still be "
            f"written and {free / 2**30:.3g} GiB are free. Free some space, give another path, "
            "or store in dtype='float16'."
        )


def _fill(
    source: AbstractSource,
    x: Rows,
    store: Store,
    missing: list[tuple[int, int]],
    progress: bool | ProgressFn,
) -> None:
    pending: deque[tuple[tuple[int, int], Any, Record]] = deque()

    def finish() -> None:
        tile, future, record = pending.popleft()
        _wait_for(future, store.path)
        with _in_words(store.path):
            write_sealed(store.record_path(tile), asdict(record))
        ticker.tick()

    with Ticker(len(missing), f"kernel tiles to {store.path}", progress) as ticker:
        try:
            for tile in missing:
                # A tile that failed its checksum must not look finished while it is rewritten, and
                # TensorStore would read what is left of its chunk.
                with _in_words(store.path):
                    store.record_path(tile).unlink(missing_ok=True)
                    store.chunk_path(tile).unlink(missing_ok=True)
                value, record = _tile(source, x, store.header, tile)
                i, j = (store.header.rows(k) for k in tile)
                target = store.array[i.start : i.stop, j.start : j.stop]
                pending.append((tile, target.write(value), record))
                if len(pending) >= IN_FLIGHT:
                    finish()
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"store: {store.path} can be resumed by the same call of build.")
            raise
        finally:
            while pending:
                finish()


def _wait_for(future: Any, path: Path) -> None:
    """Extract the error of the system from the message of TensorStore."""
    try:
        future.result()
    except Exception as error:
        refused = system_error(error)
        words = in_words(refused) if refused else _reason(str(error))
        raise StoreError(
            f"store: cannot write to {path}: {words}. Finished tiles stay; the same call resumes the build."
        ) from error


def _reason(text: str) -> str:
    found = re.search(r"os[ _]error(?:_code=')? ?(\d+)", text, re.IGNORECASE)
    return in_words(OSError(int(found[1]), text)) if found else text


def _tile(
    source: AbstractSource, x: Rows, header: Header, tile: tuple[int, int]
) -> tuple[np.ndarray, Record]:
    """The tile as stored, and its checksum and storage error."""
    size = min(header.tile, header.num_points)
    parts = [pad_rows(x[k * header.tile : k * header.tile + size], 0, size) for k in tile]
    block = np.asarray(source.block(parts[0], parts[1], False))
    side = size * header.per_point
    rows, cols = (header.rows(k) for k in tile)
    exact = block.reshape(side, side)[: rows.stop - rows.start, : cols.stop - cols.start]
    if not np.isfinite(exact).all():
        raise ValueError(f"store: tile {tile} of the kernel has entries that are not finite.")
    stored = np.ascontiguousarray(exact.astype(numpy_dtype(header.storage_dtype)))
    gap = exact.astype(np.float64) - stored.astype(np.float64)
    if not np.isfinite(gap).all():
        raise StoreError(
            f"store: entries up to {np.abs(exact).max():.3g} overflow {header.storage_dtype}. Store "
            "in bfloat16 or float32."
        )
    norm = float(np.sum(exact.astype(np.float64) ** 2))
    return stored, Record(header.name, tile, digest_of_array(stored), float(np.sum(gap**2)), norm)


def _header(
    source: AbstractSource,
    x: Rows,
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
    size = max(1, math.isqrt(STORED_TILE_BYTES // entry)) if tile is None else int(tile)
    if probe.ndim == 4 and num_outputs not in (None, per_point):
        raise ValueError(f"store: the kernel has {per_point} outputs, not {num_outputs}.")
    return Header(
        num_points=x.shape[0],
        num_outputs=per_point if probe.ndim == 4 else int(num_outputs or 1),
        per_point=per_point,
        tile=min(size, x.shape[0]),
        dtype=str(probe.dtype),
        storage_dtype=storage,
        fingerprint=fingerprint(source, x),
        probe=tuple(float(v) for v in probe.ravel()[:64]),
    )


def fingerprint(source: AbstractSource, x: Rows) -> str:
    """SHA-256 of the points and of every array (parameters) from which the kernel is computed."""
    total = hashlib.sha256()
    for array in [x, *jax.tree.leaves(eqx.filter(source, eqx.is_array_like))]:
        value = array if isinstance(array, DiskRows) else np.atleast_1d(np.asarray(array))
        total.update(f"{value.shape}{value.dtype}".encode())
        for _, block in blocks(value):
            total.update(np.ascontiguousarray(block).tobytes())
    return total.hexdigest()
