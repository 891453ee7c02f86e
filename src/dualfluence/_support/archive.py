"""Arrays and a header in one `.npz` file, which is accepted only if all its checksums agree.

Members are stored without compression, so they cannot be larger than the file. The sizes that the file
claims are compared with its length before anything is read. The header lists every array with a SHA-256
of its dtype, shape and bytes, and has a checksum itself. Records in the header (dataclasses, named tuples)
come back with every field checked by its annotation.
"""

import hashlib
import json
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .files import FileError, MissingFileError, remove_stale, write_atomically
from .types import Json

HEADER = "meta"
HEADER_BYTES = 2**24
"""Largest size of a header. Real ones are smaller: they have names and a few numbers per array."""

MAX_NPY_HEADER = 10_000
KINDS = "?biufc"
"""Kinds of dtypes in a file: booleans and numbers, and no objects."""


def write_archive(path: Path, header: Json, arrays: dict[str, np.ndarray]) -> None:
    """Write atomically; errors of the system become a `FileError` in plain words."""
    plain, dtypes = {}, {}
    for name, array in arrays.items():
        plain[name], narrow = _storable(np.asarray(array))
        if narrow is not None:
            dtypes[name] = narrow
    listed = {name: digest_of_array(array) for name, array in plain.items()}
    text = seal({**header, "sha256": listed, "dtypes": dtypes})
    members = {HEADER: np.frombuffer(text, np.uint8), **plain}
    remove_stale(path.parent, path.name)
    write_atomically(path, lambda file: np.savez(file, allow_pickle=False, **members))


def read_archive(
    path: Path, format: str, version: int, what: str = "load"
) -> tuple[Json, dict[str, Any]]:
    """Header and arrays of a file of `write_archive`; a `FileError` begins with `what`, the name of the
    call."""
    if not path.exists():
        raise MissingFileError(f"{what}: there is no file {path}.")
    with checking(path, what):
        with zipfile.ZipFile(path) as archive:
            members = _members(archive, path.stat().st_size)
            text = _read(archive, members, HEADER).tobytes()
            _check_kind(what, path, peek(text), format, version)
            header = unseal(text)
            _check_names(header["sha256"], set(members) - {HEADER})
            arrays = {name: _read(archive, members, name) for name in header["sha256"]}
        for name, array in arrays.items():
            if digest_of_array(array) != header["sha256"][name]:
                raise Damaged(f"array {name!r} fails its checksum")
        arrays = {n: _restored(a, header["dtypes"].get(n)) for n, a in arrays.items()}
    return header, arrays


class Damaged(Exception):
    """A part of a file that does not agree with its checksum or header; the text becomes part of a
    `FileError`."""


@contextmanager
def checking(path: Path, what: str = "load") -> Iterator[None]:
    """Errors inside this scope become a `FileError` that names the file."""
    try:
        yield
    except FileError:
        raise
    # All that readers of archives, arrays and JSON can meet in bytes that nobody wrote.
    except Exception as error:
        words = str(error) or type(error).__name__
        raise FileError(
            f"{what}: {path} is damaged or was not written by dualfluence ({words}). Restore it from a "
            "copy, or make it again."
        ) from error


def seal(content: Json) -> bytes:
    """JSON with its checksum under `"checksum"`."""
    return _encode({**content, "checksum": _checksum(content)})


