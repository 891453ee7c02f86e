"""Check inputs before anything is computed."""

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from ._spec import Spec


def as_points(x: Any, name: str) -> Array:
    """Inputs as float32 or float64 of shape `(n, c)` or `(n, H, W, c)`.

    Integers become the default float type. Half precision is computed in float32, with a
    warning: angles in it would have three digits.
    """
    if not hasattr(x, "dtype"):
        x = np.asarray(x)
    if not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool) or jnp.issubdtype(
        x.dtype, jnp.complexfloating
    ):
        raise TypeError(f"{name}: expected real numbers, got dtype {x.dtype}.")
    if x.ndim not in (2, 4):
        raise ValueError(
            f"{name}: expected vectors (n, channels) or images (n, height, width, channels), "
            f"got shape {tuple(x.shape)}. A single point needs a leading axis: x[None]; "
            "grey images need a channel axis: x[..., None]."
        )
    if min(x.shape) == 0:
        raise ValueError(f"{name}: expected at least one point and channel, got {tuple(x.shape)}.")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.asarray(x, jnp.result_type(float))
    if x.dtype.itemsize < 4:
        warnings.warn(
            f"{name}: {x.dtype} inputs are computed, and their kernel returned, in float32.",
            stacklevel=4,
        )
        return jnp.asarray(x, jnp.float32)
    return jnp.asarray(x)


def check_finite_points(x: Array, name: str) -> None:
    """Raise for NaN or infinity, unless `x` is traced."""
    if isinstance(x, Tracer) or bool(jnp.isfinite(x).all()):
        return
    rows = np.flatnonzero(~np.asarray(jnp.isfinite(x)).reshape(x.shape[0], -1).all(axis=1))
    raise ValueError(
        f"{name}: expected finite numbers, got NaN or infinity in {len(rows)} of {x.shape[0]} "
        f"points, first in point {rows[0]}."
    )


def check_match(x1: Array, x2: Array) -> None:
    """Raise unless both inputs hold points of the same shape and type."""
    if x1.shape[1:] != x2.shape[1:]:
        raise ValueError(
            f"x1 and x2 must hold points of the same shape, got {x1.shape[1:]} and "
            f"{x2.shape[1:]}. Check the channels, and that both are NHWC."
        )


def input_spec(shape: tuple[int, ...]) -> Spec:
    """The `Spec` of inputs of shape `(n, c)` or `(n, H, W, c)`."""
    return Spec(tuple(shape[1:-1]), shape[-1])
