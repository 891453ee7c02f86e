"""Infinitely wide networks on vectors, against expectations by quadrature."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

import dualfluence as dfl
from dualfluence import infinite as inf
from dualfluence.infinite._spec import Spec

from .table import each, raises, row

SHOWN = 4
"""Points whose kernel is compared with the truth; the kernel itself is of all of them."""

erf = np.vectorize(math.erf)


def relu(x):
    return np.maximum(x, 0)


ACTIVATIONS = {
    "ABRelu": (inf.ABRelu(0.5, 1.5), lambda x: 0.5 * np.minimum(x, 0) + 1.5 * relu(x)),
    "Relu": (inf.Relu(), relu),
    "LeakyRelu": (inf.LeakyRelu(), lambda x: relu(x) + 0.01 * np.minimum(x, 0)),
    "Abs": (inf.Abs(), np.abs),
    "Sign": (inf.Sign(), np.sign),
    "Erf": (inf.Erf(), erf),
    "SigmoidLike": (inf.SigmoidLike(), lambda x: (1 + erf(x / 2.4020563531719796)) / 2),
    "Gelu": (inf.Gelu(), lambda x: x * (1 + erf(x / 2**0.5)) / 2),
    "Sin": (inf.Sin(), np.sin),
    "Cos": (inf.Cos(), np.cos),
    "Rbf": (inf.Rbf(0.3), lambda x: 2**0.5 * np.sin(0.6**0.5 * x + np.pi / 4)),
    "Exp": (inf.Exp(1.0, 0.5), lambda x: np.exp(x / 2)),
    "Gaussian": (inf.Gaussian(), lambda x: np.exp(-(x**2))),
    "Polynomial": (inf.Polynomial((1.0, 0.5, 0.2)), lambda x: 1 + 0.5 * x + 0.2 * x**2),
    "Activation": (inf.Activation(jnp.tanh), np.tanh),
}
CLASSES = "ABRelu Sign Erf Gelu Sin Exp Gaussian Polynomial Activation"
SMOOTH = "Erf Gelu Sin Exp Gaussian Polynomial"
W, B = 1.3, 0.4


@functools.cache
def grid(nodes=64, radii=100):
    """Angles between kinks, as shares of the interval, and radii of a Gaussian pair with weights."""
    t, w_t = np.polynomial.legendre.leggauss(nodes)
    r, w_r = np.polynomial.legendre.leggauss(radii)
    r, w_r = 6 * (r + 1), 6 * w_r
    return (t + 1) / 2, w_t / 2, r, w_r * r * np.exp(-(r**2) / 2)


def expectation(f, g, q1, q2, cov):
    """`E f(u)g(v)` of a Gaussian pair in polar coordinates, cut where `u` or `v` is zero."""
    angle = np.arccos(np.clip(cov / np.sqrt(q1 * q2), -1, 1))
    cuts = np.array([np.pi / 2, 3 * np.pi / 2, angle + np.pi / 2, angle + 3 * np.pi / 2])
    cuts = np.sort(np.mod(cuts, 2 * np.pi))
    cuts = np.append(cuts, cuts[0] + 2 * np.pi)
    share, w_t, r, w_r = grid()
    total = 0.0
    for low, high in itertools.pairwise(cuts):
        t = low + (high - low) * share
        u = np.sqrt(q1) * np.outer(r, np.cos(t))
        v = np.sqrt(q2) * np.outer(r, np.cos(t - angle))
        total += (high - low) * (w_r @ (f(u) * g(v)) @ w_t)
    return total / (2 * np.pi)


def slope(f):
    """Central differences, which take one side's slope at a kink."""
    step = 1e-5
    return lambda x: (f(x + step) - f(x - step)) / (2 * step)


def shallow(f, x1, x2, has_slope=True):
    """`(nngp, ntk)` of `Dense, f, Dense` for a few pairs."""
    d = x1.shape[1]
    input_cov = lambda a, b: W**2 * (a @ b) / d + B**2  # noqa: E731
    found = np.zeros((2, len(x1), len(x2)))
    for i, a in enumerate(x1):
        for j, b in enumerate(x2):
            q1, q2, cov = input_cov(a, a), input_cov(b, b), input_cov(a, b)
            nngp = W**2 * expectation(f, f, q1, q2, cov) + B**2
            df = slope(f)
            bent = expectation(df, df, q1, q2, cov) if has_slope else 0.0
            found[:, i, j] = nngp, nngp + W**2 * cov * bent
    return found


