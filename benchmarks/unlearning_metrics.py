"""How well methods forget: KLOM, membership inference, distance to retraining; writes JSON and a plot.

    python benchmarks/unlearning_metrics.py --out benchmarks/results/unlearning_metrics_cpu.json
    python benchmarks/unlearning_metrics.py --out ... --draw     # the plot again, from the JSON alone

One network, 196-64-10, on mnist-small with pixels averaged over 2×2, in two forms: linearised at its start
and fitted, and as it is, trained by SGD with weight decay. A tenth of the training points is forgotten. Every
method has models of seeds 0, 1, …; they are held against as many models retrained with other seeds. The row
"retraining" is the floor. Rates of gradient methods and the damping of the exact Hessian are the best of a
grid, by the margins' errors on seeds that are not judged. Seconds are of one model, medians; networks that
move together in one program share its time evenly.
"""

import argparse
import json
import os
import time
from functools import partial
from pathlib import Path

# One core: threads wait for each other in products this small.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)

from forgetting import linear, network  # noqa: E402
from forgetting import measures as metrics  # noqa: E402
from measure import num_cores  # noqa: E402

import dualfluence as dfl  # noqa: E402
from dualfluence.apps.compare import _look, _names  # noqa: E402
from dualfluence.apps.compare._machine import environment  # noqa: E402

LOSS = dfl.SoftmaxCrossEntropy()
TEST_POINTS, TUNING = 200, 5
LINEAR_RATES = [4.0**k for k in range(8)]
RATES = {
    "gradient ascent": [0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0],
    "fine-tuning": [0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0],
}
DAMPINGS = [0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3]


def apply(params, x):
    (W, b), (V, c) = params
    return jax.nn.relu(x @ W + b) @ V + c


