"""A model for `dualfluence attribute --model dualfluence.apps.attribute.example:small_network`.

A function without arguments that returns `(apply_fn, params)`, or anything that `dualfluence.fit`
takes. The network is linearised at `params`; the command trains it in data space.
"""

import jax
import jax.numpy as jnp


def apply(params, x):
    """`(n, 784) -> (n, 10)`."""
    hidden = jax.nn.relu(x @ params["w1"])
    return hidden @ params["w2"]


def small_network():
    """784-64-10 at a random start."""
    first, second = jax.random.split(jax.random.key(0))
    return apply, {
        "w1": jax.random.normal(first, (784, 64)) / jnp.sqrt(784),
        "w2": jax.random.normal(second, (64, 10)) / 8,
    }
