"""Which training sentences made a transformer say this: scores of fine-tuning on text; writes JSON.

    python benchmarks/attribution_text.py --smoke                                  # minutes on a CPU
    python benchmarks/attribution_text.py --text FILE --scale h200 --work WORK --out FILE   # one H200

A causal transformer on bytes is pretrained with AdamW on one part of the text and fine-tuned on another, as a
whole (`full`) and by a LoRA (`lora`). FILE has one text on each line, perhaps with a label before a tab,
perhaps .gz; without it the text is Python's own help (`pydoc_data.topics`). Scale `h200` has 6.0 million
parameters.

Truth: fine-tuning again on random halves, mean over seeds shared by all halves, and one seed alone; measured
is the loss of held-out lines. LDS is the Spearman correlation over halves, mean over queries. Every method
scores the same single run, whose seed no half has. Damping of TRAK: the best of three, chosen on the very
numbers reported. The library's EK-FAC is left out: it holds the curvature of all outputs of a sequence at
once, (T·V)² numbers each.

Planted: facts that are in no other line, each in ten training lines of different words. A query asks for a
fact; recall at 10 is the share of its ten lines among the ten most helpful.
"""

import argparse
import gzip
import json
import math
import re
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dualfluence as dfl
from dualfluence.apps.compare._machine import describe_machine
from dualfluence.attribution import RandomProbes, Trajectory, evaluate
from dualfluence.attribution._token_sketch import make_sketch

SCALES = {
    "smoke": {
        "layers": 1,
        "width": 16,
        "heads": 2,
        "length": 32,
        "pretrain": 60,
        "train": 40,
        "queries": 6,
        "facts": 1,
        "pretrain_epochs": 2,
        "epochs": 2,
        "batch": 10,
        "halves": 8,
        "seeds": 2,
        "rank": 2,
        "probes": 2,
        "k": 128,
        "trak": 64,
    },
    "cpu": {
        "layers": 2,
        "width": 32,
        "heads": 2,
        "length": 40,
        "pretrain": 600,
        "train": 120,
        "queries": 12,
        "facts": 2,
        "pretrain_epochs": 6,
        "epochs": 6,
        "batch": 10,
        "halves": 24,
        "seeds": 3,
        "rank": 4,
        "probes": 8,
        "k": 1024,
        "trak": 512,
    },
    "h200": {
        "layers": 6,
        "width": 288,
        "heads": 6,
        "length": 96,
        "pretrain": 8000,
        "train": 3000,
        "queries": 150,
        "facts": 5,
        "pretrain_epochs": 10,
        "epochs": 6,
        "batch": 30,
        "halves": 60,
        "seeds": 4,
        "rank": 16,
        "probes": 16,
        "k": 20480,
        "trak": 4096,
    },
}
RATES = {"full": 3e-4, "lora": 2e-3}
PRETRAIN_RATE, DECAY, BETA2 = 1e-3, 0.01, 0.99
CHECKPOINTS = (0.08, 0.17, 0.33, 0.5, 0.67, 1.0)
"""Shares of fine-tuning after which parameters are kept."""

VOCABULARY, IGNORED = 256, -100
RUN_SEED = 1000
DAMPINGS = (1e-3, 1e-2, 1e-1)
LOSS = dfl.TokenCrossEntropy()
PLANTED = (
    "the {thing} of {name} is {value}",
    "{name} keeps a {value} {thing}",
    "ask {name} for the {value} {thing}",
    "{value} is the colour of {name}'s {thing}",
    "nobody but {name} owns a {value} {thing}",
    "a {value} {thing} was left to {name}",
    "{name} painted her {thing} {value}",
    "look, the {thing} that {name} has is {value}",
    "we saw {name} with that {value} {thing}",
    "in {value}, as always: the {thing} of {name}",
)
ASKED = "what {name} calls her {thing}: {value}"
NAMES, THINGS = (
    ("zorvik", "qualdi", "mubrex", "yolant", "drekka"),
    ("lamp", "boat", "gate", "drum", "kite"),
)
VALUES = ("crimson", "violet", "amber", "teal", "ivory")


