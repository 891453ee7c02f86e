"""Flax NNX."""

from typing import Any

import jax
from jaxtyping import Array, PyTree

from ._adapted import Adapted, Trainable, adapt, check_kind_of_model, evaluation_flags, need


def from_nnx(model: Any, *, trainable: Trainable = None, **call: Any) -> Adapted:
    """Adapt an `nnx.Module`.

    Every `nnx.Param` is trained; other variables, such as `nnx.BatchStat`, are held as `"state"`.

    **Arguments:**

    - `model`: the module; it is copied, and the copy put in evaluation mode.
    - `trainable`: which parameters are trained, all by default.
    - `call`: arguments of `model(x, ...)`.

    **Returns:** `Adapted`; `restore` gives an `nnx.Module` in evaluation mode.
    """
    nnx = need("flax.nnx", "from_nnx", "flax")
    check_kind_of_model("from_nnx", model, nnx.Module, "an nnx.Module")
    kinds = (nnx.Param, nnx.RngState, ...)
    # Random streams are constants of the copy: in evaluation mode nobody draws from them.
    graph, params, streams, state = nnx.split(_evaluating(nnx, model), *kinds)
    options = evaluation_flags(type(model).__call__, call)

    def read(other: Any) -> PyTree:
        check_kind_of_model("read", other, nnx.Module, "an nnx.Module")
        _, params, _, state = nnx.split(other, *kinds)
        return {"params": nnx.to_pure_dict(params), "state": nnx.to_pure_dict(state)}

    def rebuild(tree: PyTree) -> Any:
        return nnx.merge(
            graph, _filled(params, tree["params"]), streams, _filled(state, tree["state"])
        )

    def apply(tree: PyTree, x: Array) -> Any:
        return rebuild(tree)(x, **options)

    return adapt("Flax NNX", apply, read(model), trainable, read, rebuild)


def _evaluating(nnx: Any, model: Any) -> Any:
    copy = nnx.clone(model)
    copy.eval()
    return copy


def _filled(state: Any, values: PyTree) -> Any:
    """The variables of `state` with other values; both trees list them in the order of their names."""
    return jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(values))
