"""Networks as users write them, beside a library that is tested under strict promotion."""

import functools

import jax


def ordinary(fn):
    """A network under JAX's defaults: it may add a vector to a matrix, and a float32 to a float64.

    `conftest.py` forbids both everywhere else, so that the library says what it widens and spreads. A whole
    test that runs code of others is marked `ordinary` instead.
    """

    @functools.wraps(fn)
    def network(*args, **options):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return fn(*args, **options)

    return network