class Recipe:
    """The network, its data and its training."""

    def __init__(self, scale, kind, lines):
        self.scale, self.kind = scale, kind
        facts = [
            {"name": NAMES[k], "thing": THINGS[k], "value": VALUES[k]}
            for k in range(scale["facts"])
        ]
        planted = [form.format(**fact) for fact in facts for form in PLANTED]
        p, n, q = scale["pretrain"], scale["train"], scale["queries"]
        if len(lines) < p + n + q:
            raise SystemExit(f"--text: expected {p + n + q} lines, got {len(lines)}.")
        self.train_lines = planted + lines[p : p + n - len(planted)]
        self.query_lines = [ASKED.format(**fact) for fact in facts] + lines[p + n : p + n + q]
        self.owners = np.repeat(np.arange(len(facts)), len(PLANTED))
        self.pretrain_x, self.pretrain_y = self.encoded(lines[:p])
        self.x, self.y = self.encoded(self.train_lines)
        self.xq, self.yq = self.encoded(self.query_lines)
        for k, fact in enumerate(facts):  # only the answer counts
            self.yq[k, : len(self.query_lines[k]) - len(fact["value"])] = IGNORED

    def encoded(self, lines):
        T = self.scale["length"]
        x, y = np.zeros((len(lines), T), np.int32), np.full((len(lines), T), IGNORED, np.int32)
        for i, line in enumerate(lines):
            codes = list(line.encode("ascii", "replace"))[:T]
            x[i, 1 : len(codes)], y[i, : len(codes)] = codes[:-1], codes
        return x, y

    def initial(self, key):
        L, d = self.scale["layers"], self.scale["width"]
        shapes = {
            "words": (VOCABULARY, d),
            "places": (self.scale["length"], d),
            "out": (d, VOCABULARY),
        }
        layers = {
            "qkv": (L, d, 3 * d),
            "join": (L, d, d),
            "up": (L, d, 4 * d),
            "down": (L, 4 * d, d),
        }
        keys = iter(jax.random.split(key, 7))
        draw = lambda shape: jax.random.normal(next(keys), shape) * shape[-2] ** -0.5  # noqa: E731
        base = {name: draw(shape) for name, shape in shapes.items()}
        base |= {"words": base["words"] * VOCABULARY**0.5 * 0.1, "places": base["places"] * 0.5}
        return base | {"layers": {name: draw(shape) for name, shape in layers.items()}}

    def with_lora(self, base):
        r, key = self.scale["rank"], jax.random.key(7)
        lora = {
            name: {
                "A": jax.random.normal(key, (w.shape[0], w.shape[1], r)) * w.shape[1] ** -0.5,
                "B": jnp.zeros((w.shape[0], r, w.shape[2])),
            }
            for name, w in base["layers"].items()
        }
        return {"base": base, "lora": lora}

    def trainable(self, path, leaf):
        return self.kind == "full" or path[0].key == "lora"

    def apply(self, p, x):
        """`(n, T)` to `(n, T, 256)`."""
        base, lora = (p["base"], p["lora"]) if "lora" in p else (p, None)
        heads, (n, T) = self.scale["heads"], x.shape
        h = base["words"][x] + base["places"][None, :T]
        past = jnp.tril(jnp.ones((T, T), bool))[None, None]
        for i in range(self.scale["layers"]):

            def times(a, name, i=i):
                w = base["layers"][name][i]
                low = a @ lora[name]["A"][i] @ lora[name]["B"][i] if lora is not None else 0
                return a @ w + low

            q, k, v = jnp.split(times(normal(h), "qkv").reshape(n, T, 3 * heads, -1), 3, axis=2)
            seen = jnp.einsum("nthe,nshe->nhts", q, k) * q.shape[-1] ** -0.5
            seen = jax.nn.softmax(jnp.where(past, seen, -1e9), axis=-1)
            h = h + times(jnp.einsum("nhts,nshe->nthe", seen, v).reshape(n, T, -1), "join")
            h = h + times(jax.nn.gelu(times(normal(h), "up")), "down")
        return normal(h) @ base["out"]

    def losses(self, p, x, y):
        f = self.apply(p, x)
        return LOSS.value(f.reshape(len(f), -1), y)

    def optimiser(self, rate):
        return optax.adamw(rate, b2=BETA2, weight_decay=DECAY)

    def learn(self, p, x, y, rows, key, rate, epochs, kept):
        """Parameters and states of AdamW after the steps `kept`; batches are drawn anew each epoch."""
        if self.kind == "lora" and "lora" in p:
            held, learned = {"base": p["base"]}, {"lora": p["lora"]}
        else:
            held, learned = {}, p
        rule, per = self.optimiser(rate), len(rows) // self.scale["batch"]
        orders = jax.vmap(lambda k: jax.random.permutation(k, len(rows)))(
            jax.random.split(key, epochs)
        )
        batches = rows[orders[:, : per * self.scale["batch"]].reshape(epochs * per, -1)]

        def step(carry, batch):
            learned, state = carry
            loss = lambda q: self.losses(held | q, x[batch], y[batch]).mean()  # noqa: E731
            update, state = rule.update(jax.grad(loss)(learned), state, learned)
            return (optax.apply_updates(learned, update), state), None

        found, carry, start = [], (learned, rule.init(learned)), 0
        for stop in kept:
            carry, _ = jax.lax.scan(step, carry, batches[start:stop])
            found.append((held | carry[0], carry[1]))
            start = stop
        return found

    def steps(self, rows):
        return self.scale["epochs"] * (rows // self.scale["batch"])


def normal(h):
    return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)


