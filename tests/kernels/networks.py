"""Seeded networks for the empirical kernel: `name -> (apply_fn, params, x)`, all float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from users import ordinary


def draw(seed, *shape):
    fan = shape[0] if len(shape) < 3 else int(np.prod(shape[:-1]))
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / np.sqrt(fan))


def data(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def tokens(seed, high, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(0, high, shape))


def mlp():
    params = {"W1": draw(0, 5, 8), "b1": draw(1, 8), "W2": draw(2, 8, 3), "b2": draw(3, 3)}

    def apply(p, x):
        h = jax.nn.relu(0.7 * (x @ p["W1"]) + 0.1 * p["b1"])
        return h @ p["W2"] * 1.5 + p["b2"] * 0.2

    return apply, params, data(4, 7, 5)


def views():
    """Parameters cast, transposed, reshaped, negated and scaled on their way in."""
    params = {
        "W1": draw(0, 8, 5).astype(jnp.float64),
        "W2": draw(1, 24),
        "W3": draw(2, 2, 3, 4),
        "s": jnp.asarray(1.3),
    }

    def apply(p, x):
        h = jnp.tanh(x @ (0.5 * p["W1"].T))
        h = jnp.tanh(jnp.einsum("ni,io->no", h, -p["W2"].reshape(8, 3) / 3.0))
        return jnp.einsum("nc,bcd->nbd", h, p["W3"] * p["s"]).reshape(x.shape[0], -1)

    return apply, params, data(4, 6, 5)


def layouts():
    """`dot_general` with the weight on the left, batched over heads, and over positions."""
    params = {"L": draw(0, 6, 5), "H": draw(1, 2, 6, 3), "P": draw(2, 3, 4), "O": draw(3, 8, 2)}

    def apply(p, x):
        h = jnp.tanh(jnp.einsum("oi,nti->nto", p["L"], x))
        h = jnp.tanh(jnp.einsum("hio,nti->nhto", p["H"], h))
        h = jnp.tanh(h @ p["P"])
        return h.mean(2).reshape(x.shape[0], -1) @ p["O"]

    return apply, params, data(4, 5, 7, 5)


def _conv(x, w, strides, padding, **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=numbers, **options
    )


def cnn():
    params = {
        "C1": draw(0, 3, 3, 2, 6),
        "c1": draw(1, 6),
        "C2": draw(2, 3, 2, 3, 8),
        "C3": draw(3, 2, 2, 8, 4),
        "C4": draw(4, 3, 1, 1, 8),
        "W": draw(5, 8, 3),
        "b": draw(6, 3),
    }

    def apply(p, x):
        h = jax.nn.relu(_conv(x, p["C1"], (2, 1), "SAME") + p["c1"])
        h = jax.nn.relu(_conv(h, p["C2"], (1, 2), [(2, 0), (1, 1)], feature_group_count=2))
        h = jnp.tanh(_conv(h, p["C3"], (1, 1), "VALID", rhs_dilation=(2, 1)))
        padding = [(1, 1), (0, 1)]
        h = _conv(h, p["C4"], (1, 1), padding, feature_group_count=4, lhs_dilation=(1, 2))
        return jnp.tanh(h).mean((1, 2)) @ p["W"] + p["b"]

    return apply, params, data(7, 5, 9, 7, 2)


def _normalise(h, axes, eps=1e-5):
    mean = h.mean(axes, keepdims=True)
    return (h - mean) / jnp.sqrt(((h - mean) ** 2).mean(axes, keepdims=True) + eps)


def residual():
    """Residual blocks with a layer norm and a group norm (both per point)."""
    params = {
        "C0": draw(0, 3, 3, 3, 8),
        "block": {"C": draw(1, 3, 3, 8, 8), "scale": 1 + draw(2, 8), "bias": draw(3, 8)},
        "group": {"C": draw(4, 1, 1, 8, 8), "scale": 1 + draw(5, 8), "bias": draw(6, 8)},
        "W": draw(7, 8, 3),
    }

    def apply(p, x):
        h = _conv(x, p["C0"], (1, 1), "SAME")
        b = p["block"]
        h = h + _conv(
            jax.nn.gelu(_normalise(h, -1) * b["scale"] + b["bias"]), b["C"], (1, 1), "SAME"
        )
        g = p["group"]
        split = _normalise(h.reshape(*h.shape[:3], 2, 4), (1, 2, 4)).reshape(h.shape)
        h = h + _conv(jax.nn.silu(split * g["scale"] + g["bias"]), g["C"], (1, 1), "SAME")
        return h.mean((1, 2)) @ p["W"]

    return apply, params, data(8, 5, 6, 5, 3)


def attention():
    """Token embedding, one attention block, read-out by the same embedding."""
    params = {
        "E": draw(0, 11, 6),
        "pos": draw(1, 4, 6),
        "qkv": draw(2, 6, 18),
        "o": draw(3, 6, 6),
        "gamma": 1 + draw(4, 6),
    }

    def apply(p, x):
        h = p["E"][x] + p["pos"]
        q, k, v = jnp.split((_normalise(h, -1) * p["gamma"]) @ p["qkv"], 3, axis=-1)
        weights = jax.nn.softmax(jnp.einsum("nsd,ntd->nst", q, k) / jnp.sqrt(6.0), axis=-1)
        h = h + jnp.einsum("nst,ntd->nsd", weights, v) @ p["o"]
        return (h.mean(1) @ p["E"].T)[:, :5]

    return apply, params, tokens(5, 11, 6, 4)


def lookup():
    """An embedding alone, with repeated tokens, and a table used twice."""
    params = {"E": draw(0, 50, 9), "T": draw(1, 50, 9), "W": draw(2, 9, 3)}

    def apply(p, x):
        h = jnp.tanh(p["E"][x].mean(1)) + jnp.sin(p["T"][x[:, 0]]) * jnp.cos(p["T"][x[:, 1]])
        return h @ p["W"]

    return apply, params, tokens(3, 50, 7, 3)


def rnn_scan():
    params = {"U": draw(0, 6, 6), "V": draw(1, 3, 6), "b": draw(2, 6), "O": draw(3, 6, 2)}

    def apply(p, x):
        def step(h, x_t):
            return jnp.tanh(h @ p["U"] + x_t @ p["V"] + p["b"]), None

        h, _ = jax.lax.scan(step, jnp.zeros((x.shape[0], 6)), jnp.swapaxes(x, 0, 1))
        return h @ p["O"]

    return apply, params, data(4, 5, 4, 3)


def rnn_unrolled():
    _, params, x = rnn_scan()

    def apply(p, x):
        h = jnp.zeros((x.shape[0], 6))
        for t in range(4):
            h = jnp.tanh(h @ p["U"] + x[:, t] @ p["V"] + p["b"])
        return h @ p["O"]

    return apply, params, x


def siamese():
    """One weight used by two branches and, transposed, by the decoder."""
    params = {"W": draw(0, 5, 6), "O": draw(1, 6, 4), "D": draw(2, 5, 3)}

    def apply(p, x):
        h = jnp.tanh(x @ p["W"]) * jnp.tanh((x**2) @ p["W"])
        return jnp.concatenate([h @ p["O"], jnp.tanh(h @ p["W"].T) @ p["D"]], axis=1)

    return apply, params, data(3, 6, 5)


def nonlinear():
    """Weight norm, a parameter squared, sliced, under cond, and one under a custom rule."""

    @jax.custom_vjp
    def clipped(w, h):
        return h @ w

    def clipped_fwd(w, h):
        return h @ w, (w, h)

    def clipped_bwd(saved, g):
        w, h = saved
        return 0.5 * (h.T @ g), g @ w.T  # on purpose not the derivative: the rule must win

    clipped.defvjp(clipped_fwd, clipped_bwd)
    params = {
        "v": draw(0, 5, 6),
        "g": draw(1, 6),
        "q": draw(2, 6, 6),
        "S": draw(3, 2, 6, 6),
        "k": draw(4, 6),
        "r": draw(5, 6, 4),
    }

    def apply(p, x):
        h = jnp.tanh(x @ (p["g"] * p["v"] / jnp.linalg.norm(p["v"], axis=0)))
        h = jnp.tanh(h @ (p["q"] ** 2))
        h = jnp.tanh(jnp.tanh(h @ p["S"][0]) @ p["S"][1])
        h = h + jax.lax.cond(jnp.sum(p["q"]) > 0, jnp.sin, jnp.cos, p["k"])
        return clipped(p["r"], h)

    return apply, params, data(6, 5, 5)


def nested():
    """Layers under jit, remat and a custom activation."""

    @jax.custom_jvp
    def act(x):
        return jnp.maximum(x, 0)

    @act.defjvp
    def act_jvp(primals, tangents):
        return act(*primals), tangents[0] * (primals[0] > 0)

    params = [{"W": draw(k, 6, 6), "b": draw(10 + k, 6)} for k in range(3)]

    @jax.jit
    def layer(p, h):
        return act(h @ p["W"] + p["b"])

    def apply(p, x):
        h = layer(p[0], x)
        h = jax.checkpoint(layer)(p[1], h)
        return h @ p[2]["W"] + p[2]["b"]

    return apply, params, jnp.abs(data(4, 6, 6))


def integers():
    """Integer, boolean, unused and non-array leaves beside the weights."""
    params = {
        "W": draw(0, 5, 3),
        "order": jnp.asarray([4, 2, 0, 1, 3]),
        "mask": jnp.asarray([True, False, True]),
        "unused": draw(1, 4),
        "name": "net",
        "depth": 2,
    }

    def apply(p, x):
        assert p["name"] == "net"
        return jnp.where(p["mask"], jnp.tanh(x[:, p["order"]] @ p["W"]), 1.0)

    return apply, params, data(2, 6, 5)


def _made(maker):
    apply, params, x = maker()
    return ordinary(apply), params, x


NETWORKS = {
    maker.__name__: functools.partial(_made, maker)
    for maker in (
        mlp,
        views,
        layouts,
        cnn,
        residual,
        attention,
        lookup,
        rnn_scan,
        rnn_unrolled,
        siamese,
        nonlinear,
        nested,
        integers,
    )
}
