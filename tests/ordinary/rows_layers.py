"""Layers one at a time, and networks on images against covariances of all pixels, written out."""

import jax
import jax.numpy as jnp
import numpy as np

from dualfluence import infinite as inf
from dualfluence.infinite._spec import Spec
from dualfluence.infinite._states import cross_vectors, images, vectors_with_themselves

from .rows_infinite import ACTIVATIONS, CLASSES, SHOWN, SMOOTH, B, W, dense, shallow
from .table import each, raises, row

SIDE, CHANNELS = 4, 2
PIXELS = SIDE * SIDE
IMAGES = {
    "Flatten": (inf.Conv((3, 3), W_std=W, b_std=B), inf.Relu(), inf.Flatten(), dense()),
    "AvgPool": (inf.Conv(), inf.Relu(), inf.AvgPool(), inf.Conv(), inf.Flatten(), dense()),
    "SumPool": (inf.Conv(), inf.Relu(), inf.SumPool(), inf.Flatten(), dense()),
    "GlobalAvgPool": (inf.Conv(W_std=W, b_std=B), inf.Relu(), inf.GlobalAvgPool(), dense()),
    "GlobalSumPool": (inf.Conv(), inf.Relu(), inf.GlobalSumPool(), dense()),
    "GlobalSelfAttention": (
        inf.Conv(), inf.Relu(), inf.GlobalSelfAttention(), inf.Flatten(), dense(),
    ),
}  # fmt: skip


def pictures(at, n, seed):
    return at.array(n, SIDE, SIDE, CHANNELS, seed=seed)


def all_pixels(layers, x):
    """`(nngp, ntk)`, `(N, N)`, with the covariance of every two pixels of every two images."""
    N, flat = len(x), np.asarray(x, float).reshape(len(x), -1, CHANNELS)
    K = np.einsum("ipc,jqc->ijpq", flat, flat) / CHANNELS
    T = np.zeros_like(K)
    for layer in layers:
        kind = type(layer).__name__
        if kind == "Conv":
            shifts = moves(round(K.shape[2] ** 0.5))
            bias = (layer.b_std or 0.0) ** 2
            K = layer.W_std**2 * np.mean([m @ K @ m.T for m in shifts], axis=0) + bias
            T = layer.W_std**2 * np.mean([m @ T @ m.T for m in shifts], axis=0) + K
        elif kind == "ABRelu":
            q = np.einsum("iipp->ip", K)
            s = np.sqrt(q[:, None, :, None] * q[None, :, None, :])
            angle = np.arccos(np.clip(K / s, -1, 1))
            T = T * (np.pi - angle) / (2 * np.pi)
            K = s * (np.sin(angle) + (np.pi - angle) * np.cos(angle)) / (2 * np.pi)
        elif kind in ("AvgPool", "SumPool"):
            P = pool(round(K.shape[2] ** 0.5), kind == "AvgPool")
            K, T = P @ K @ P.T, P @ T @ P.T
        elif kind == "Flatten":
            K, T = (np.einsum("ijpp->ij", M)[..., None, None] / M.shape[2] for M in (K, T))
        elif kind.startswith("Global") and "Pool" in kind:
            read = np.mean if "Avg" in kind else np.sum
            K, T = (read(M, axis=(2, 3))[..., None, None] for M in (K, T))
        elif kind == "GlobalSelfAttention":
            own = np.einsum("iipq->ipq", K)
            G = np.exp(own - own.max(2, keepdims=True))
            G = G / G.sum(2, keepdims=True)
            mix = lambda M, G=G: np.einsum("ipr,ijrs,jqs->ijpq", G, M, G)  # noqa: E731
            K, T = mix(K), mix(T) + 2 * mix(K)
        else:
            K = layer.W_std**2 * K + (layer.b_std or 0.0) ** 2
            T = layer.W_std**2 * T + K
    return K.reshape(N, N), T.reshape(N, N)


