"""How far in λ, width and depth a network stays linearisable: `python benchmarks/linearisable.py --out FILE`.

Networks of the paper (NTK parameterisation, ReLU) learn two digits from 7 by 7 pixels with squared error and
a ridge towards their start, by gradient descent with momentum and a rate that falls to zero. `from_trained`
then measures `fidelity` with the tangent at the start. A tenth of the points is removed by one step, with
that tangent and with the tangent at the trained parameters. The truth is the same network trained again
without these points. The record has, for every width and depth, the λ from which on neither gap of `fidelity`
is above the limit at which `from_trained` warns.
"""

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from measure import draw_again, keep, num_cores

DIGITS = (3, 8)
PER_CLASS, SIDE = 50, 7
WIDTHS, DEPTHS = (32, 128, 512), (1, 2, 3)
RIDGES = (10.0, 1.0, 1e-1, 1e-2)
SEEDS = 5
MOMENTUM, MAX_EPOCHS = 0.9, 500
RATE = 0.3
"""Of the descent, over the largest curvature at the start."""

STOP = 1e-3
"""Share of its first value that the gradient must fall to before the last epoch."""


def digits() -> tuple[Any, Any]:
    """Means of blocks of pixels, and targets ±1."""
    from dualfluence import datasets

    whole = datasets.load("mnist-small")
    part = datasets.subset(whole, per_class_train=PER_CLASS, per_class_test=1, classes=DIGITS)
    blocks = np.asarray(part.x_train).reshape(-1, SIDE, 28 // SIDE, SIDE, 28 // SIDE)
    x = blocks.mean(axis=(2, 4)).reshape(-1, SIDE**2).astype(np.float32)
    return x, np.asarray(datasets.plus_minus_one(part.y_train, *DIGITS), np.float32)


def make_train(apply: Any) -> Any:
    """Descent for one network, from `θ₀` to `θ`, the number of epochs, and `‖∇L‖` at end and start."""
    import jax
    import jax.numpy as jnp

    def risk(theta: Any, theta_0: Any, x: Any, y: Any, weights: Any, ridge: Any) -> Any:
        errors = 0.5 * jnp.sum(weights * jnp.sum((apply(theta, x) - y) ** 2, axis=1))
        apart = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), theta, theta_0)
        return errors + 0.5 * ridge * sum(jax.tree.leaves(apart))

    def norm(tree: Any) -> Any:
        return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))

    @jax.jit
    def train(theta_0: Any, x: Any, y: Any, weights: Any, ridge: Any, rate: Any) -> Any:
        def gradient(theta: Any) -> Any:
            return jax.grad(risk)(theta, theta_0, x, y, weights, ridge)

        first = norm(gradient(theta_0))

        def more(carry: Any) -> Any:
            _, _, epoch, last = carry
            return (epoch < MAX_EPOCHS) & (last > STOP * first)

        def step(carry: Any) -> Any:
            theta, velocity, epoch, _ = carry
            g = gradient(theta)
            velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, g)
            # A rate that stays would keep θ bouncing between the linear pieces of the network.
            now = rate * (1 - epoch / MAX_EPOCHS)
            theta = jax.tree.map(lambda t, v: t - now * v, theta, velocity)
            return theta, velocity, epoch + 1, norm(g)

        still = jax.tree.map(jnp.zeros_like, theta_0)
        theta, _, epochs, last = jax.lax.while_loop(more, step, (theta_0, still, 0, first))
        return theta, epochs, last, first

    return train


