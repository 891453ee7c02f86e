"""Where the paper's dual form overtakes parameter space: `python benchmarks/crossover.py --out FILE`.

One hidden layer on digits of 7 by 7 pixels, linearised; its width alone changes, so that the number of
parameters `p` runs over more than two decades around `n·c`. Every method removes a tenth of the points from
the same model and hands out new parameters. `K` is there before, as in the paper. The plot beside the record
also has what `dualfluence.plan` predicts from the speed of this machine: products with `K` against products
with the Jacobian, at equal numbers of steps.

`--scale h200` takes ten times the points, so that a product with `K` takes longer than starting it. `--limit`
starts no further width after so many seconds. `--draw` draws from a record alone.
"""

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from measure import compare_removals, draw_again, keep, num_cores

CLASSES, SIDE = 10, 7
RIDGE = 1e-2


@dataclass(frozen=True)
class Scale:
    """Points of each class, and the widths of the hidden layer."""

    per_class: int
    widths: tuple[int, ...]


SCALES = {
    "cpu": Scale(20, (3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000)),
    "h200": Scale(200, (30, 100, 300, 1000, 3000, 10_000, 30_000)),
}
"""`p/(n·c)` runs from 0.1 to 900 on a CPU and from 0.09 to 90 on the device."""

PLANS = 5
"""Predictions; the fastest counts, because other programs slow the measured speed of the machine down."""


def measure(
    repeats: int, scale: Scale = SCALES["cpu"], limit: float = float("inf")
) -> dict[str, Any]:
    """One row per width."""
    import dualfluence as dfl
    from dualfluence._plan import measure_speed
    from dualfluence.apps.compare._machine import commit, describe_machine

    start, n = time.monotonic(), scale.per_class * CLASSES
    rows: list[dict[str, Any]] = []
    for width in scale.widths:
        if time.monotonic() - start > limit:
            break
        rows.append(measure_width(scale.per_class, width, repeats))
    for row in rows:
        row["plan_seconds_dense"] = row["plan_seconds_matrix_free"] = float("inf")
    for _ in range(PLANS if rows else 0):
        measure_speed.cache_clear()
        for row in rows:
            forms = dfl.plan(n, CLASSES, row["num_params"], products=1)
            for key, name in (("dense", "dense"), ("matrix_free", "matrix-free")):
                key = f"plan_seconds_{key}"
                row[key] = min(row[key], forms[name].seconds)
    return {
        "benchmark": "crossover",
        "machine": describe_machine() | {"cores": num_cores()},
        "commit": commit(),
        "dtype": "float32",
        "settings": {
            "points": n,
            "outputs": CLASSES,
            "pixels": SIDE**2,
            "ridge": RIDGE,
            "removed": n // 10,
            "repeats": repeats,
            "loss": "softmax",
            "widths_left_out": list(scale.widths[len(rows) :]),
        },
        "rows": rows,
        "crossing": {
            kind: crossing(rows, *pair)
            for kind, pair in {
                "measured": (_seconds("paper's dual form"), _seconds("parameter space")),
                "per step": (_per_step("paper's dual form"), _per_step("parameter space")),
                "plan": (
                    lambda r: 2 * r["plan_seconds_dense"],
                    lambda r: r["plan_seconds_matrix_free"],
                ),
            }.items()
        },
    }


def machine_in_words(found: dict[str, Any]) -> str:
    device = found["machine"]["device"].split(": ")[-1]
    return f"{found['machine']['cores']} CPU cores" if device == "cpu" else device


def _seconds(name: str) -> Any:
    return lambda row: min(row["methods"][name]["seconds"])


def _per_step(name: str) -> Any:
    """Seconds of the solve alone, over its steps."""
    return lambda row: row["methods"][name]["solve_seconds"] / row["methods"][name]["iterations"]


def crossing(rows: list[dict[str, Any]], dual: Any, primal: Any) -> float | None:
    """`p/(n·c)` above which `dual` is always the smaller one, between widths on logarithmic axes.

    It is 0 if `dual` is the smaller one everywhere, and `None` if not even at the end.
    """
    x = np.log([row["p_over_nc"] for row in rows])
    lead = np.log([dual(row) / primal(row) for row in rows])
    slower = np.flatnonzero(lead >= 0)
    if slower.size == 0:
        return 0.0
    if slower[-1] == len(rows) - 1:
        return None
    i = slower[-1]
    return float(np.exp(x[i] + (x[i + 1] - x[i]) * lead[i] / (lead[i] - lead[i + 1])))


