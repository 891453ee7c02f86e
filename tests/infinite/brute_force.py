"""Infinitely wide networks in plain NumPy: every pair of points, every pair of pixels, no shortcut.

A kernel is an array `(n, n, H, W, H, W)`; vectors are images of one pixel. Points beyond an image are
one more row and column of zeros, which the index -1 finds.
"""

import numpy as np
from scipy.special import erf, expit

from dualfluence import infinite

FUNCTIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "leaky": lambda x: np.where(x > 0, x, 0.1 * x),
    "abs": np.abs,
    "two_slopes": lambda x: np.where(x > 0, 1.3 * x, -0.4 * x),
    "sign": np.sign,
    "erf": lambda x: 1.3 * erf(0.8 * x) - 0.4,
    "sigmoid_like": lambda x: (1 + erf(x / 2.4020563531719796)) / 2,
    "gelu": lambda x: x * (1 + erf(x / np.sqrt(2))) / 2,
    "sin": lambda x: 0.9 * np.sin(1.4 * x + 0.5),
    "cos": lambda x: 1.2 * np.cos(0.7 * x - 0.3),
    "rbf": lambda x: np.sqrt(2) * np.sin(np.sqrt(2 * 0.6) * x + np.pi / 4),
    "gaussian": lambda x: 1.4 * np.exp(-0.7 * x * x),
    "exp": lambda x: 0.8 * np.exp(0.6 * x),
    "polynomial": lambda x: 0.5 - 0.3 * x + 0.7 * x**2 + 0.2 * x**3 + 0.1 * x**4,
    "swish": lambda x: x * expit(x),
}


def slope(function, x):
    """The derivative by a central difference that stays on one side of a kink at 0."""
    h = np.clip(np.abs(x) / 2, 1e-300, 1e-5)
    return (function(x + h) - function(x - h)) / (2 * h)


def plane(rho, panels=7, nodes=24):
    """Nodes and weights of a standard Gaussian pair `(u, v)` of correlation `rho`.

    In polar coordinates, cut at the angles where `u` or `v` changes sign: nothing has a kink in between.
    """
    z, w = np.polynomial.legendre.leggauss(nodes)
    r = np.concatenate([z + 1 + 2 * i for i in range(6)])  # up to 12 deviations
    wr = np.tile(w, 6) * r * np.exp(-r * r / 2)
    lean = np.arcsin(rho)  # v = r sin(angle + lean)
    cuts = [np.pi / 2, 3 * np.pi / 2, 2 * np.pi - lean, np.pi - lean]
    edges = np.sort(np.mod([0, *cuts, *np.linspace(0, 2 * np.pi, panels)], 2 * np.pi))
    edges = np.append(edges, edges[0] + 2 * np.pi)
    half = np.diff(edges) / 2
    angle = (edges[:-1] + half)[:, None] + half[:, None] * z
    weight = (half[:, None] * w)[..., None] * wr / (2 * np.pi)
    return r * np.cos(angle)[..., None], r * np.sin(angle + lean)[..., None], weight


def expectations(function, q1, q2, rho):
    """`E f(u) f(v)` and `E f'(u) f'(v)` for variances `q1`, `q2`."""
    u, v, w = plane(rho)
    u, v = np.sqrt(q1) * u, np.sqrt(q2) * v
    return np.sum(w * function(u) * function(v)), np.sum(
        w * slope(function, u) * slope(function, v)
    )


def inputs(x):
    """The kernel of the inputs, `(n, c)` or `(n, H, W, c)`."""
    x = x[:, None, None] if x.ndim == 2 else x
    return np.einsum("ihwc,jgvc->ijhwgv", x, x) / x.shape[-1]


def variances(K):
    """`(n, H, W)`: every pixel of every point with itself."""
    return np.einsum("iihwhw->ihw", K)


def pairs(values):
    """Values at pixels, `(n, H, W)`, multiplied for every pair of them."""
    return np.einsum("ihw,jgv->ijhwgv", values, values)


def relu(K):
    s = np.sqrt(pairs(variances(K)))
    cos = np.clip(K / s, -1, 1)
    angle = np.arccos(cos)
    cov = s * (np.sqrt(1 - cos**2) + (np.pi - angle) * cos) / (2 * np.pi)
    return cov, (np.pi - angle) / (2 * np.pi)