def measure_network(width: int, depth: int, seeds: int, ridges: tuple[float, ...]) -> list[Any]:
    """One row for every seed and λ."""
    import jax
    import jax.numpy as jnp

    import dualfluence as dfl
    from dualfluence import metrics
    from dualfluence.apps.compare._networks import Architecture, make_network

    x, y = digits()
    n = len(x)
    net = make_network(Architecture("fcnn", depth, width))
    train, given = make_train(net.apply), (jnp.asarray(x), jnp.asarray(y))
    rows = []
    for seed in range(seeds):
        theta_0 = net.init(jax.random.key(seed), x.shape[1:], outputs=1)
        model = dfl.linearize(net.apply, theta_0)
        gone = np.random.default_rng(seed).choice(n, n // 10, replace=False)
        kept = jnp.asarray(~np.isin(np.arange(n), gone), jnp.float32)
        K = np.asarray(model.kernel(*2 * given[:1]), np.float64).reshape(n, n)
        curvature = float(np.linalg.eigvalsh(K)[-1] / n)
        for ridge in ridges:
            how = (jnp.float32(ridge), jnp.float32(RATE / (curvature + ridge)))
            theta, epochs, last, first = train(theta_0, *given, jnp.full(n, 1 / n, x.dtype), *how)
            truth, *_ = train(theta_0, *given, kept / kept.sum(), *how)
            row = {
                "width": width,
                "depth": depth,
                "seed": seed,
                "ridge": ridge,
                "num_params": model.num_params,
                "curvature": curvature,
                "epochs": int(epochs),
                "gradient_left": float(last / first),
                "moved": metrics.relative_distance(theta, theta_0),
            }
            change = metrics.distance(theta, truth)
            for tangent in ("initial", "trained"):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", dfl.FidelityWarning)
                    fitted = dfl.from_trained(
                        model, theta, x, y, loss=dfl.SquaredError(), ridge=ridge,
                        tangent=tangent, progress=False,
                    )  # fmt: skip
                edited = fitted.edit(dfl.Remove(gone), on_failure="report", progress=False)
                row[f"error_{tangent}"] = metrics.distance(edited.params(), truth) / change
                if tangent == "initial":
                    row |= {
                        "output_gap": fitted.fidelity.output_gap,
                        "parameter_gap": fitted.fidelity.parameter_gap,
                    }
            rows.append(row)
    return rows


def larger_gap(row: dict[str, Any]) -> float:
    return max(row["output_gap"], row["parameter_gap"])


def threshold(rows: list[dict[str, Any]], limit: float) -> float | None:
    """The λ of one network from which on neither gap is above the limit, on logarithmic axes.

    It is 0 if every λ will do, and `None` if not even the largest one does.
    """
    rows = sorted(rows, key=lambda row: row["ridge"])
    x = np.log([row["ridge"] for row in rows])
    over = np.log([larger_gap(row) / limit for row in rows])
    bad = np.flatnonzero(over > 0)
    if bad.size == 0:
        return 0.0
    if bad[-1] == len(rows) - 1:
        return None
    i = bad[-1]
    return float(np.exp(x[i] + (x[i + 1] - x[i]) * over[i] / (over[i] - over[i + 1])))


def thresholds(rows: list[dict[str, Any]], limit: float) -> list[dict[str, Any]]:
    """For every width and depth, the threshold of every seed."""
    found = []
    for depth, width in sorted({(row["depth"], row["width"]) for row in rows}):
        own = [row for row in rows if (row["depth"], row["width"]) == (depth, width)]
        by_seed = [
            threshold([row for row in own if row["seed"] == seed], limit)
            for seed in sorted({row["seed"] for row in own})
        ]
        found.append(
            {"depth": depth, "width": width, "num_params": own[0]["num_params"], "ridges": by_seed}
        )
    return found


def measure(
    widths: tuple[int, ...] = WIDTHS,
    depths: tuple[int, ...] = DEPTHS,
    seeds: int = SEEDS,
    ridges: tuple[float, ...] = RIDGES,
) -> dict[str, Any]:
    from dualfluence.apps.compare._machine import commit, describe_machine
    from dualfluence.dual._fidelity import FAR

    start, rows = time.monotonic(), []
    for depth in depths:
        for width in widths:
            rows += measure_network(width, depth, seeds, ridges)
            print(depth, width, round(time.monotonic() - start), "s", flush=True)
    return {
        "benchmark": "linearisable",
        "machine": describe_machine() | {"cores": num_cores()},
        "commit": commit(),
        "settings": {
            "points": PER_CLASS * len(DIGITS),
            "pixels": SIDE**2,
            "removed": PER_CLASS * len(DIGITS) // 10,
            "loss": "squared",
            "limit": FAR,
            "momentum": MOMENTUM,
            "max_epochs": MAX_EPOCHS,
            "stop": STOP,
        },
        "thresholds": thresholds(rows, FAR),
        "rows": rows,
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """The gap against λ for every width and depth, and the error of a removal against the gap."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    rows, limit = found["rows"], found["settings"]["limit"]
    depths, widths = (sorted({row[key] for row in rows}) for key in ("depth", "width"))
    figure = Figure(figsize=(3.3 * (len(depths) + 1), 3.6), layout="constrained")
    axes = figure.subplots(1, len(depths) + 1)
    colours = dict(zip(widths, ("#440154", "#21918C", "#5EC962", "#3B528B"), strict=False))
    for axis, depth in zip(axes, depths, strict=False):
        for width in widths:
            own = [row for row in rows if (row["depth"], row["width"]) == (depth, width)]
            ridges = sorted({row["ridge"] for row in own})
            logs = [[np.log(larger_gap(row)) for row in own if row["ridge"] == r] for r in ridges]
            middle = np.exp([np.mean(values) for values in logs])
            spread = np.exp([np.std(values) for values in logs])
            bars = [middle - middle / spread, middle * spread - middle]
            axis.errorbar(ridges, middle, bars, capsize=3, marker="o", color=colours[width],
                          label=f"width {width}")  # fmt: skip
        axis.axhline(limit, color="#888888", linestyle="--", linewidth=1)
        axis.set(title=f"{depth} hidden layer{'s' * (depth > 1)}", xlabel="λ", ylabel="larger gap")
        axis.legend(fontsize=8)
    for name, marker in (("initial", "o"), ("trained", "x")):
        axes[-1].plot([larger_gap(row) for row in rows], [row[f"error_{name}"] for row in rows],
                      marker, markersize=3, alpha=0.7, label=f"tangent {name}")  # fmt: skip
    axes[-1].axvline(limit, color="#888888", linestyle="--", linewidth=1)
    axes[-1].set(title="removal of 10 %", xlabel="larger gap", ylabel="error, share of the change")
    axes[-1].legend(fontsize=8)
    for axis in axes:
        axis.set(xscale="log", yscale="log")
        axis.grid(color="#dddddd", linewidth=0.6)
    seeds = len({row["seed"] for row in rows})
    figure.suptitle(
        f"{found['settings']['points']} points, squared error; bars: deviation over {seeds} seeds",
        fontsize=10,
    )
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--draw", type=Path, help="draw the plot of this record, nothing else")
    args = parser.parse_args()
    if args.draw:
        draw_again(args.draw, draw)
        return
    found = measure(tuple(args.widths), tuple(args.depths), args.seeds)
    keep(found, args.out, draw)


if __name__ == "__main__":
    main()
