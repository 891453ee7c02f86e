"""Functions of the rows that one device of a mesh holds."""

from collections.abc import Callable

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import PyTree

AXIS = "rows"
"""The one axis of the library's meshes."""

ROWS, EVERY = PartitionSpec(AXIS), PartitionSpec()
"""How arrays enter such a function: only the rows of its device, or all of them."""


def on_shards(
    fn: Callable[..., PyTree], mesh: Mesh | AbstractMesh, in_specs: PyTree, out_specs: PyTree
) -> Callable[..., PyTree]:
    """`jax.shard_map` under the names it has had since JAX 0.6; no check of replication."""
    if hasattr(jax, "shard_map"):
        return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    from jax.experimental.shard_map import shard_map

    return shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_rep=False)