def moves(side):
    """Nine shifts of an image by a pixel, zeros from outside."""
    found = []
    for a in (-1, 0, 1):
        for b in (-1, 0, 1):
            m = np.zeros((side, side, side, side))
            for i in range(side):
                for j in range(side):
                    if 0 <= i + a < side and 0 <= j + b < side:
                        m[i, j, i + a, j + b] = 1
            found.append(m.reshape(side**2, side**2))
    return found


def pool(side, mean):
    half = side // 2
    P = np.zeros((half, half, side, side))
    for i in range(half):
        for j in range(half):
            P[i, j, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2] = 0.25 if mean else 1.0
    return P.reshape(half**2, side**2)


@row(*each("infinite", "Conv AvgPool SumPool Flatten GlobalAvgPool GlobalSumPool", ""))
@row("infinite.GlobalSelfAttention", "infinite.Network.kernel", "infinite.Network.diagonal")
@row("infinite.Network.describe")
def networks_on_images(at):
    images_of_a_network(at, "GlobalAvgPool")


@row(
    "infinite.Network.kernel", "infinite.Network.diagonal", "infinite.Network.describe", quick=False
)
def all_networks_on_images(at):
    images_of_a_network(at, *IMAGES)


def images_of_a_network(at, *names):
    x1, x2 = pictures(at, 2, 61), pictures(at, at.n, 62)
    m = min(SHOWN, at.n)
    for name in names:
        layers = IMAGES[name]
        net = inf.serial(*layers)
        nngp, ntk = all_pixels(layers, jnp.concatenate([x1, x2[:m]]))
        found = net.kernel(x1, x2)
        at.typed(found)
        at.close(found[:, :m], ntk[:2, 2:], 5, what=name)
        at.close(net.kernel(x1, x2, kind="nngp")[:, :m], nngp[:2, 2:], 5, what=name)
        own = net.kernel(x2)
        at.close(own[:m, :m], ntk[2:, 2:], 5, what=name)
        at.close(net.diagonal(x2), np.diagonal(own), what=name)
        assert len(net.describe((SIDE, SIDE, CHANNELS)).splitlines()) == len(layers) + 1


def one_layer(layer, states, again=True):
    """Both passes of a layer; `record` and `pairs` must say the same as `self_pass`."""
    first, second, pair = states
    after = layer.out_spec(pair.spec)
    assert layer.need(None, pair.spec) in (None, (0, 0))
    assert isinstance(layer.note, str)
    (first1, rec1), (second1, rec2) = (layer.self_pass(s, band(s)) for s in (first, second))
    same = ()
    if again:
        alone = layer.pairs(first, rec1, rec1, band(first))
        same = ((layer.record(first, band(first)), rec1), (variance(alone), variance(first1)))
    turned = jax.tree.map(lambda a: jnp.swapaxes(a, -1, -2), rec2)
    crossed = layer.cross_pass(pair, rec1, turned, band(pair))
    np.testing.assert_equal(
        (crossed.spec.shape, crossed.spec.gaussian), (after.shape, after.gaussian)
    )
    return (first1, second1, crossed), same


def read(states):
    """The covariance and the NTK at the end."""
    return states[2].joint.cov, states[2].ntk


def band(state):
    return None if state.spec.is_image else (0, 0)


def variance(state):
    return state.q1 if state.spec.is_image else state.joint.q1


def start(x1, x2, spec):
    if not spec.is_image:
        q1, q2 = (jnp.sum(x * x, axis=1, keepdims=True) / spec.channels for x in (x1, x2))
        selves = (vectors_with_themselves(q, spec) for q in (q1, q2))
        return (*selves, cross_vectors(x1, x2, q1, q2.T, spec))
    pixels = [jnp.moveaxis(x, (3, 0), (0, 3)) for x in (x1, x2)]
    q = [jnp.sum(p * p, axis=0) / spec.channels for p in pixels]
    one = [
        images(p[..., None], p[..., None], v[..., None], v[..., None], None, spec, True)
        for p, v in zip(pixels, q, strict=True)
    ]
    a, b = pixels[0][..., :, None], pixels[1][..., None, :]
    return (*one, images(a, b, q[0][..., :, None], q[1][..., None, :], None, spec, False))


