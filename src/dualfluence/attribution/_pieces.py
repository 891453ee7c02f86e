"""Finished pieces of a long computation on disk, so that a killed run can continue."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .._support.archive import read_archive, write_archive
from .._support.types import AnyPath

FORMAT, VERSION = "dualfluence-piece", 1


class Pieces:
    """One `.npz` file per piece in a folder; with no folder, every piece is computed.

    A piece is taken from its file only if the file was written for the same inputs: `fingerprint` for
    what all pieces share, a tag for each one's own.
    """

    def __init__(self, folder: AnyPath | None, fingerprint: str) -> None:
        self._folder = None if folder is None else Path(folder)
        self._fingerprint = fingerprint

    @property
    def kept(self) -> bool:
        """Whether pieces are written."""
        return self._folder is not None

    def get(
        self, name: str, compute: Callable[[], Any], tag: Callable[[], str] = lambda: ""
    ) -> Any:
        """The piece from its file, or computed and written; with no folder it stays on its device."""
        if self._folder is None:
            return compute()
        path, inputs = self._folder / f"{name}.npz", [self._fingerprint, tag()]
        if path.exists():
            return _read(path, inputs)
        value = compute()
        header = {"format": FORMAT, "version": VERSION, "inputs": inputs}
        write_archive(path, header, {"value": np.asarray(value)})
        return value


def _read(path: Path, inputs: list[str]) -> np.ndarray:
    header, arrays = read_archive(path, FORMAT, VERSION, "resume")
    if header["inputs"] != inputs:
        raise ValueError(
            f"resume: {path} was made from other data, checkpoints or options. Use another folder, "
            "or delete this one."
        )
    return arrays["value"]
