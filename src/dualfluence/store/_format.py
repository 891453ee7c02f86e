"""What a kernel store is on disk.

    path/header.json          version, shapes, dtypes, fingerprint of the points and parameters
    path/kernel/              a zarr array, one uncompressed chunk per tile, upper triangle only
    path/tiles/3.7.json       checksum and storage error of tile (3, 7)

A tile exists once its checksum file does. That file is written last and renamed into place, and
TensorStore renames chunks into place as well, so a kill at any moment leaves a store to resume.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._support.files import write_atomically

FORMAT, VERSION = "dualfluence-kernel-store", 1
STORAGE = ("float16", "bfloat16", "float32", "float64")


class StoreError(RuntimeError):
    """A store on disk is damaged, incomplete or of another model. The message says what to do."""


@dataclass(frozen=True)
class Header:
    """Everything that has to agree before a stored tile may be used."""

    num_points: int
    num_outputs: int
    per_point: int  # rows of the matrix per point: c, or 1 for a Kronecker kernel
    tile: int  # points per side of a tile
    dtype: str
    storage_dtype: str
    fingerprint: str
    probe: tuple[float, ...]  # K of the first points, which tells kernels without arrays apart
    format: str = FORMAT
    version: int = VERSION

    @property
    def tiles_per_side(self) -> int:
        return math.ceil(self.num_points / self.tile)

    @property
    def tiles(self) -> list[tuple[int, int]]:
        """On and above the diagonal, row by row."""
        side = range(self.tiles_per_side)
        return [(i, j) for i in side for j in side if j >= i]

    @property
    def side(self) -> int:
        """Rows of the matrix."""
        return self.num_points * self.per_point

    def rows(self, i: int) -> slice:
        """Rows of the matrix in tile row `i`."""
        step = self.tile * self.per_point
        return slice(i * step, min((i + 1) * step, self.side))

    def differences(self, other: "Header") -> list[str]:
        """Names of fields that disagree; the probe only to the accuracy of another device."""
        mine, theirs = asdict(self), asdict(other)
        probes = mine.pop("probe"), theirs.pop("probe")
        names = [name for name in mine if mine[name] != theirs[name]]
        same = len(probes[0]) == len(probes[1]) and np.allclose(*probes, rtol=1e-3, atol=1e-6)
        return names if same else [*names, "probe"]


class Store:
    """A kernel on disk.

    Every read of a tile is verified: the first in a process against its SHA-256, later ones against
    the sum of its words, which a changed word cannot leave as it is and which costs little beside
    the read.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path, self.header = path, header
        self._sums: dict[tuple[int, int], int] = {}

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
        return ts.open(spec, create=True, open=True).result()

    @property
    def complete(self) -> bool:
        return all(self.record_path(tile).exists() for tile in self.header.tiles)

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored triangle."""
        size = numpy_dtype(self.header.storage_dtype).itemsize
        rows = [self.header.rows(i) for i in range(self.header.tiles_per_side)]
        widths = [r.stop - r.start for r in rows]
        return size * sum(widths[i] * widths[j] for i, j in self.header.tiles)

    @property
    def error(self) -> float:
        """`‖K − K_stored‖ / ‖K‖` (Frobenius), zero unless stored in half precision."""
        error = norm = 0.0
        for i, j in self.header.tiles:
            record = self.record((i, j))
            times = 1 if i == j else 2
            error, norm = error + times * record["error"], norm + times * record["norm"]
        return math.sqrt(error / norm) if norm else 0.0

    def record_path(self, tile: tuple[int, int]) -> Path:
        return self.path / "tiles" / f"{tile[0]}.{tile[1]}.json"

    def record(self, tile: tuple[int, int]) -> dict[str, Any]:
        """Checksum and storage error of a tile."""
        try:
            return json.loads(self.record_path(tile).read_text())
        except (OSError, ValueError) as error:
            raise StoreError(
                f"store: tile {tile} of {self.path} is missing. Run store.build again with the same "
                "model, points and path; it computes only what is not there."
            ) from error

    def request(self, tile: tuple[int, int]) -> Any:
        """A future of the tile, unverified."""
        i, j = (self.header.rows(k) for k in tile)
        return self.array[i.start : i.stop, j.start : j.stop].read()

    def receive(self, tile: tuple[int, int], future: Any) -> np.ndarray:
        """The tile, verified, or a `StoreError`."""
        value = np.ascontiguousarray(future.result())
        first = tile not in self._sums
        if first:
            record = self.record(tile)
            sound = digest(value) == record["sha256"]
        else:
            sound = word_sum(value) == self._sums[tile]
        if not sound:
            raise StoreError(
                f"store: tile {tile} of {self.path} does not match its checksum: the file was "
                "changed or the disk is failing. Run store.build again to recompute it."
            )
        if first:
            self._sums[tile] = word_sum(value)
        return value

    def is_sound(self, tile: tuple[int, int]) -> bool:
        """Whether the tile is there and matches its checksum."""
        if not self.record_path(tile).exists():
            return False
        try:
            self._sums.pop(tile, None)
            self.receive(tile, self.request(tile))
        except (StoreError, ValueError):
            return False
        return True

    def operator(self) -> Any:
        """`K` as an operator that streams its tiles; give it to `fit(..., kernel_op=...)`."""
        from ._operator import StoredOperator  # it reads what this file defines

        for tile in self.header.tiles:
            self.record(tile)
        return StoredOperator(self)


def open_store(path: Any) -> Store:
    """A store that `build` made, complete or not; tiles are verified as they are read."""
    path = Path(path)
    try:
        fields = json.loads((path / "header.json").read_text())
        if fields.get("format") != FORMAT:
            raise ValueError(f"format {fields.get('format')!r}")
        if fields.get("version") != VERSION:
            raise StoreError(
                f"store: {path} has format version {fields.get('version')}, this release reads "
                f"{VERSION}. Build it again."
            )
        header = Header(**{**fields, "probe": tuple(fields["probe"])})
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"store: {path} is not a kernel store ({error}).") from error
    return Store(path, header)


def digest(value: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(value).view(np.uint8).data).hexdigest()


def word_sum(value: np.ndarray) -> int:
    """Sum of the array's bytes as words of eight, modulo 2⁶⁴; those left over one by one."""
    flat = np.ascontiguousarray(value).view(np.uint8).reshape(-1)
    cut = flat.size - flat.size % 8
    words, rest = flat[:cut].view(np.uint64), flat[cut:]
    return (int(np.add.reduce(words)) + int(np.sum(rest, dtype=np.uint64))) % 2**64


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(jnp.bfloat16) if name == "bfloat16" else np.dtype(name)


def write_record(path: Path, content: dict[str, Any]) -> None:
    """JSON, atomically: readers see all of it or none."""
    write_atomically(path, lambda file: file.write(json.dumps(content).encode()))


def import_tensorstore() -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise ImportError(
            "store: kernels on disk need TensorStore; pip install 'dualfluence[store]'."
        ) from error
    return tensorstore