def dense(**more):
    return inf.Dense(W_std=W, b_std=B, **more)


@row("infinite.Activation", "infinite.LeakyRelu", "infinite.Relu", "infinite.Abs")
@row("infinite.ABRelu", "infinite.Sign", "infinite.Erf", "infinite.SigmoidLike", "infinite.Gelu")
@row("infinite.Sin", "infinite.Cos", "infinite.Rbf", "infinite.Exp", "infinite.Gaussian")
@row("infinite.Polynomial", *each("infinite", CLASSES, "function apply"))
def functions_of_activations(at):
    z = at.array(50, seed=51)
    for name, (layer, f) in ACTIVATIONS.items():
        at.close(layer.function(z), f(np.asarray(z, float)), what=name)
        at.close(layer.apply((), z), f(np.asarray(z, float)), what=name)


@row("infinite.serial", "infinite.Network.kernel", quick=False)
def every_activation(at):
    x, few = np.asarray(at.x, float), np.asarray(at.x, float)[:SHOWN]
    queries = np.asarray(at.xq, float)[:2]
    for name, (layer, f) in ACTIVATIONS.items():
        net = inf.serial(dense(), layer, dense())
        nngp, ntk = shallow(f, queries, few, name != "Sign")
        # Quadrature of 64 nodes gives 4 digits where the variance is large.
        scale = 1e4 if at.bits == 64 and name == "Activation" else 20
        found = net.kernel(at.xq, at.x)
        at.typed(found)
        at.close(found[:2, :SHOWN], ntk, scale, what=name)
        at.close(net.kernel(at.xq, at.x, kind="nngp")[:2, :SHOWN], nngp, scale, what=name)
        own = np.asarray(net.kernel(at.x), float)
        np.testing.assert_equal(own.shape, (len(x), len(x)))
        at.close(own, own.T, what=name)


@row(*each("infinite", "Dense Network", "kernel_block diagonal kernel")[:2], "infinite.serial")
@row("infinite.Network.kernel", "infinite.Network.kernel_block", "infinite.Network.diagonal")
@row("infinite.Network.describe", "infinite.Network.specs", "infinite.Network.bands")
@row("infinite.Network.tile_shape", "infinite.Network.pair_entries", "infinite.Network.note")
def a_network_on_vectors(at):
    net = inf.serial(dense(), inf.Relu(), dense(), inf.Erf(), dense())
    assert isinstance(net, inf.Network)
    K = np.asarray(net.kernel(at.x), float)
    at.close(net.kernel(at.x, at.x), K)
    at.close(net.kernel_block(at.x, at.x), K)
    at.close(net.diagonal(at.x), np.diagonal(K))
    both = net.kernel_block(at.xq, at.x, kind="both")
    at.close(both[0], net.kernel(at.xq, at.x, kind="nngp"))
    at.close(both[1], net.kernel(at.xq, at.x))
    values = np.linalg.eigvalsh(K)
    assert values[0] > -at.rtol * values[-1]
    spec = Spec((), at.d)
    np.testing.assert_equal(len(net.specs(spec)), 6)
    np.testing.assert_equal(net.bands((0, 0), spec), [(0, 0)] * 6)
    np.testing.assert_equal(net.pair_entries((at.n, at.d)), 1)
    (rows, columns), block = net.tile_shape((at.n, at.d), at.n, at.dtype.itemsize, 2**20, True)
    assert rows >= block
    np.testing.assert_equal(rows, columns)
    np.testing.assert_equal(net.note, "closed form")
    for text in (net.describe(), net.describe((at.d,))):
        np.testing.assert_equal(len(text.splitlines()), 6)


