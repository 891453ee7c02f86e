"""Which training sentences made a transformer say this: scores of fine-tuning on text; writes JSON.

    python benchmarks/attribution_text.py --smoke                                  # minutes on a CPU
    python benchmarks/attribution_text.py --text FILE --scale h200 --work WORK --out FILE   # one H200

A causal transformer on bytes is pretrained with AdamW on one part of the text and fine-tuned on another, as a
whole (`full`) and by a LoRA (`lora`). FILE has one text on each line, perhaps with a label before a tab,
perhaps .gz; without it the text is Python's own help (`pydoc_data.topics`). Scale `h200` has 6.0 million
parameters.

Truth: fine-tuning again on random halves, mean over seeds shared by all halves, and one seed alone; measured
is the loss of held-out lines. LDS is the Spearman correlation over halves, mean over queries. Every method
scores the same single run, whose seed no half has. Damping of TRAK: for every second query the best of three
for the others, and the other way round. EK-FAC draws labels at every token, as the library's own, which
holds the curvature of all outputs of a sequence, (T·V)² numbers, cannot be used.

Planted: facts that are in no other line, each in ten training lines of different words. A query asks for a
fact; recall at 10 is the share of its ten lines among the ten most helpful.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from text_recipes import BETA2, DECAY, PLANTED, PRETRAIN_RATE, RATES, RUN_SEED, SCALES, Recipe, read
from text_rivals import bm25, ekfac, products, trak

import dualfluence as dfl
from dualfluence.apps.compare._machine import describe_machine
from dualfluence.attribution import RandomProbes, Trajectory, evaluate

CHECKPOINTS = (0.08, 0.17, 0.33, 0.5, 0.67, 1.0)
"""Shares of fine-tuning after which parameters are kept."""


class Bench:
    def __init__(self, name, scale, kind, lines, work, save):
        self.save = save
        self.name, self.recipe, self.work = f"{name}-{kind}", Recipe(scale, kind, lines), work
        self.scale, self.table, self.seconds = scale, {}, {}

    def timed(self, label, call):
        start = time.perf_counter()
        value = jax.block_until_ready(call())
        self.seconds[label] = round(time.perf_counter() - start, 2)
        print(f"[{self.name}] {label}: {self.seconds[label]} s", flush=True)
        return value

    def prepare(self):
        r, scale = self.recipe, self.scale
        x, y, xq, yq = (jnp.asarray(a) for a in (r.x, r.y, r.xq, r.yq))
        base = r.initial(jax.random.key(0))
        everything = jnp.arange(len(r.pretrain_x))
        steps = scale["pretrain_epochs"] * (len(everything) // scale["batch"])
        self.start = self.timed("pretraining", lambda: jax.jit(
            lambda p: r.learn(p, jnp.asarray(r.pretrain_x), jnp.asarray(r.pretrain_y), everything,
                              jax.random.key(1), PRETRAIN_RATE, scale["pretrain_epochs"], [steps])[0][0]
        )(base))  # fmt: skip
        if r.kind == "lora":
            self.start = r.with_lora(self.start)
        rate, last = RATES[r.kind], r.steps(len(x))
        self.kept = sorted({max(1, round(share * last)) for share in CHECKPOINTS})
        self.run = self.timed("fine-tuning", lambda: jax.jit(
            lambda p: r.learn(p, x, y, jnp.arange(len(x)), jax.random.key(RUN_SEED), rate,
                              scale["epochs"], self.kept)
        )(self.start))  # fmt: skip
        self.checkpoints = [p for p, _ in self.run]
        masks = evaluate.random_masks(len(x), scale["halves"], seed=0)

        def train(key, rows):
            return r.learn(
                self.start, x, y, rows, key, rate, scale["epochs"], [r.steps(len(rows))]
            )[0][0]

        self.truth = self.timed("truth", lambda: evaluate.retrain_networks(
            train, lambda p: r.losses(p, xq, yq), masks, seeds=range(scale["seeds"]),
            name=f"{self.name} {scale}", folder=self.work and self.work / self.name,
        ))  # fmt: skip
        self.masks, self.facts = masks, scale["facts"]
        ceiling = evaluate.noise_ceiling(self.truth.repeats[:, :, self.facts :])
        leaves = jax.tree.leaves_with_path(self.start)
        self.result = {
            "scale": scale,
            "parameters": sum(a.size for _, a in leaves),
            "trained": sum(a.size for path, a in leaves if r.trainable(path, a)),
            "steps": self.kept,
            "loss": {
                "pretrained": float(r.losses(self.start, xq, yq)[self.facts :].mean()),
                "fine-tuned": float(r.losses(self.checkpoints[-1], xq, yq)[self.facts :].mean()),
            },
            "ceiling": {"value": ceiling.value, "interval": list(ceiling.interval)},
            "table": self.table,
            "seconds": self.seconds,
        }

    def report(self, label, values):
        values = np.asarray(values, np.float64)
        facts = self.facts
        mean = evaluate.lds(values[facts:], self.masks, self.truth.targets[:, facts:])
        one = evaluate.lds(values[facts:], self.masks, self.truth.repeats[0][:, facts:])
        found = [
            np.isin(
                np.argsort(-values[k], kind="stable")[:10], np.flatnonzero(self.recipe.owners == k)
            ).sum()
            / len(PLANTED)
            for k in range(facts)
        ]
        self.table[label] = {
            "lds": mean.value,
            "interval": list(mean.interval),
            "lds_of_one_seed": one.value,
            "recall_at_10": float(np.mean(found)),
            "seconds": self.seconds.get(label),
        }
        print(f"[{self.name}] {label}: {self.table[label]}", flush=True)
        self.save(self.result)

    def trajectory(self, checkpoints=slice(None)):
        r, states = self.recipe, [s for _, s in self.run]
        record = dfl.adapters.adam_record(
            states, self.start, learning_rate=RATES[r.kind], weight_decay=DECAY, b2=BETA2
        )
        record = {
            k: v[checkpoints] if isinstance(v, (list, tuple)) else v for k, v in record.items()
        }
        return Trajectory(r.apply, self.checkpoints[checkpoints], trainable=r.trainable, **record)

    def score(self):
        r, last = self.recipe, self.checkpoints[-1]
        data = (r.x, r.y, r.xq, r.yq)
        run, m = self.trajectory(), self.scale["probes"]
        for probes in sorted({2, m}):
            label = f"Trajectory, {probes} probes"
            call = partial(run.attribute, *data, probes=RandomProbes(probes), progress=False)
            self.report(label, self.timed(label, lambda call=call: call().values))
        label = f"Trajectory, {m} probes projected to {self.scale['k']}"
        call = partial(run.attribute, *data, probes=RandomProbes(m), method="projected",
                       rank=self.scale["k"], progress=False)  # fmt: skip
        self.report(label, self.timed(label, lambda: call().values))
        self.report("gradient products", self.timed("gradient products", lambda: products(r, last)))
        self.report(
            "gradient cosine", self.timed("gradient cosine", lambda: products(r, last, True))
        )
        tracin = lambda: sum(products(r, p) for p in self.checkpoints)  # noqa: E731
        self.report("TracIn", self.timed("TracIn", tracin))
        label = f"TRAK, {self.scale['trak']} projections"
        found = self.timed(label, lambda: trak(r, last))
        self.report(label, self.chosen(found))
        self.report("EK-FAC", self.timed("EK-FAC", lambda: ekfac(r, last)))
        self.report("BM25", self.timed("BM25", lambda: bm25(r.train_lines, r.query_lines)))

    def chosen(self, found):
        """For every second query the values that are best for the others, and the other way round."""
        values = np.array(next(iter(found.values())))
        for own in (slice(self.facts, None, 2), slice(self.facts + 1, None, 2)):
            other = slice(2 * self.facts + 1 - own.start, None, 2)
            best = max(found.values(), key=lambda v: self.lds(v, other))
            values[own] = best[own]
            values[: self.facts] = best[: self.facts]
        return values

    def lds(self, values, queries):
        return evaluate.lds(values[queries], self.masks, self.truth.targets[:, queries]).value


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--smoke", action="store_true")
    options.add_argument("--scale", choices=list(SCALES), default="cpu")
    options.add_argument("--kinds", nargs="+", choices=list(RATES), default=list(RATES))
    options.add_argument("--text", type=Path)
    options.add_argument("--work", type=Path, help="keeps the truth, so that a killed run goes on")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    name = "smoke" if given.smoke else given.scale
    lines = read(given.text)
    head = {
        "machine": describe_machine(),
        "text": "pydoc_data.topics" if given.text is None else given.text.name,
        "scale": name,
    }

    def save(kind, found):
        """Adds to what an earlier command has left."""
        if given.out:
            kinds = json.loads(given.out.read_text())["kinds"] if given.out.exists() else {}
            text = json.dumps(head | {"kinds": kinds | {kind: found}}, indent=1)
            given.out.with_suffix(".part").write_text(text + "\n")
            given.out.with_suffix(".part").replace(given.out)

    for kind in given.kinds:
        bench = Bench(name, SCALES[name], kind, lines, given.work, partial(save, kind))
        bench.prepare()
        bench.score()
        save(kind, bench.result)
        print(json.dumps(bench.table, indent=1))


if __name__ == "__main__":
    main()