PASSES = "out_spec need record pairs self_pass cross_pass note"


AROUND = (inf.Identity(), inf.Scale(0.7), inf.Dropout(0.9), inf.LayerNorm())


@row(*each("infinite", f"{CLASSES} Dense Identity Scale Dropout LayerNorm Network", PASSES))
@row(*each("infinite", CLASSES, "dual variance"), *each("infinite", SMOOTH, "moments lipschitz"))
def layers_on_vectors(at):
    spec, kinds = Spec((), at.d), {name: layer for name, (layer, _) in ACTIVATIONS.items()}
    x2 = at.x[:SHOWN]

    @jax.jit
    def run(x1, x2):
        before, same = one_layer(dense(), start(x1, x2, spec))
        checks, ends = [same], {}
        for name, layer in kinds.items():
            states, same = one_layer(layer, before)
            joint = before[2].joint
            q1, q2 = layer.variance(joint.q1), layer.variance(joint.q2)
            after, slope = layer.dual(joint, q1, q2)
            pairs = [(after.cov, states[2].joint.cov), (before[2].ntk * slope, states[2].ntk)]
            if hasattr(layer, "moments"):
                assert layer.lipschitz is None or layer.lipschitz > 0
                pairs.append((layer.moments(joint), (after.cov, slope)))
            checks += [same, pairs]
            states, _ = one_layer(dense(), states, again=False)
            ends[name] = read(states)
            if name == "Relu":
                for layer in AROUND:
                    around, same = one_layer(layer, states)
                    checks.append(same)
                    ends[type(layer).__name__] = read(around)
        inner, same = one_layer(inf.serial(dense(), inf.Erf()), start(x1, x2, spec))
        ends["Network"] = read(one_layer(dense(), inner, again=False)[0])
        return checks, ends

    checks, ends = run(at.xq[:2], x2)
    for one, other in (pair for check in checks for pair in check):
        jax.tree.map(lambda a, b: at.close(a, np.broadcast_to(b, a.shape)), one, other)
    few = np.asarray(at.xq, float)[:2], np.asarray(x2, float)
    # Quadrature of 64 nodes gives 4 digits where the variance is large.
    for name, (_, f) in ACTIVATIONS.items():
        nngp, ntk = shallow(f, *few, name != "Sign")
        scale = 1e4 if at.bits == 64 and name == "Activation" else 20
        at.close(ends[name][0], nngp, scale, what=name)
        at.close(ends[name][1], ntk, scale, what=name)
    cov, ntk = (np.asarray(v, float) for v in ends["Relu"])
    own = [shallow(ACTIVATIONS["Relu"][1], x, x)[0] for x in few]
    size = np.sqrt(np.outer(np.diagonal(own[0]), np.diagonal(own[1])))
    for name, change in (
        ("Identity", 1.0),
        ("Scale", 0.49),
        ("Dropout", 1.0),
        ("LayerNorm", 1 / size),
    ):
        at.close(ends[name][0], cov * change, 20, what=name)
        at.close(ends[name][1], ntk * change, 20, what=name)
    jax.tree.map(at.close, ends["Network"], ends["Erf"])


POOLS = "Conv AvgPool SumPool Flatten GlobalAvgPool GlobalSumPool GlobalSelfAttention"


