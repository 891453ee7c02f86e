"""Linear datamodelling scores of real networks against retraining on random halves; writes JSON.

    python benchmarks/attribution_lds.py --smoke                           # minutes on a laptop
    python benchmarks/attribution_lds.py --data-dir DATA --work WORK --out lds.json    # one H200

MNIST, first 5,000 training and 500 test rows, pixels (x/255 - 0.1307)/0.3081. `mlp`: 784-128-64-10,
ReLU, dropout 0.1 after both hidden layers, SGD 0.01, momentum 0.9, batch 64, 50 epochs. `logistic`:
784-10, SGD 0.01, batch 32, 20 epochs. Weights and biases uniform ±1/√fan_in. Truth: 100 random halves
times 10 seeds, mean test loss. Seeds: subsets 0; truth 0 to 9; scored runs 1000 to 1004; halves of
TRAK 2000.

Constants (κ, which checkpoints, leverage) are compared on subsets 0-49 and queries 0-249 only, and the
table reports the other subsets and queries. Every piece is kept in --work; a killed run goes on.
"""

import argparse
import itertools
import json
import platform
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dualfluence as dfl
from dualfluence.apps.bench import Trained, rival_scores
from dualfluence.attribution import KAPPA, Trajectory, evaluate, gradient_dot
from dualfluence.attribution._pieces import Pieces
from dualfluence.attribution._rivals import DAMPINGS, trak_terms
from dualfluence.attribution._trajectory import _check_data, _normalised

RECIPES = {
    "mlp": {
        "widths": (784, 128, 64, 10),
        "dropout": 0.1,
        "rate": 0.01,
        "momentum": 0.9,
        "batch": 64,
        "epochs": 50,
        "saved": (
            0.5,
            1,
            1.5,
            2,
            2.5,
            3,
            3.5,
            4,
            4.5,
            5,
            5.5,
            6,
            7,
            8,
            9.5,
            11,
            12.5,
            14,
            19,
            25,
            35,
            50,
        ),
    },
    "logistic": {
        "widths": (784, 10),
        "dropout": 0.0,
        "rate": 0.01,
        "momentum": 0.0,
        "batch": 32,
        "epochs": 20,
        "saved": (0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, 7, 8, 9.5, 11, 12.5, 14, 20),
    },
}
FULL = {"points": 5000, "queries": 500, "subsets": 100, "seeds": 10, "runs": 5, "trak": (1, 10, 50)}
SMOKE = {"points": 120, "queries": 20, "subsets": 12, "seeds": 2, "runs": 2, "trak": (1, 2)}
SUBSET_SEED, RUN_SEED, TRAK_SEED = 0, 1000, 2000

EPOCHS = {
    "first quarter, halves": lambda e, total: e <= total / 4,
    "first quarter, whole": lambda e, total: e <= total / 4 and e % 1 == 0,
    "first half, halves": lambda e, total: e <= total / 2,
    "sketch": lambda e, total: e in (1, 2, 3, 5, 8, 14, 25, total),
    "all": lambda e, total: True,
}
KAPPAS = {"1.5": (1.5,), "3": (3.0,), "10": (10.0,)}
DEFAULT = ("first quarter, halves", "3", False)
"""Checkpoints while the loss still falls fast; κ by the reasoning in the library."""


