"""Attribution methods on one problem: seconds, memory, and agreement with retraining.

    python benchmarks/attribution.py --out benchmarks/results/attribution_cpu.json

A network trained by full-batch gradient descent from one start: training has no randomness. Retraining
without a point therefore gives the exact effect of that point, without noise.
"""

import argparse
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from measure import num_cores
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rivals import Candidate, Trained, candidates

from dualfluence import datasets
from dualfluence.apps.compare._machine import describe_machine
from dualfluence.apps.compare._timing import time_call, time_calls
from dualfluence.apps.paper._results import write_json
from dualfluence.attribution import Trajectory, evaluate
from dualfluence.problem._certificate import NotConverged
from kernels import peak_above, resident

OURS = "ours, trajectory"
OURS_LAST = "ours, last checkpoint"
OURS_POINTS = "ours, single points"

MOMENTUM = 0.9


class Problem(NamedTuple):
    """Data, the training run that is scored, and the results of retraining.

    - `saved`: `{step: params}` of the run on all points.
    - `masks`, `targets`: halves, `(s, n)`, and the queries' losses of the models trained on them.
    - `loo_rows`, `loo`: points left out one by one, and the true changes, `(q, m)`.
    """

    data: tuple[Array, Array, Array, Array]
    saved: dict[int, Any]
    rate: float
    masks: np.ndarray
    targets: Float[np.ndarray, "s q"]
    loo_rows: np.ndarray
    loo: Float[np.ndarray, "q m"]


def bench_attribution(
    *,
    points: int = 200,
    queries: int = 50,
    hidden: tuple[int, ...] = (32,),
    side: int = 14,
    steps: int = 300,
    rate: float = 0.02,
    subsets: int = 60,
    loo_points: int = 100,
    rank: int = 100,
    projection: int = 512,
    repeats: int = 2,
    only: str = "",
    seed: int = 0,
) -> dict[str, Any]:
    """Times, peak memory and agreement of every method; the dampings of other methods are chosen in
    their favour.

    No constant of our method is chosen here. Other methods report their best LDS over several dampings
    (`settings`); repeated seconds and memory are those of the best one. The first call is that of the
    first setting, with all compiled programs forgotten before it.

    **Arguments:**

    - `points`, `queries`: rows of MNIST, averaged to `side` by `side` pixels.
    - `hidden`, `steps`, `rate`: of the network and of gradient descent with momentum 0.9.
    - `subsets`, `loo_points`: number of random halves, and of single points, without which the network
      is retrained.
    - `repeats`: repeated calls that are timed; with 0 only the agreement is measured, from one call.
    - `only`: methods whose names begin like this.
    - `rank`, `projection`: of Arnoldi and Nyström, and of projected TRAK.
    """
    problem = _make_problem(points, queries, hidden, side, steps, rate, subsets, loo_points, seed)
    methods = _methods(problem, rank, projection)
    chosen = [
        _best(name, tried, problem, repeats)
        for name, tried in methods.items()
        if name.startswith(only)
    ]
    return {
        "benchmark": "attribution",
        "machine": {**describe_machine(), "cores": num_cores()},
        "config": {
            "network": "-".join(map(str, (side * side, *hidden, 10))),
            "parameters": int(sum(a.size for a in jax.tree.leaves(problem.saved[steps]))),
            "points": points,
            "queries": queries,
            "steps": steps,
            "rate": rate,
            "momentum": MOMENTUM,
            "subsets": subsets,
            "left_out_one_by_one": len(problem.loo_rows),
            "rank": rank,
            "projection": projection,
            "dtype": "float32",
            "seed": seed,
        },
        "methods": chosen,
    }


def _methods(problem: Problem, rank: int, projection: int) -> dict[str, list[Candidate]]:
    last = max(problem.saved)
    checkpoints = list(problem.saved.values())
    trajectory = partial(Trajectory, _apply, learning_rate=problem.rate, momentum=MOMENTUM)
    early = [s for s in problem.saved if s <= last / 4]
    ours = {
        OURS: trajectory([problem.saved[s] for s in early], early),
        OURS_LAST: trajectory([problem.saved[last]], [last]),
    }
    run = ours[OURS_LAST]
    trained = Trained(
        _apply, checkpoints, [problem.rate] * len(checkpoints), (), run.ridge(0), problem.data
    )
    found: dict[str, list[Candidate]] = {
        name: [Candidate(name, "", partial(_ours, t, problem.data))] for name, t in ours.items()
    }
    whole = trajectory(checkpoints, list(problem.saved))
    points = partial(_ours, whole, problem.data, question="point")
    found[OURS_POINTS] = [Candidate(OURS_POINTS, "", points)]
    for candidate in candidates(trained, rank=rank, projections=(None, projection)):
        found.setdefault(candidate.name, []).append(candidate)
    return found


