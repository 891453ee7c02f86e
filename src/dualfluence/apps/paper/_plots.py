"""The paper's figures, drawn only from the JSON files."""

from typing import Any

import matplotlib
import matplotlib.figure
import numpy as np

from ..compare._look import COLOURS, PUBLISHED, SCALE, STYLES
from ..compare._names import (
    COMPARED,
    HELD,
    ITERATED,
    ONE_STEP,
    RANDOM,
    RELEASED,
    RETRAINED,
    SHARDED,
    TANGENT,
)
from . import _published as published
from ._read import ROW_TITLES, bars, over_seeds, r_squared, series, values

matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

OTHER_SEEDS = {"color": "#444444", "marker": "_", "linestyle": "none", "markersize": 12}
FONTS: Any = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.labelsize": 10,
    "legend.fontsize": 9,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",
}
DPI = 150
"""Dots per inch of the figures; with twice this value, the report takes four times the bytes."""


def caption(results: dict[str, Any]) -> str:
    """The source of the numbers, for the foot of a figure."""
    env = results["environment"]
    parts = [f"{env['device']}, float32, matrix products: {results['config']['matmul_precision']}"]
    if results["experiment"] == "fig1":
        places = env["num_devices"]
        parts.append(f"sharded: mesh of {places} device{'s' if places > 1 else ''}")
    if results["experiment"] != "fig2" and (seeds := results["config"].get("seeds")):
        words = "lowest R² in brackets" if results["experiment"] == "fig4" else "bars: range"
        parts.append(f"{words} over {len(seeds) + 1} seeds")
    if results["scale"] == "smoke":
        parts.insert(0, "SMOKE SCALE: smaller networks, fewer points and epochs than published")
    if not results["complete"]:
        parts.insert(0, "INCOMPLETE")
    return "  ·  ".join(parts)


def new_figure(
    results: dict[str, Any], rows: int, cols: int, width: float, height: float, title: str
):
    figure = Figure(figsize=(width * cols, height * rows + 1.1), layout="constrained")
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.set(w_pad=0.1, h_pad=0.08)  # pyright: ignore[reportCallIssue]
    axes = figure.subplots(rows, cols, squeeze=False)
    smoke = results["scale"] == "smoke"
    figure.suptitle(
        f"{title}\n{caption(results)}",
        fontsize=11,
        color="#a00000" if smoke or not results["complete"] else "#222222",
    )
    return figure, axes


def put_legend(figure: Figure, names: list[str], extra: list[Line2D], columns: int) -> None:
    handles = [Line2D([], [], label=name, **STYLES[name]) for name in names]
    figure.legend(handles=[*handles, *extra], loc="outside lower center", ncols=columns)


def percent_axis(axis: Axes, percentages: list[int]) -> None:
    axis.set_xlabel("removed points (%)")
    axis.set_xticks(percentages)


def draw_line(axis: Axes, name: str, xs: list[int], ys: list[float], **more: Any) -> None:
    if xs:
        axis.plot(xs, ys, **{"linewidth": 1.5, "markersize": 6} | STYLES[name] | more)


def draw_series(
    axis: Axes, name: str, results: dict[str, Any], prefix: str, pick: Any, **more: Any
) -> None:
    """A line over percentages, with bars for the range over seeds where there are several."""
    xs, ys = series(results, prefix, pick)
    draw_line(axis, name, xs, ys, **more)
    if (spread := bars(results, prefix, pick)) is not None:
        colour = STYLES[name]["color"]
        axis.errorbar(xs, ys, spread, linestyle="none", capsize=2, color=colour, linewidth=1)


def _stars(axis: Axes, points: Any, percentages: list[int]) -> None:
    if points is not None:
        found = {p: v for p, v in published.at_percentages(points).items() if p in percentages}
        axis.plot(list(found), list(found.values()), **PUBLISHED)


