"""Inputs that stay on disk: rows are read when a computation needs them."""

import io
from collections.abc import Iterable, Iterator
from typing import IO, Any

import numpy as np

from .checks import as_array, check_finite, check_not_empty, check_numbers
from .files import FileError, write_atomically
from .memory import PANEL_BYTES
from .options import check_path
from .types import AnyPath, Numbers


class DiskRows:
    """An array on disk (TensorStore, zarr, HDF5) of which slices of rows become NumPy arrays."""

    def __init__(self, name: str, array: Any) -> None:
        self._array, self.shape = array, tuple(int(size) for size in array.shape)
        self.dtype = np.dtype(getattr(array.dtype, "numpy_dtype", array.dtype))
        self.ndim, self.size = len(self.shape), int(np.prod(self.shape))
        check_numbers(name, np.empty(0, self.dtype))

    def __getitem__(self, rows: slice) -> np.ndarray:
        return np.asarray(self._array[rows.start or 0 : min(rows.stop, self.shape[0])])


Rows = np.ndarray | DiskRows
"""Points on axis 0 of which a slice costs its own bytes; a memory-mapped array is one of NumPy's."""


def on_disk(x: Numbers) -> bool:
    """Whether `x` is an array whose rows are on disk."""
    if isinstance(x, np.memmap):
        return True
    chunked = hasattr(x, "chunks") or hasattr(x, "chunk_layout")
    return chunked and hasattr(x, "shape") and hasattr(x, "dtype")


def as_rows(name: str, x: Numbers) -> Rows:
    """Points on axis 0, checked block by block. Points that are on disk stay there."""
    rows = DiskRows(name, x) if on_disk(x) and not isinstance(x, np.ndarray) else None
    found = np.asarray(as_array(name, x)) if rows is None else rows
    check_not_empty(name, found)
    for start, block in blocks(found):
        check_finite(f"{name} (rows from {start})" if start else name, block)
    return found


def blocks(rows: Rows) -> Iterator[tuple[int, np.ndarray]]:
    """All rows, in blocks of at most `PANEL_BYTES`, each with the number of its first row."""
    n = rows.shape[0]
    size = max(1, PANEL_BYTES // max(1, rows.size // max(1, n) * rows.dtype.itemsize))
    for start in range(0, n, size):
        yield start, rows[start : min(start + size, n)]


def spool(batches: Iterable[Numbers], path: AnyPath) -> np.memmap:
    """Write batches of rows to one `.npy` file, and return that file as a memory-mapped array.

    Use this for inputs that come only in batches, such as those of a data loader, because a kernel reads
    every row many times. Memory is that of one batch. The file appears under its name when it is whole.

    **Arguments:**

    - `batches`: arrays with the points on axis 0, of one dtype and with the same trailing axes.
    - `path`: a file that does not exist yet.

    **Returns:** the rows of all batches in order, read-only, for `build` and `fit`.
    """
    path = check_path("spool", path)
    if path.exists():
        raise FileError(
            f"spool: {path} exists. Open it with np.load(path, mmap_mode='r'), or give another path."
        )
    write_atomically(path, lambda file: _write(file, batches))
    return np.load(path, mmap_mode="r")


def _write(file: IO[bytes], batches: Iterable[Numbers]) -> None:
    first, total = None, 0
    for batch in batches:
        rows = np.ascontiguousarray(as_array("spool: batch", batch))
        if rows.ndim == 0 or rows.dtype.hasobject:
            raise ValueError("spool: expected batches with the points on axis 0, got a number.")
        if first is None:
            first = rows[:0]
            file.write(_header(first.dtype, (0, *first.shape[1:])))
        if rows.dtype != first.dtype or rows.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"spool: expected batches of {first.dtype} with trailing axes {first.shape[1:]}, got "
                f"{rows.dtype} with {rows.shape[1:]}. Convert them first."
            )
        check_finite(f"spool: batch after {total} rows", rows)
        file.write(rows.tobytes())
        total += rows.shape[0]
    if first is None or total == 0:
        raise ValueError("spool: expected at least one batch with at least one row, got none.")
    file.seek(0)
    file.write(_header(first.dtype, (total, *first.shape[1:])))


def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """The header of a `.npy` file; NumPy leaves room in it for axis 0 to grow."""
    text = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    np.lib.format.write_array_header_1_0(text, described | {"shape": shape})
    return text.getvalue()
