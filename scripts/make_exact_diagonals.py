"""Make tests/data/infinite/exact_diagonals.npz: kernels of points with themselves, 50 digits.

Neural Tangents computes the angle of equal points by cancellation and is wrong there in the 9th
digit. This follows the formulas with mpmath instead, sharing no code with the library:

    python scripts/make_exact_diagonals.py          (needs numpy and mpmath; a minute or two)

A kernel of one image with itself is an array over pixel pairs, (H, W, H, W); a vector is an image
of one pixel.
"""

import json
from pathlib import Path

import mpmath as mp
import numpy as np

mp.mp.dps = 50
DATA = Path(__file__).parents[1] / "tests" / "data" / "infinite"
NAMES = ("stride2_flatten", "identity_sqrt", "e_residual_dense", "e_dropout_train_dense")
to_mp = np.frompyfunc(mp.mpf, 1, 1)


def scalar(x):
    return mp.mpf(x or 0)


def positions(n, size, k, s, padding):
    """Pixels under tap 0..k-1 of every output pixel, -1 for zeros."""
    total = 0 if padding == "VALID" else max((size - 1) * s + k - n, 0)
    p = np.arange(size)[:, None] * s + np.arange(k)[None] - total // 2
    return p % n if padding == "CIRCULAR" else np.where((p >= 0) & (p < n), p, -1)


def mean_over_taps(A, args):
    (kh, kw), (sh, sw), pad = args["filter_shape"], args["strides"], args["padding"]
    sizes = []
    for n, k, s in zip(A.shape[:2], (kh, kw), (sh, sw), strict=True):
        sizes.append((n - k) // s + 1 if pad == "VALID" else -(-n // s))
    rows = positions(A.shape[0], sizes[0], kh, sh, pad)
    cols = positions(A.shape[1], sizes[1], kw, sw, pad)
    A = np.pad(A, [(0, 1)] * 4, constant_values=mp.mpf(0))  # index -1 is a zero
    out = to_mp(np.zeros((*sizes, *sizes)))
    for a in range(kh):
        for b in range(kw):
            r, c = rows[:, a], cols[:, b]
            out = out + A[np.ix_(r, c, r, c)]
    return out / (kh * kw)


def variances(K):
    h, w = K.shape[:2]
    i, j = np.ix_(np.arange(h), np.arange(w))
    return K[i, j, i, j]


def relu(K, T):
    q = variances(K)
    q1, q2 = q[:, :, None, None], q[None, None]

    def pair(a, b, k):
        s = mp.sqrt(a * b)
        if s == 0:
            return mp.mpf(0), mp.mpf(1) / 4
        theta = mp.acos(min(mp.mpf(1), max(mp.mpf(-1), k / s)))
        root = mp.sqrt(max(a * b - k * k, mp.mpf(0)))
        dot = (mp.pi - theta) / (2 * mp.pi)
        return root / (2 * mp.pi) + dot * k, dot

    cov, dot = np.frompyfunc(pair, 3, 2)(q1, q2, K)
    return cov, T * dot


def erf(K, T):
    q = variances(K)
    q1, q2 = q[:, :, None, None], q[None, None]

    def pair(a, b, k):
        outer = (1 + 2 * a) * (1 + 2 * b)
        cov = 2 / mp.pi * mp.asin(2 * k / mp.sqrt(outer))
        return cov, 4 / mp.pi / mp.sqrt(outer - 4 * k * k)

    cov, dot = np.frompyfunc(pair, 3, 2)(q1, q2, K)
    return cov, T * dot


def weights(K, T, args, mean):
    W2, b2 = scalar(args.get("W_std", 1)) ** 2, scalar(args.get("b_std")) ** 2
    assert args.get("parameterization", "ntk") == "ntk"
    K, T = mean(K), mean(T)
    K = W2 * K + b2
    return K, K + W2 * T


def attention(K, T, args):
    stds = [scalar(args[f"W_{n}_std"]) for n in ("key", "value", "query", "out")]
    v, b2 = mp.fprod(stds) ** 2, scalar(args["b_std"]) ** 2
    KK, KT = (K * K).sum(), (K * T).sum()
    return v * KK * K + b2, v * (2 * KT * K + KK * (T + 4 * K)) + b2


def run(layers, K, T):
    for name, args in layers:
        if name == "Dense":
            K, T = weights(K, T, args, lambda A: A)
        elif name == "Conv":
            K, T = weights(K, T, args, lambda A, args=args: mean_over_taps(A, args))
        elif name == "Relu":
            K, T = relu(K, T)
        elif name == "Erf":
            K, T = erf(K, T)
        elif name == "GlobalSelfAttention":
            K, T = attention(K, T, args)
        elif name == "Flatten":
            K, T = (np.full((1, 1, 1, 1), variances(A).mean()) for A in (K, T))
        elif name == "GlobalAvgPool":
            K, T = (np.full((1, 1, 1, 1), A.mean()) for A in (K, T))
        elif name == "Dropout":
            assert K.size == 1
            gain = 1 if args["mode"] == "test" else 1 / scalar(args["rate"])
            K, T = K * gain, T * gain
        elif name == "parallel":
            ends = [run(branch, K, T) for branch in args["branches"]]
            K, T = sum(e[0] for e in ends), sum(e[1] for e in ends)
        elif name not in ("FanOut", "FanInSum", "Identity"):
            raise ValueError(f"no formula for {name}")
    return K, T


def main():
    with np.load(DATA / "reference.npz") as f:
        arrays, nets = dict(f), json.loads(str(f["layers_json"]))
    out = {}
    for name, net in nets.items():
        if not any(part in name for part in NAMES):
            continue
        ends = []
        for x in arrays[f"{net['inputs']}/x1"]:
            x = to_mp(x.reshape((1, 1, -1) if x.ndim == 1 else x.shape))
            K = np.tensordot(x, x, (2, 2)) / x.shape[2]
            K, T = run(net["layers"], K, K * 0)
            ends.append((float(K.item()), float(T.item())))
        out[f"{name}/nngp"], out[f"{name}/ntk"] = map(np.array, zip(*ends, strict=True))
        for kind in ("nngp", "ntk"):
            theirs = np.diag(arrays[f"{name}/{kind}_x1x1"])
            error = np.abs(theirs / out[f"{name}/{kind}"] - 1).max()
            print(f"{name} {kind}: Neural Tangents is {error:.1e} off", flush=True)
    np.savez_compressed(DATA / "exact_diagonals.npz", **out)


if __name__ == "__main__":
    main()
