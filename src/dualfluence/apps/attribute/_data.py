"""Data and models of the commands: files and names on the command line, checked."""

import importlib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ... import datasets, infinite
from ..._support.checks import check_finite, check_rows
from ...fitted._fit import fit
from ...fitted._fitted import Fitted
from ...fitted._options import KernelOptions
from ...kernels._linearized import linearize
from ...losses import AbstractLoss, SoftmaxCrossEntropy, SquaredError

NAMES = {"x": "x_train", "y": "y_train", "xq": "x_test", "yq": "y_test"}


@dataclass(frozen=True, eq=False)
class Data:
    """Training points and queries; `groups` names the group of every training point, if given."""

    x: np.ndarray
    y: np.ndarray
    xq: np.ndarray
    yq: np.ndarray
    name: str
    groups: np.ndarray | None = None

    @property
    def is_classes(self) -> bool:
        return np.issubdtype(self.y.dtype, np.integer)


def load_data(path: Path | None, *, points: int | None = None, queries: int | None = None) -> Data:
    """An `.npz` file with `x`, `y`, `xq`, `yq` (or `x_train`, …) and optionally `groups`, or
    `mnist-small`."""
    if path is None:
        small = datasets.load("mnist-small")
        data = Data(small.x_train, small.y_train, small.x_test, small.y_test, "mnist-small")
    else:
        data = _read(path)
    n, q = points or len(data.x), queries or len(data.xq)
    groups = None if data.groups is None else data.groups[:n]
    return Data(data.x[:n], data.y[:n], data.xq[:q], data.yq[:q], data.name, groups)


def _read(path: Path) -> Data:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not an .npz file of plain arrays: {error}") from error
    found = {}
    for short, long in NAMES.items():
        name = short if short in arrays else long
        if name not in arrays:
            raise ValueError(
                f"{path}: expected arrays x, y, xq, yq (or {', '.join(NAMES.values())}), got "
                f"{', '.join(sorted(arrays)) or 'none'}; {short} is missing."
            )
        check_finite(f"{path}: {name}", arrays[name])
        found[short] = arrays[name]
    for features, targets in (("x", "y"), ("xq", "yq")):
        check_rows(f"{path}: {targets}", found[targets], len(found[features]), f"row of {features}")
    groups = arrays.get("groups")
    if groups is not None:
        check_rows(f"{path}: groups", groups, len(found["x"]), "row of x")
    return Data(**found, name=Path(path).name, groups=groups)


def load_model(name: str | None) -> Any:
    """The result of `module:function`, by default an infinitely wide network of two layers."""
    if name is None:
        layer = infinite.Dense(W_std=1.5, b_std=0.1)
        return infinite.serial(layer, infinite.Relu(), layer, infinite.Relu(), layer)
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"--model: expected module:function, got {name!r}.")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--model: cannot call {name!r}: {error}") from error
    return linearize(*made) if isinstance(made, tuple) and len(made) == 2 else made


def fit_model(model: Any, data: Data, ridge: float) -> Fitted:
    """The model trained on the data: softmax for class labels, squared error for numbers."""
    loss: AbstractLoss = SoftmaxCrossEntropy() if data.is_classes else SquaredError()
    outputs = int(max(data.y.max(), data.yq.max())) + 1 if data.is_classes else None
    kernel = KernelOptions(num_outputs=outputs)
    return fit(model, data.x, data.y, loss=loss, ridge=ridge, kernel=kernel)