def make_setting(points):
    data = dfl.datasets.load("mnist-small")
    pixels = lambda x: x.reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196)  # noqa: E731
    x = pixels(np.asarray(data.x_train[:points], np.float64))
    labels = [np.asarray(y, np.int64) for y in (data.y_train[:points], data.y_test[:TEST_POINTS])]
    forgotten = np.sort(np.random.default_rng(0).permutation(points)[: points // 10])
    x_test = pixels(np.asarray(data.x_test[:TEST_POINTS], np.float64))
    return x, metrics.Setting(forgotten, x_test, *labels)


def start(width, dtype, key):
    keys = jax.random.split(key)
    shapes = zip(keys, (196, width), (width, 10), strict=True)
    return [
        (jax.random.normal(k, (a, b), dtype) * (2 / a) ** 0.5, jnp.zeros(b, dtype))
        for k, a, b in shapes
    ]


def bench_linearised(args):
    x, setting = make_setting(args.points)
    names, gone = ("retraining", *linear.METHODS), dfl.Remove(setting.forgotten)
    options = {"loss": LOSS, "ridge": args.ridge, "progress": False}
    weights = np.ones(args.points)
    weights[setting.forgotten] = 0

    def fit(seed, **more):
        params = start(args.width, "float64", jax.random.key(seed))
        return dfl.fit(dfl.linearize(apply, params), x, setting.y, **options, **more)

    def fit_both(seed):
        fitted = fit(seed)
        return fitted, fitted.retrain(gone, progress=False)

    def judged(pair, name):
        found = linear.forget_linear(*pair, setting, name, rates.get(name, 1.0))
        # Retraining was there already: its time is on record.
        return found._replace(seconds=pair[1].stats.seconds) if name == "retraining" else found

    pairs = [fit_both(2 * args.models + k) for k in range(TUNING)]
    exact = [linear.forget_linear(*pair, setting, "retraining") for pair in pairs]
    rates = {}
    for name in linear.BY_GRADIENTS:
        error = lambda rate, name=name: metrics.margin_error(  # noqa: E731
            [linear.forget_linear(*pair, setting, name, rate) for pair in pairs], exact, setting
        )
        rates[name] = min(LINEAR_RATES, key=error)
    found, reference = {name: [] for name in names}, []
    for seed in range(args.models):
        pair = fit_both(seed)
        for name in names:
            found[name].append(judged(pair, name))
        other = fit(args.models + seed, weights=weights)
        outputs = [np.asarray(other.predict(each)) for each in (x, setting.x_test)]
        reference.append(metrics.Judged(*outputs, 0.0))
        tick("linearised", seed, args.models)
    return table(found, reference, setting) | {"rates": rates}


def bench_network(args):
    x, setting = make_setting(args.points)
    nets = network.Networks(apply, x, setting.y, LOSS, args.ridge, epochs=args.epochs)
    gone = setting.forgotten

    def networks(seeds, weights):
        """In single precision, as networks are trained; methods then work in double."""
        keys = jnp.stack([jax.random.key(seed) for seed in seeds])
        params = jax.vmap(partial(start, args.width, "float32"))(keys)
        trained = jax.block_until_ready(network.train(nets, params, keys, weights))
        return network.unstack(jax.tree.map(lambda leaf: leaf.astype("float64"), trained))

    def by_gradients(name, before, exact, keys, rate):
        began = time.perf_counter()
        moved = network.forget_by_gradients(nets, network.stack(before), keys, gone, name, rate)
        jax.block_until_ready(moved)
        seconds = (time.perf_counter() - began) / len(before)
        return network.judge(nets, network.unstack(moved), before, exact, setting, seconds)

    def keys_of(seeds):
        """Fine-tuning sees other batches than training did."""
        return jnp.stack([jax.random.fold_in(jax.random.key(seed), 1) for seed in seeds])

    extra = range(2 * args.models, 2 * args.models + TUNING)
    before, exact = networks(extra, nets.weights()), networks(extra, nets.weights(gone))
    truth = network.judge(nets, exact, before, exact, setting)
    chosen = {}
    for name, grid in RATES.items():
        error = lambda rate, name=name: metrics.margin_error(  # noqa: E731
            by_gradients(name, before, exact, keys_of(extra), rate), truth, setting
        )
        chosen[name] = min(grid, key=error)
    damped = "parameter space, exact Hessian"

    def damping_error(damping):
        judged = network.judge_hessian(nets, before, exact, setting, damping)
        return metrics.margin_error(judged, truth, setting)

    chosen[damped] = min(DAMPINGS, key=damping_error)
    tick("network, tuning", TUNING - 1, TUNING)
    seeds, others = range(args.models), range(args.models, 2 * args.models)
    began = time.perf_counter()
    before = networks(seeds, nets.weights())
    seconds = (time.perf_counter() - began) / args.models
    exact = networks(seeds, nets.weights(gone))
    reference = networks(others, nets.weights(gone))
    tick("network, training", args.models - 1, args.models)
    found = {"retraining": network.judge(nets, exact, before, exact, setting, seconds)}
    judged, facts = network.forget_one_by_one(nets, before, exact, setting, chosen[damped])
    found |= judged
    for name in RATES:
        found[name] = by_gradients(name, before, exact, keys_of(seeds), chosen[name])
    found["no unlearning"] = network.judge(nets, before, before, exact, setting)
    others_judged = network.judge(nets, reference, reference, exact, setting)
    sgd = {k: getattr(nets, k) for k in ("epochs", "batch", "rate", "momentum")}
    return table(found, others_judged, setting) | {"chosen": chosen, "facts": facts, "sgd": sgd}


def table(found, reference, setting):
    rows = [
        metrics.measure_forgetting(name, each, reference, setting) for name, each in found.items()
    ]
    print(metrics.forgetting_table(rows), flush=True)
    right = {
        name: float(np.mean([np.mean(each.test.argmax(1) == setting.y_test) for each in models]))
        for name, models in found.items()
    }
    return {"table": [row._asdict() for row in rows], "test_accuracy": right}


def tick(what, done, total):
    print(f"{time.strftime('%H:%M:%S')} {what}: {done + 1} of {total}", flush=True)


GROUPS = {"forgotten": "o", "retained": "s", "test": "^"}
TITLES = {"linearised": "linearised at its start", "network": "the network itself, trained by SGD"}


def draw(record, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts = [part for part in TITLES if part in record]
    rows = {part: record[part]["table"] for part in parts}
    heights = [len(rows[part]) for part in parts]
    fig, axes = plt.subplots(
        len(parts),
        2,
        figsize=(11, 1.6 + 0.36 * sum(heights)),
        height_ratios=heights,
        sharex="col",
        squeeze=False,
        layout="constrained",
    )
    for (left, right), part in zip(axes, parts, strict=True):
        draw_klom(left, rows[part])
        draw_auc(right, rows[part])
        left.set_title(f"KLOM, {TITLES[part]}", fontsize=10)
        right.set_title(f"membership AUC, {TITLES[part]}", fontsize=10)
    axes[-1][0].set_xlabel("nats: median over points, line to 95 %; dashed: retraining")
    axes[-1][1].set_xlabel("mean over models, 95 % interval; dashed: retraining")
    handles = [
        plt.Line2D([], [], color=_look.BLACK, marker=mark, linestyle="", label=group)
        for group, mark in GROUPS.items()
    ]
    fig.legend(handles=handles, fontsize=9, loc="outside upper center", ncols=3, title="points")
    fig.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(fig)


def colour_of(method):
    """Of the method, or of what it is a variant of."""
    if method == network.READ_OUT:
        return _look.COLOURS[_names.TWO_STEPS]
    return _look.COLOURS.get(method) or _look.COLOURS[method.split(",")[0]]


def draw_klom(axis, rows):
    floor = rows[0]["klom_forgotten"][0]
    for place, row in enumerate(rows):
        colour = colour_of(row["method"])
        for shift, (group, mark) in zip((-0.22, 0, 0.22), GROUPS.items(), strict=True):
            middle, high = row[f"klom_{group}"]
            axis.plot([middle, high], [place + shift] * 2, color=colour, linewidth=1, alpha=0.6)
            hollow = {"mfc": "white"} if row["method"] == network.READ_OUT else {}
            axis.plot(middle, place + shift, mark, color=colour, markersize=5, **hollow)
    axis.axvline(floor, color=_look.BLACK, linestyle="--", linewidth=1)
    axis.set_xscale("log")
    axis.set_xticks([0.3, 1, 3, 10], ["0.3", "1", "3", "10"])
    axis.minorticks_off()
    label(axis, rows)


def draw_auc(axis, rows):
    for place, row in enumerate(rows):
        value, (low, high) = row["membership_auc"], row["intervals"]["membership_auc"]
        axis.errorbar(
            value,
            place,
            xerr=[[value - low], [high - value]],
            fmt="o",
            color=colour_of(row["method"]),
        )
    axis.axvline(rows[0]["membership_auc"], color=_look.BLACK, linestyle="--", linewidth=1)
    label(axis, rows)
    axis.set_yticklabels([])


def label(axis, rows):
    axis.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.grid(axis="x", alpha=0.3)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=300)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--ridge", type=float, default=1e-3)
    parser.add_argument("--models", type=int, default=100, help="seeds of each method")
    parser.add_argument("--epochs", type=int, default=600, help="of SGD")
    parser.add_argument(
        "--only", choices=list(TITLES), help="one part; keeps the other in the JSON"
    )
    parser.add_argument("--draw", action="store_true", help="only the plot, from the JSON")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    record = (
        json.loads(args.out.read_text()) if args.out.exists() and (args.draw or args.only) else {}
    )
    parts = {"linearised": bench_linearised, "network": bench_network}
    for part, bench in parts.items():
        if args.draw or args.only not in (None, part):
            continue
        began = time.perf_counter()
        sizes = {k: getattr(args, k) for k in ("points", "width", "ridge", "models")}
        found = sizes | {"forgotten": args.points // 10, "test_points": TEST_POINTS} | bench(args)
        found |= {"seconds": time.perf_counter() - began, "cores": num_cores()}
        record[part] = found | {"environment": environment()}
        args.out.write_text(json.dumps(record, indent=2) + "\n")
    draw(record, args.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
