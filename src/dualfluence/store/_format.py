"""The format of a kernel store on disk.

    path/header.json          version, shapes, dtypes, fingerprint of the points and parameters
    path/kernel/              a zarr array, one uncompressed chunk per tile, upper triangle only
    path/tiles/3.7.json       checksum and storage error of tile (3, 7)
    path/build.lock           held by the process that builds; the system frees it when that ends
    path/share-0-of-4.lock    held by the process that computes that share; then build.lock is free

Header and records have checksums, and a record names its store and tile. A tile counts as written once
its record exists. The record is written last and renamed into place, and TensorStore renames chunks
into place as well. So after a kill at any moment the store can be resumed.
"""

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._support.archive import Damaged, digest_of_array, from_plain, peek, seal, unseal
from .._support.files import FileError, write_whole
from .._support.types import Json

FORMAT, VERSION = "dualfluence-kernel-store", 2
STORAGE = ("float16", "bfloat16", "float32", "float64")
HEADER, LOCK, SHARES = "header.json", "build.lock", "share-*-of-*.lock"


class StoreError(FileError):
    """A store on disk is damaged or incomplete, or belongs to another model. The message says what to
    do."""


@dataclass(frozen=True)
class Header:
    """The fields that must agree before a stored tile may be used."""

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

    def __post_init__(self) -> None:
        sizes = (self.num_points, self.num_outputs, self.per_point, self.tile)
        kinds = self.storage_dtype in STORAGE and self.dtype in STORAGE
        if min(sizes) < 1 or self.tile > self.num_points or not kinds:
            raise ValueError(f"sizes {sizes}, dtypes {self.dtype} and {self.storage_dtype}")

    @cached_property
    def name(self) -> str:
        """A digest of these fields, by which records name their store."""
        return digest_of_array(np.frombuffer(seal(asdict(self)), np.uint8))

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

    def tile_bytes(self, tile: tuple[int, int]) -> int:
        """Bytes of a stored tile."""
        rows, cols = (self.rows(k) for k in tile)
        entries = (rows.stop - rows.start) * (cols.stop - cols.start)
        return entries * numpy_dtype(self.storage_dtype).itemsize

    def differences(self, other: "Header") -> list[str]:
        """Names of fields that disagree; the probe needs to agree only to the accuracy of another
        device."""
        mine, theirs = asdict(self), asdict(other)
        probes = mine.pop("probe"), theirs.pop("probe")
        names = [name for name in mine if mine[name] != theirs[name]]
        same = len(probes[0]) == len(probes[1]) and np.allclose(*probes, rtol=1e-3, atol=1e-6)
        return names if same else [*names, "probe"]


@dataclass(frozen=True)
class Record:
    """The record of one tile: it exists, and its checksums."""

    store: str  # name of the header it belongs to
    tile: tuple[int, ...]
    sha256: str
    error: float  # squared Frobenius norm of what storage rounded away
    norm: float  # and of the tile


def read_header(path: Path) -> Header:
    """The header of the store in the folder `path`."""
    file = path / HEADER
    try:
        text = file.read_bytes()
        fields = peek(text)
        if fields.get("format") != FORMAT:
            raise Damaged(f"its format is {fields.get('format')!r}")
        if fields.get("version") != VERSION:
            raise StoreError(
                f"store: {path} has format version {fields.get('version')}, this release reads "
                f"{VERSION}. Build it again in another folder."
            )
        return from_plain(Header, unseal(text), "header")
    except FileNotFoundError as error:
        raise StoreError(f"store: {path} is not a kernel store: it has no {HEADER}.") from error
    except StoreError:
        raise
    except (Damaged, OSError, ValueError) as error:
        raise StoreError(
            f"store: {path} is not a kernel store, or its {HEADER} is damaged ({error}). Restore that "
            "file from a copy, or delete the folder and build again."
        ) from error


def write_header(path: Path, header: Header) -> None:
    write_sealed(path / HEADER, asdict(header))


def read_record(file: Path, header: Header, tile: tuple[int, int]) -> Record:
    """The record of a tile; `Damaged`, `OSError` or `ValueError` if it is not one of this store."""
    record = from_plain(Record, unseal(file.read_bytes()), "record")
    if record.store != header.name or record.tile != tile:
        raise Damaged("it belongs to another store or tile")
    return record


def write_sealed(path: Path, content: Json) -> None:
    """JSON with its checksum, atomically: readers see all of it or none."""
    write_whole(path, seal(content))


def word_sum(value: np.ndarray) -> int:
    """Sum of the array's bytes as words of eight, modulo 2⁶⁴; remaining bytes are added one by one."""
    flat = np.ascontiguousarray(value).view(np.uint8).reshape(-1)
    cut = flat.size - flat.size % 8
    words, rest = flat[:cut].view(np.uint64), flat[cut:]
    return (int(np.add.reduce(words)) + int(np.sum(rest, dtype=np.uint64))) % 2**64


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(jnp.bfloat16) if name == "bfloat16" else np.dtype(name)


def import_tensorstore() -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise ImportError(
            "store: kernels on disk need TensorStore; pip install 'dualfluence[store]'."
        ) from error
    return tensorstore
