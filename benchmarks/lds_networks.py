"""Recipes `adamw` and `cnn` of `attribution_lds.py`: data, networks, training with a weight for each point.

Training is a function of a key and of weights of the points. The key decides the first parameters, the
batches of every step and the dropout, for all points; a point of weight zero takes no part in its batches.
So leaving points out changes nothing else, and the outcome has a derivative in the weights.
"""

import itertools
import math
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from lds_recipes import apply as mlp_apply
from lds_recipes import dropped, init

import dualfluence as dfl
from dualfluence.datasets._cifar10 import parse_records, read_files

RECIPES = {
    "adamw": {
        "data": "mnist",
        "widths": (784, 128, 64, 10),
        "dropout": 0.1,
        "optimiser": "adamw",
        "rate": 1e-3,
        "decay": 0.01,
        "batch": 128,
        "epochs": 20,
    },
    "cnn": {
        "data": "cifar10",
        "channels": (16, 32, 64),
        "optimiser": "sgd",
        "rate": 0.05,
        "momentum": 0.9,
        "batch": 100,
        "epochs": 15,
    },
}
"""The rate falls to zero along a half cosine. Without half of the points, batches lose half of theirs."""

SMALLER = {
    "adamw": {
        "small": {"widths": (784, 16, 10), "dropout": 0.0, "batch": 50, "epochs": 15},
        "smoke": {"widths": (784, 6, 10), "batch": 20, "epochs": 3},
    },
    "cnn": {
        "small": {"channels": (8, 16), "batch": 50, "epochs": 15},
        "smoke": {"channels": (2, 3), "batch": 20, "epochs": 3},
    },
}

SCALES = {
    "adamw": {
        "full": {
            "points": 5000, "queries": 500, "subsets": 100, "choosing": 50, "seeds": 10, "runs": 5,
            "halves": 10, "datamodel": (1000, 4000, 12000), "at_once": 500, "replayed": 100,
        },
        "small": {
            "points": 500, "queries": 100, "subsets": 100, "choosing": 50, "seeds": 10, "runs": 3,
            "halves": 10, "datamodel": (500, 2000, 4000), "at_once": 50, "replayed": 10,
        },
    },
    "cnn": {
        "full": {
            "points": 3000, "queries": 300, "subsets": 100, "choosing": 50, "seeds": 8, "runs": 3,
            "halves": 10, "datamodel": (1000, 4000), "at_once": 250, "replayed": 25,
        },
        "small": {
            "points": 300, "queries": 60, "subsets": 60, "choosing": 30, "seeds": 6, "runs": 3,
            "halves": 5, "datamodel": (250, 1000), "at_once": 10, "replayed": 10,
        },
    },
}  # fmt: skip
"""`at_once` models are trained together, and `replayed` queries go back through training together."""

SMOKE = {
    "points": 50, "queries": 4, "subsets": 8, "choosing": 6, "seeds": 2, "runs": 2,
    "halves": 2, "datamodel": (20, 40), "at_once": 8, "replayed": 2,
}  # fmt: skip

SHARES = (0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.75, 1.0)
"""Parts of training after which a trajectory is read: most of them early, as `Trajectory` advises."""

SEGMENTS, PER_SEGMENT = 3, 2
"""Of SOURCE, as in Bae et al."""

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
ADAM_ROOT = 1e-16
"""`eps_root` of Adam. Without it the derivative of the root is infinite where a moment is zero."""

NPZ = ("x_train", "y_train", "x_test", "y_test")


def recipe_at(name, scale):
    """The recipe and its sizes at one of the scales `full`, `small` and `smoke`."""
    sizes = SMOKE if scale == "smoke" else SCALES[name][scale]
    return RECIPES[name] | SMALLER[name].get(scale, {}), sizes


