"""A transformer small enough for explicit Jacobians, and its sequences."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

N, Q, T, V, D = 6, 2, 4, 5, 3
IGNORED = -100


def params(seed, vocabulary=V, width=D, length=T, dtype=jnp.float64):
    keys = jax.random.split(jax.random.key(seed), 5)
    shapes = {
        "words": (vocabulary, width),
        "places": (length, width),
        "qkv": (3, width, width),
        "mlp": (width, width),
        "out": (width, vocabulary),
    }
    scale = {"words": 1.0, "places": 0.5}
    return {
        name: scale.get(name, width**-0.5) * jax.random.normal(key, shape, dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def net(p, tokens):
    """Token `t` sees tokens up to `t`: `(n, T)` to `(n, T, V)`."""
    h = p["words"][tokens] + p["places"][None, : tokens.shape[1]]
    q, k, v = jnp.einsum("ntd,xde->xnte", h, p["qkv"])
    seen = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))[None]
    weights = jax.nn.softmax(jnp.where(seen, jnp.einsum("nte,nse->nts", q, k), -jnp.inf), axis=-1)
    h = h + jnp.einsum("nts,nse->nte", weights, v)
    return jnp.tanh(h @ p["mlp"]) @ p["out"]


def data(seed=0, n=N, q=Q, length=T, vocabulary=V):
    """Sequences of several lengths, padded behind; the last query is one token."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, vocabulary, (n + q, length + 1))
    x, y = text[:, :-1], text[:, 1:].copy()
    for i, size in enumerate(rng.integers(2, length + 1, n + q)):
        y[i, size:] = IGNORED
    y[-1] = np.where(np.arange(length) == 1, text[-1, 1:], IGNORED)
    return x[:n], y[:n], x[n:], y[n:]


def jacobian(p, x):
    """`J` of all outputs, `(n, T·V, p)`."""
    flat, unravel = jax.flatten_util.ravel_pytree(p)
    J = jax.jacobian(lambda t: net(unravel(t), jnp.asarray(x)))(flat)
    return np.asarray(J).reshape(x.shape[0], -1, flat.size)


def softmax(p, x):
    f = np.asarray(net(p, jnp.asarray(x)), float)
    e = np.exp(f - f.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gradients(p, x, y):
    """`∇ℓ` of each sequence in its outputs, `(n, T, V)`: a mean over tokens that count."""
    s = softmax(p, x)
    counted = y != IGNORED
    hot = np.eye(s.shape[-1])[np.where(counted, y, 0)]
    return (s - hot) * (counted / counted.sum(1, keepdims=True))[:, :, None]


def hessians(p, x, y):
    """Of each sequence's mean loss over `n`, `(n, T·V, T·V)`."""
    s, counted = softmax(p, x), y != IGNORED
    n, length, words = s.shape
    H = np.zeros((n, length, words, length, words))
    for i in range(n):
        for t in range(length):
            block = np.diag(s[i, t]) - np.outer(s[i, t], s[i, t])
            H[i, t, :, t, :] = counted[i, t] / counted[i].sum() / n * block
    return H.reshape(n, length * words, length * words)


def scores(p, ridge, x, y, xq, yq, H, metric=None):
    """`v_qᵀJ_q(λI + ΣJᵢᵀHᵢJᵢ)⁻¹Jᵢᵀgᵢ` token by token of the training sequences, `(q, n, T)`, NumPy."""
    J, J_q = jacobian(p, x), jacobian(p, xq)
    root = np.ones(J.shape[2]) if metric is None else np.sqrt(metric)
    J, J_q = J * root, J_q * root
    A = ridge * np.eye(J.shape[2]) + np.einsum("nap,nab,nbr->pr", J, H, J)
    v = gradients(p, xq, yq).reshape(len(xq), -1)
    z = np.linalg.solve(A, np.einsum("qap,qa->pq", J_q, v))
    g = gradients(p, x, y) / len(x)
    along = np.einsum("nap,pq->qna", J, z).reshape(len(xq), *g.shape)
    return np.einsum("qntv,ntv->qnt", along, g)


def probes(p, x, y, m, key):
    """The probes that the library documents: signs of their own for each sequence and token."""
    s, counted = softmax(p, x), y != IGNORED
    n, length, words = s.shape
    P = np.zeros((n, length, words, m))
    for i in range(n):
        for t in range(length):
            own = jax.random.fold_in(jax.random.fold_in(key, i), t)
            signs = np.asarray(jax.random.rademacher(own, (words, m), jnp.float64))
            root = np.sqrt(s[i, t])
            R = np.diag(root) - np.outer(s[i, t], root)
            P[i, t] = np.sqrt(counted[i, t] / counted[i].sum() / n / m) * R @ signs
    return P.reshape(n, length * words, m)
