"""The transformer of `attribution_text.py`: its sizes, its text with planted facts, its training."""

import gzip
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dualfluence as dfl

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
VOCABULARY, IGNORED = 256, -100
RUN_SEED = 1000
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

    def apply(self, p, x, product=lambda a, w, name: a @ w):
        """`(n, T)` to `(n, T, 256)`; `product` makes the products with weights, each of which has a name."""
        base, lora = (p["base"], p["lora"]) if "lora" in p else (p, None)
        heads, (n, T) = self.scale["heads"], x.shape
        h = base["words"][x] + base["places"][None, :T]
        past = jnp.tril(jnp.ones((T, T), bool))[None, None]
        for i in range(self.scale["layers"]):

            def times(a, name, i=i):
                whole = product(a, base["layers"][name][i], (name, i))
                if lora is None:
                    return whole
                low = product(a, lora[name]["A"][i], (name, i, "A"))
                return whole + product(low, lora[name]["B"][i], (name, i, "B"))

            q, k, v = jnp.split(times(normal(h), "qkv").reshape(n, T, 3 * heads, -1), 3, axis=2)
            seen = jnp.einsum("nthe,nshe->nhts", q, k) * q.shape[-1] ** -0.5
            seen = jax.nn.softmax(jnp.where(past, seen, -1e9), axis=-1)
            h = h + times(jnp.einsum("nhts,nshe->nthe", seen, v).reshape(n, T, -1), "join")
            h = h + times(jax.nn.gelu(times(normal(h), "up")), "down")
        return product(normal(h), base["out"], ("out",))

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