def draw_fig1(results: dict[str, Any]) -> Figure:
    """Two rows of four panels: cold and warm runtime, distance, forget accuracy."""
    rows = [row["name"] for row in results["config"]["rows"]]
    percentages = results["config"]["percentages"]
    figure, axes = new_figure(
        results, len(rows), 4, 3.7, 3.1, "Unlearning from linearised networks"
    )
    for (cold, warm, distance, accuracy), row in zip(axes, rows, strict=True):
        known = published.FIG1.get(row, {})
        for name in (*RELEASED, *COMPARED):
            pick = lambda v, n=name: v["cold_seconds"].get(n)  # noqa: E731
            draw_line(cold, name, *series(results, row, pick, "/cold"))
        for name in (*RELEASED, *COMPARED, HELD):
            xs, times = series(results, row, lambda v, n=name: v["warm_seconds"].get(n))
            if xs:
                means, spread = [np.mean(t) for t in times], [np.std(t) for t in times]
                warm.errorbar(xs, means, spread, capsize=2, linewidth=1.5, **STYLES[name])
        for name in (*COMPARED, RANDOM):
            for base, look in (("published", {}), ("exact", {"linestyle": "--", "mfc": "white"})):
                if base == "exact" and name == RANDOM:
                    continue
                pick = lambda v, n=name, b=base: v["distance"][b][b].get(n)  # noqa: E731
                if base == "published" and name != SHARDED:
                    draw_series(distance, name, results, row, pick, **look)
                else:
                    draw_line(distance, name, *series(results, row, pick), **look)
        for name in (RETRAINED, *COMPARED, RANDOM):
            pick = lambda v, n=name: v["accuracy"]["published"][n]["forgotten"]  # noqa: E731
            if name == SHARDED:
                draw_line(accuracy, name, *series(results, row, pick))
            else:
                draw_series(accuracy, name, results, row, pick)
        if results["scale"] == "paper":
            for axis, key in ((cold, "cold dual"), (warm, "warm dual"), (distance, "distance dual"),
                              (accuracy, "forget accuracy")):  # fmt: skip
                _stars(axis, known.get(key), percentages)
        cold.set(
            title=f"{ROW_TITLES[row]}\ncold runtime", ylabel="seconds, first call", yscale="log"
        )
        warm.set(title="warm runtime\nmean and deviation", ylabel="seconds", yscale="log")
        distance.set(
            title="relative parameter distance\nto retraining",
            ylabel="‖θ − θ_r‖ / ‖θ_r‖",
            yscale="log",
        )
        accuracy.set(title="accuracy on the\nforgotten points", ylabel="accuracy")
        for axis in (cold, warm, distance, accuracy):
            percent_axis(axis, percentages)
    extra = [
        Line2D([], [], color="#444444", label="trained and retrained as published"),
        Line2D([], [], color="#444444", linestyle="--", marker="o", mfc="white",
               label="trained and retrained to the optimum"),
    ]  # fmt: skip
    if results["scale"] == "paper":
        extra.append(Line2D([], [], label="published (two RTX 3080 Ti)", **PUBLISHED))
    held = any(HELD in p["values"].get("warm_seconds", {}) for p in results["pieces"].values())
    names = [*COMPARED, *[HELD] * held, *RELEASED, RANDOM, RETRAINED]
    put_legend(figure, names, extra, 4)
    return figure


def draw_fig2(results: dict[str, Any]) -> Figure:
    """Four panels over epochs, one colour per ridge."""
    figure, axes = new_figure(results, 1, 4, 3.9, 3.4, "A network beside its linearisation")
    distance, rmse, accuracy, gradient = axes[0]
    handles = []
    for ridge, colour in zip(results["config"]["ridges"], SCALE, strict=False):
        found = values(results, f"ridge/{ridge:g}")
        handles.append(Line2D([], [], color=colour, label=f"λ = {ridge:g}"))
        if found is None:
            continue
        epochs = found["epoch"]
        if ridge == max(results["config"]["ridges"]):
            _seeds(results, distance, accuracy, epochs[-1], colour)
        # The first step is the same for both models: what they differ by after it is rounding.
        first = next((i for i, epoch in enumerate(epochs) if epoch > 1), len(epochs))
        distance.plot(epochs[first:], found["distance"][first:], color=colour)
        rmse.plot(epochs[first:], found["rmse"][first:], color=colour)
        for axis, key in ((accuracy, "accuracy"), (gradient, "gradient")):
            for model, line in (("network", "-"), ("linear", "--")):
                axis.plot(epochs[1:], found[f"{key}_{model}"][1:], color=colour, linestyle=line)
        if results["scale"] == "paper":
            for axis, key in ((distance, "distance"), (accuracy, "accuracy")):
                if ridge in published.FIG2[key]:
                    star = PUBLISHED | {"color": colour}
                    axis.plot([epochs[-1]], [published.FIG2[key][ridge]], clip_on=False, **star)
    distance.set(title="relative parameter distance", ylabel="‖θ − θ_lin‖ / ‖θ_lin‖", yscale="log")
    rmse.set(title="difference of test outputs", ylabel="RMSE", yscale="log")
    accuracy.set(title="test accuracy", ylabel="accuracy")
    gradient.set(title="gradient norm", ylabel="‖∇L‖", yscale="log")
    for axis in axes[0]:
        axis.set(xlabel="epochs", xscale="log")
    handles += [
        Line2D([], [], color="#444444", label="network"),
        Line2D([], [], color="#444444", linestyle="--", label="linearisation"),
    ]
    if results["config"].get("seeds"):
        handles.append(Line2D([], [], label="other initialisations", **OTHER_SEEDS))
    if results["scale"] == "paper":
        handles.append(Line2D([], [], label="published, last epoch", **PUBLISHED))
    put_legend(figure, [], handles, 8)
    return figure


def _seeds(
    results: dict[str, Any], distance: Axes, accuracy: Axes, epoch: int, colour: str
) -> None:
    """Where other initialisations end, at the largest ridge."""
    for seed in results["config"].get("seeds", ()):
        found = values(results, f"seed/{seed}")
        if found is not None and seed != results["seed"]:
            look = OTHER_SEEDS | {"color": colour, "clip_on": False}
            distance.plot([epoch], [found["distance"]], **look)
            accuracy.plot([epoch], [found["accuracy_network"]], **look)