def _ours(trajectory: Trajectory, data: tuple[Any, ...], **options: Any) -> np.ndarray:
    return np.asarray(trajectory.attribute(*data, probes=None, progress=False, **options).values)


def _best(name: str, tried: list[Candidate], problem: Problem, repeats: int) -> dict[str, Any]:
    """The setting with the best LDS: its agreement, seconds and memory."""
    jax.clear_caches()  # the first call compiles, whatever other methods have compiled before
    first, found = None, {}
    for candidate in tried:
        try:
            call = time_call(candidate.scores)
        except NotConverged:
            continue
        first = call.seconds if first is None else first
        found[candidate.setting] = (_agreement(call.result, problem), candidate)
    if first is None:
        return {"method": name, "settings": {}, "lds": None, "note": "diverged"}
    best = max(found, key=lambda setting: found[setting][0]["lds"])
    facts, candidate = found[best]
    if not repeats:
        return {"method": name, "setting": best, **facts, "seconds_first": first}
    return {
        "method": name,
        "setting": best,
        **facts,
        "seconds_first": first,
        "seconds_repeat": float(np.median(time_calls(candidate.scores, repeats)[1])),
        "peak_bytes": peak_above(candidate.scores, _in_use),
        "settings": {setting: entry[0]["lds"] for setting, entry in found.items()},
    }


def _agreement(scores: np.ndarray, problem: Problem) -> dict[str, Any]:
    lds = evaluate.lds(scores, problem.masks, problem.targets)
    loo = evaluate.loo_correlation(scores[:, problem.loo_rows], problem.loo)
    return {
        "lds": lds.value,
        "lds_interval": list(lds.interval),
        "loo_correlation": loo.value,
        "loo_interval": list(loo.interval),
    }


def _in_use() -> int:
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_in_use" in stats:
        return int(stats["bytes_in_use"])
    return resident() if Path("/proc/self/statm").exists() else 0


def _make_problem(
    points: int,
    queries: int,
    hidden: tuple[int, ...],
    side: int,
    steps: int,
    rate: float,
    subsets: int,
    loo_points: int,
    seed: int,
) -> Problem:
    raw = datasets.load("mnist-small")
    x, xq = (_small(a, side) for a in (raw.x_train[:points], raw.x_test[:queries]))
    y, yq = jnp.asarray(raw.y_train[:points]), jnp.asarray(raw.y_test[:queries])
    start = _init((side * side, *hidden, 10), seed)
    saved_at = sorted({max(1, round(steps * share)) for share in (*np.arange(1, 11) / 40, 0.5, 1)})
    train = partial(_descend, x, y, rate)
    everyone = jnp.ones(points, x.dtype) / points
    saved, at = {}, 0
    state = (start, jax.tree.map(jnp.zeros_like, start))
    for step in saved_at:
        state = train(state, everyone, step - at)
        saved[step], at = state[0], step
    halves = evaluate.random_masks(points, subsets, seed=seed)
    singles = np.arange(min(loo_points, points))
    masks = np.concatenate([halves, ~np.eye(points, dtype=bool)[singles]])

    def measure(keep: Array) -> Array:
        weights = keep.astype(x.dtype) / jnp.sum(keep)
        zero = (start, jax.tree.map(jnp.zeros_like, start))
        return _losses(train(zero, weights, steps)[0], xq, yq)

    losses = np.asarray(jax.jit(lambda m: jax.lax.map(measure, m, batch_size=20))(masks))
    change = (losses[subsets:] - np.asarray(_losses(saved[steps], xq, yq))).T
    return Problem((x, y, xq, yq), saved, rate, halves, losses[:subsets], singles, change)


def _small(images: np.ndarray, side: int) -> Array:
    """Means over squares of pixels, brought to the usual mean and size."""
    pixels = np.asarray(images, np.float32).reshape(len(images), 28, 28)
    block = 28 // side
    means = pixels.reshape(-1, side, block, side, block).mean((2, 4))
    return jnp.asarray((means.reshape(len(images), -1) - 0.1307) / 0.3081)


def _init(widths: tuple[int, ...], seed: int) -> list[dict[str, Array]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "w": jnp.asarray(rng.uniform(-1, 1, (a, b)) / np.sqrt(a), jnp.float32),
            "b": jnp.asarray(rng.uniform(-1, 1, b) / np.sqrt(a), jnp.float32),
        }
        for a, b in pairwise(widths)
    ]


def _apply(params: Any, x: Array) -> Array:
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"][None])
    return x @ params[-1]["w"] + params[-1]["b"][None]


def _losses(params: Any, x: Array, y: Array) -> Float[Array, " q"]:
    f = _apply(params, x)
    return jax.nn.logsumexp(f, axis=1) - jnp.take_along_axis(f, y[:, None], 1)[:, 0]


