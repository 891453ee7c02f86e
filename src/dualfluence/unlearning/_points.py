"""Commitments to the rows that a model was trained on.

Every row has one hash of its features, its target and a blind. The blind is a keyed hash of the same
data, so only the salt of the desk can make it, and a new target gets a new blind. Lines of the ledger
contain the hash over all commitments, the *root*. A commitment stays when its row is purged, and
without the blind nobody can guess the row from it.
"""

import hashlib
import hmac
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from .._support.archive import checking, read_archive, write_archive
from ..problem._objective import TrainingSet
from ._ledger import LedgerError, digest_of_parts

FORMAT, VERSION = "dualfluence-points", 1
SIZE = hashlib.sha256().digest_size
"""Bytes of a commitment and of a blind."""


class Commitments:
    """The commitments of a training set's rows, in order.

    - `commitments`: one row of bytes each.
    - `root`: their hash.
    """

    def __init__(self, salt: bytes, commitments: np.ndarray) -> None:
        self._salt, self.commitments = salt, commitments
        self.root = digest_of_parts(commitments.tobytes())

    @classmethod
    def of(cls, salt: bytes, data: TrainingSet, stored: np.ndarray | None = None) -> "Commitments":
        """Commitments to all rows; those of purged rows are taken from `stored`."""
        found = _commitments(salt, data, range(data.num_points))
        if stored is not None and data.purged is not None and len(stored) >= len(found):
            found[data.purged] = stored[data.purged]
        return cls(salt, found)

    def after(self, data: TrainingSet, changed: Iterable[int]) -> "Commitments":
        """The commitments after the rows `changed`, which may be new, are replaced by those of `data`."""
        changed = list(changed)
        more = data.num_points - len(self.commitments)
        commitments = np.pad(self.commitments, ((0, more), (0, 0)))
        commitments[changed] = _commitments(self._salt, data, changed)
        return Commitments(self._salt, commitments)

    def witnesses(self, data: TrainingSet) -> dict[str, np.ndarray]:
        """Commitments, and blinds of the points that have a weight, for a check of these rows."""
        blinds = np.zeros_like(self.commitments)
        kept = np.flatnonzero(data.sample_weights > 0).tolist()
        blinds[kept] = _rows_of(
            _blind(self._salt, row, content)
            for row, content in zip(kept, _contents(data, kept), strict=True)
        )
        return {"commitments": self.commitments, "blinds": blinds}

    def write(self, folder: Path) -> Path:
        """Store the commitments, because those of purged rows cannot be computed again."""
        path, header = path_of(folder, self.root), {"format": FORMAT, "version": VERSION}
        write_archive(path, header, {"commitments": self.commitments})
        return path


def path_of(folder: Path, root: str) -> Path:
    """The file of the commitments with this root."""
    return folder / f"points-{root[:16]}.npz"


def read_commitments(folder: Path, root: str) -> np.ndarray | None:
    """The commitments that `write` stored, checked with the root; `None` if there is no such file."""
    path = path_of(folder, root)
    if not path.exists():
        return None
    _, arrays = read_archive(path, FORMAT, VERSION, "open")
    with checking(path, "open"):
        found = arrays["commitments"]
        if found.dtype != np.uint8 or found.ndim != 2 or found.shape[1] != SIZE:
            raise ValueError(f"commitments have dtype {found.dtype} and shape {found.shape}")
    if digest_of_parts(found.tobytes()) != root:
        raise LedgerError(f"ledger: {path.name} was changed: its commitments are not the ledger's.")
    return found


def _commitments(salt: bytes, data: TrainingSet, rows: Iterable[int]) -> np.ndarray:
    rows = list(rows)
    return _rows_of(
        hashlib.sha256(_blind(salt, row, content) + content).digest()
        for row, content in zip(rows, _contents(data, rows), strict=True)
    )


def _contents(data: TrainingSet, rows: Iterable[int]) -> Iterator[bytes]:
    """A hash of features and target for each of the rows."""
    x, targets = np.asarray(data.x), np.asarray(data.targets)
    head = "".join(f"{a.dtype.name} {a.shape[1:]} " for a in (x, targets)).encode()
    for row in rows:
        yield hashlib.sha256(head + x[row].tobytes() + targets[row].tobytes()).digest()


def _blind(salt: bytes, row: int, content: bytes) -> bytes:
    return hmac.new(salt, b"point" + row.to_bytes(8, "big") + content, hashlib.sha256).digest()


def _rows_of(hashes: Iterable[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, SIZE).copy()
