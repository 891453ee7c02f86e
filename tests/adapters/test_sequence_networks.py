"""Transformers of Flax NNX and Equinox, and LoRA of NNX: sequences against explicit Jacobians."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sequences import IGNORED, brute_force

import dualfluence as dfl
from dualfluence.attribution import Trajectory

pytestmark = [pytest.mark.thorough, pytest.mark.host, pytest.mark.ordinary]

N, Q, T, V, D = 5, 2, 4, 6, 4


def sequences():
    rng = np.random.default_rng(0)
    text = rng.integers(0, V, (N + Q, T + 1))
    x, y = text[:, :-1], text[:, 1:].copy()
    y[1, 2:] = IGNORED
    y[-1, [0, 2, 3]] = IGNORED  # the query of one token
    return x[:N], y[:N], x[N:], y[N:]


def check(adapted, count):
    data = sequences()
    run = Trajectory(adapted, [adapted.params], [10], 0.1)
    size, want = brute_force(adapted, run.ridge(0), *data)
    assert size == count
    got = run.attribute(*data, probes=None, combine="mean", progress=False)
    np.testing.assert_allclose(got.values, want, rtol=1e-5, atol=1e-7)
    some = run.attribute(*data, tokens=True, progress=False)  # what a newcomer writes
    np.testing.assert_allclose(some.tokens.sum(2), some.values, rtol=1e-4, atol=1e-6)


def test_nnx_with_lora_in_training_mode():
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs):
            wide = {"param_dtype": jnp.float64, "rngs": rngs}
            self.words = nnx.Embed(V, D, **wide)
            self.attention = nnx.MultiHeadAttention(2, D, decode=False, **wide)
            self.lora = nnx.LoRA(D, 2, D, base_module=nnx.Linear(D, D, **wide), **wide)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.out = nnx.Linear(D, V, **wide)

        def __call__(self, tokens):
            h = self.words(tokens)
            seen = nnx.make_causal_mask(tokens)
            h = h + self.attention(h, mask=seen)
            return self.out(jnp.tanh(self.dropout(self.lora(h))))

    model = Network(nnx.Rngs(0))
    model.lora.lora_b.set_value(0.1 * jax.random.normal(jax.random.key(1), (2, D), jnp.float64))
    model.train()
    adapted = dfl.adapters.from_nnx(model, trainable="lora/lora_*")
    check(adapted, count=2 * D * 2)
    x = sequences()[0]
    # Dropout is off in the copy, and the model stays in training mode.
    np.testing.assert_array_equal(adapted(x), adapted(x))
    assert not model.dropout.deterministic


def test_equinox_in_training_mode():
    class Network(eqx.Module):
        words: eqx.nn.Embedding
        attention: eqx.nn.MultiheadAttention
        dropout: eqx.nn.Dropout
        out: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 3)
            self.words = eqx.nn.Embedding(V, D, dtype=jnp.float64, key=keys[0])
            self.attention = eqx.nn.MultiheadAttention(2, D, dtype=jnp.float64, key=keys[1])
            self.dropout = eqx.nn.Dropout(0.5)
            self.out = eqx.nn.Linear(D, V, dtype=jnp.float64, key=keys[2])

        def __call__(self, tokens, key):
            h = jax.vmap(self.words)(tokens)
            seen = jnp.tril(jnp.ones((len(tokens),) * 2, bool))
            h = h + self.attention(h, h, h, mask=seen)
            return jax.vmap(self.out)(jnp.tanh(self.dropout(h, key=key)))

    adapted = dfl.adapters.from_equinox(
        Network(jax.random.key(0)), trainable=["attention/*", "out/*"]
    )
    check(adapted, count=4 * D * D + D * V + V)
