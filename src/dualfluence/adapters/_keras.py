"""Keras, on its JAX backend."""

import copy
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from jaxtyping import Array, PyTree

from ._adapted import Adapted, Trainable, adapt, check_kind_of_model, evaluation_flags, need


def from_keras(model: Any, *, trainable: Trainable = None, **call: Any) -> Adapted:
    """Adapt a built Keras 3 model that runs on JAX.

    `model.trainable_variables` are trained, all other variables are held as `"state"`; both are named
    by their paths.

    **Arguments:**

    - `model`: the model; `restore` copies it with Keras itself, so your own classes need a constructor
      that passes on `**kwargs`, and a `get_config` for its other arguments.
    - `trainable`: which parameters are trained, all by default.
    - `call`: arguments of the call other than `x`; `training` is `False` unless it is given.

    **Returns:** `Adapted`; `restore` gives a Keras model.
    """
    keras = _import_keras()
    check_kind_of_model("from_keras", model, keras.Model, "a keras.Model")
    _check_ready(keras, model)
    options = evaluation_flags(model.call, call)
    names = _names(model.trainable_variables), _names(model.non_trainable_variables)

    def read(other: Any) -> PyTree:
        check_kind_of_model("read", other, keras.Model, "a keras.Model")
        # By the names of this model: Keras numbers layers anew in every copy.
        return {
            "params": _values(names[0], other.trainable_variables),
            "state": _values(names[1], other.non_trainable_variables),
        }

    def listed(tree: PyTree) -> tuple[list[Any], list[Any]]:
        return [tree["params"][k] for k in names[0]], [tree["state"][k] for k in names[1]]

    def rebuild(tree: PyTree) -> Any:
        # Keras copies by configuration, and must be told the classes that it does not know.
        own_classes = {type(part).__name__: type(part) for part in (model, *model.layers)}
        with keras.saving.custom_object_scope(own_classes):
            twin = copy.deepcopy(model)
        params, state = listed(tree)
        own = [*twin.trainable_variables, *twin.non_trainable_variables]
        for variable, value in zip(own, params + state, strict=True):
            variable.assign(value)
        return twin

    def apply(tree: PyTree, x: Array) -> Any:
        return model.stateless_call(*listed(tree), x, **options)[0]

    return adapt("Keras", apply, read(model), trainable, read, rebuild)


def _import_keras() -> Any:
    """Keras, or an error that says whether the package or the backend is missing."""
    try:
        return need("keras", "from_keras", "keras")
    except ImportError as error:
        if find_spec("keras") is None:
            raise
        raise ImportError(
            f"from_keras: Keras is installed but cannot be imported ({error.__cause__}). Set "
            "KERAS_BACKEND=jax in the environment before Keras is imported: by default it wants TensorFlow."
        ) from error


def _check_ready(keras: Any, model: Any) -> None:
    if keras.backend.backend() != "jax":
        raise ValueError(
            f"from_keras: Keras runs on {keras.backend.backend()}, expected jax. Set "
            "KERAS_BACKEND=jax in the environment before Keras is imported, and load the model there."
        )
    if not model.built:
        raise ValueError("from_keras: the model has no weights yet. Call it once on data first.")


def _names(variables: Sequence[Any]) -> list[str]:
    """Paths of variables; variables with the same path get a number."""
    paths = [variable.path for variable in variables]
    return [
        path if paths.count(path) == 1 else f"{path}#{paths[:k].count(path)}"
        for k, path in enumerate(paths)
    ]


def _values(names: Sequence[str], variables: Sequence[Any]) -> dict[str, Any]:
    if len(names) != len(variables):
        raise ValueError(
            f"read: the adapted model has {len(names)} variables and the given model {len(variables)}, "
            "counting either the trainable or the other ones alone. Both models need the same layers."
        )
    return {name: variable.value for name, variable in zip(names, variables, strict=True)}