def draw_fig3(results: dict[str, Any]) -> Figure:
    """Distance and forget accuracy, one row per ridge."""
    ridges, percentages = results["config"]["ridges"], results["config"]["percentages"]
    names = [*COMPARED, TANGENT, RANDOM]
    figure, axes = new_figure(
        results, len(ridges), 2, 5.0, 3.2, "Unlearning from a nonlinear network"
    )
    for (distance, accuracy), ridge in zip(axes, ridges, strict=True):
        prefix = f"ridge/{ridge:g}"
        for name in names:
            pick = lambda v, n=name: v["distance"].get(n)  # noqa: E731
            draw_series(distance, name, results, prefix, pick)
        for name in (RETRAINED, *names):
            pick = lambda v, n=name: v["accuracy"][n]["forgotten"]  # noqa: E731
            draw_series(accuracy, name, results, prefix, pick)
        if results["scale"] == "paper":
            _stars(distance, published.FIG3.get(ridge), percentages)
        distance.set(
            title=f"λ = {ridge:g}: distance to retraining", ylabel="‖θ − θ_r‖ / ‖θ_r‖", yscale="log"
        )
        accuracy.set(title=f"λ = {ridge:g}: forgotten points", ylabel="accuracy")
        for axis in (distance, accuracy):
            percent_axis(axis, percentages)
    extra = []
    if results["scale"] == "paper":
        extra = [Line2D([], [], label="published, dual form", **PUBLISHED)]
    put_legend(figure, [*names, RETRAINED], extra, 4)
    return figure


LOSS_VARIANTS = {
    "loss_with_ridge": ("with the ridge term (eq. 9)", SCALE[0], "s"),
    "loss_without_ridge": ("without it, first order", SCALE[2], "o"),
    "loss_evaluated": ("without it, loss evaluated", SCALE[3], "^"),
}


def draw_fig4(results: dict[str, Any]) -> Figure:
    """Estimated against actual changes of outputs and losses; both ways of training."""
    rows = [row["name"] for row in results["config"]["rows"]]
    title = "Infinitely wide networks: estimated against actual change, half of each class removed"
    figure, axes = new_figure(results, len(rows), 4, 3.7, 3.5, title)
    for line, row in zip(axes, rows, strict=True):
        for pair, training in ((line[:2], "published"), (line[2:], "exact")):
            found = values(results, f"{row}/{training}")
            words = "as published" if training == "published" else "to the optimum"
            name = ROW_TITLES[row].split(",")[0]
            pair[0].set(title=f"{name}, trained {words}:\nchange of outputs")
            pair[1].set(title=f"{name}, trained {words}:\nchange of loss")
            if found is None:
                continue
            key_of = f"{row}/{training}"
            outputs = {"paper's dual form / ours, one step": (ONE_STEP, COLOURS[ONE_STEP], "s"),
                       "ours, iterated": (ITERATED, COLOURS[ITERATED], "v")}  # fmt: skip
            for label, (method, colour, marker) in outputs.items():
                got = np.ravel(found["estimates"][method]["outputs"])
                label += _lowest(results, key_of, "actual_outputs", method, "outputs")
                _scatter(pair[0], np.ravel(found["actual_outputs"]), got, colour, marker, label)
            for key, (label, colour, marker) in LOSS_VARIANTS.items():
                got = np.ravel(found["estimates"][ONE_STEP][key])
                label += _lowest(results, key_of, "actual_loss", ONE_STEP, key)
                _scatter(pair[1], np.ravel(found["actual_loss"]), got, colour, marker, label)
            for axis in pair:
                _diagonal(axis)
                axis.set(xlabel="actual change", ylabel="estimated change")
                axis.legend(loc="upper left", fontsize=7, framealpha=0.9, handletextpad=0.2)
    return figure


def _lowest(results: dict[str, Any], key: str, actual: str, method: str, what: str) -> str:
    """The lowest R² over seeds in brackets, if there are several."""
    found = over_seeds(results, key, lambda v: r_squared(v[actual], v["estimates"][method][what]))
    return f" [{min(found):.5f}]" if len(found) > 1 else ""


def _scatter(
    axis: Axes, actual: np.ndarray, got: np.ndarray, colour: str, marker: str, label: str
) -> None:
    text = f"{label}\nR² = {r_squared(actual, got):.5f}"
    axis.scatter(actual, got, s=18, c=colour, marker=marker, alpha=0.75, label=text, linewidths=0)


def _diagonal(axis: Axes) -> None:
    low = min(axis.get_xlim()[0], axis.get_ylim()[0])
    high = max(axis.get_xlim()[1], axis.get_ylim()[1])
    axis.plot([low, high], [low, high], color="#000000", linewidth=0.8, zorder=0)
    axis.set(xlim=(low, high), ylim=(low, high + 0.45 * (high - low)))
    axis.ticklabel_format(style="sci", scilimits=(-2, 3), axis="both")
