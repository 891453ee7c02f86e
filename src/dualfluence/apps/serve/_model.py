"""The model that a server is started with: a file, and the function that it was fitted with."""

from pathlib import Path

from ...dual._fitted import Fitted
from ...dual._io import load
from ..attribute._data import load_model


def load_fitted(path: Path, network: str) -> Fitted:
    """A saved fit with its network or kernel."""
    return load(path, load_model(network), progress=False)


def read_names(path: Path | None) -> list[str] | None:
    """One name per line."""
    return None if path is None else path.read_text("utf-8").splitlines()
