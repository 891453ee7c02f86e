"""Narrow arithmetic inside a network is seen in its jaxpr, wherever it hides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dualfluence as dfl
from dualfluence.kernels import narrowest_dtype
from users import ordinary

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4)).astype(np.float32)
W = jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32)
OPTIONS = {"loss": dfl.SquaredError(), "ridge": 0.1, "progress": False}


def low(p, x):
    return (x.astype(jnp.bfloat16) @ p.astype(jnp.bfloat16)).astype(x.dtype)


def in_a_loop(p, x):
    return lax.scan(lambda h, _: (h + low(p, x), None), jnp.zeros((len(x), 3), x.dtype), None, 2)[0]


NARROW = {
    "casts": (low, jnp.bfloat16),
    "a scan": (in_a_loop, jnp.bfloat16),
    "a jitted layer": (lambda p, x: jax.jit(low)(p, x), jnp.bfloat16),
    "a remat": (lambda p, x: jax.checkpoint(low)(p, x), jnp.bfloat16),
    "half outputs of a product": (
        lambda p, x: jnp.matmul(x, p, preferred_element_type=jnp.float16).astype(x.dtype),
        jnp.float16,
    ),
    "rounded parameters": (
        lambda p, x: x @ lax.reduce_precision(p, exponent_bits=8, mantissa_bits=7),
        jnp.bfloat16,
    ),
    "rounded data": (lambda p, x: x.astype(jnp.bfloat16).astype(x.dtype) @ p, jnp.bfloat16),
    "an algorithm": (
        lambda p, x: jnp.dot(x, p, precision=lax.DotAlgorithmPreset.BF16_BF16_F32),
        jnp.bfloat16,
    ),
}


@pytest.mark.parametrize("name", NARROW)
def test_narrow_steps_are_found(name):
    fn, want = NARROW[name]
    assert narrowest_dtype(fn, W, X) == want
    model = dfl.linearize(fn, W).bound(X)
    assert model.arithmetic_eps == float(jnp.finfo(want).eps)
    assert any("narrow arithmetic" in note for note in model.notes)


def test_plain_networks_are_as_wide_as_their_parameters():
    def net(p, x):
        return jax.nn.gelu(x @ p) * 0.5

    assert narrowest_dtype(net, W, X) == jnp.float32
    wide = W.astype(jnp.float64)
    # float32 data in a float64 network are what they are: scaling them rounds nothing of the model.
    assert narrowest_dtype(lambda p, x: (x / 255).astype(p.dtype) @ p, wide, X) == jnp.float64
    model = dfl.linearize(net, W).bound(X)
    assert model.notes == ()
    assert model.arithmetic_eps == float(jnp.finfo(jnp.float32).eps)


def test_float32_inside_a_float64_network_counts():
    wide = W.astype(jnp.float64)
    model = dfl.linearize(
        ordinary(lambda p, x: jnp.tanh((x @ p).astype(jnp.float32)) * p[0]), wide
    ).bound(X)
    assert model.arithmetic_eps == float(jnp.finfo(jnp.float32).eps)


def test_a_fit_says_so():
    y = np.zeros((6, 3), np.float32)
    fitted = dfl.fit(dfl.linearize(low, W), X, y, on_failure="report", **OPTIONS)
    assert any("bfloat16 inside a float32 network" in note for note in fitted.stats.notes)
    assert fitted.epsilon == float(jnp.finfo(jnp.bfloat16).eps)
