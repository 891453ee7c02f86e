"""The figure of an experiment of one's own."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..compare._names import FULL_HESSIAN, ITERATED, ONE_STEP, PAPER, PARAMETER, RANDOM, RETRAINED
from ._plots import draw_line, new_figure, put_legend
from ._read import values

METHODS = (PARAMETER, PAPER, FULL_HESSIAN, ONE_STEP, ITERATED)


def draw_own(results: dict[str, Any]) -> Figure:
    """Seconds, distance and accuracy of every method, one column of marks per set to forget."""
    config = results["config"]
    kind, depth, width = (config["network"][key] for key in ("kind", "depth", "width"))
    what = "linearised " if config["linearised"] else ""
    title = f"Unlearning from a {what}{kind} of depth {depth} and width {width}, {config['data']['dataset']}"
    figure, axes = new_figure(results, 1, 3, 4.6, 3.6, title)
    seconds, distance, accuracy = axes[0]
    found = [values(results, f"removal/{i}") for i in range(len(config["forget"]))]
    places = [i for i, v in enumerate(found) if v is not None]
    present = [v for v in found if v is not None]
    marks = {"linestyle": "none"}
    for name in METHODS:
        draw_line(
            seconds,
            name,
            places,
            [float(np.median(v["warm_seconds"][name])) for v in present],
            **marks,
        )
    for name in (*METHODS, RANDOM):
        draw_line(distance, name, places, [v["distance"][name] for v in present], **marks)
    for name in (*METHODS, RANDOM, RETRAINED):
        draw_line(
            accuracy, name, places, [v["accuracy"][name]["forgotten"] for v in present], **marks
        )
    seconds.set(title="later calls, median", ylabel="seconds", yscale="log")
    distance.set(title="distance to retraining", ylabel="‖θ − θ_r‖ / ‖θ_r‖", yscale="log")
    accuracy.set(title="accuracy on the forgotten points", ylabel="accuracy")
    labels = [", ".join(f"{p:g} % of {c}" for c, p in each) for each in config["forget"]]
    for axis in axes[0]:
        axis.set_xticks(range(len(labels)), labels, rotation=15)
        axis.set_xlim(-0.5, len(labels) - 0.5)
    put_legend(figure, [*METHODS, RANDOM, RETRAINED], [], 4)
    return figure
