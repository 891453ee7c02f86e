"""A kernel on disk: its tiles, verified as they are read, and the operator that streams them."""

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._support.archive import Damaged, digest_of_array
from .._support.options import check_path
from .._support.show import Shown, Table
from .._support.types import AnyPath, Numbers
from ..operators import AbstractKernelOperator
from ._format import (
    Header,
    Record,
    StoreError,
    import_tensorstore,
    numpy_dtype,
    read_header,
    read_record,
    word_sum,
)

PREFETCH = 2
"""Tiles read ahead of the one in use."""


class Store(Shown):
    """A kernel on disk.

    Every read of a tile is verified: the first in a process by its SHA-256, later ones by the sum of
    its words. The sum detects every single changed word and costs little compared with the read.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path, self.header = path, header
        self._sums: dict[tuple[int, int], int] = {}

    def _table(self) -> Table:
        header, state = self.header, "complete" if self.complete else "not complete"
        return "Store", [
            ("path", str(self.path)),
            ("kernel", f"{header.side:,} rows and columns, {header.storage_dtype}, {state}"),
            ("disk", f"{self.num_bytes:,} bytes"),
        ]

    @cached_property
    def array(self) -> Any:
        """The TensorStore array; chunks below the diagonal are never written."""
        ts = import_tensorstore()
        chunk = self.header.tile * self.header.per_point
        side = self.header.side
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": str(self.path / "kernel")},
            "metadata": {
                "shape": [side, side],
                "chunks": [min(chunk, side)] * 2,
                "dtype": numpy_dtype(self.header.storage_dtype).str
                if self.header.storage_dtype != "bfloat16"
                else "bfloat16",
                "compressor": None,
                "fill_value": None,
            },
            # No cache of its own: memory stays that of the tiles in flight.
            "context": {"cache_pool": {"total_bytes_limit": 0}},
        }
        try:
            return ts.open(spec, create=True, open=True).result()
        except Exception as error:
            raise StoreError(
                f"store: the array in {self.path / 'kernel'} cannot be opened ({error}). Delete the file "
                ".zarray there and run store.build again."
            ) from error

    def can_open(self) -> bool:
        """Whether the array of tiles can be opened."""
        try:
            return self.array is not None
        except StoreError:
            return False

    @property
    def complete(self) -> bool:
        """Whether every tile is recorded."""
        return all(self.is_recorded(tile) for tile in self.header.tiles)

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored triangle."""
        return sum(self.header.tile_bytes(tile) for tile in self.header.tiles)

    @property
    def error(self) -> float:
        """`‖K − K_stored‖ / ‖K‖` (Frobenius), zero unless stored in half precision."""
        error = norm = 0.0
        for i, j in self.header.tiles:
            record = self.record((i, j))
            times = 1 if i == j else 2
            error, norm = error + times * record.error, norm + times * record.norm
        return math.sqrt(error / norm) if norm else 0.0

    def record_path(self, tile: tuple[int, int]) -> Path:
        return self.path / "tiles" / f"{tile[0]}.{tile[1]}.json"

    def chunk_path(self, tile: tuple[int, int]) -> Path:
        return self.path / "kernel" / f"{tile[0]}.{tile[1]}"

    def record(self, tile: tuple[int, int]) -> Record:
        """Checksum and storage error of a tile."""
        try:
            return read_record(self.record_path(tile), self.header, tile)
        except (Damaged, OSError, ValueError) as error:
            raise StoreError(
                f"store: tile {tile} of {self.path} is missing or its record is damaged "
                f"({error}). Run store.build again with the same model, points and path; it "
                "computes only the missing tiles."
            ) from error

    def request(self, tile: tuple[int, int]) -> Any:
        """A future of the tile, unverified."""
        i, j = (self.header.rows(k) for k in tile)
        return self.array[i.start : i.stop, j.start : j.stop].read()

    def receive(self, tile: tuple[int, int], future: Any) -> np.ndarray:
        """The tile, verified, or a `StoreError`."""
        try:
            value = np.ascontiguousarray(future.result())
        except Exception as error:
            raise StoreError(
                f"store: tile {tile} of {self.path} cannot be read ({error}). Run store.build again to "
                "recompute it."
            ) from error
        first, total = tile not in self._sums, word_sum(value)
        if first and digest_of_array(value) == self.record(tile).sha256:
            self._sums[tile] = total
        if self._sums.get(tile) != total:
            raise StoreError(
                f"store: tile {tile} of {self.path} does not match its checksum: the file was "
                "changed or the disk is failing. Run store.build again to recompute it."
            )
        return value

    def is_recorded(self, tile: tuple[int, int]) -> bool:
        """Whether the tile has a record."""
        try:
            self.record(tile)
        except StoreError:
            return False
        return True

    def is_sound(self, tile: tuple[int, int]) -> bool:
        """Whether the tile exists and matches its checksum."""
        try:
            self.record(tile)
            self._sums.pop(tile, None)
            self.receive(tile, self.request(tile))
        except StoreError:
            return False
        return True

    def operator(self) -> "StoredOperator":
        """`K` as an operator that streams its tiles; give it to `fit(..., kernel=...)`."""
        for tile in self.header.tiles:
            self.record(tile)
        return StoredOperator(self)