def error_function(K):
    D = pairs(1 + 2 * variances(K))
    return 2 / np.pi * np.arcsin(2 * K / np.sqrt(D)), 4 / np.pi / np.sqrt(D - 4 * K**2)


def sources(size, window, stride, padding):
    """`(out, window)`: the pixel that each tap reads, -1 beyond the image."""
    out = (size - window) // stride + 1 if padding == "VALID" else -(-size // stride)
    before = 0 if padding == "VALID" else max((out - 1) * stride + window - size, 0) // 2
    index = stride * np.arange(out)[:, None] + np.arange(window) - before
    if padding == "CIRCULAR":
        return index % size
    return np.where((index >= 0) & (index < size), index, -1)


def taps(shape, window, strides, padding):
    """The rows and the columns that every tap of a window reads."""
    rows, cols = (sources(*axis, padding) for axis in zip(shape, window, strides, strict=True))
    return [(rows[:, a], cols[:, b]) for a in range(window[0]) for b in range(window[1])]


def seen(K, first, second):
    """The kernel between what two taps read: a pixel beyond the image is 0."""
    K = np.pad(K, [(0, 0)] * 2 + [(0, 1)] * 4)
    return K[:, :, first[0]][:, :, :, first[1]][:, :, :, :, second[0]][..., second[1]]


def pool_taps(layer, shape):
    return taps(shape, layer.window, layer.strides or layer.window, layer.padding)


def pool_scale(layer, shape):
    """The factor of every window's sum, `(H', W')`."""
    every = pool_taps(layer, shape)
    true = sum(np.outer(r >= 0, c >= 0) for r, c in every)
    size = len(every)
    if isinstance(layer, infinite.AvgPool):
        return 1 / true if layer.normalize_edges else np.full(true.shape, 1 / size)
    return size / true if layer.normalize_edges else np.ones(true.shape)


def weighted(layer, cov_in, ntk_in, fan_in):
    """After weights, from the means over what each output reads."""
    b2 = (layer.b_std or 0) ** 2
    cov = layer.W_std**2 * cov_in + b2
    own = cov
    if layer.parameterization == "standard":
        own = fan_in / layer.s[0] * cov_in + (layer.b_std is not None)
    return cov, own + layer.W_std**2 * ntk_in


def attention(layer, K, T):
    b2, ov = (layer.b_std or 0) ** 2, (layer.W_out_std * layer.W_value_std) ** 2
    qk = layer.W_query_std * layer.W_key_std
    if layer.scaling == "sqrt":
        # v <K, K> K: three factors, of which the weights make two with the NTK.
        norm, both = (
            np.einsum("ijhwgv,ijhwgv->ij", K, A)[..., None, None, None, None] for A in (K, T)
        )
        v = ov * qk**2
        return v * norm * K + b2, v * (2 * both * K + norm * (T + 4 * K)) + b2
    n, h, w = variances(K).shape
    own = qk * np.einsum("iihwgv->ihwgv", K).reshape(n, h * w, h * w)
    if layer.mechanism == "softmax":
        own = np.exp(own) / np.exp(own).sum(2, keepdims=True)
    G = np.maximum(own, 0) if layer.mechanism == "relu" else own
    G = G.reshape(n, h, w, h, w)
    K, T = (ov * np.einsum("ihwab,ijabcd,jgvcd->ijhwgv", G, A, G) for A in (K, T))
    return K + b2, T + 2 * K + b2