def peek(text: bytes) -> Json:
    """The content of JSON from `seal`, not yet checked, because other versions compute the checksum
    differently."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged("its header was changed") from error
    if not isinstance(content, dict):
        raise Damaged("its header was changed")
    return content


def unseal(text: bytes) -> Json:
    """The content of JSON from `seal`; `Damaged` if a single byte of it has changed."""
    content = peek(text)
    if text != _encode(content):
        raise Damaged("its header was changed")
    if content.pop("checksum", None) != _checksum(content):
        raise Damaged("its header fails its checksum")
    return content


def digest_of_array(array: np.ndarray) -> str:
    """SHA-256 of dtype, shape and bytes."""
    total = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def digest_of_all(arrays: PyTree) -> str:
    """SHA-256 over the leaves of a tree, in order: arrays by their digests, other leaves by their
    `repr`."""
    each = (
        digest_of_array(np.asarray(leaf)) if hasattr(leaf, "dtype") else repr(leaf)
        for leaf in jax.tree.leaves(arrays)
    )
    return hashlib.sha256("".join(each).encode()).hexdigest()


def _encode(content: Json) -> bytes:
    return json.dumps(content).encode()


def _checksum(content: Json) -> str:
    return hashlib.sha256(_encode(content)).hexdigest()


def _members(archive: zipfile.ZipFile, file_bytes: int) -> dict[str, zipfile.ZipInfo]:
    """Members by name; their sizes are at most that of the file."""
    infos = archive.infolist()
    members = {info.filename.removesuffix(".npy"): info for info in infos}
    if len(members) != len(infos):
        raise Damaged("a member occurs twice")
    if any(i.compress_type != zipfile.ZIP_STORED or i.file_size != i.compress_size for i in infos):
        raise Damaged("a member is compressed, which dualfluence never does")
    if sum(info.file_size for info in infos) > file_bytes:
        raise Damaged("its members claim to be larger than the file")
    if HEADER not in members or members[HEADER].file_size > HEADER_BYTES:
        raise Damaged("it has no header")
    return members


def _read(archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], name: str) -> np.ndarray:
    """One array, after its size was compared with its dtype and shape."""
    info = members[name]
    with archive.open(info) as member:
        if np.lib.format.read_magic(member) != (1, 0):
            raise Damaged(f"array {name!r} has an unknown version")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(member, MAX_NPY_HEADER)
        if dtype.kind not in KINDS or dtype.itemsize == 0:
            raise Damaged(f"array {name!r} has dtype {dtype}")
        count = 1
        for axis in shape:  # in whole numbers of any size: a product of int64 could wrap around
            count *= axis
        if min(shape, default=0) < 0 or member.tell() + count * dtype.itemsize != info.file_size:
            raise Damaged(f"array {name!r} has another size than its shape {shape}")
        array = np.empty(count, dtype)
        _fill(member, array)
    return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)


def _fill(member: Any, array: np.ndarray) -> None:
    """The whole array. It is read to the end, because only there the archive's checksum is compared."""
    view, done = array.view(np.uint8).data, 0
    while done < len(view):
        got = member.readinto(view[done:])
        if not got:
            raise Damaged("it ends early")
        done += got
    member.read(1)


def _check_kind(what: str, path: Path, header: Json, format: str, version: int) -> None:
    if header.get("format") != format:
        raise Damaged(f"its format is {header.get('format')!r}, not {format!r}")
    if header.get("version") != version:
        raise FileError(
            f"{what}: {path} has format version {header.get('version')}, this release reads version "
            f"{version}. Use the release that wrote it, or make the file again."
        )


def _check_names(listed: object, found: set[str]) -> None:
    if not isinstance(listed, dict) or set(listed) != found:
        raise Damaged("its members are not those that its header lists")


def _storable(array: np.ndarray) -> tuple[np.ndarray, str | None]:
    """The array, or its bits where NumPy's format does not know the dtype (bfloat16 and the like)."""
    if array.dtype.kind in KINDS:
        return array, None
    if array.dtype.kind != "V" or jnp.dtype(array.dtype.name) != array.dtype:
        raise ValueError(f"save: arrays must hold numbers, got dtype {array.dtype}.")
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}"), array.dtype.name


def _restored(array: np.ndarray, dtype: str | None) -> np.ndarray:
    return array if dtype is None else array.view(jnp.dtype(dtype))


T = TypeVar("T")


def to_plain(value: object) -> Any:
    """Records as dictionaries, tuples as lists, numbers of arrays as numbers."""
    names = _field_names(type(value))
    if names is not None:
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def from_plain(cls: type[T], value: object, what: str) -> T:
    """A record of class `cls`; a `ValueError` names the field whose value has the wrong type."""
    hints, names = get_type_hints(cls), _field_names(cls)
    if names is None or not isinstance(value, dict) or set(value) != set(names):
        raise ValueError(f"{what} does not have the fields of {cls.__name__}")
    return cls(**{name: _typed(hints[name], value[name], f"{what}.{name}") for name in names})


def _field_names(cls: type) -> tuple[str, ...] | None:
    if is_dataclass(cls):
        return tuple(field.name for field in fields(cls))
    return getattr(cls, "_fields", None)


def _typed(hint: Any, value: object, what: str) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        (hint,) = (each for each in get_args(hint) if each is not type(None))
    if get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_typed(get_args(hint)[0], item, what) for item in value)
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint in (int, bool, str) and type(value) is hint:
        return value
    if isinstance(hint, type) and _field_names(hint) is not None:
        return from_plain(hint, value, what)
    raise ValueError(f"{what} is {value!r}")
