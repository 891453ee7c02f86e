"""Networks that `attribution_lds.py` scores, and how they are trained: pure JAX, seeds said by the caller."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

EARLY = (0.5, *(quarter / 4 for quarter in range(4, 25)))
"""Epochs of the first quarter or so, of which attribution says most: every quarter epoch."""

RECIPES = {
    "mlp": {
        "widths": (784, 128, 64, 10),
        "dropout": 0.1,
        "rate": 0.01,
        "momentum": 0.9,
        "batch": 64,
        "epochs": 50,
        "saved": (*EARLY, 7, 8, 9.5, 11, 12.5, 14, 19, 25, 35, 50),
    },
    "logistic": {
        "widths": (784, 10),
        "dropout": 0.0,
        "rate": 0.01,
        "momentum": 0.0,
        "batch": 32,
        "epochs": 20,
        "saved": (*EARLY, 7, 8, 9.5, 11, 12.5, 14, 20),
    },
    "mnist": {
        "widths": (784, 128, 64, 10),
        "dropout": 0.1,
        "rate": 0.05,
        "momentum": 0.9,
        "batch": 256,
        "epochs": 12,
        "saved": (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4.5, 7, 12),
    },
}
"""`mnist` is for all of MNIST, with the ten checkpoints that are scored."""

QUARTERS = (0.25, 0.5, 0.75)


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
    """`(params, velocity), key, indices` to the same after one pass in random order, and at its quarters."""
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

        ends, parts = [0, *(steps_at(q, batches) for q in QUARTERS), batches], []
        for start, end in itertools.pairwise(ends):
            rows = jax.tree.map(lambda a, s=start, e=end: a[s:e], packed)
            state, _ = jax.lax.scan(step, state, rows)
            parts.append(state)
        return parts[-1], parts[:-1]

    return epoch


def steps_at(epoch, batches):
    """Steps done at a whole epoch or a quarter of one, with so many batches in each."""
    return int(epoch * batches)


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
        for when, (params, _) in zip((*QUARTERS, 1), (*middle, state), strict=True):
            when += e
            if when in recipe["saved"]:
                saved[when] = jax.tree.map(np.asarray, params)
    return saved


def pick(tree, i):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[i]), tree)
