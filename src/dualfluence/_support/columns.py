"""Decisions that a batch of columns takes together."""

from typing import Any

import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool


@custom_vmap
def any_column(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    """`flag`; under `vmap`, whether it is set in any column, the same for all of them.

    `lax.cond` on the flag of one column becomes a `select` under `vmap`, which computes the rare branch
    every time. On this flag it stays a branch.
    """
    return flag


@any_column.def_vmap
def _(size: int, batched: list[bool], flag: Any) -> tuple[Array, bool]:
    return jnp.any(flag), False
