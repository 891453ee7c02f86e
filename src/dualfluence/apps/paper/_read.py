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


def over_seeds(
    results: dict[str, Any], key: str, pick: Callable[[dict[str, Any]], Any]
) -> list[Any]:
    """The result of `pick` at a piece, and at the same piece of every further seed."""
    keys = [key, *(f"seed/{seed}/{key}" for seed in results["config"].get("seeds", ()))]
    found = [values(results, each) for each in keys]
    return [pick(each) for each in found if each is not None]


def bars(
    results: dict[str, Any], prefix: str, pick: Callable[[dict[str, Any]], Any]
) -> list[list[float]] | None:
    """How far the values of other seeds lie below and above those of `series`, at most."""
    xs, ys = series(results, prefix, pick)
    if not results["config"].get("seeds") or not xs:
        return None
    all_of = [over_seeds(results, f"{prefix}/{percent}", pick) for percent in xs]
    pairs = list(zip(ys, all_of, strict=True))
    return [[y - min(found) for y, found in pairs], [max(found) - y for y, found in pairs]]


def r_squared(actual: Any, estimated: Any) -> float:
    """R² of the diagonal: `1 − Σ(actual − estimated)² / Σ(actual − mean)²`."""
    a, e = np.ravel(actual).astype(float), np.ravel(estimated).astype(float)
    return float(1 - np.sum((a - e) ** 2) / np.sum((a - a.mean()) ** 2))
