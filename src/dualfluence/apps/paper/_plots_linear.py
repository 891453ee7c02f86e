"""Figures of the linear models."""

from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..compare._look import PUBLISHED
from ..compare._names import COMPARED, ITERATED, ONE_STEP, PAPER, PARAMETER, RANDOM, RETRAINED
from . import _published as published
from ._claims_linear import AUTHORS_PER_CLASS, warm_seconds
from ._plots import draw_line, new_figure, percent_axis, put_legend
from ._read import series, values

METHODS = (PARAMETER, PAPER, ONE_STEP, ITERATED)


def draw_linear(results: dict[str, Any]) -> Figure:
    """First call, later calls, distance and accuracy of the authors' linear model."""
    config = results["config"]
    per_class, size = config["data"]["per_class_train"], config["num_features"]
    title = f"A linear model: {per_class} of digits 3 and 8 each, {size} random ReLU features"
    theirs = per_class == AUTHORS_PER_CLASS
    figure, axes = new_figure(results, 1, 4, 3.7, 3.6, title)
    first, warm, distance, accuracy = axes[0]
    for name in METHODS:
        _points(first, results, name, lambda v, n=name: v["first_seconds"].get(n))
        _points(warm, results, name, lambda v, n=name: warm_seconds(results, v, n))
    for name in (*METHODS, RANDOM):
        _points(distance, results, name, lambda v, n=name: v["distance"]["published"].get(n))
        pick = lambda v, n=name: v["accuracy"]["published"][n]["forgotten"]  # noqa: E731
        _points(accuracy, results, name, pick)
    for name in METHODS:
        look = {"linestyle": "--", "mfc": "white"}
        pick = lambda v, n=name: v["distance"]["exact"].get(n)  # noqa: E731
        _points(distance, results, name, pick, **look)
    retrained = lambda v: v["accuracy"]["published"][RETRAINED]["forgotten"]  # noqa: E731
    _points(accuracy, results, RETRAINED, retrained)
    if theirs:
        for axis, key in ((warm, "warm dual"), (distance, "distance dual"),
                          (accuracy, "forget accuracy")):  # fmt: skip
            found = published.at_percentages(published.AUTHORS_LINEAR[key])
            axis.plot(list(found), list(found.values()), **PUBLISHED)
    first.set(title="first call", ylabel="seconds", yscale="log")
    on_cpu = results["environment"].get("platform") == "cpu"
    unit = "processor seconds" if on_cpu else "seconds"
    warm.set(title="later calls, median", ylabel=unit, yscale="log")
    distance.set(title="distance to retraining", ylabel="‖θ − θ_r‖ / ‖θ_r‖", yscale="log")
    accuracy.set(title="accuracy on the forgotten points", ylabel="accuracy")
    for axis in axes[0]:
        percent_axis(axis, config["percentages"])
    extra = [
        Line2D([], [], color="#444444", label="gradient descent, as published"),
        Line2D([], [], color="#444444", linestyle="--", marker="o", mfc="white",
               label="trained and retrained to the optimum"),
    ]  # fmt: skip
    if theirs:
        extra.append(Line2D([], [], label="authors' dual form (two RTX 3080 Ti)", **PUBLISHED))
    put_legend(figure, [*METHODS, RANDOM, RETRAINED], extra, 3)
    return figure


def _points(
    axis: Axes,
    results: dict[str, Any],
    name: str,
    pick: Callable[[dict[str, Any]], Any],
    **more: Any,
) -> None:
    found = {p: values(results, f"{p}") for p in results["config"]["percentages"]}
    ys = {p: pick(v) for p, v in found.items() if v is not None}
    ys = {p: y for p, y in ys.items() if y is not None}
    draw_line(axis, name, list(ys), list(ys.values()), **more)


def draw_linear_ten(results: dict[str, Any]) -> Figure:
    """Distances for both losses of a model that is linear."""
    percentages = results["config"]["percentages"]
    count = results["config"]["num_features"]
    figure, axes = new_figure(
        results, 1, 2, 5.4, 3.6, f"Ten classes on {count} random ReLU features"
    )
    titles = {"softmax": "softmax cross-entropy", "squared": "squared error"}
    for axis, (loss, title) in zip(axes[0], titles.items(), strict=True):
        for name in COMPARED:
            draw_line(axis, name, *series(results, loss, lambda v, n=name: v["distance"].get(n)))
        xs, ys = series(results, loss, lambda v: v["dual_against_parameter_space"])
        if xs:
            axis.plot(xs, ys, color="#000000", linestyle=":", marker="+")
        xs, ys = series(results, loss, lambda v: v["change"])
        if xs:
            axis.plot(xs, ys, color="#777777", linestyle="--")
        axis.set(title=title, ylabel="relative parameter distance", yscale="log")
        percent_axis(axis, percentages)
    extra = [
        Line2D([], [], color="#000000", linestyle=":", marker="+",
               label="our step against parameter space"),
        Line2D([], [], color="#777777", linestyle="--", label="change by the removal itself"),
    ]  # fmt: skip
    put_legend(figure, list(COMPARED), extra, 3)
    return figure