def through(layer, K, T, channels):
    """NNGP, NTK and channels after a layer."""
    kind, shape = type(layer).__name__, K.shape[2:4]
    if kind in ("Network", "Serial"):
        for each in layer.layers:
            K, T, channels = through(each, K, T, channels)
        return K, T, channels
    if kind == "Sum":
        ends = [through(each, K, T, channels) for each in layer.branches]
        return sum(e[0] for e in ends), sum(e[1] for e in ends), ends[0][2]
    if kind == "Dense":
        return *weighted(layer, K, T, channels), (layer.width or 0) * layer.s[1]
    if kind == "Conv":
        every = taps(shape, layer.filter_shape, layer.strides, layer.padding)
        means = (sum(seen(A, t, t) for t in every) / len(every) for A in (K, T))
        return *weighted(layer, *means, channels * len(every)), (layer.width or 0) * layer.s[1]
    if kind in ("AvgPool", "SumPool"):
        every, scale = pool_taps(layer, shape), pool_scale(layer, shape)
        scale = np.einsum("hw,gv->hwgv", scale, scale)
        K, T = (scale * sum(seen(A, s, t) for s in every for t in every) for A in (K, T))
    elif kind == "Flatten":
        K, T = (
            np.einsum("ijhwhw->ij", A)[..., None, None, None, None] / np.prod(shape) for A in (K, T)
        )
        channels = channels * int(np.prod(shape))
    elif kind in ("GlobalAvgPool", "GlobalSumPool"):
        by = np.mean if kind == "GlobalAvgPool" else np.sum
        K, T = (by(A, axis=(2, 3, 4, 5), keepdims=True) for A in (K, T))
    elif kind == "LayerNorm":
        axes = (layer.axis,) if isinstance(layer.axis, int) else layer.axis
        spatial = tuple(a % 4 for a in axes if a % 4 != 3)
        q = layer.eps + variances(K).mean(axis=spatial, keepdims=True) + 0 * variances(K)
        K, T = K / np.sqrt(pairs(q)), T / np.sqrt(pairs(q))
    elif kind == "Dropout" and layer.mode == "train":
        gain = 1 + (1 / layer.rate - 1) * np.einsum(
            "ij,hg,wv->ijhwgv", *(np.eye(k) for k in (len(K), *shape))
        )
        K, T = gain * K, gain * T
    elif kind == "Scale":
        K, T = layer.factor**2 * K, layer.factor**2 * T
    elif kind == "GlobalSelfAttention":
        K, T = attention(layer, K, T)
    elif layer == infinite.Relu():
        K, bend = relu(K)
        T = T * bend
    elif layer == infinite.Erf():
        K, bend = error_function(K)
        T = T * bend
    else:
        assert kind in ("Identity", "Dropout"), f"the brute force has no {layer}"
    return K, T, channels


def kernels(net, x):
    """NNGP and NTK between all points, `(n, n)` each."""
    K = inputs(np.asarray(x, float))
    K, T, _ = through(net, K, 0 * K, x.shape[-1])
    assert K.shape[2:] == (1, 1, 1, 1)
    return K[..., 0, 0, 0, 0], T[..., 0, 0, 0, 0]


def outputs(layer, params, x):
    """The finite network: windows as sums over their taps."""
    kind, shape = type(layer).__name__, x.shape[1:3]
    if kind in ("Network", "Serial"):
        for each, own in zip(layer.layers, params, strict=True):
            x = outputs(each, own, x)
        return x
    if kind == "Sum":
        return sum(outputs(b, p, x) for b, p in zip(layer.branches, params, strict=True))
    if kind in ("Dense", "Conv"):
        W, b = np.asarray(params["W"], float), np.asarray(params.get("b", 0.0), float)
        if layer.parameterization == "ntk":
            W, b = W * layer.W_std / np.sqrt(W[..., 0].size), b * (layer.b_std or 0)
        else:
            W = W / np.sqrt(layer.s[0])
        if kind == "Dense":
            return x @ W + b
        every = taps(shape, layer.filter_shape, layer.strides, layer.padding)
        return (
            sum(
                picked(x, *t) @ w
                for t, w in zip(every, W.reshape(len(every), *W.shape[2:]), strict=True)
            )
            + b
        )
    if kind in ("AvgPool", "SumPool"):
        total = sum(picked(x, *t) for t in pool_taps(layer, shape))
        return total * pool_scale(layer, shape)[..., None]
    if kind == "Flatten":
        return x.reshape(len(x), -1)
    if kind in ("GlobalAvgPool", "GlobalSumPool"):
        return x.mean(axis=(1, 2)) if kind == "GlobalAvgPool" else x.sum(axis=(1, 2))
    if kind == "LayerNorm":
        axes = (layer.axis,) if isinstance(layer.axis, int) else layer.axis
        axes = tuple(a % x.ndim for a in axes)
        return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + layer.eps)
    if kind == "Scale":
        return layer.factor * x
    if layer == infinite.Relu():
        return np.maximum(x, 0)
    assert kind == "Identity", f"the brute force has no {layer}"
    return x


def picked(x, rows, cols):
    return np.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)])[:, rows][:, :, cols]
