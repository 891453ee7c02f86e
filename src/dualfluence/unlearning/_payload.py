"""The data of a request: new features and labels, kept beside the ledger until a checkpoint."""

import hashlib
import io
from pathlib import Path

import numpy as np

from .._support.compile import in_own_precision
from .._support.files import FileError, write_whole
from .._support.types import Json
from ..fitted._file import name_of
from ..fitted._fitted import Fitted
from ..problem._edits import AbstractEdit, Add, Relabel, Remove, Replace
from ._ledger import LedgerError, digest_of_parts


@in_own_precision
def digest_of_model(fitted: Fitted, root: str = "") -> str:
    """SHA-256 of a model, given its kernel: loss, ridge, weights, dual variables and offsets.

    `root` is the root of the commitments to the model's features and targets, if the model has a desk.
    """
    parts = [name_of(fitted.loss).encode("utf-8"), root.encode("ascii")]
    offset = fitted.layout.points(fitted.offset)
    for array in (fitted.alpha, fitted.data.sample_weights, np.float64(fitted.ridge), offset):
        plain = np.asarray(array, order="C")
        parts += [f"{plain.dtype.str} {plain.shape}".encode(), plain.tobytes()]
    return digest_of_parts(*parts)


def edits_of(kind: str, rows: list[int], arrays: dict[str, np.ndarray]) -> list[AbstractEdit]:
    """The request as edits of the training set."""
    if kind == "remove":
        return [Remove(rows)]
    if kind == "relabel":
        return [Relabel(rows, arrays["targets"])]
    if kind == "correct":
        return [Replace(rows, arrays["x"], arrays.get("targets"))]
    if kind == "add":
        return [Add(arrays["x"], arrays["targets"])]
    raise LedgerError(
        f"ledger: {kind!r} is not a request of this version (remove, relabel, correct, add). Was "
        "the line written by a later version?"
    )


def write_payload(
    path: Path, rows: list[int], references: list[str], arrays: dict[str, np.ndarray]
) -> str:
    """Write the request's contents, readable by the owner alone; returns their SHA-256."""
    buffer = io.BytesIO()
    np.savez(
        buffer,
        **arrays,  # type: ignore[arg-type]
        __rows=np.asarray(rows, np.int64),
        __references=np.asarray(references, "U64"),
    )
    raw = buffer.getvalue()
    try:
        write_whole(path, raw, private=True)
    except FileError as error:
        raise LedgerError(
            f"ledger: the request was not recorded and not applied: {error}"
        ) from error
    return hashlib.sha256(raw).hexdigest()


def read_payload(
    path: Path, expected: str | None, number: int
) -> tuple[list[int], list[str], Json] | None:
    """Rows, references of new names and arrays of a request, checked against the ledger's hash."""
    if expected is None:
        return None
    if not path.exists():
        raise LedgerError(
            f"ledger: {path.name}, the contents of line {number}, is missing. Open the desk with "
            "the checkpoint that was made after it."
        )
    raw = path.read_bytes()
    if hashlib.sha256(raw).hexdigest() != expected:
        raise LedgerError(f"ledger: {path.name}, the contents of line {number}, was changed.")
    with np.load(io.BytesIO(raw), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    rows = arrays.pop("__rows").tolist()
    return rows, arrays.pop("__references").tolist(), arrays
