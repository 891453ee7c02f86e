"""`Trajectory` by probes against its exact form, and on all of MNIST: seconds and LDS; writes JSON.

    python benchmarks/attribution_size.py --smoke                              # minutes on a laptop
    python benchmarks/attribution_size.py --data-dir DATA --work WORK --out size.json --limit 480   # one H200

`mlp` is the recipe of `attribution_lds.py` (5,000 points, 500 queries, 20 of the checkpoints), `mnist` all
60,000 images, ten checkpoints, SGD 0.05, momentum 0.9, batch 256, 12 epochs. The truth of `mlp` is 100 random
halves times 10 seeds; of `mnist`, 60 times 12. Nothing is chosen here: probes are those that are named, and
the rest is the library's default. The first call includes compilation. `adam` has random positive numbers as
its diagonal, which changes no seconds; it has no LDS.

The record is written after every step. `--limit` is in seconds: a step that is not expected to fit is left
out (`skipped`), and the clock ends what takes longer than expected. The work folder keeps the truth, so that
the same command goes on where an earlier one stopped. A step that fails is recorded, and the others go on.
"""

import argparse
import json
import platform
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from attribution_lds import FULL, RUN_SEED, START, Bench, OutOfTime, ring
from lds_recipes import apply, pick, steps_at

import dualfluence as dfl
from dualfluence.attribution import (
    LeadingProbes,
    RandomProbes,
    Trajectory,
    attribute_runs,
    evaluate,
)

TWENTY = (0.5, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9.5, 11, 14, 19, 25)
"""Checkpoints of `mlp`, in epochs: most of them early."""

SHORT = {"epochs": 4, "saved": (0.5, 1, 2, 4)}
"""Training of a smoke test."""

MNIST = {"points": 60_000, "queries": 500, "subsets": 60, "choosing": 0, "seeds": 12, "runs": 1}
TINY = {"points": 1_024, "queries": 10, "subsets": 6, "choosing": 0, "seeds": 2, "runs": 1}
SCALES = {
    "mlp": (FULL | {"choosing": 0, "trak": ()}, TINY | {"points": 130, "runs": 2}),
    "mnist": (MNIST, TINY),
}
MODELS_AT_ONCE = {"mlp": 500, "mnist": 360}
"""Of the truth: two batches each."""


class Step(NamedTuple):
    """One thing to measure: its recipe, its name, and seconds that it may take on an H200."""

    recipe: str
    name: str
    expected: float
    options: dict[str, Any] = {}  # noqa: RUF012


EXACT, LEADING = {"probes": None}, {m: {"probes": LeadingProbes(m)} for m in (1, 2, 3)}
STEPS = [
    Step("mlp", "prepare", 50),
    Step("mlp", "3 leading", 20, LEADING[3]),
    Step("mlp", "exact", 60, EXACT),
    Step("mnist", "prepare", 90),
    Step("mnist", "1 leading", 60, LEADING[1]),
    Step("mlp", "2 leading", 15, LEADING[2]),
    Step("mlp", "adam, 3 leading", 20, LEADING[3] | {"adam": True}),
    Step("mlp", "3 leading, every checkpoint, 5 runs", 30, LEADING[3] | {"whole": 5}),
    Step("mlp", "3 leading, every checkpoint", 8, LEADING[3] | {"whole": 1}),
    Step("mlp", "2 random", 15, {"probes": RandomProbes(2)}),
    Step("mlp", "1 leading", 10, LEADING[1]),
    Step("mnist", "1 random", 40, {"probes": RandomProbes(1), "repeat": False}),
]
"""The most important first."""


class Clock:
    """Seconds that are left."""

    def __init__(self, limit):
        self.limit = limit

    def left(self):
        return self.limit - (time.perf_counter() - START)


def say(text):
    print(f"{time.perf_counter() - START:6.1f} {text}", flush=True)


