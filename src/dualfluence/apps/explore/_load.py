"""The model and the queries of the page: a file, a function, or the embedded example."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...fitted._fitted import Fitted
from ..attribute._data import Data, fit_model, load_data, load_model
from ..compare._networks import fully_connected_from_zero
from ..demo._run import RIDGE, WIDTHS
from ..page._scene import Scene
from ..page._view import MAX_POINTS
from ..serve._model import load_fitted

EXAMPLE_POINTS = 300
"""Training images of the embedded example, as in the demo."""


def load_scene(
    model: str | None,
    *,
    network: str | None = None,
    data: Path | None = None,
    points: int | None = None,
    queries: int = 60,
    ridge: float = RIDGE,
) -> Scene:
    """The model, queries and data of the page.

    **Arguments:**

    - `model`: a file of `Fitted.save`, or `module:function` that returns `(apply_fn, params)` or a kernel;
      `None` for the network of the demo on `mnist-small`.
    - `network`: for a file, the `module:function` that it was fitted with.
    - `data`: an `.npz` file with `x`, `y`, `xq`, `yq`. If the model is a saved one, only the queries in
      this file are used.
    - `points`: how many training points to use, counted from the first.
    - `queries`: how many queries to use, counted from the first.
    - `ridge`: the ridge of a model that is fitted here.
    """
    if model is not None and ":" not in model:
        return _saved(Path(model), network, data, points, queries)
    if network is not None:
        raise ValueError(
            "--network goes with a saved model, but MODEL is module:function or missing. Leave --network "
            "out."
        )
    example = model is None and data is None
    first = points or (EXAMPLE_POINTS if example or data is None else None)
    rows = load_data(data, points=first, queries=queries)
    _check_count(len(rows.x))
    made = fully_connected_from_zero(WIDTHS, 0) if example else load_model(model)
    title = f"A network {'-'.join(map(str, WIDTHS))}" if example else _title(model)
    return _scene(fit_model(made, rows, ridge), rows, title)


def _saved(
    path: Path, network: str | None, data: Path | None, points: int | None, queries: int
) -> Scene:
    if network is None:
        raise ValueError(
            f"{path}: a saved model needs --network module:function, the function it was fitted "
            "with. For a function in place of a file write module:function."
        )
    if points is not None:
        raise ValueError(
            "--points cannot be used with a saved model, which has its own training points. Leave it out."
        )
    fitted = load_fitted(path, network)
    _check_count(fitted.data.num_points)
    title = f"{path.name}, {network}"
    if data is not None:
        return _scene(fitted, load_data(data, queries=queries), title)
    x, y = np.asarray(fitted.x)[:queries], np.asarray(fitted.data.targets)[:queries]
    scene = Scene(fitted, x, y, path.name, title)
    note = "No queries were given (--data), so the first training points are shown as queries."
    return replace(scene, notes=(note,))


def _scene(fitted: Fitted, rows: Data, title: str) -> Scene:
    groups = rows.groups if len(rows.x) == fitted.data.num_points else None
    return Scene(fitted, rows.xq, rows.yq, rows.name, title, groups)


def _title(model: Any) -> str:
    return "An infinitely wide network" if model is None else str(model)


def _check_count(count: int) -> None:
    if count > MAX_POINTS:
        raise ValueError(
            f"explore: a page shows up to {MAX_POINTS} training points, got {count}. "
            "Take the first ones with --points."
        )