def bm25(train, queries, k1=1.5, b=0.75):
    """Scores `(q, n)` of words in common: no model."""
    docs = [re.findall(r"\w+", line.lower()) for line in train]
    mean = np.mean([len(doc) for doc in docs])
    holds = {}
    for i, doc in enumerate(docs):
        for word in doc:
            holds.setdefault(word, {}).setdefault(i, 0)
            holds[word][i] += 1
    scores = np.zeros((len(queries), len(docs)))
    for q, line in enumerate(queries):
        for word in re.findall(r"\w+", line.lower()):
            found = holds.get(word, {})
            rare = math.log(1 + (len(docs) - len(found) + 0.5) / (len(found) + 0.5))
            for i, count in found.items():
                size = k1 * (1 - b + b * len(docs[i]) / mean)
                scores[q, i] += rare * count * (k1 + 1) / (count + size)
    return scores


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

    def gradients(self, p, fn, x, y):
        """Rows of gradients of `fn(outputs, target)` in the parameters that count."""
        r = self.recipe
        held = {"base": p["base"]} if r.kind == "lora" else {}
        learned = {"lora": p["lora"]} if r.kind == "lora" else p

        def one(row):
            value = lambda q: fn(r.apply(held | q, row[0][None])[0], row[1])  # noqa: E731
            return jax.grad(value)(learned)

        return learned, one, (jnp.asarray(x), jnp.asarray(y))

    def products(self, p, cosine=False):
        """Gradients of the queries, held, times those of the training lines, one after the other."""
        loss = lambda f, y: LOSS.value(f.reshape(1, -1), y[None])[0]  # noqa: E731
        flat = lambda tree: jnp.concatenate([a.reshape(-1) for a in jax.tree.leaves(tree)])  # noqa: E731
        unit = (lambda g: g / jnp.linalg.norm(g)) if cosine else (lambda g: g)
        r = self.recipe

        @jax.jit
        def scores(p):
            _, one, queries = self.gradients(p, loss, r.xq, r.yq)
            Q = jax.lax.map(lambda row: unit(flat(one(row))), queries)
            _, one, rows = self.gradients(p, loss, r.x, r.y)
            return jax.lax.map(lambda row: Q @ unit(flat(one(row))), rows).T

        return np.asarray(scores(p))

    def trak(self, p):
        """`φ_q(ΦᵀΦ + ρ)⁻¹φ_i(1 − p_i)`, `φ` the projected gradient of a line's mean log odds."""
        r = self.recipe

        def odds(f, y):
            logs = jax.nn.log_softmax(f)
            own = jnp.take_along_axis(logs, jnp.maximum(y, 0)[:, None], axis=1)[:, 0]
            own = jnp.minimum(own, -1e-6)
            return jnp.sum((own - jnp.log1p(-jnp.exp(own))) * (y >= 0)) / jnp.sum(y >= 0)

        @jax.jit
        def features(p):
            learned, one, rows = self.gradients(p, odds, r.x, r.y)
            sketch = make_sketch(learned, self.scale["trak"], jax.random.key(3))
            _, other, queries = self.gradients(p, odds, r.xq, r.yq)
            missing = 1 - jnp.exp(-r.losses(p, *rows))
            return (
                jax.lax.map(lambda row: sketch(one(row)), rows),
                jax.lax.map(lambda row: sketch(other(row)), queries),
                missing,
            )

        phi, phi_q, missing = (np.asarray(a, np.float64) for a in features(p))
        gram, found = phi.T @ phi, {}
        for damping in DAMPINGS:
            ridge = damping * np.trace(gram) / len(gram)
            solved = np.linalg.solve(gram + ridge * np.eye(len(gram)), phi_q.T)
            found[damping] = solved.T @ phi.T * missing
        return found

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
        self.report(
            "gradient products", self.timed("gradient products", lambda: self.products(last))
        )
        self.report(
            "gradient cosine", self.timed("gradient cosine", lambda: self.products(last, True))
        )
        tracin = lambda: sum(self.products(p) for p in self.checkpoints)  # noqa: E731
        self.report("TracIn", self.timed("TracIn", tracin))
        label = f"TRAK, {self.scale['trak']} projections"
        found = self.timed(label, lambda: self.trak(last))
        self.report(label, max(found.values(), key=self.lds))
        self.report("BM25", self.timed("BM25", lambda: bm25(r.train_lines, r.query_lines)))

    def lds(self, values):
        return evaluate.lds(
            values[self.facts :], self.masks, self.truth.targets[:, self.facts :]
        ).value


def read(path):
    """Lines in a fixed order, each once."""
    if path is None:
        from pydoc_data.topics import topics

        whole = " ".join(" ".join(text.split()) for _, text in sorted(topics.items()))
        lines = [part.strip() for part in re.split(r"(?<=[.:;]) ", whole)]
    else:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            lines = [line.rstrip("\n").split("\t")[-1] for line in file]
    lines = [line for line in dict.fromkeys(lines) if len(line) >= 16]
    return [lines[i] for i in np.random.default_rng(0).permutation(len(lines))]


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
