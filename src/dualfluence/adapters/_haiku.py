"""Haiku."""

import inspect
from typing import Any

import jax
from jaxtyping import Array, PyTree

from ._adapted import Adapted, Trainable, adapt, evaluation_flags, need


def from_haiku(
    transformed: Any, params: Any, state: Any = None, *, trainable: Trainable = None, **call: Any
) -> Adapted:
    """Adapt a transformed Haiku function and its parameters.

    `params` is trained, `state` is held fixed. No random key is passed, so a function that asks for one
    fails.

    **Arguments:**

    - `transformed`: from `hk.transform`, or with a `state` from `hk.transform_with_state`.
    - `params`, `state`: arguments of `transformed.apply`.
    - `trainable`: which parameters are trained, all by default.
    - `call`: arguments of the function other than `x`. A flag such as `is_training` is set to
      evaluation unless it is given.

    **Returns:** `Adapted`; `restore` gives the parameters, or the pair of parameters and state.
    """
    hk = need("haiku", "from_haiku", "haiku")
    stateful = _check_transformed(hk, transformed, state)
    options = evaluation_flags(transformed.apply, call)
    # hk.without_apply_rng takes this argument away.
    takes_key = list(inspect.signature(transformed.apply).parameters)[1 + stateful] == "rng"
    key = (None,) if takes_key else ()

    def read(other: Any) -> PyTree:
        params, state = other if stateful else (other, {})
        return {"params": hk.data_structures.to_mutable_dict(params), "state": dict(state)}

    def rebuild(tree: PyTree) -> Any:
        copy = jax.tree.map(lambda leaf: leaf, tree)
        return (copy["params"], copy["state"]) if stateful else copy["params"]

    def apply(tree: PyTree, x: Array) -> Any:
        if stateful:
            return transformed.apply(tree["params"], tree["state"], *key, x, **options)[0]
        return transformed.apply(tree["params"], *key, x, **options)

    given = (params, state) if stateful else params
    return adapt("Haiku", apply, read(given), trainable, read, rebuild)


def _check_transformed(hk: Any, transformed: Any, state: Any) -> bool:
    """Whether the function has a state, which must then be given, and only then."""
    stateful = isinstance(transformed, hk.TransformedWithState)
    if not stateful and not isinstance(transformed, hk.Transformed):
        raise TypeError(
            "from_haiku: transformed must come from hk.transform or hk.transform_with_state, got "
            f"{type(transformed).__name__}."
        )
    if stateful != (state is not None):
        raise ValueError(
            f"from_haiku: {'a state is missing' if stateful else 'a state was given'}, but the function "
            f"comes from hk.transform{'_with_state' if stateful else ''}."
        )
    return stateful
