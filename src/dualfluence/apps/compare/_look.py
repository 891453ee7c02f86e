"""One colour and one marker per method, for every figure and page. Imports no plotting.

The palette is Okabe and Ito's, readable with any colour vision, with indigo, wine and olive of Tol's.
Colours of quantities such as λ come from viridis, so that the colour of a method has no other meaning.
"""

from typing import Any

from ._names import (
    ASCENT,
    FINE_TUNED,
    FULL_HESSIAN,
    HELD,
    ITERATED,
    ONE_STEP,
    PAPER,
    PAPER_RELEASED,
    PARAMETER,
    PARAMETER_RELEASED,
    RANDOM,
    RETRAINED,
    SHARDED,
    TANGENT,
    TWO_STEPS,
    UNTOUCHED,
)

BLUE, SKY, GREEN, INDIGO = "#0072B2", "#56B4E9", "#009E73", "#332288"
VERMILION, ORANGE, PURPLE, GREY, BLACK = "#D55E00", "#E69F00", "#CC79A7", "#777777", "#000000"
WINE, OLIVE, LIGHT, TEAL = "#882255", "#999933", "#AAAAAA", "#44AA99"

COLOURS: dict[str, str] = {
    ONE_STEP: BLUE,
    HELD: BLUE,
    TWO_STEPS: GREEN,
    ITERATED: SKY,
    TANGENT: INDIGO,
    PAPER: VERMILION,
    PAPER_RELEASED: VERMILION,
    SHARDED: ORANGE,
    FULL_HESSIAN: TEAL,
    PARAMETER: PURPLE,
    PARAMETER_RELEASED: PURPLE,
    RANDOM: GREY,
    RETRAINED: BLACK,
    ASCENT: WINE,
    FINE_TUNED: OLIVE,
    UNTOUCHED: LIGHT,
}
"""By method. A method that runs in another way keeps its colour and changes its line."""

_LINES: dict[str, dict[str, Any]] = {
    ONE_STEP: {"marker": "^"},
    HELD: {"marker": "d", "linestyle": "--", "mfc": "white"},
    TWO_STEPS: {"marker": "s"},
    ITERATED: {"marker": "v"},
    TANGENT: {"marker": "P"},
    # What coincides with one step in most panels is drawn around it, not over it.
    PAPER: {"marker": "s", "markersize": 10, "mfc": "none"},
    PAPER_RELEASED: {"marker": "s", "linestyle": "-.", "mfc": "white"},
    FULL_HESSIAN: {"marker": "*", "linestyle": ":"},
    SHARDED: {"marker": "D", "markersize": 4},
    PARAMETER: {"marker": "o", "markersize": 13, "mfc": "none"},
    PARAMETER_RELEASED: {"marker": "o", "linestyle": "-.", "markersize": 5},
    RANDOM: {"marker": "x", "linestyle": ":"},
    RETRAINED: {"linestyle": "--"},
    ASCENT: {"marker": "<"},
    FINE_TUNED: {"marker": ">"},
    UNTOUCHED: {"marker": "o", "linestyle": ":"},
}

STYLES: dict[str, dict[str, Any]] = {
    name: {"color": colour, **_LINES[name]} for name, colour in COLOURS.items()
}
"""By method: keywords of matplotlib's `plot`."""

SCALE = ("#440154", "#3B528B", "#21918C", "#5EC962")
"""Four steps of a quantity, from dark to light."""

PUBLISHED: dict[str, Any] = {
    "color": BLACK, "marker": "*", "linestyle": "none", "markersize": 9, "mfc": "none"
}  # fmt: skip
"""Values that the paper published."""
