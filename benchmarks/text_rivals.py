"""What `attribution_text.py` compares with: BM25, gradient products, TRAK and EK-FAC, for one network `p`."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from text_recipes import LOSS

from dualfluence.attribution._token_sketch import make_sketch

DAMPINGS = (1e-3, 1e-2, 1e-1)
"""Of TRAK; `attribution_text.py` says how one is chosen."""

DAMPING = 0.1
"""Of EK-FAC, over the mean eigenvalue of a weight."""


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


def gradients(r, p, fn, x, y):
    """Rows of gradients of `fn(outputs, target)` in the parameters that count."""
    held = {"base": p["base"]} if r.kind == "lora" else {}
    learned = {"lora": p["lora"]} if r.kind == "lora" else p

    def one(row):
        value = lambda q: fn(r.apply(held | q, row[0][None])[0], row[1])  # noqa: E731
        return jax.grad(value)(learned)

    return learned, one, (jnp.asarray(x), jnp.asarray(y))


def products(r, p, cosine=False):
    """Gradients of the queries, held, times those of the training lines, one after the other."""
    loss = lambda f, y: LOSS.value(f.reshape(1, -1), y[None])[0]  # noqa: E731
    flat = lambda tree: jnp.concatenate([a.reshape(-1) for a in jax.tree.leaves(tree)])  # noqa: E731
    unit = (lambda g: g / jnp.linalg.norm(g)) if cosine else (lambda g: g)

    @jax.jit
    def scores(p):
        _, one, queries = gradients(r, p, loss, r.xq, r.yq)
        Q = jax.lax.map(lambda row: unit(flat(one(row))), queries)
        _, one, rows = gradients(r, p, loss, r.x, r.y)
        return jax.lax.map(lambda row: Q @ unit(flat(one(row))), rows).T

    return np.asarray(scores(p))


def trak(r, p):
    """`φ_q(ΦᵀΦ + ρ)⁻¹φ_i(1 − p_i)`, `φ` the projected gradient of a line's mean log odds."""

    def odds(f, y):
        logs = jax.nn.log_softmax(f)
        own = jnp.take_along_axis(logs, jnp.maximum(y, 0)[:, None], axis=1)[:, 0]
        own = jnp.minimum(own, -1e-6)
        return jnp.sum((own - jnp.log1p(-jnp.exp(own))) * (y >= 0)) / jnp.sum(y >= 0)

    @jax.jit
    def features(p):
        learned, one, rows = gradients(r, p, odds, r.x, r.y)
        sketch = make_sketch(learned, r.scale["trak"], jax.random.key(3))
        _, other, queries = gradients(r, p, odds, r.xq, r.yq)
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


def ekfac(r, p, key=5):
    """`Σ_W ⟨∇_W m_q, (F_W + λ)⁻¹∇_W ℓ_i⟩` over weights, `F` in the eigenbasis of its Kronecker factors.

    Factors and eigenvalues are those of labels drawn by the model at every token (George et al. 2018; Grosse
    et al. 2023), so that one backward pass serves a line and nothing has the square of its outputs. `λ` is
    `DAMPING` times the mean eigenvalue of a weight, as in Grosse et al.; nothing is tuned. Tables of words
    and places, and frozen weights, have no block.
    """
    bases, values, turned = ekfac_parts(r, p, key)

    @jax.jit
    def scores(p, bases, values):
        found = jax.lax.map(
            lambda row: turned(p, bases, row), (jnp.asarray(r.xq), jnp.asarray(r.yq))
        )
        left = {
            n: found[n] / (v + DAMPING * jnp.maximum(v.mean(), 1e-30)) for n, v in values.items()
        }

        def one(row):
            own = turned(p, bases, row)
            return sum(jnp.einsum("qab,ab->q", left[n], own[n]) for n in left)

        return jax.lax.map(one, (jnp.asarray(r.x), jnp.asarray(r.y))).T

    return np.asarray(scores(p, bases, values))


def ekfac_parts(r, p, key):
    """Eigenbases and eigenvalues by weight, and a function for the gradient of a line in the bases."""

    blank = {}

    def noted(a, w, name):
        if r.kind == "full" or len(name) == 3:
            blank[name] = (a.shape[1], w.shape[1])
        return a @ w

    jax.eval_shape(lambda x: r.apply(p, x, noted), jnp.asarray(r.x[:1]))
    blank = {name: jnp.zeros(shape) for name, shape in blank.items()}

    def factors(p, x, y, drawn=None):
        """Inputs `(T, a)` and cotangents of outputs `(T, b)` of every weight, for one line."""

        def outputs(added):
            seen = {}

            def product(a, w, name):
                seen[name] = a[0]
                return a @ w + added.get(name, 0)

            return r.apply(p, x[None], product)[0], seen

        f, back, seen = jax.vjp(outputs, blank, has_aux=True)
        if drawn is not None:
            y = jnp.where(y >= 0, jax.random.categorical(drawn, f), y)
        g = jax.grad(lambda f: LOSS.value(f.reshape(1, -1), y[None])[0])(f)
        (cotangents,) = back(g)
        return {name: (seen[name], cotangents[name]) for name in blank}

    draws = jax.random.split(jax.random.key(key), len(r.x))
    lines = (jnp.asarray(r.x), jnp.asarray(r.y), draws)

    def summed(p, part):
        """The mean over lines of what `part` makes of their factors."""
        one = lambda row: {n: part(n, *ag, row[1] >= 0) for n, ag in factors(p, *row).items()}  # noqa: E731
        first = jax.tree.map(lambda a: a[0], lines)
        start = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(one, first))
        add = lambda total, row: (jax.tree.map(jnp.add, total, one(row)), None)  # noqa: E731
        total = jax.lax.scan(add, start, lines)[0]
        return jax.tree.map(lambda a: a / len(r.x), total)

    def squares(name, a, g, counted):
        a = a * counted[:, None]
        return a.T @ a, g.T @ g

    moments = jax.jit(lambda p: summed(p, squares))(p)
    bases = {n: tuple(jnp.linalg.eigh(m)[1] for m in pair) for n, pair in moments.items()}
    turn = lambda bases, n, a, g: (a @ bases[n][0]).T @ (g @ bases[n][1])  # noqa: E731
    values = jax.jit(lambda p, b: summed(p, lambda n, a, g, _: turn(b, n, a, g) ** 2))(p, bases)

    def turned(p, bases, row):
        return {n: turn(bases, n, *ag) for n, ag in factors(p, *row).items()}

    return bases, values, turned