class StoredOperator(AbstractKernelOperator):
    """`K` streamed from a `Store`: memory of a few tiles, one pass over the disk per product.

    Each tile above the diagonal is used for its mirror image too. Products accumulate in the dtype of
    the vector, so a float32 store multiplies float64 vectors in float64.
    """

    store: Store = eqx.field(static=True)

    @property
    def num_outputs(self) -> int:
        return self.store.header.num_outputs

    @property
    def num_points(self) -> int:
        return self.store.header.num_points

    @property
    def num_bytes(self) -> int:
        return self.store.num_bytes

    @property
    def in_memory(self) -> bool:
        return False

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(self.store.header.dtype)

    def mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        shape = jax.ShapeDtypeStruct(v.shape, v.dtype)
        return jax.pure_callback(self._product, shape, v, vmap_method="sequential")

    def mm(self, v: Float[Array, "n c k"]) -> Float[Array, "n c k"]:
        shape = jax.ShapeDtypeStruct(v.shape, v.dtype)
        return jax.pure_callback(self._product, shape, v, vmap_method="sequential")

    def wide_mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        return self.mv(v)

    def check(self) -> str:
        return "on disk, verified by checksum as it is read"

    def diagonal(self) -> Float[Array, "n c"]:
        shape = jax.ShapeDtypeStruct((self.num_points, self.num_outputs), self.dtype)
        return jax.pure_callback(self._diagonal, shape, vmap_method="sequential")

    def dense(self) -> Float[Array, "nc nc"]:
        size = self.num_points * self.num_outputs
        eye = jnp.eye(size, dtype=self.dtype).reshape(self.num_points, self.num_outputs, size)
        return self.mm(eye).reshape(size, size)

    def _product(self, v: Numbers) -> np.ndarray:
        header = self.store.header
        v = np.asarray(v)
        flat = v.reshape(header.side, -1)
        result = np.zeros_like(flat)
        for (i, j), tile in self._tiles(header.tiles):
            T = tile.astype(v.dtype, copy=False)
            rows, cols = header.rows(i), header.rows(j)
            result[rows] += T @ flat[cols]
            if i != j:
                result[cols] += T.T @ flat[rows]
        return result.reshape(v.shape)

    def _diagonal(self) -> np.ndarray:
        header = self.store.header
        entries = np.empty(header.side, header.dtype)
        for (i, _), tile in self._tiles([(i, i) for i in range(header.tiles_per_side)]):
            entries[header.rows(i)] = np.diagonal(tile).astype(header.dtype)
        column = entries.reshape(header.num_points, -1)
        return np.broadcast_to(column, (header.num_points, header.num_outputs)).copy()

    def _tiles(self, order: list[tuple[int, int]]) -> Any:
        """Verified tiles in order, while the next ones are being read."""
        futures = {tile: self.store.request(tile) for tile in order[:PREFETCH]}
        for place, tile in enumerate(order):
            ahead = order[place + PREFETCH : place + PREFETCH + 1]
            futures.update({each: self.store.request(each) for each in ahead})
            yield tile, self.store.receive(tile, futures.pop(tile))


def open_store(path: AnyPath) -> Store:
    """A store that `build` made, complete or not; tiles are verified as they are read."""
    path = check_path("open_store", path)
    return Store(path, read_header(path))
