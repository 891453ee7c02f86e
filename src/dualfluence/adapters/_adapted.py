"""The result of every adapter: a function of parameters, its parameters, and the way back."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from .._support.points import is_floating, is_tree
from .._support.show import Shown, Table, described
from ..kernels._linearized import ApplyFn, Linearized, linearize

EVALUATION = {
    "train": False,
    "training": False,
    "is_training": False,
    "deterministic": True,
    "inference": True,
    "use_running_average": True,
}
"""Names of flags for training, and their value in evaluation mode."""

Trainable = Callable[[tuple[Any, ...], Any], bool] | str | Sequence[str] | None
"""Which parameters are trained: as in `linearize`, or patterns of their names, such as `"head/*"`."""


@dataclass(frozen=True, eq=False, repr=False)
class Adapted(Shown):
    """A trained model of some framework as a function of its parameters, in evaluation mode.

    Made by `from_nnx`, `from_torch` and the like. `fit` and `load` take it in
    place of a linearised network, `attribution.Trajectory` takes it as `apply_fn`, and `from_trained` as
    `model`.

    **Fields:**

    - `framework`: its name.
    - `apply_fn`: `apply_fn(params, x) -> (n, c)`; dropout off, statistics taken from `params`.
    - `params`: a dict. `"params"` is trained; other collections (`"state"`, in Linen `"batch_stats"`
      and others) are not: running statistics, buffers, frozen parameters.
    - `trainable`: `(path, leaf) -> bool`, false outside `"params"`.
    - `reader`: a function that takes a model object to a tree like `params`.
    - `rebuild`: a function that takes a tree like `params` to a model object.
    - `scale`: of the ridge, as in `linearize`; see `with_scale`.
    """

    framework: str
    apply_fn: ApplyFn
    params: PyTree
    trainable: Callable[[tuple[Any, ...], Any], bool]
    reader: Callable[[Any], PyTree]
    rebuild: Callable[[PyTree], Any]
    scale: Any = None

    def _table(self) -> Table:
        rows = jax.tree.leaves_with_path(self.params)
        floats = [(path, leaf) for path, leaf in rows if is_floating(leaf)]
        used = sum(leaf.size for path, leaf in floats if self.trainable(path, leaf))
        held = sum(leaf.size for _, leaf in floats) - used
        table = [("parameters", f"{used:,} trained, {held:,} held fixed")]
        return f"Adapted model of {self.framework}", [*table, ("scale", described(self.scale))]

    def __call__(self, x: Any) -> Array:
        """The model's outputs at its own parameters."""
        return self.apply_fn(
            self.params, jax.tree.map(jnp.asarray, x) if is_tree(x) else jnp.asarray(x)
        )

    @cached_property
    def linearized(self) -> Linearized:
        """The network linearised at these parameters, for `fit`."""
        return linearize(self.apply_fn, self.params, trainable=self.trainable, scale=self.scale)

    def read(self, model: Any) -> PyTree:
        """The parameters of another model object of this kind: a checkpoint, the initialisation.

        Give the object in the form that the adapter takes: a module; for Linen its variables; for Haiku
        its parameters, or a pair with its state. Statistics are read too.
        """
        return self._checked("read", self.reader(model))

    def at(self, params: PyTree) -> "Adapted":
        """The same network with other parameters, from `read` or `fitted.params()`."""
        return replace(self, params=self._checked("at", params))

    def at_zero(self) -> "Adapted":
        """The same network with its trained parameters zero, towards which plain weight decay pulls."""
        treedef = jax.tree.structure(self.params)
        leaves = jax.tree.leaves_with_path(self.params)
        zero = [
            jnp.zeros_like(leaf) if is_floating(leaf) and self.trainable(path, leaf) else leaf
            for path, leaf in leaves
        ]
        return replace(self, params=jax.tree.unflatten(treedef, zero))

    def with_scale(self, scale: Any) -> "Adapted":
        """The same network with a ridge that pulls parameters differently.

        **Arguments:**

        - `scale`: as in `linearize`, for the tree `params`; a rule `(path, leaf) -> number` is often
          the shortest, e.g. `lambda path, leaf: 1 if leaf.ndim > 1 else "free"` for biases and scales
          of normalisation that weight decay leaves out.
        """
        return replace(self, scale=scale)

    def restore(self, params: PyTree) -> Any:
        """A new model object of the framework with these parameters, in evaluation mode.

        **Arguments:**

        - `params`: a tree like `self.params`, e.g. `update.params()`.
        """
        return self.rebuild(self._checked("restore", params))

    def _checked(self, call: str, params: PyTree) -> PyTree:
        """`params` as arrays in our dtypes, or an error if the trees differ."""
        want, got = jax.tree.structure(self.params), jax.tree.structure(params)
        if want != got:
            raise ValueError(
                f"{call}: params must have the tree of this {self.framework} model, {want}, got {got}. "
                "They come from adapted.params, adapted.read(model) or fitted.params()."
            )
        pairs = zip(jax.tree.leaves_with_path(self.params), jax.tree.leaves(params), strict=True)
        leaves = [_like(f"{call}: params{jax.tree_util.keystr(p)}", a, b) for (p, a), b in pairs]
        return jax.tree.unflatten(want, leaves)


def _like(name: str, own: Any, given: Any) -> Array:
    if np.shape(given) != np.shape(own):
        raise ValueError(f"{name} must have shape {np.shape(own)}, got {np.shape(given)}.")
    return jnp.asarray(given, own.dtype)


def adapt(
    framework: str,
    call: Callable[[PyTree, Any], Any],
    params: PyTree,
    trainable: Trainable,
    reader: Callable[[Any], PyTree],
    rebuild: Callable[[PyTree], Any],
) -> Adapted:
    """An `Adapted` from a function that calls the framework's model with parameters in the framework's
    form."""
    params = jax.tree.map(jnp.asarray, params)

    def apply_fn(params: PyTree, x: Any) -> Any:
        return _with_columns(call(params, x))

    return Adapted(framework, apply_fn, params, _rule(trainable), reader, rebuild)


def _with_columns(outputs: Any) -> Any:
    """One number per point becomes a column; any result that is then not `(n, c)` raises an error."""
    return outputs[:, None] if getattr(outputs, "ndim", None) == 1 else outputs


def _rule(trainable: Trainable) -> Callable[[tuple[Any, ...], Any], bool]:
    patterns = (trainable,) if isinstance(trainable, str) else trainable

    def chosen(path: tuple[Any, ...], leaf: Any) -> bool:
        if path[0].key != "params":
            return False
        if patterns is None or callable(patterns):
            return patterns is None or bool(patterns(path, leaf))
        name = jax.tree_util.keystr(path[1:], simple=True, separator="/")
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return chosen


def need(module: str, call: str, extra: str) -> Any:
    """A framework's module, or an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except (
        ImportError,
        AttributeError,
    ) as error:  # the latter where two versions do not go together
        raise ImportError(
            f"{call}: needs {module.split('.')[0]}, which cannot be imported ({error}). "
            f"Try: pip install 'dualfluence[{extra}]'."
        ) from error


def evaluation_flags(call: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a model's call: those given, and evaluation mode if the call has a flag for it."""
    names = inspect.signature(call).parameters
    return {name: off for name, off in EVALUATION.items() if name in names} | given


def check_kind_of_model(call: str, model: Any, kind: type, name: str) -> None:
    """Raise unless `model` is an object of the framework's class."""
    if not isinstance(model, kind):
        what = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"{call}: model must be {name}, got {what}. Give the trained model itself.")
