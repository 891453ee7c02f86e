"""A query beside its most helpful and most harmful training points."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._support.types import Numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any

HELPFUL, HARMFUL = "#1b6ca8", "#b3401f"


def as_picture(features: np.ndarray) -> np.ndarray | None:
    """One point's features as a picture, grey or colour, or `None` where they are not one."""
    array: Any = np.asarray(features)
    if array.ndim == 1:
        side = math.isqrt(array.size)
        if side < 4 or side * side != array.size:
            return None
        array = array.reshape(side, side)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim == 2 and min(array.shape) >= 4:
        return _scaled(array)
    if array.ndim == 3 and array.shape[2] == 3 and min(array.shape[:2]) >= 4:
        return _scaled(array)
    return None


def _scaled(array: np.ndarray) -> np.ndarray:
    low, high = float(array.min()), float(array.max())
    return (array - low) / (high - low if high > low else 1)


def label(targets: Numbers | None, index: int) -> str:
    """A target in a few characters."""
    if targets is None:
        return ""
    value = np.asarray(targets)[index]
    if value.ndim == 0:
        return f"{value:g}"
    if value.size == 1:
        return f"{float(value.reshape(())):.3g}"
    return (
        str(int(value.argmax()))
        if np.isclose(value.sum(), 1)
        else np.array2string(value, precision=2)
    )


def plot_strip(
    result: Any, query: int = 0, k: int = 8, *, names: Sequence[str] | None = None
) -> Figure:
    """The query on the left; in the upper row the points that helped it, in the lower row those that
    harmed it.

    **Arguments:**

    - `query`: its row.
    - `k`: points in each strip.
    - `names`: names of the classes, for the captions.

    **Returns:** the Matplotlib figure.
    """
    from matplotlib.figure import Figure as MakeFigure

    if not 0 <= query < result.num_queries:
        raise ValueError(f"plot: query must be in [0, {result.num_queries}), got {query}.")
    k = min(k, result.num_points)
    top = result.top(k)
    figure = MakeFigure(figsize=(1.3 * (k + 2), 3.6), layout="constrained")
    pictures = _pictures(
        result, np.concatenate([top.helpful.indices[query], top.harmful.indices[query]])
    )
    grid = figure.add_gridspec(2, k + 2)
    _query_panel(figure.add_subplot(grid[:, :2]), result, query, names)
    for row, (kind, colour) in enumerate((("helpful", HELPFUL), ("harmful", HARMFUL))):
        ranked = getattr(top, kind)
        points = list(zip(ranked.indices[query], ranked.values[query], strict=True))
        if pictures:
            for column, (i, value) in enumerate(points):
                axis = figure.add_subplot(grid[row, column + 2])
                axis.imshow(pictures[int(i)], cmap="gray_r")
                axis.set_title(
                    f"{_name(result.y, int(i), names)}  {value:+.2g}", color=colour, fontsize=9
                )
                axis.set_xticks([])
                axis.set_yticks([])
                if column == 0:
                    axis.set_ylabel(kind, color=colour)
        else:
            axis = figure.add_subplot(grid[row, 2:])
            _table(axis, kind, colour, points, result, names)
    return figure


def _pictures(result: Any, points: np.ndarray) -> dict[int, Any]:
    """Pictures of these points, none where features are not pictures."""
    if result.x is None or as_picture(result.x[0]) is None:
        return {}
    return {int(i): as_picture(result.x[i]) for i in points}


def _query_panel(axis: Any, result: Any, query: int, names: Sequence[str] | None) -> None:
    axis.set_title(f"query {query}: {_name(result.yq, query, names)}\n{result.of}", fontsize=10)
    axis.set_xticks([])
    axis.set_yticks([])
    picture = None if result.xq is None else as_picture(result.xq[query])
    if picture is not None:
        axis.imshow(picture, cmap="gray_r")
    elif result.xq is not None:
        text = np.array2string(np.asarray(result.xq[query]).ravel()[:8], precision=2)
        axis.text(0.5, 0.5, text, ha="center", va="center", wrap=True, fontsize=8)


def _table(
    axis: Any, kind: str, colour: str, points: list[Any], result: Any, names: Sequence[str] | None
) -> None:
    axis.axis("off")
    axis.set_title(kind, color=colour, loc="left", fontsize=10)
    rows = [["point"], ["target"], ["effect"]]
    for i, value in points:
        rows[0].append(str(int(i)))
        rows[1].append(_name(result.y, int(i), names))
        rows[2].append(f"{value:+.2g}")
    axis.table(cellText=rows, loc="center", edges="horizontal")


def _name(targets: Numbers | None, index: int, names: Sequence[str] | None) -> str:
    text = label(targets, index)
    return str(names[int(text)]) if names is not None and text.isdigit() else text
