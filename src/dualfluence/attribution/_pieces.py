"""Finished pieces of a long computation on disk, so that a killed run can continue."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .._support.files import write_atomically


class Pieces:
    """One `.npz` file per piece in a folder; with no folder, every piece is computed.

    A piece is taken from its file only if the file was written for the same inputs: `fingerprint` for
    what all pieces share, a tag for each one's own.
    """

    def __init__(self, folder: Any, fingerprint: str) -> None:
        self._folder = None if folder is None else Path(folder)
        self._fingerprint = fingerprint

    def get(
        self, name: str, compute: Callable[[], np.ndarray], tag: Callable[[], str] = lambda: ""
    ) -> np.ndarray:
        """The piece from its file, or computed and written."""
        if self._folder is None:
            return compute()
        path, own = self._folder / f"{name}.npz", tag()
        if path.exists():
            return self._read(path, own)
        value = compute()
        meta = np.frombuffer(json.dumps([self._fingerprint, own]).encode(), np.uint8)
        write_atomically(path, lambda file: np.savez(file, value=value, meta=meta))
        return value

    def _read(self, path: Path, own: str) -> np.ndarray:
        try:
            with np.load(path, allow_pickle=False) as file:
                value, meta = file["value"], json.loads(file["meta"].tobytes())
        except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"resume: {path} is damaged: {error}. Delete it to compute it again."
            ) from error
        if meta != [self._fingerprint, own]:
            raise ValueError(
                f"resume: {path} was made from other data, checkpoints or options. Use another folder, "
                "or delete this one."
            )
        return value