class Timed:
    """Calls of `Trajectory` on one bench: seconds of the first and of a repeated call, and LDS."""

    def __init__(self, bench, epochs, save, clock):
        self.bench, self.save, self.clock = bench, save, clock
        self.epochs = [e for e in epochs if e in bench.recipe["saved"]]
        self.rows = bench.result.setdefault("calls", {})

    def trajectory(self, number, epochs, adam):
        bench = self.bench
        per_epoch = -(-bench.x.shape[0] // bench.recipe["batch"])
        checkpoints = [pick(bench.saved[e], number) for e in epochs]
        diagonal = jax.tree.map(lambda a: 1 / (jnp.abs(a) + 0.01), checkpoints) if adam else None
        return Trajectory(
            apply,
            checkpoints,
            steps=[steps_at(e, per_epoch) for e in epochs],
            learning_rate=bench.recipe["rate"],
            momentum=bench.recipe["momentum"],
            preconditioner=diagonal,
        )

    def call(self, name, *, repeat=True, adam=False, whole=0, **options):
        """One row. `whole` is a number of runs that are scored with every saved checkpoint."""
        bench = self.bench
        epochs = tuple(bench.saved) if whole else self.epochs
        numbers = range(min(max(whole, 1), bench.scale["runs"]))
        runs = [self.trajectory(r, epochs, adam) for r in numbers]
        attribute = partial(attribute_runs, runs, *bench.reported, progress=False, **options)
        start = time.perf_counter()
        found = attribute()
        first = time.perf_counter() - start
        row = self.rows[name] = {
            "checkpoints": len(epochs),
            "runs": len(runs),
            "seconds_first": first,
        }
        row |= {k: found.stats[k] for k in ("probes", "left_out", "agreement")}
        if not adam:
            subsets, queries = bench.report
            lds = evaluate.lds(found, bench.truth.masks[subsets], bench.targets[subsets, queries])
            row |= {"lds": lds.value, "interval": list(lds.interval)}
        self.save()
        if repeat and first < self.clock.left():
            start = time.perf_counter()
            attribute()
            row["seconds_repeat"] = time.perf_counter() - start
        row["bytes_in_use_peak"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        say(f"[{bench.name}] {name}: {row}")


def measure(steps, timed, record, save, clock):
    """Every step that fits; what failed or was left out is in the record."""
    ready = set()
    for step in steps:
        name = f"{step.recipe}: {step.name}"
        if step.name != "prepare" and step.recipe not in ready:
            record["skipped"].append(f"{name} (nothing was prepared)")
        elif clock.left() < step.expected:
            record["skipped"].append(f"{name} ({clock.left():.0f} s left)")
        else:
            try:
                if step.name == "prepare":
                    timed[step.recipe].bench.prepare()
                    ready.add(step.recipe)
                else:
                    timed[step.recipe].call(step.name, **step.options)
            except Exception as error:
                record["failed"][name] = f"{type(error).__name__}: {error}"[:2000]
                say(f"{name} failed: {record['failed'][name]}")
        record["missing"].remove(name)
        save()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--work", type=Path, default=Path("attribution-size"))
    parser.add_argument("--out", type=Path, default=Path("attribution-size.json"))
    parser.add_argument("--recipes", nargs="+", default=list(SCALES), choices=list(SCALES))
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    data = dfl.datasets.load("mnist-small" if args.smoke else "mnist", data_dir=args.data_dir)
    benches = {}
    for name in args.recipes:
        scale, at_once = SCALES[name][args.smoke], MODELS_AT_ONCE[name]
        bench = benches[name] = Bench(name, scale, data, args.work, models_at_once=at_once)
        if args.smoke:
            bench.recipe = bench.result["recipe"] = bench.recipe | SHORT
    steps = [step for step in STEPS if step.recipe in benches]
    device = jax.devices()[0]
    record = {
        "device": f"{device.platform}: {device.device_kind}",
        "host": platform.machine(),
        "jax": jax.__version__,
        "data": data.origin,
        "run seed": RUN_SEED,
        "limit": args.limit if np.isfinite(args.limit) else None,
        "recipes": {bench.name: bench.result for bench in benches.values()},
        "skipped": [],
        "failed": {},
        "missing": [f"{step.recipe}: {step.name}" for step in steps],
    }

    def save():
        record["seconds"] = round(time.perf_counter() - START, 1)
        part = args.out.with_name(f"{args.out.name}.part")
        part.write_text(json.dumps(record, indent=1, default=float))
        part.replace(args.out)

    clock, timed = Clock(args.limit), {}
    for name, bench in benches.items():
        epochs = TWENTY if name == "mlp" else bench.recipe["saved"]
        timed[name] = Timed(bench, epochs, save, clock)
    if np.isfinite(args.limit):
        ring(args.limit)
    try:
        with jax.default_matmul_precision("highest"):
            measure(steps, timed, record, save, clock)
    except OutOfTime:
        say(f"out of time after {args.limit:g} s; missing: {'; '.join(record['missing'])}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        save()
    if record["failed"]:
        raise SystemExit(f"failed: {', '.join(record['failed'])}")


if __name__ == "__main__":
    main()
