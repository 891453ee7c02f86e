"""Flax Linen."""

from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array, PyTree

from ._adapted import Adapted, Trainable, adapt, check_kind_of_model, evaluation_flags, need


def from_linen(module: Any, variables: Any, *, trainable: Trainable = None, **call: Any) -> Adapted:
    """Adapt a Linen module and its variables.

    The collection `"params"` is trained; `"batch_stats"` and all others are held fixed.

    **Arguments:**

    - `module`, `variables`: as in `module.apply(variables, x)`.
    - `trainable`: which parameters are trained, all by default.
    - `call`: arguments of `module.apply(variables, x, ...)`. A flag such as `train` or `deterministic`
      is set to evaluation unless it is given.

    **Returns:** `Adapted`; `restore` gives variables for `module.apply`.
    """
    linen = need("flax.linen", "from_linen", "flax")
    core = need("flax.core", "from_linen", "flax")
    check_kind_of_model("from_linen", module, linen.Module, "a linen.Module")
    _check_variables("from_linen", variables)
    options = evaluation_flags(type(module).__call__, call)
    frozen = isinstance(variables, core.FrozenDict)

    def read(other: Any) -> PyTree:
        _check_variables("read", other)
        return linen.meta.unbox(core.unfreeze(other))

    def rebuild(tree: PyTree) -> Any:
        copy = jax.tree.map(lambda leaf: leaf, tree)
        return core.freeze(copy) if frozen else copy

    def apply(tree: PyTree, x: Array) -> Any:
        return module.apply(tree, x, **options)

    return adapt("Flax Linen", apply, read(variables), trainable, read, rebuild)


def _check_variables(call: str, variables: Any) -> None:
    if not isinstance(variables, Mapping) or "params" not in variables:
        given = sorted(variables) if isinstance(variables, Mapping) else type(variables).__name__
        raise ValueError(
            f"{call}: variables must be what module.apply takes, with a collection 'params', got "
            f"{given}. From a TrainState, give {{'params': state.params}} and its other collections."
        )