def _descend(x: Array, y: Array, rate: float, state: Any, weights: Array, steps: int) -> Any:
    """`steps` of gradient descent with momentum on the weighted loss."""

    def loss(params: Any) -> Array:
        return jnp.sum(weights * _losses(params, x, y))

    def step(carry: Any, _: Any) -> tuple[Any, None]:
        params, velocity = carry
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, jax.grad(loss)(params))
        return (jax.tree.map(lambda p, v: p - rate * v, params, velocity), velocity), None

    return jax.lax.scan(step, state, None, length=steps)[0]


def attribution_table(result: dict[str, Any]) -> Any:
    """The methods as a table, best agreement first."""
    config = result["config"]
    title = f"{config['network']}, {config['points']} points, {config['queries']} queries"
    caption = "LDS, LOO: correlation with retraining on halves and without single points"
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, pad_edge=False)
    for name in ("method", "setting", "LDS", "LOO", "first", "repeat", "memory"):
        left = name in ("method", "setting")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for m in sorted(result["methods"], key=lambda m: -(m["lds"] or -1)):
        if m["lds"] is None:
            table.add_row(m["method"], m["note"])
            continue
        table.add_row(
            m["method"],
            m["setting"],
            f"{m['lds']:.3f}",
            f"{m['loo_correlation']:.3f}",
            f"{m['seconds_first']:.3g} s",
            f"{m['seconds_repeat']:.3g} s",
            f"{m['peak_bytes'] / 2**20:.0f} MiB",
        )
    return table


def plot_attribution(result: dict[str, Any], path: Path) -> None:
    """Agreement with retraining against seconds of a repeated call, and against peak memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from dualfluence.apps.compare._look import BLUE, GREY

    fig, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    shown = [m for m in result["methods"] if m["lds"] is not None]
    for ax, key, unit, label in (
        (axes[0], "seconds_repeat", 1, "seconds of a repeated call"),
        (axes[1], "peak_bytes", 2**20, "peak memory, MiB"),
    ):
        sizes = [(m[key] or 1) / unit for m in shown]
        ends = min(sizes) / 2, max(sizes) * 10  # room for names on the right
        ax.set(xscale="log", xlabel=label, xlim=ends, ylim=(0, 1))
        ax.xaxis.set_minor_formatter("")
        colours = [BLUE if m["method"].startswith("ours") else GREY for m in shown]
        ax.scatter(sizes, [m["lds"] for m in shown], color=colours, clip_on=False)
        fig.draw_without_rendering()  # lays out: names need to know where they are
        each = zip(shown, sizes, colours, strict=True)
        _name_points(ax, [(m["method"], size, m["lds"], colour) for m, size, colour in each])
    axes[0].set_ylabel("LDS")
    fig.suptitle(f"{result['config']['network']}, {result['machine']['device']}", size=10)
    fig.savefig(path)
    plt.close(fig)


def _name_points(ax: Any, points: list[tuple[str, float, float, str]]) -> None:
    """Write each name beside its point, on the first side where it covers no other name or point."""
    from matplotlib.transforms import Bbox

    renderer, edge = ax.figure.canvas.get_renderer(), ax.get_window_extent()
    dots = [ax.transData.transform((x, y)) for _, x, y, _ in points]
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in dots]
    sides = [(side, up) for up in (-3, 6, -12, 15, -21, 24, -30) for side in (6, -6)]

    def written(name: str, x: float, y: float, colour: str, side: int, up: int) -> Any:
        options = {"textcoords": "offset points", "size": 7, "color": colour}
        ha = "left" if side > 0 else "right"
        return ax.annotate(name, (x, y), (side, up), ha=ha, **options)

    def fits(box: Any) -> bool:
        inside = edge.x0 < box.x0 and box.x1 < edge.x1
        return inside and not any(box.overlaps(other) for other in taken)

    for point in sorted(points, key=lambda p: -p[2]):
        tried = [written(*point, *side) for side in sides]
        boxes = [text.get_window_extent(renderer) for text in tried]
        best = next((i for i, box in enumerate(boxes) if fits(box)), 0)
        taken.append(boxes[best])
        for i, text in enumerate(tried):
            if i != best:
                text.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=500, help="training images")
    parser.add_argument("--repeats", type=int, default=7, help="repeated calls; 0: agreement alone")
    parser.add_argument("--out", type=Path, help="JSON file, with two plots beside it")
    parser.add_argument("--only", default="", help="methods whose names begin like this")
    args = parser.parse_args()
    result = bench_attribution(points=args.points, repeats=args.repeats, only=args.only)
    if not args.repeats:
        write_json(args.out, result)
        return
    Console().print(attribution_table(result))
    if args.out is not None:
        write_json(args.out, result)
        plot_attribution(result, args.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
