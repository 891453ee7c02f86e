"""Which leaves of a pytree are parameters, and norms of pytrees."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree


def is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array, or the shape of one."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def is_floating(leaf: Any) -> bool:
    """Whether `leaf` can be a parameter: an array of floating-point numbers.

    Python numbers cannot: they are settings, and most libraries do not train them.
    """
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def common_dtype(*arrays_or_dtypes: Any) -> Any:
    """The dtype that holds all of these by JAX's table, even if a user asks for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*arrays_or_dtypes)


def float_leaves(tree: PyTree) -> list[Array]:
    """Floating-point leaves as arrays; numbers, flags and functions are not parameters."""
    leaves = jax.tree.leaves(tree)
    return [jnp.asarray(leaf) for leaf in leaves if is_floating(leaf)]


def tree_norm(tree: PyTree) -> Float[Array, ""]:
    """`√Σ leaf²` over floating leaves, summed in at least float32."""
    leaves = float_leaves(tree)
    dtype = common_dtype(jnp.float32, *leaves)
    squares = (jnp.sum(leaf.astype(dtype) ** 2) for leaf in leaves)
    return jnp.sqrt(sum(squares, start=jnp.zeros((), dtype)))