@row(*each("infinite", POOLS, PASSES))
def layers_on_images(at):
    x1, x2 = pictures(at, 2, 63), pictures(at, min(at.n, 5), 64)
    spec = Spec((SIDE, SIDE), CHANNELS)

    @jax.jit
    def run(x1, x2):
        checks, ends, known = [], {}, {(): start(x1, x2, spec)}
        for name, layers in IMAGES.items():
            for k in range(1, len(layers) + 1):
                if layers[:k] not in known:  # networks begin alike
                    known[layers[:k]], same = one_layer(layers[k - 1], known[layers[: k - 1]])
                    checks.append(same)
            ends[name] = read(known[layers])
        return checks, ends

    checks, ends = run(x1, x2)
    for one, other in (pair for check in checks for pair in check):
        jax.tree.map(at.close, one, other)
    for name, layers in IMAGES.items():
        nngp, ntk = all_pixels(layers, jnp.concatenate([x1, x2]))
        at.close(ends[name][0], nngp[:2, 2:], 5, what=name)
        at.close(ends[name][1], ntk[:2, 2:], 5, what=name)


@row(*each("infinite", POOLS, "init apply"), *each("infinite", CLASSES, "init"))
@row(*each("infinite", "Identity Scale Dropout LayerNorm", "init apply"))
def finite_layers(at):
    x = pictures(at, at.n, 65)
    spec = Spec((SIDE, SIDE), CHANNELS)
    made = {
        name: layer
        for layers in IMAGES.values()
        for layer in layers
        for name in [type(layer).__name__]
    }
    for name in POOLS.split():
        if name == "GlobalSelfAttention":
            with raises(NotImplementedError, "finite network is not available"):
                made[name].init(jax.random.key(0), spec, 6)
            with raises(NotImplementedError, "finite network is not available"):
                made[name].apply((), x)
            continue
        params, after = made[name].init(jax.random.key(0), spec, 6)
        params = jax.tree.map(lambda a: a.astype(at.dtype), params)
        out = made[name].apply(params, x)
        at.typed(out)
        shape = (at.n, *after.shape, after.channels) if after.channels else out.shape
        np.testing.assert_equal(out.shape, shape)
    values = np.asarray(x, float)
    grouped = values.reshape(at.n, 2, 2, 2, 2, CHANNELS)
    at.close(inf.AvgPool().apply((), x), grouped.mean(axis=(2, 4)))
    at.close(inf.SumPool().apply((), x), grouped.sum(axis=(2, 4)))
    at.close(inf.GlobalAvgPool().apply((), x), values.mean(axis=(1, 2)))
    at.close(inf.GlobalSumPool().apply((), x), values.sum(axis=(1, 2)))
    at.close(inf.Flatten().apply((), x), values.reshape(at.n, -1))
    conv, _ = inf.Conv().init(jax.random.key(1), spec, 3)
    filters = np.asarray(conv["W"], float)
    padded = np.pad(values, ((0, 0), (1, 1), (1, 1), (0, 0)))
    want = sum(
        padded[:, i : i + SIDE, j : j + SIDE] @ filters[i, j] for i in range(3) for j in range(3)
    )
    conv = jax.tree.map(lambda a: a.astype(at.dtype), conv)
    at.close(inf.Conv().apply(conv, x), want / np.sqrt(9 * CHANNELS))
    for layer, _ in ACTIVATIONS.values():
        params, after = layer.init(jax.random.key(0), Spec((), at.d, gaussian=True), 6)
        np.testing.assert_equal((jax.tree.leaves(params), after.gaussian), ([], False))
    z = np.asarray(at.y, float)
    plain = Spec((), at.c)
    for layer, want in ((inf.Identity(), z), (inf.Scale(0.7), 0.7 * z), (inf.Dropout(0.9), z)):
        assert layer.init(jax.random.key(0), plain, 6)[0] == ()
        at.close(layer.apply((), at.y), want)
    centred = np.asarray(at.x, float) - np.asarray(at.x, float).mean(1, keepdims=True)
    normal = inf.LayerNorm()
    assert normal.init(jax.random.key(0), plain, 6)[0] == ()
    at.close(normal.apply((), at.x), centred / centred.std(1, keepdims=True))