def load(recipe, scale, source, classes=None):
    """Training and test arrays, labels from 0 up, and words on where they are from.

    `source` is a folder; for CIFAR-10 also an .npz file with the arrays `x_train`, `y_train`, `x_test` and
    `y_test`, images `(n, 32, 32, 3)` as bytes or in [0, 1]. Without it a smoke test of `cnn` has noise.
    """
    if recipe["data"] == "mnist":
        small = scale != "full" and source is None
        found = dfl.datasets.load("mnist-small" if small else "mnist", data_dir=source)
        x, xq = ((a.reshape(len(a), -1) - 0.1307) / 0.3081 for a in (found.x_train, found.x_test))
        return (x, found.y_train, xq, found.y_test), found.origin
    if source is None and scale == "smoke":
        rng = np.random.default_rng(0)
        images, labels = rng.random((200, 32, 32, 3), np.float32), rng.integers(0, 2, 200)
        images = images * (0.5 + 0.5 * labels[:, None, None, None])
        arrays, origin = (images[:100], labels[:100], images[100:], labels[100:]), "noise"
    elif source is not None and Path(source).suffix == ".npz":
        arrays, origin = read_npz(Path(source)), Path(source).name
    else:
        arrays, origin = read_batches(source), "CIFAR-10, binary records"
    x, y, xq, yq = arrays
    known = np.intersect1d(y, yq)
    wanted = known if classes is None else np.unique(classes)
    if absent := sorted(set(wanted.tolist()) - set(known.tolist())):
        raise SystemExit(f"--classes: {origin} has images of {known.tolist()}, none of {absent}.")
    keep, keep_q = np.isin(y, wanted), np.isin(yq, wanted)
    scaled = lambda a: (a - np.asarray(CIFAR_MEAN)) / np.asarray(CIFAR_STD)  # noqa: E731
    labels = lambda a: np.searchsorted(wanted, a)  # noqa: E731
    chosen = scaled(x[keep]), labels(y[keep]), scaled(xq[keep_q]), labels(yq[keep_q])
    return chosen, f"{origin}, classes {wanted.tolist()}"


def read_batches(folder):
    """All images of the binary files, whichever classes they hold."""
    parts = [parse_records(content, where) for where, content in read_files(folder, True)]
    pixels = [x.astype(np.float32) / 255 for x, _ in parts]
    labels = [y.astype(np.int32) for _, y in parts]
    return np.concatenate(pixels[:-1]), np.concatenate(labels[:-1]), pixels[-1], labels[-1]


def read_npz(path):
    with np.load(path, allow_pickle=False) as file:
        if missing := [name for name in NPZ if name not in file]:
            raise SystemExit(
                f"{path.name}: expected the arrays {', '.join(NPZ)}, {', '.join(missing)} missing."
            )
        x, y, xq, yq = (file[name] for name in NPZ)
    for name, images, labels in (("train", x, y), ("test", xq, yq)):
        if images.shape[1:] != (32, 32, 3) or labels.shape != images.shape[:1]:
            raise SystemExit(
                f"{path.name}: expected x_{name} of shape (n, 32, 32, 3) and y_{name} of shape (n,), got "
                f"{images.shape} and {labels.shape}."
            )
    x, xq = (a.astype(np.float32) / (255 if a.dtype == np.uint8 else 1) for a in (x, xq))
    return x, y.astype(np.int32), xq, yq.astype(np.int32)


def cnn_init(key, channels, num_classes, dtype):
    """Layers of 3x3 convolutions with stride 2, then the mean over places and a dense layer."""
    widths = [9 * a for a in (3, *channels[:-1])]
    layers = []
    shapes = [*zip(widths, channels, strict=True), (channels[-1], num_classes)]
    for k, (a, b) in zip(jax.random.split(key, len(shapes)), shapes, strict=True):
        bound = (3 / a) ** 0.5
        w = jax.random.uniform(k, (a, b), dtype, minval=-bound, maxval=bound)
        layers.append({"w": w, "b": jnp.zeros(b, dtype)})
    return layers


def patches(x):
    """The 3x3 neighbourhoods of every second place, with a border of zeros: `(n, H/2, W/2, 9·C)`.

    A convolution is one product with them, which many models with weights of their own share well.
    """
    height, width = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifted = [x[:, i : i + height : 2, j : j + width : 2] for i in range(3) for j in range(3)]
    return jnp.concatenate(shifted, axis=-1)