def apply(params, x):
    """The network in inference mode."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def init(key, widths):
    """Uniform ±1/√fan_in."""
    layers = []
    for k, (a, b) in zip(
        jax.random.split(key, len(widths) - 1), itertools.pairwise(widths), strict=True
    ):
        low, high = jax.random.split(k)
        bound = a**-0.5
        layers.append(
            {
                "w": jax.random.uniform(low, (a, b), minval=-bound, maxval=bound),
                "b": jax.random.uniform(high, (b,), minval=-bound, maxval=bound),
            }
        )
    return layers


def dropped(params, x, key, share):
    for layer, k in zip(params[:-1], jax.random.split(key, len(params)), strict=False):
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
        if share:
            x = jnp.where(jax.random.bernoulli(k, 1 - share, x.shape), x / (1 - share), 0)
    return x @ params[-1]["w"] + params[-1]["b"]


def make_epoch(recipe, x, y):
    """`(params, velocity), key, indices` to the same after one pass in random order, and halfway."""
    size, share = recipe["batch"], recipe["dropout"]

    def loss(params, rows, weights, key):
        f = dropped(params, x[rows], key, share)
        each = jax.nn.logsumexp(f, axis=1) - jnp.take_along_axis(f, y[rows][:, None], 1)[:, 0]
        return jnp.sum(weights * each) / jnp.sum(weights)

    def epoch(state, key, indices):
        order_key, drop_key = jax.random.split(key)
        m = indices.shape[0]
        batches = -(-m // size)
        order = jnp.pad(jax.random.permutation(order_key, indices), (0, batches * size - m))
        # The last batch may be short: its other rows have weight zero.
        weights = (jnp.arange(batches * size) < m).astype(x.dtype)
        packed = (
            order.reshape(batches, size),
            weights.reshape(batches, size),
            jax.random.split(drop_key, batches),
        )

        def step(carry, batch):
            params, velocity = carry
            grads = jax.grad(loss)(params, *batch)
            velocity = jax.tree.map(lambda v, g: recipe["momentum"] * v + g, velocity, grads)
            return (
                jax.tree.map(lambda p, v: p - recipe["rate"] * v, params, velocity),
                velocity,
            ), None

        half = batches // 2
        middle, _ = jax.lax.scan(step, state, jax.tree.map(lambda a: a[:half], packed))
        return jax.lax.scan(step, middle, jax.tree.map(lambda a: a[half:], packed))[0], middle

    return epoch


def make_train(recipe, x, y):
    """`train(key, indices) -> params`, pure."""
    epoch = make_epoch(recipe, x, y)

    def train(key, indices):
        start, rest = jax.random.split(key)
        params = init(start, recipe["widths"])
        state = (params, jax.tree.map(jnp.zeros_like, params))
        keys = jax.random.split(rest, recipe["epochs"])
        return jax.lax.scan(lambda s, k: (epoch(s, k, indices)[0], None), state, keys)[0][0]

    return train


def train_runs(recipe, x, y, seeds):
    """Parameters of runs on all points at every saved epoch: `{epoch: stacked params}`."""
    epoch = make_epoch(recipe, x, y)
    indices = jnp.arange(x.shape[0])
    keys = jnp.stack([jax.random.key(s) for s in seeds])
    starts, rests = jax.vmap(lambda k: tuple(jax.random.split(k)))(keys)
    params = jax.vmap(lambda k: init(k, recipe["widths"]))(starts)
    state = (params, jax.tree.map(jnp.zeros_like, params))
    order = jax.vmap(lambda k: jax.random.split(k, recipe["epochs"]))(rests)
    advance = jax.jit(jax.vmap(lambda s, k: epoch(s, k, indices)))
    saved = {}
    for e in range(recipe["epochs"]):
        state, middle = advance(state, order[:, e])
        for when, (params, _) in ((e + 0.5, middle), (e + 1, state)):
            if when in recipe["saved"]:
                saved[when] = jax.tree.map(np.asarray, params)
    return saved


def pick(tree, i):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[i]), tree)


class Bench:
    """One recipe: truth, runs, scores, table."""

    def __init__(self, name, scale, data, work):
        self.name, self.scale, self.work = name, scale, work / name
        self.recipe = RECIPES[name]
        n, q = scale["points"], scale["queries"]
        scaled = lambda a: jnp.asarray((a.reshape(len(a), -1) - 0.1307) / 0.3081, jnp.float32)  # noqa: E731
        self.x, self.y = scaled(data.x_train[:n]), jnp.asarray(data.y_train[:n])
        self.xq, self.yq = scaled(data.x_test[:q]), jnp.asarray(data.y_test[:q])
        self.seconds = {}

    def timed(self, label, call):
        start = time.perf_counter()
        result = call()
        self.seconds[label] = round(time.perf_counter() - start, 2)
        print(f"[{self.name}] {label}: {self.seconds[label]} s", flush=True)
        return result

    def truth(self):
        masks = evaluate.random_masks(self.x.shape[0], self.scale["subsets"], seed=SUBSET_SEED)

        def measure(params):
            f = apply(params, self.xq)
            own = jnp.take_along_axis(f, self.yq[:, None], 1)[:, 0]
            return jax.nn.logsumexp(f, axis=1) - own

        return evaluate.retrain_networks(
            make_train(self.recipe, self.x, self.y),
            measure,
            masks,
            seeds=range(self.scale["seeds"]),
            name=f"{self.name} {self.scale}",
            slice_size=500,
            folder=self.work / "truth",
        )

    def trajectory(self, saved, run, epochs, kappa):
        per_epoch = -(-self.x.shape[0] // self.recipe["batch"])
        return Trajectory(
            apply,
            [pick(saved[e], run) for e in epochs],
            steps=[int(e) * per_epoch + (per_epoch // 2 if e % 1 else 0) for e in epochs],
            learning_rate=self.recipe["rate"],
            momentum=self.recipe["momentum"],
            kappa=kappa,
        )

    def piece(self, saved, run, epoch, kappa, leverage):
        """Normalised scores at one checkpoint, from disk if they are there."""
        data = (self.x, self.y, self.xq, self.yq)
        loss = dfl.SoftmaxCrossEntropy()

        def compute():
            only = self.trajectory(saved, run, (epoch,), kappa)
            checked = _check_data(only, *data, loss, "loss")
            return _normalised(only, 0, checked, loss, "outputs", leverage, 0)

        name = f"run-{run}-epoch-{epoch:04.1f}-kappa-{kappa:g}{'-leverage' if leverage else ''}"
        return Pieces(self.work / "scores", f"{self.name} {self.scale}").get(name, compute)

    def total(self, saved, runs, epochs, kappas, leverage):
        total = self.recipe["epochs"]
        chosen = [e for e in self.recipe["saved"] if EPOCHS[epochs](e, total)]
        parts = itertools.product(runs, chosen, KAPPAS[kappas])
        return sum(
            self.piece(saved, run, e, kappa, leverage).astype(np.float64) for run, e, kappa in parts
        )

    def split(self):
        """Rows for choosing constants and rows for reporting: (subsets, queries) each."""
        s, q = self.scale["subsets"] // 2, self.scale["queries"] // 2
        return (slice(0, s), slice(0, q)), (slice(s, None), slice(q, None))

    def lds(self, scores, truth, part=None):
        subsets, queries = part or (slice(None), slice(None))
        return evaluate.lds(
            scores[queries], truth.masks[subsets], truth.targets[subsets][:, queries]
        )

    def record(self, scores, truth):
        (choose, report), row = self.split(), {}
        for label, part in (("choose", choose), ("report", report), ("all", None)):
            m = self.lds(scores, truth, part)
            row[label] = {"lds": m.value, "interval": list(m.interval)}
        return row

    def explore(self, saved, truth, leverages):
        """LDS of one run on the choosing part for each setting of the constants."""
        choose, _ = self.split()
        found = {}
        for epochs, kappas, leverage in itertools.product(EPOCHS, KAPPAS, leverages):
            if leverage and kappas != "3":
                continue  # twice the price of a solve: compared at one κ
            key = f"epochs {epochs}, kappa {kappas}, leverage {leverage}"
            scores = self.total(saved, [0], epochs, kappas, leverage)
            found[key] = ((epochs, kappas, leverage), self.lds(scores, truth, choose).value)
        return found

    def rivals(self, saved, truth):
        last = pick(saved[self.recipe["epochs"]], 0)
        data = (self.x, self.y, self.xq, self.yq)
        rows = {"gradient dot product, last checkpoint (1 run)": gradient_dot(apply, last, *data)}
        e = self.recipe["saved"][-1]
        rows["influence, last checkpoint (1 run)"] = self.piece(saved, 0, e, 3.0, False)
        halves = evaluate.random_masks(self.x.shape[0], max(self.scale["trak"]), seed=TRAK_SEED)
        indices = jnp.asarray(np.stack([np.flatnonzero(row) for row in halves]))
        keys = jax.random.split(jax.random.key(TRAK_SEED), len(halves))
        stacked = jax.jit(jax.vmap(make_train(self.recipe, self.x, self.y)))(keys, indices)
        totals, missing = [0.0] * len(DAMPINGS), 0.0
        for i in range(max(self.scale["trak"])):
            solved, short = trak_terms(apply, pick(stacked, i), *data)
            totals, missing = [t + s for t, s in zip(totals, solved, strict=True)], missing + short
            if i + 1 in self.scale["trak"]:
                found = [t * missing for t in totals]
                best = max(found, key=lambda s: self.lds(s, truth).value)
                rows[f"TRAK, exact kernel, best of {len(DAMPINGS)} dampings ({i + 1} halves)"] = (
                    best
                )
        return rows | self.solvers(saved, truth)

    def solvers(self, saved, truth):
        """Every method of the literature on one run, each at the damping with its best LDS."""
        epochs = self.recipe["saved"]
        trained = Trained(
            apply,
            [pick(saved[e], 0) for e in epochs],
            [self.recipe["rate"]] * len(epochs),
            (),
            self.trajectory(saved, 0, epochs[-1:], KAPPA).ridge(0),
            (self.x, self.y, self.xq, self.yq),
        )
        found = {}
        for name, setting, scores in rival_scores(trained):
            value = self.lds(scores, truth).value
            print(f"[{self.name}] {name} {setting}: LDS {value:.3f}", flush=True)
            found.setdefault(name, []).append((value, setting, scores))
        rows = {}
        for name, tried in found.items():
            _, setting, scores = max(tried, key=lambda entry: entry[0])
            label = f", best of {len(tried)} dampings, {setting}" if setting else ""
            rows[f"{name}{label} (1 run)"] = scores
        return rows

    def ours(self, label, setting, saved, truth, table):
        epochs, kappas, leverage = setting
        for runs in (1, self.scale["runs"]):
            name = f"ours, {label} ({runs} run{'s' if runs > 1 else ''})"
            total = partial(self.total, saved, range(runs), epochs, kappas, leverage)
            table[name] = self.record(self.timed(name, total), truth)

    def run(self, leverages, explore, save):
        """The whole table; `save(result)` after each part, the longest last."""
        truth = self.timed("truth", self.truth)
        seeds = [RUN_SEED + r for r in range(self.scale["runs"])]
        saved = self.timed("runs", partial(train_runs, self.recipe, self.x, self.y, seeds))
        ceiling = evaluate.noise_ceiling(truth.repeats)
        table = {}
        result = {
            "recipe": dict(self.recipe),
            "scale": self.scale,
            "ceiling": {
                "value": ceiling.value,
                "interval": list(ceiling.interval),
                "notes": ceiling.notes,
            },
            "default": DEFAULT,
            "table": table,
            "seconds": self.seconds,
        }
        self.ours("default constants", DEFAULT, saved, truth, table)
        save(result)
        for name, scores in self.timed("rivals", partial(self.rivals, saved, truth)).items():
            table[name] = self.record(scores, truth)
        save(result)
        if explore:
            found = self.timed("choosing constants", partial(self.explore, saved, truth, leverages))
            best = max(found, key=lambda k: found[k][1])
            result["choosing"] = {k: v for k, (_, v) in found.items()}
            result["chosen"] = best
            save(result)
            if found[best][0] != DEFAULT:
                self.ours("constants chosen on the other half", found[best][0], saved, truth, table)
        save(result)
        return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--work", type=Path, default=Path("attribution-lds"))
    parser.add_argument("--out", type=Path, default=Path("attribution-lds.json"))
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--no-explore", action="store_true", help="default constants only")
    parser.add_argument("--leverage", action="store_true", help="compare closed-form leverage too")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    data = dfl.datasets.load("mnist-small" if args.smoke else "mnist", data_dir=args.data_dir)
    scale = SMOKE if args.smoke else FULL
    device = jax.devices()[0]
    record = {
        "device": f"{device.platform}: {device.device_kind}",
        "host": platform.machine(),
        "jax": jax.__version__,
        "data": data.origin,
        "recipes": {},
    }
    leverages = (False, True) if args.leverage else (False,)
    for name in args.recipes:

        def save(result, name=name):
            record["recipes"][name] = result
            args.out.write_text(json.dumps(record, indent=1))

        with jax.default_matmul_precision("highest"):
            result = Bench(name, scale, data, args.work).run(leverages, not args.no_explore, save)
        for row, parts in result["table"].items():
            low, high = parts["report"]["interval"]
            print(
                f"{name:9s} {row:62s} report {parts['report']['lds']:.3f} [{low:.3f}, {high:.3f}]  "
                f"all {parts['all']['lds']:.3f}"
            )
        print(f"{name:9s} noise ceiling {result['ceiling']['value']:.3f}")


if __name__ == "__main__":
    main()