def digits(per_class: int) -> tuple[Any, Any]:
    """The first digits of every class, averaged over blocks of 4 by 4 pixels."""
    from dualfluence import datasets

    whole = datasets.load("mnist-small")
    part = datasets.subset(
        whole, per_class_train=per_class, per_class_test=1, classes=range(CLASSES)
    )
    blocks = np.asarray(part.x_train).reshape(-1, SIDE, 28 // SIDE, SIDE, 28 // SIDE)
    return blocks.mean(axis=(2, 4)).reshape(-1, SIDE**2).astype(np.float32), part.y_train


def measure_width(per_class: int, width: int, repeats: int) -> dict[str, Any]:
    """Seconds, steps and distance to exact retraining of every method on a network of this width."""
    import jax

    import dualfluence as dfl
    from dualfluence.apps.compare._names import ONE_STEP, PAPER, PARAMETER
    from dualfluence.apps.compare._networks import fully_connected_from_zero
    from dualfluence.apps.compare._timing import time_call
    from dualfluence.apps.paper._remove import remove

    x, y = digits(per_class)
    model = fully_connected_from_zero((SIDE**2, width, CLASSES), 0)
    fitted = dfl.fit(
        model,
        x,
        y,
        loss=dfl.SoftmaxCrossEntropy(),
        ridge=RIDGE,
        kernel=dfl.KernelOptions(refine=False),  # float32 throughout, like the others
        progress=False,
        on_failure="report",
    )
    rng = np.random.default_rng(0)
    sets = [rng.choice(len(y), len(y) // 10, replace=False) for _ in range(repeats + 1)]
    found, change = compare_removals(fitted, y, sets, (PARAMETER, PAPER, ONE_STEP))
    for method in found.values():
        method["solve_seconds"] = min(method["seconds"])
    solve = lambda s: remove(fitted, dfl.Remove(s), on_failure="report").delta_alpha  # noqa: E731
    jax.block_until_ready(solve(sets[0]))
    alone = [time_call(lambda s=s: solve(s)).seconds for s in sets[1:]]
    # At most the whole removal, which may have met a quieter moment.
    found[PAPER]["solve_seconds"] = min(*alone, *found[PAPER]["seconds"])
    p, nc = model.num_params, len(y) * CLASSES
    return {
        "width": width,
        "num_params": p,
        "p_over_nc": p / nc,
        "change": change,
        "methods": found,
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Seconds of a removal against `p/(n·c)`, and seconds of one step beside the prediction."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    from dualfluence.apps.compare._look import STYLES

    rows, cross = found["rows"], found["crossing"]
    x = [row["p_over_nc"] for row in rows]
    figure = Figure(figsize=(10, 5), layout="constrained")
    whole, step = figure.subplots(1, 2)
    for name in rows[0]["methods"]:
        whole.plot(x, [_seconds(name)(r) for r in rows], label=name, **STYLES[name])
    for name in ("parameter space", "paper's dual form"):
        step.plot(x, [_per_step(name)(r) for r in rows], label=f"{name}, measured", **STYLES[name])
    look = {"linestyle": ":", "linewidth": 2}
    step.plot(
        x,
        [r["plan_seconds_matrix_free"] for r in rows],
        color=STYLES["parameter space"]["color"],
        label="parameter space, predicted by plan",
        **look,
    )
    step.plot(
        x,
        [2 * r["plan_seconds_dense"] for r in rows],
        color=STYLES["paper's dual form"]["color"],
        label="dual form, predicted by plan",
        **look,
    )
    for axis, kinds in ((whole, ("measured",)), (step, ("per step", "plan"))):
        for kind in kinds:
            if cross[kind]:
                style = ":" if kind == "plan" else "--"
                axis.axvline(cross[kind], color="#888888", linestyle=style, linewidth=1)
                axis.annotate(
                    f"{kind}: {cross[kind]:.0f} ", (cross[kind], 0.98 if kind == "plan" else 0.92),
                    xycoords=("data", "axes fraction"), fontsize=8, va="top", ha="right",
                )  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="parameters over n·c", ylabel="seconds")
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
        axis.grid(color="#dddddd", linewidth=0.6)
    whole.set_title("a repeated removal, new parameters included")
    step.set_title("one step of conjugate gradients")
    s = found["settings"]
    figure.suptitle(
        f"{s['points']} points, {s['outputs']} outputs, softmax, λ = {s['ridge']:g}, 10 % removed, "
        f"{machine_in_words(found)}, float32",
        fontsize=10,
    )
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", choices=SCALES, default="cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--widths", type=int, nargs="+", help="other widths of the hidden layer")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--draw", type=Path, help="draw the plot of this record and do nothing else"
    )
    args = parser.parse_args()
    if args.draw:
        draw_again(args.draw, draw)
        return
    scale = SCALES[args.scale]
    if args.widths:
        scale = replace(scale, widths=tuple(args.widths))
    found = measure(args.repeats, scale, args.limit)
    keep(found, args.out, draw)


if __name__ == "__main__":
    main()
