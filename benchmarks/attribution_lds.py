"""Linear datamodelling scores of real networks against retraining on random halves; writes JSON.

    python benchmarks/attribution_lds.py --smoke                           # minutes on a laptop
    python benchmarks/attribution_lds.py --data-dir DATA --work WORK --out lds.json --limit 300    # one H200

MNIST, first 5,000 training and 500 test rows, pixels (x/255 - 0.1307)/0.3081. `mlp`: 784-128-64-10,
ReLU, dropout 0.1 after both hidden layers, SGD 0.01, momentum 0.9, batch 64, 50 epochs. `logistic`:
784-10, SGD 0.01, batch 32, 20 epochs. Weights and biases uniform ±1/√fan_in. Truth: 100 random halves
times 10 seeds shared by all halves, mean test loss. Seeds: subsets 0; truth 0 to 9; scored runs 1000
to 1004; halves of TRAK 2000.

Settings (which checkpoints, how they are combined) are compared with one run of each recipe on 50 other
halves (seed 1) and the next 500 test rows. The best mean of LDS over ceiling is chosen; no number in the
table is of a subset or a query that it was chosen on. Rivals come last, each with the damping that is best
on the very numbers reported. After --limit seconds it writes what it has, says what is missing, and ends.

`adamw` and `cnn` have tables of their own, with two questions and more rivals (lds_estimands.py):

    python benchmarks/attribution_lds.py --recipes adamw --smoke                      # a minute on a laptop
    python benchmarks/attribution_lds.py --recipes adamw --scale small --data-dir DATA --out adamw.json
    python benchmarks/attribution_lds.py --recipes adamw --data-dir DATA --out adamw.json       # one H200
    python benchmarks/attribution_lds.py --recipes cnn --data-dir CIFAR --out cnn.json          # one H200

CIFAR is a folder with CIFAR-10's binary files, all or only some classes, or an .npz file (lds_networks.py).
The same command goes on where a killed one ended, with the folder --work. On one H200 `adamw` should take 15
minutes and `cnn` 12, from the seconds of `mlp` and counts of operations (not measured); up to a half of that
goes into the retrainings of the datamodel. `--limit` ends earlier. A failed step is recorded, and the others
go on.
"""

import argparse
import itertools
import json
import platform
import signal
import sys
import time
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from lds_candidates import OTHER_KAPPAS, REFERENCE, SETTINGS
from lds_estimands import Estimands, markdown
from lds_networks import RECIPES as TWO_QUESTIONS
from lds_networks import exact_losses
from lds_recipes import RECIPES, apply, make_train, pick, steps_at, train_runs
from rivals import Trained, rival_scores

import dualfluence as dfl
from dualfluence.apps.compare._machine import environment
from dualfluence.attribution import KAPPA, Trajectory, attribute_runs, evaluate, gradient_dot
from dualfluence.attribution._checkpoint import checkpoint_scores
from dualfluence.attribution._request import check_data
from dualfluence.attribution._rivals import DAMPINGS, trak_terms

START = time.perf_counter()
FULL = {
    "points": 5000,
    "queries": 500,
    "subsets": 100,
    "choosing": 50,
    "seeds": 10,
    "runs": 5,
    "trak": (1, 10, 50),
}
SMOKE = FULL | {
    "points": 300,
    "queries": 20,
    "subsets": 12,
    "choosing": 12,
    "seeds": 2,
    "runs": 2,
    "trak": (1, 2),
}
TRUTH_SCALE = ("points", "queries", "subsets", "choosing", "seeds")
"""What retraining depends on; runs and rivals may differ."""

SUBSET_SEED, CHOICE_SEED, RUN_SEED, TRAK_SEED = 0, 1, 1000, 2000


class OutOfTime(BaseException):
    """Raised by the clock; no handler of ordinary errors may swallow it."""