def cnn_apply(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(patches(x) @ layer["w"] + layer["b"])
    return x.mean(axis=(1, 2)) @ params[-1]["w"] + params[-1]["b"]


def exact_losses(f, y):
    """Cross-entropy. For a sure query it is far below the rounding of outputs: no difference of those."""
    ahead = f - jnp.take_along_axis(f, y[:, None], 1)
    others = jnp.where(jnp.arange(f.shape[1]) == y[:, None], -jnp.inf, ahead)
    return jax.nn.softplus(jax.nn.logsumexp(others, axis=1))


class Training:
    """One recipe on one training set."""

    def __init__(self, recipe, x, y, num_classes=10):
        self.recipe, self.x, self.y = recipe, x, y
        self.num_classes = num_classes
        self.per_epoch = -(-x.shape[0] // recipe["batch"])
        self.total = recipe["epochs"] * self.per_epoch
        self.schedule = optax.cosine_decay_schedule(recipe["rate"], self.total)
        self.apply = mlp_apply if "widths" in recipe else cnn_apply

    @property
    def rule(self):
        if self.recipe["optimiser"] == "adamw":
            decay = self.recipe["decay"]
            return optax.adamw(self.schedule, weight_decay=decay, eps_root=ADAM_ROOT)
        return optax.sgd(self.schedule, momentum=self.recipe["momentum"])

    def first(self, key):
        """Parameters before the first step."""
        if "widths" in self.recipe:
            params = init(key, self.recipe["widths"])
            return jax.tree.map(lambda a: a.astype(self.x.dtype), params)
        return cnn_init(key, self.recipe["channels"], self.num_classes, self.x.dtype)

    def learn(self, key, weights, again=False):
        """Parameters at the end.

        With `again` a derivative runs parts of training a second time instead of holding every step.
        """
        carry, batches = self._begin(key)
        step = partial(self._step, weights)
        if not again:
            return jax.lax.scan(step, carry, batches)[0][0]
        each = math.isqrt(self.total)
        whole = self.total // each * each
        packed = jax.tree.map(lambda a: a[:whole].reshape(-1, each, *a.shape[1:]), batches)
        inner = jax.checkpoint(lambda c, part: (jax.lax.scan(step, c, part)[0], None))
        carry = jax.lax.scan(inner, carry, packed)[0]
        rest = jax.tree.map(lambda a: a[whole:], batches)
        return jax.lax.scan(step, carry, rest)[0][0]

    def checkpoints(self, key, stops):
        """Parameters and states of the optimiser after these steps of training on all points."""
        carry, batches = self._begin(key)
        found, last = {}, 0
        for stop in stops:
            carry, last = self._advance(carry, batches, last, stop), stop
            found[stop] = carry
        return found

    @partial(jax.jit, static_argnums=0)
    def _begin(self, key):
        start, order, masks = jax.random.split(key, 3)
        params = self.first(start)
        batches = (*self.batches(order), jax.random.split(masks, self.total))
        return (params, self.rule.init(params)), batches

    @partial(jax.jit, static_argnums=0)
    def _advance(self, carry, batches, start, stop):
        weights = jnp.ones(self.x.shape[0], self.x.dtype)

        def step(i, carry):
            return self._step(weights, carry, jax.tree.map(lambda a: a[i], batches))[0]

        return jax.lax.fori_loop(start, stop, step, carry)

    def batches(self, key):
        """Rows of every step and whether each counts: the last batch of an epoch may be short."""
        n, size = self.x.shape[0], self.recipe["batch"]
        keys = jax.random.split(key, self.recipe["epochs"])
        orders = jax.vmap(lambda k: jax.random.permutation(k, n))(keys)
        orders = jnp.pad(orders, ((0, 0), (0, self.per_epoch * size - n)))
        counts = (jnp.arange(self.per_epoch * size) < n).astype(self.x.dtype)
        counts = jnp.broadcast_to(counts, orders.shape)
        return orders.reshape(self.total, size), counts.reshape(self.total, size)

    def _step(self, weights, carry, batch):
        rows, counts, key = batch
        w = counts * weights[rows]
        total = jnp.sum(w)

        def loss(params):
            f = self._noisy(params, self.x[rows], key)
            each = jax.nn.logsumexp(f, axis=1)
            each -= jnp.take_along_axis(f, self.y[rows][:, None], 1)[:, 0]
            return jnp.sum(w * each) / jnp.where(total > 0, total, 1)

        params, state = carry
        update, state = self.rule.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, update), state), None

    def _noisy(self, params, x, key):
        if "widths" in self.recipe:
            return dropped(params, x, key, self.recipe["dropout"])
        return self.apply(params, x)

    def on_rows(self, key, rows):
        """Parameters trained on these points alone."""
        weights = jnp.zeros(self.x.shape[0], self.x.dtype).at[rows].set(1)
        return self.learn(key, weights)

    def stops(self, shares):
        return sorted({max(1, round(share * self.total)) for share in shares})

    def record(self, states, stops):
        """What `Trajectory` needs of the optimiser."""
        if self.recipe["optimiser"] == "adamw":
            return dfl.adapters.adam_record(
                [s for _, s in states],
                states[0][0],
                learning_rate=self.schedule,
                weight_decay=self.recipe["decay"],
            )
        return dfl.adapters.sgd_record(self.schedule, stops, momentum=self.recipe["momentum"])

    def time(self, start, stop):
        """The sum of learning rates from one step to another, over one minus the momentum."""
        rates = [float(self.schedule(step)) for step in range(start, stop)]
        return sum(rates) / (1 - self.recipe.get("momentum", 0.0))


def segment_stops(total):
    """Ends of the segments of SOURCE, and the steps whose checkpoints stand for each."""
    ends = [round(total * k / SEGMENTS) for k in range(SEGMENTS + 1)]
    return [
        (a, b, sorted({max(1, a + round((b - a) * j / PER_SEGMENT)) for j in (1, 2)}))
        for a, b in itertools.pairwise(ends)
    ]
