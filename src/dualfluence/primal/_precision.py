"""Float32 models in float64 where nothing is lost by it."""

import jax
import jax.numpy as jnp

from .._support.wide import double
from ..kernels._linearized import Linearized


def in_float64(model: Linearized) -> Linearized:
    """The model computed in float64 if it is in float32, on a CPU; elsewhere as it is."""
    if model.dtype != jnp.float32 or jax.default_backend() != "cpu":
        return model
    with double():
        return model.widened()
