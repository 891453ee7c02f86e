"""Figures of measures and removal curves."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ._measures import Measured
from ._removal import RemovalCurve

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any


def plot_measured(methods: Mapping[str, Measured], *, ceiling: Measured | None = None) -> Figure:
    """One bar per method with its interval over queries; the noise ceiling as a dashed line."""
    from matplotlib.figure import Figure as MakeFigure

    figure = MakeFigure(figsize=(7, 0.8 + 0.4 * len(methods)), layout="constrained")
    axis = figure.add_subplot()
    names, rows = list(methods), list(methods.values())
    values = np.array([m.value for m in rows])
    spread = np.array([[m.value - m.interval[0], m.interval[1] - m.value] for m in rows]).T
    axis.barh(names, values, xerr=spread, color="#1b6ca8", ecolor="#333333", height=0.6)
    axis.invert_yaxis()
    axis.set_xlabel(rows[0].name if rows else "")
    if ceiling is not None:
        axis.axvline(ceiling.value, color="#333333", linestyle="--")
        axis.set_title(f"noise ceiling {ceiling.value:.2f}", fontsize=9, loc="right")
    return figure


def plot_removal(curve: RemovalCurve, *, target: str = "mean loss of the queries") -> Figure:
    """The target as helpful, harmful or random points are removed."""
    from matplotlib.figure import Figure as MakeFigure

    figure = MakeFigure(figsize=(6, 4), layout="constrained")
    axis = figure.add_subplot()
    for name, colour in (("helpful", "#1b6ca8"), ("harmful", "#b3401f"), ("random", "#777777")):
        axis.plot(curve.counts, getattr(curve, name), "o-", color=colour, label=f"{name} points")
    axis.set_xlabel("points removed")
    axis.set_ylabel(target)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    return figure
