"""Draws the figure of a results file, from its numbers alone."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ..._support.files import write_whole
from ._config import OWN
from ._plots import DPI, FONTS, draw_fig1, draw_fig2, draw_fig3, draw_fig4
from ._plots_linear import draw_linear, draw_linear_ten
from ._plots_own import draw_own

DRAWERS: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "fig1": draw_fig1,
    "fig2": draw_fig2,
    "fig3": draw_fig3,
    "fig4": draw_fig4,
    "linear": draw_linear,
    "linear-ten": draw_linear_ten,
    OWN: draw_own,
}


def draw(results: dict[str, Any], folder: Path) -> Path:
    """Draw the figure of one results file as `<experiment>.png`."""
    name = results["experiment"]
    with matplotlib.rc_context(FONTS):
        figure = DRAWERS[name](results)
        buffer = BytesIO()
        figure.savefig(buffer, dpi=DPI, format="png")
    path = folder / f"{name}.png"
    write_whole(path, buffer.getvalue())
    return path
