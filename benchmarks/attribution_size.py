"""`Trajectory` by probes against its exact form, and on all of MNIST: seconds and LDS; writes JSON.

    python benchmarks/attribution_size.py --smoke                              # minutes on a laptop
    python benchmarks/attribution_size.py --data-dir DATA --work WORK --out size.json --limit 300   # one H200

`mlp` is the recipe of `attribution_lds.py` (5,000 points, 500 queries, one run, 20 checkpoints), `mnist` all
60,000 images, ten checkpoints, SGD 0.05, momentum 0.9, batch 256, 12 epochs. The truth of `mlp` is that of
`attribution_lds.py`; of `mnist`, 60 random halves times 12 seeds. Nothing is chosen here: probes are those
that are named. The first call includes compilation. `adam` has random positive numbers as its diagonal, which
changes no seconds; it has no LDS.
"""

import argparse
import json
import platform
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from attribution_lds import FULL, RUN_SEED, SMOKE, Bench
from lds_recipes import apply, pick, steps_at

import dualfluence as dfl
from dualfluence.attribution import (
    LeadingProbes,
    RandomProbes,
    Trajectory,
    evaluate,
)

START = time.perf_counter()
TWENTY = (0.5, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9.5, 11, 14, 19, 25)
"""Checkpoints of `mlp`, in epochs: most of them early."""

MNIST = {"points": 60_000, "queries": 500, "subsets": 60, "choosing": 20, "seeds": 12, "runs": 1}
MNIST_SMOKE = {"points": 2_560, "queries": 20, "subsets": 8, "choosing": 4, "seeds": 2, "runs": 1}


def say(text):
    print(f"{time.perf_counter() - START:6.1f} {text}", flush=True)


class Timed:
    """Calls of `Trajectory` on one bench: seconds of the first and of a repeated call, and LDS."""

    def __init__(self, bench, epochs, save):
        self.bench, self.save = bench, save
        self.epochs = [e for e in epochs if e in bench.saved]
        self.rows = bench.result.setdefault("calls", {})

    def run(self, adam=False):
        bench = self.bench
        per_epoch = -(-bench.x.shape[0] // bench.recipe["batch"])
        checkpoints = [pick(bench.saved[e], 0) for e in self.epochs]
        diagonal = jax.tree.map(lambda a: 1 / (jnp.abs(a) + 0.01), checkpoints) if adam else None
        return Trajectory(
            apply,
            checkpoints,
            steps=[steps_at(e, per_epoch) for e in self.epochs],
            learning_rate=bench.recipe["rate"],
            momentum=bench.recipe["momentum"],
            preconditioner=diagonal,
        )

    def call(self, name, *, repeat=True, adam=False, **options):
        run, seconds = self.run(adam), []
        for _ in range(1 + repeat):
            start = time.perf_counter()
            found = run.attribute(*self.bench.reported, progress=False, **options)
            seconds.append(time.perf_counter() - start)
        row = self.rows[name] = {"checkpoints": len(self.epochs), "seconds_first": seconds[0]}
        if repeat:
            row["seconds_repeat"] = seconds[1]
        if not adam:
            subsets, queries = self.bench.report
            lds = evaluate.lds(
                found, self.bench.truth.masks[subsets], self.bench.targets[subsets, queries]
            )
            row |= {"lds": lds.value, "interval": list(lds.interval)}
        row |= {k: found.stats[k] for k in ("left_out", "agreement")}
        row["bytes_in_use_peak"] = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        say(f"[{self.bench.name}] {name}: {row}")
        self.save()


def measure_mlp(bench, save):
    bench.prepare()
    save()
    timed = Timed(bench, TWENTY, save)
    timed.call("3 leading", probes=LeadingProbes(3))
    timed.call("2 leading", probes=LeadingProbes(2))
    timed.call("exact", probes=None)
    timed.call("1 leading", probes=LeadingProbes(1))
    timed.call("2 random", probes=RandomProbes(2))
    timed.call("adam, 3 leading", probes=LeadingProbes(3), adam=True)


def measure_mnist(bench, save):
    bench.prepare()
    save()
    timed = Timed(bench, bench.recipe["saved"], save)
    timed.call("1 leading", probes=LeadingProbes(1))
    timed.call("1 random", probes=RandomProbes(1), repeat=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--work", type=Path, default=Path("attribution-size"))
    parser.add_argument("--out", type=Path, default=Path("attribution-size.json"))
    parser.add_argument("--recipes", nargs="+", default=["mlp", "mnist"])
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    data = dfl.datasets.load("mnist-small" if args.smoke else "mnist", data_dir=args.data_dir)
    scales = {"mlp": (FULL, SMOKE), "mnist": (MNIST, MNIST_SMOKE)}
    benches = [
        Bench(name, scales[name][args.smoke] | {"runs": 1, "trak": ()}, data, args.work)
        for name in args.recipes
    ]
    device = jax.devices()[0]
    record = {
        "device": f"{device.platform}: {device.device_kind}",
        "host": platform.machine(),
        "jax": jax.__version__,
        "data": data.origin,
        "run seed": RUN_SEED,
        "recipes": {bench.name: bench.result for bench in benches},
    }

    def save():
        args.out.write_text(json.dumps(record, indent=1, default=float))

    measures = {"mlp": measure_mlp, "mnist": measure_mnist}
    with jax.default_matmul_precision("highest"):
        for bench in benches:
            measures[bench.name](bench, save)
    save()


if __name__ == "__main__":
    main()
