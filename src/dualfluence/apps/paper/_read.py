"""Access to results by name: pieces, series over percentages. Needs neither plotting nor a device."""

from collections.abc import Callable
from typing import Any

import numpy as np

ROW_TITLES = {"fcnn": "FCNN, MNIST", "cnn": "CNN, CIFAR-10 classes 0 and 1"}


def values(results: dict[str, Any], key: str) -> dict[str, Any] | None:
    """The values of a piece, if it was computed."""
    piece = results["pieces"].get(key)
    return None if piece is None else piece["values"]


def series(
    results: dict[str, Any], prefix: str, pick: Callable[[dict[str, Any]], Any], suffix: str = ""
) -> tuple[list[int], list[Any]]:
    """Percentages, and the result of `pick` at each of them."""
    xs, ys = [], []
    for percent in results["config"]["percentages"]:
        found = values(results, f"{prefix}/{percent}{suffix}")
        value = None if found is None else pick(found)
        if value is not None:
            xs.append(percent)
            ys.append(value)
    return xs, ys


def r_squared(actual: Any, estimated: Any) -> float:
    """R² of the diagonal: `1 − Σ(actual − estimated)² / Σ(actual − mean)²`."""
    a, e = np.ravel(actual).astype(float), np.ravel(estimated).astype(float)
    return float(1 - np.sum((a - e) ** 2) / np.sum((a - a.mean()) ** 2))
