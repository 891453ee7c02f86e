"""The model that a server is started with: a file, and the function that it was fitted with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...fitted._fitted import Fitted
from ...fitted._io import load
from ..attribute._data import load_model


def load_fitted(path: Path, network: str) -> Fitted:
    """A saved fit with its network or kernel."""
    return load(path, load_model(network), progress=False)


def kernel_of(path: Path, network: str) -> Callable[[Any, Any], np.ndarray]:
    """`kernel(x1, x2)` of the network that a file was fitted with, at the parameters where the file
    takes the Jacobian."""
    fitted = load_fitted(path, network)
    source, queries = fitted.source, fitted.data.queries

    def kernel(x1: Any, x2: Any) -> np.ndarray:
        one, two = queries(x1), queries(x2)
        if not source.has_features:
            return np.asarray(source.block(one, two, False))
        phi = source.features
        return np.asarray(jnp.einsum("iar,jbr->iajb", phi(one), phi(two), precision="highest"))

    return kernel


def read_names(path: Path | None) -> list[str] | None:
    """One name per line."""
    return None if path is None else path.read_text("utf-8").splitlines()
