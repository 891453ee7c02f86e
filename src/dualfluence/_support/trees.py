"""Norms of parameter pytrees."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


def float_leaves(tree: PyTree) -> list[Array]:
    """Floating-point leaves as arrays; integers, flags and functions are not parameters."""
    leaves = jax.tree.leaves(tree)
    return [jnp.asarray(leaf) for leaf in leaves if eqx.is_inexact_array_like(leaf)]


def tree_norm(tree: PyTree) -> Float[Array, ""]:
    """`√Σ leaf²` over floating leaves, summed in at least float32."""
    wide = [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in float_leaves(tree)]
    return jnp.sqrt(sum((jnp.sum(leaf**2) for leaf in wide), start=jnp.zeros((), jnp.float32)))
