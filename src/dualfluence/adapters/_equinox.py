"""Equinox."""

import inspect
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, PyTree

from ._adapted import Adapted, Trainable, adapt, check_kind_of_model, evaluation_flags


def from_equinox(
    model: Any, state: Any = None, *, trainable: Trainable = None, **call: Any
) -> Adapted:
    """Adapt an Equinox module and its state. The module takes one point at a time.

    Floating-point arrays of the module are trained; `state`, such as that of batch norm, is held fixed.

    **Arguments:**

    - `model`: called as `model(point)`, with a state as `model(point, state)`.
    - `state`: an `eqx.nn.State`.
    - `trainable`: which parameters are trained, all by default.
    - `call`: further arguments of the call; a required argument `key` is `None` unless it is given here.

    **Returns:** `Adapted`; `restore` gives the module in inference mode, or the pair of module and state.
    """
    check_kind_of_model("from_equinox", model, eqx.Module, "an eqx.Module")
    static = _split(model)[1]
    treedef = jax.tree.structure(state)
    options = evaluation_flags(type(model).__call__, _keyless(model) | call)

    def read(other: Any) -> PyTree:
        module, held = (other, None) if state is None else other
        # By position: a state names its entries by objects that a tree cannot show.
        return {"params": _split(module)[0], "state": jax.tree.leaves(held)}

    def rebuild(tree: PyTree) -> Any:
        module = eqx.combine(tree["params"], static)
        return module if state is None else (module, jax.tree.unflatten(treedef, tree["state"]))

    def apply(tree: PyTree, x: Array) -> Any:
        if state is None:
            return jax.vmap(lambda point: rebuild(tree)(point, **options))(x)
        module, held = rebuild(tree)
        return jax.vmap(lambda point: module(point, held, **options)[0])(x)

    given = model if state is None else (model, state)
    return adapt("Equinox", apply, read(given), trainable, read, rebuild)


def _split(model: Any) -> tuple[PyTree, PyTree]:
    return eqx.partition(eqx.nn.inference_mode(model), eqx.is_inexact_array)


def _keyless(model: Any) -> dict[str, Any]:
    key = inspect.signature(type(model).__call__).parameters.get("key")
    return {"key": None} if key is not None and key.default is key.empty else {}
