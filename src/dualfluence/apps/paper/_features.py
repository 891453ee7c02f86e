"""Random ReLU features, the input of the models that are linear to begin with."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from ..compare._networks import B_STD, W_STD
from ._common import Points


def with_features(points: Points, size: int, key: PRNGKeyArray, *, bias: bool) -> Points:
    """The points with `size` random ReLU features in place of pixels.

    Features are scaled for a readout in the NTK parameterisation. With `bias` a constant follows, whose
    weight is the bias of the readout.
    """
    key_w, key_b = jax.random.split(key)
    num_pixels = points.x.shape[1]
    W = jax.random.normal(key_w, (num_pixels, size)) * (W_STD / float(np.sqrt(num_pixels)))
    b = jax.random.normal(key_b, (1, size)) * B_STD

    def features(x: Float[Array, "n d"]) -> Float[Array, "n p"]:
        phi = jax.nn.relu(x.astype(W.dtype) @ W + b) * (W_STD / float(np.sqrt(size)))
        constant = jnp.full((x.shape[0], 1), B_STD, phi.dtype)
        return jnp.concatenate([phi, constant], axis=1) if bias else phi

    return points._replace(x=features(points.x), x_test=features(points.x_test))


def readout(theta: PyTree, features: Array) -> Array:
    """`f = Φθ`."""
    return features @ theta
