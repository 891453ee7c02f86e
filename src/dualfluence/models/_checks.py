"""Checks of networks and trained parameters from users."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._support.checks import all_finite, as_dtype
from ..kernels._linearized import Linearized


def check_network(model: Linearized, x: Array, num_outputs: int | None) -> int:
    """`c` of a network, after a check that it runs on all points and on one."""
    # All points first, as the user gave them; batches have any number of points, down to one.
    for points in (x, x[:1]):
        model._traced_shape(points)
    c = model.apply_shape(x)[1]
    if num_outputs not in (None, c):
        raise ValueError(
            f"num_outputs: {num_outputs} was given, but apply_fn has {c} outputs. Leave it out: "
            "the number follows from the network."
        )
    if jnp.finfo(model.dtype).bits < 32:
        raise ValueError(
            f"linearize: expected parameters in float32 or float64, got {model.dtype}, which "
            "linear solvers do not support. Convert them, e.g. by jax.tree.map(jnp.float32, "
            "params)."
        )
    return c


def check_params(name: str, model: Linearized, params: PyTree) -> PyTree:
    """`params` with trainable leaves as finite arrays in the shapes and dtypes of `model.params`."""
    want, got = jax.tree.structure(model.params), jax.tree.structure(params)
    if want != got:
        raise ValueError(
            f"{name} must have the tree structure of the parameters given to linearize, {want}, got "
            f"{got}."
        )
    paths = jax.tree_util.tree_leaves_with_path(model.params)
    rows = zip(paths, jax.tree.leaves(params), model.trainable, strict=True)
    leaves = [
        _like(f"{name}{jax.tree_util.keystr(path)}", leaf, base, used)
        for (path, base), leaf, used in rows
    ]
    return jax.tree.unflatten(got, leaves)


def _like(name: str, leaf: Any, base: Any, used: bool) -> Any:
    array = as_dtype(name, leaf, base.dtype) if used else leaf
    if np.shape(array) != np.shape(base):
        raise ValueError(
            f"{name} must have the shape {np.shape(base)} that linearize was given, got "
            f"{np.shape(array)}."
        )
    if not used:
        return leaf
    if not all_finite(name, array):
        raise ValueError(f"{name} has NaN or inf. Did training diverge?")
    return array