class Bench:
    """One recipe: truth, runs, scores, table."""

    def __init__(self, name, scale, data, work, *, models_at_once=500):
        self.name, self.scale, self.work = name, scale, work / name
        self.models_at_once = models_at_once
        self.recipe = RECIPES[name]
        # Queries that are reported, and as many to choose constants on.
        n, q = scale["points"], 2 * scale["queries"]
        scaled = lambda a: jnp.asarray((a.reshape(len(a), -1) - 0.1307) / 0.3081, jnp.float32)  # noqa: E731
        self.x, self.y = scaled(data.x_train[:n]), jnp.asarray(data.y_train[:n])
        self.xq, self.yq = scaled(data.x_test[:q]), jnp.asarray(data.y_test[:q])
        self.seconds, self.table, self.compared = {}, {}, {}
        self.kept = [{} for _ in range(scale["runs"])]
        self.result = {
            "recipe": dict(self.recipe),
            "scale": scale,
            "candidates": self.compared,
            "table": self.table,
            "seconds": self.seconds,
        }

    @property
    def data(self):
        return self.x, self.y, self.xq, self.yq

    @property
    def reported(self):
        """What rivals need: they choose nothing but their damping, on the very numbers reported."""
        q = self.scale["queries"]
        return self.x, self.y, self.xq[:q], self.yq[:q]

    def timed(self, label, call):
        start = time.perf_counter()
        try:
            return call()
        finally:
            self.seconds[label] = round(time.perf_counter() - start, 2)
            since = time.perf_counter() - START
            print(f"{since:6.1f} [{self.name}] {label}: {self.seconds[label]} s", flush=True)

    def prepare(self):
        """Truth and runs."""
        self.truth = self.timed("truth", self.make_truth)
        subsets, queries = self.report
        ceiling = evaluate.noise_ceiling(self.truth.repeats[:, subsets, queries])
        self.ceiling = ceiling.value
        self.result["ceiling"] = {
            "value": ceiling.value,
            "interval": list(ceiling.interval),
            "notes": ceiling.notes,
        }
        self.targets = self.truth.targets
        seeds = [RUN_SEED + r for r in range(self.scale["runs"])]
        self.saved = self.timed("runs", partial(train_runs, self.recipe, self.x, self.y, seeds))

    def make_truth(self):
        halves = partial(evaluate.random_masks, self.x.shape[0])
        reported = halves(self.scale["subsets"], seed=SUBSET_SEED)
        choosing = self.scale["choosing"]
        others = [halves(choosing, seed=CHOICE_SEED)] if choosing else []
        masks = np.concatenate([reported, *others])

        def measure(params):
            return exact_losses(apply(params, self.xq), self.yq)

        return evaluate.retrain_networks(
            make_train(self.recipe, self.x, self.y),
            measure,
            masks,
            seeds=range(self.scale["seeds"]),
            name=f"{self.name} { {k: self.scale[k] for k in TRUTH_SCALE} }, exact losses",
            slice_size=self.models_at_once,
            folder=self.work / "truth",
        )

    def trajectory(self, run, epochs, kappa):
        per_epoch = -(-self.x.shape[0] // self.recipe["batch"])
        return Trajectory(
            apply,
            [pick(self.saved[e], run) for e in epochs],
            steps=[steps_at(e, per_epoch) for e in epochs],
            learning_rate=self.recipe["rate"],
            momentum=self.recipe["momentum"],
            kappa=kappa,
        )

    def solve(self, run, epoch, kappa):
        """Scores at one checkpoint, with root mean square one per query."""
        one, loss = self.trajectory(run, (epoch,), kappa), dfl.SoftmaxCrossEntropy()
        d = check_data(one, *self.data, loss, "loss")
        options = {"loss": loss, "ridge": one.ridge(0), "key": jax.random.key(0)}
        start = time.perf_counter()
        found = checkpoint_scores(one.model(0), d.x, d.targets, d.xq, d.quantity, **options)
        scores = found.values
        size = jnp.sqrt(jnp.mean(scores**2, axis=1, keepdims=True))
        values = scores / jnp.where(size > 0, size, 1)
        if not jnp.isfinite(values).all():
            raise FloatingPointError(f"epoch {epoch}, run {run}: the factorisation failed")
        self.result.setdefault("checkpoint seconds", []).append(
            round(time.perf_counter() - start, 2)
        )
        return values

    def fill(self, run, keys):
        """Scores of the checkpoints that are not there yet."""
        for epoch, kappa in keys:
            if (epoch, kappa) not in self.kept[run]:
                self.kept[run][epoch, kappa] = self.solve(run, epoch, kappa)

    @property
    def report(self):
        """Subsets and queries of the recipe."""
        return slice(0, self.scale["subsets"]), slice(0, self.scale["queries"])

    @property
    def choice(self):
        """Subsets and queries to choose on; the ceiling is taken to be the same."""
        return slice(self.scale["subsets"], None), slice(self.scale["queries"], None)

    def lds(self, scores, part):
        subsets, queries = part
        return evaluate.lds(
            np.asarray(scores, float)[queries],
            self.truth.masks[subsets],
            self.targets[subsets, queries],
        )

    def record(self, name, scores):
        m = self.lds(scores, self.report)
        self.table[name] = {"lds": m.value, "interval": list(m.interval)}
        low, high = m.interval
        print(f"{self.name:9s} {name:72s} {m.value:.4f} [{low:.3f}, {high:.3f}]", flush=True)

    def compare(self):
        """LDS of run 0 on the choosing part for every setting."""
        self.fill(0, [key for setting in SETTINGS for key in setting.keys(self.recipe)])
        for setting in SETTINGS:
            self.show(setting)

    def show(self, setting):
        """LDS of a setting with run 0 on the choosing part."""
        self.fill(0, setting.keys(self.recipe))
        scores = setting.combined(self.kept[:1], self.recipe)
        self.compared[str(setting)] = self.lds(scores, self.choice).value
        print(f"[{self.name}] {setting}: {self.compared[str(setting)]:.4f}", flush=True)

    def ours(self, label, setting, runs):
        """One run, each run alone, and all runs together."""
        for run in range(runs):
            keys = setting.keys(self.recipe)
            self.timed(f"{label}, run {run}", partial(self.fill, run, keys))
        alone = [setting.combined([kept], self.recipe) for kept in self.kept[:runs]]
        self.record(f"ours, {label} (1 run)", alone[0])
        each = [self.lds(scores, self.report).value for scores in alone]
        mean = float(np.mean(each))
        self.result.setdefault("single runs", {})[label] = {"each": each, "mean": mean}
        print(f"[{self.name}] {runs} runs alone: {np.round(each, 4)}, mean {mean:.4f}", flush=True)
        if runs > 1:
            together = setting.combined(self.kept[:runs], self.recipe)
            self.record(f"ours, {label} ({runs} runs)", together)

    def rivals(self, save):
        """Gradient dot product, influence at the last checkpoint, exact-kernel TRAK."""
        last = pick(self.saved[self.recipe["epochs"]], 0)
        dot = gradient_dot(apply, last, *self.reported)
        self.record("gradient dot product, last checkpoint (1 run)", dot)
        key = REFERENCE.keys(self.recipe)[-1]
        self.fill(0, [key])
        self.record("influence, last checkpoint (1 run)", self.kept[0][key])
        save()
        halves = evaluate.random_masks(self.x.shape[0], max(self.scale["trak"]), seed=TRAK_SEED)
        indices = jnp.asarray(np.stack([np.flatnonzero(row) for row in halves]))
        keys = jax.random.split(jax.random.key(TRAK_SEED), len(halves))
        stacked = jax.jit(jax.vmap(make_train(self.recipe, self.x, self.y)))(keys, indices)
        totals, missing = [0.0] * len(DAMPINGS), 0.0
        for i in range(max(self.scale["trak"])):
            solved, short = trak_terms(apply, pick(stacked, i), *self.reported)
            totals, missing = [t + s for t, s in zip(totals, solved, strict=True)], missing + short
            if i + 1 in self.scale["trak"]:
                self.record_best(
                    f"TRAK, exact kernel ({i + 1} halves)",
                    {f"ρ = {d:g}": t * missing for d, t in zip(DAMPINGS, totals, strict=True)},
                )
                save()

    def record_best(self, name, tried):
        """The setting with the best LDS of those reported, in the rival's favour."""
        best = max(tried, key=lambda k: self.lds(tried[k], self.report).value)
        label = f", best of {len(tried)} dampings, {best}" if best else ""
        self.record(f"{name}{label}", tried[best])

    def solvers(self, save, names):
        """Methods of the literature on one run, each at the damping with its best LDS."""
        epochs = self.recipe["saved"]
        trained = Trained(
            apply,
            [pick(self.saved[e], 0) for e in epochs],
            [self.recipe["rate"]] * len(epochs),
            (),
            self.trajectory(0, epochs[-1:], KAPPA).ridge(0),
            self.reported,
        )
        # TRAK is in the table already, with more models.
        found = rival_scores(trained, names=names, projections=())
        for name, tried in itertools.groupby(found, key=lambda each: each[0]):
            self.record_best(f"{name} (1 run)", {setting: scores for _, setting, scores in tried})
            save()

    def check_library(self, setting):
        """Scores of a setting are those of the library's own call; float32 rounding apart."""
        run = self.trajectory(0, [e for e, _ in setting.keys(self.recipe)], setting.kappa)
        options = {"combine": setting.combine, "probes": None, "progress": False}
        got = attribute_runs([run], *self.data, **options).values
        want = setting.combined(self.kept[:1], self.recipe)
        worst = np.abs(got - want).max() / np.abs(want).max()
        print(f"[{self.name}] {setting}: {worst:.1e} off the library", flush=True)
        assert worst < 1e-2, (setting, worst)


def choose(benches):
    """Compare settings on all recipes; the best mean share of the ceiling, one run, choosing part."""
    for bench in benches:
        bench.timed("comparison", bench.compare)
    shares = {
        setting: float(np.mean([b.compared[str(setting)] / b.ceiling for b in benches]))
        for setting in SETTINGS
    }
    return max(shares, key=lambda s: shares[s]), shares


def measure(benches, record, save, args):
    """All parts in the order of their worth; `record["missing"]` shrinks as they are done."""
    parts = {}
    for bench in benches:
        parts[f"{bench.name}: truth and runs"] = bench.prepare

    def chosen():
        setting, shares = choose(benches)
        record["chosen"] = setting._asdict()
        record["shares of ceiling, choosing part"] = {str(s): v for s, v in shares.items()}
        return setting

    def ours(bench, label, setting, runs):
        bench.ours(f"{label}: {setting}", setting, min(runs, bench.scale["runs"]))

    pick_setting = cache(chosen)
    parts["choice of constants"] = pick_setting
    if args.smoke:
        parts["agreement with the library"] = lambda: [
            benches[0].check_library(s) for s in (REFERENCE, SETTINGS[-1])
        ]
    for bench in benches:
        runs = 5 if bench.name == "mlp" else 1
        parts[f"{bench.name}: ours, chosen"] = lambda b=bench, r=runs: ours(
            b, "chosen", pick_setting(), r
        )
        parts[f"{bench.name}: ours, reference, one run"] = lambda b=bench: ours(
            b, "reference", REFERENCE, 1
        )
    for bench in benches if args.trak else ():
        parts[f"{bench.name}: rivals"] = partial(bench.rivals, save)
    for bench in benches:
        parts[f"{bench.name}: solvers of the literature"] = partial(
            bench.solvers, save, args.methods
        )
    for bench in benches:
        parts[f"{bench.name}: other κ"] = lambda b=bench: [b.show(s) for s in OTHER_KAPPAS]
    for bench in benches[1:]:
        parts[f"{bench.name}: ours, chosen, all runs"] = lambda b=bench: ours(
            b, "chosen", pick_setting(), 5
        )
    record["missing"] = list(parts)
    for name, part in parts.items():
        part()
        record["missing"].remove(name)
        save()


def ring(limit):
    """Raise `OutOfTime` at the limit, again every few seconds if a callback swallowed it."""

    def out(signum, frame):
        raise OutOfTime

    signal.signal(signal.SIGALRM, out)
    signal.setitimer(signal.ITIMER_REAL, max(limit - (time.perf_counter() - START), 0.01), 5)


def both_questions(args):
    """Tables of `adamw` and `cnn`; the record is written after every step."""
    scale, begun = "smoke" if args.smoke else args.scale, sys.argv[1:]
    folders = {"--data-dir", "--work", "--out"}
    shown = ["…" if a in folders else b for a, b in zip([None, *begun], begun, strict=False)]
    record = {
        "machine": environment(),
        "command": " ".join(["python benchmarks/attribution_lds.py", *shown]),
        "scale": scale,
        "missing": [],
        "errors": {},
        "recipes": {},
    }

    def save():
        record["machine"] |= {"finished": environment()["finished"]}
        part = args.out.with_suffix(".part")
        part.write_text(json.dumps(record, indent=1) + "\n")
        part.replace(args.out)

    steps = []
    for name in args.recipes:
        bench = Estimands(name, scale, args.data_dir, args.classes, args.work)
        record["recipes"][name] = bench.result
        steps += [(f"{name}: {label}", step) for label, step in bench.steps()]
    record["missing"] = [label for label, _ in steps]
    if np.isfinite(args.limit):
        ring(args.limit)
    try:
        with jax.default_matmul_precision("highest"):
            for label, step in steps:
                try:
                    step()
                    record["missing"].remove(label)
                except Exception as error:
                    if label.endswith(": truth"):
                        raise
                    record["errors"][label] = f"{type(error).__name__}: {error}"[:500]
                    print(f"{label}: {record['errors'][label]}", flush=True)
                save()
    except OutOfTime:
        print(f"out of time after {args.limit:g} s; missing: {'; '.join(record['missing'])}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        save()
    for name, result in record["recipes"].items():
        if result["ceiling"]:
            print(f"\n{name}\n\n{markdown(result)}")
    if record["errors"]:
        raise SystemExit(f"failed: {'; '.join(record['errors'])}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--work", type=Path, default=Path("attribution-lds"))
    parser.add_argument("--out", type=Path, default=Path("attribution-lds.json"))
    choices = ["mlp", "logistic", *TWO_QUESTIONS]
    parser.add_argument("--recipes", nargs="+", default=["mlp", "logistic"], choices=choices)
    parser.add_argument(
        "--scale", choices=["full", "small"], default="full", help="adamw, cnn only"
    )
    parser.add_argument("--classes", nargs="+", type=int, help="of cnn; by default all there are")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--methods", nargs="+", help="solvers, e.g. EK-FAC; all by default")
    parser.add_argument(
        "--trak",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="rivals with models of their own too",
    )
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if TWO_QUESTIONS.keys() & set(args.recipes):
        if not TWO_QUESTIONS.keys() >= set(args.recipes):
            parser.error(f"{' and '.join(TWO_QUESTIONS)} cannot be run together with other recipes")
        both_questions(args)
        return
    data = dfl.datasets.load("mnist-small" if args.smoke else "mnist", data_dir=args.data_dir)
    scale = SMOKE if args.smoke else FULL
    device = jax.devices()[0]
    benches = [Bench(name, scale, data, args.work) for name in args.recipes]
    record = {
        "device": f"{device.platform}: {device.device_kind}",
        "host": platform.machine(),
        "jax": jax.__version__,
        "data": data.origin,
        "limit": args.limit if np.isfinite(args.limit) else None,
        "recipes": {bench.name: bench.result for bench in benches},
    }

    def save():
        args.out.write_text(json.dumps(record, indent=1))

    if np.isfinite(args.limit):
        ring(args.limit)
    try:
        with jax.default_matmul_precision("highest"):
            measure(benches, record, save, args)
    except OutOfTime:
        print(f"out of time after {args.limit:g} s; missing: {'; '.join(record['missing'])}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        save()
    for bench in benches:
        if "ceiling" in bench.result:
            print(f"{bench.name:9s} noise ceiling {bench.ceiling:.3f}")


if __name__ == "__main__":
    main()