@row("fit", "infinite.serial", shared=True)
def a_fit_at_infinite_width(at):
    net = inf.serial(dense(), inf.Relu(), dense())
    fitted = dfl.fit(net, at.x, at.y, loss=dfl.SquaredError(), ridge=at.ridge)
    K = np.asarray(net.kernel(at.x), float)
    A = K + at.n * at.ridge * np.eye(at.n)
    Kq = np.asarray(net.kernel(at.xq, at.x), float)
    at.close(fitted.predict(at.xq), Kq @ np.linalg.solve(A, np.asarray(at.y, float)), 5)
    with raises(TypeError, "kernel without parameters"):
        fitted.params()
    if at.n > 1:
        after = fitted.edit(dfl.Remove([0])).predict(at.xq)
        rest = K[1:, 1:] + (at.n - 1) * at.ridge * np.eye(at.n - 1)
        at.close(after, Kq[:, 1:] @ np.linalg.solve(rest, np.asarray(at.y, float)[1:]), 5)


@row(
    "infinite.Network.init", "infinite.Network.apply", "infinite.Dense.init", "infinite.Dense.apply"
)
@row("infinite.Dense.out_spec", "infinite.Dense.note")
def a_finite_network_of_the_same_layers(at):
    net = inf.serial(dense(), inf.Relu(), dense())
    params = net.init(jax.random.key(0), (at.d,), width=2000, outputs=at.c)
    params = jax.tree.map(lambda a: a.astype(at.dtype), params)
    f = net.apply(params, at.xq)
    x = np.asarray(at.xq, float)
    (W1, b1), (W2, b2) = (
        (np.asarray(p["W"], float), np.asarray(p["b"], float)) for p in (params[0], params[2])
    )
    hidden = relu(W / at.d**0.5 * x @ W1 + B * b1)
    at.close(f, W / 2000**0.5 * hidden @ W2 + B * b2)
    tangent = dfl.linearize(net.apply, params).kernel(at.xq)
    wide = np.asarray(net.kernel(at.xq), float)
    for a in range(at.c):
        np.testing.assert_allclose(tangent[:, a, :, a], wide, atol=0.12 * wide.max())
    one = dense(width=7)
    own, spec = one.init(jax.random.key(0), Spec((), at.d), 3)
    np.testing.assert_equal((own["W"].shape, spec.channels), ((at.d, 7), 7))
    assert one.out_spec(Spec((), at.d)).gaussian
    np.testing.assert_equal(one.note, "closed form")


@row("infinite.residual", "infinite.add", "infinite.Identity", "infinite.Scale", "infinite.Dropout")
@row("infinite.LayerNorm")
def layers_around_layers(at):
    inner = inf.serial(dense(), inf.Relu(), dense())
    nets = {
        "inner": inner,
        "residual": inf.serial(inf.residual(inner)),
        "add": inf.serial(inf.add(inner, inf.Identity())),
        "scale": inf.serial(inner, inf.Scale(0.5)),
        "same": inf.serial(inner, inf.Identity(), inf.Dropout(0.8)),
        "norm": inf.serial(inner, inf.LayerNorm()),
    }
    blocks = lambda a, b: {k: net.kernel_block(a, b, kind="both") for k, net in nets.items()}  # noqa: E731
    found = jax.jit(blocks)(at.xq, at.x)
    nngp, ntk = (np.asarray(v, float) for v in found["inner"])
    start = np.asarray(at.xq, float) @ np.asarray(at.x, float).T / at.d
    q1, q2 = (np.asarray(inner.diagonal(x, kind="nngp"), float) for x in (at.xq, at.x))
    size = np.sqrt(q1[:, None] * q2[None])
    want = {
        "residual": (nngp + start, ntk),
        "add": (nngp + start, ntk),
        "scale": (nngp / 4, ntk / 4),
        "same": (nngp, ntk),
        "norm": (nngp / size, ntk / size),
    }
    for name, (cov, tangent) in want.items():
        at.close(found[name][0], cov, 5, what=name)
        at.close(found[name][1], tangent, 5, what=name)
    noisy = inf.serial(dense(), inf.Dropout(0.8, mode="train"), inf.Relu(), dense())
    at.close(np.diagonal(noisy.kernel(at.x)), noisy.diagonal(at.x))
    assert SMOOTH
