"""Split a parameter pytree into the leaves to differentiate and the rest."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._support.trees import is_array as is_array
from .._support.trees import is_floating

STATISTICS = frozenset({"batch_stats", "cache", "intermediates", "state", "stats"})
"""Collections that stand beside "params" in the variables of a model and are not trained."""


@dataclass(frozen=True)
class Split:
    """The role of each leaf of a parameter pytree.

    - `roles`: per leaf, `"trainable"`, `"fixed"` (an array) or `"static"` (anything else).
    - `static`: the static leaves, in order.
    - `paths`: readable name of every leaf.
    """

    treedef: Any
    roles: tuple[str, ...]
    static: tuple[Any, ...]
    paths: tuple[str, ...]

    def merge(self, leaves: Any, rest: Any) -> Any:
        """Put the pytree together again."""
        parts = {"trainable": iter(leaves), "fixed": iter(rest), "static": iter(self.static)}
        return jax.tree.unflatten(self.treedef, [next(parts[role]) for role in self.roles])


def statistics(params: Any) -> tuple[bool, ...]:
    """For every leaf, whether it is a statistic (a running mean, a cache) rather than a parameter.

    Flax NNX (every `Variable` that is not a `Param`) and Equinox (its `State`) are recognised by type,
    the collections of Flax Linen and Haiku (`STATISTICS`) by name.
    """
    nodes = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_state)[0]
    named = _collections(params)
    flags: list[bool] = []
    for path, node in nodes:
        held = _is_state(node) or (bool(path) and getattr(path[0], "key", None) in named)
        flags += [held] * len(jax.tree.leaves(node))
    return tuple(flags)


def _is_state(node: Any) -> bool:
    if isinstance(node, eqx.nn.State | eqx.nn.StateIndex):
        return True
    flax = {c.__name__ for c in type(node).__mro__ if c.__module__.startswith("flax.")}
    return "Variable" in flax and "Param" not in flax


def _collections(params: Any) -> frozenset[str]:
    if not isinstance(params, Mapping):
        return frozenset()
    return STATISTICS if "params" in params else frozenset({"batch_stats"})


def opened(what: str, given: Any, trainable: Any) -> tuple[Callable[..., Any], Any]:
    """`apply_fn` and its trainable leaves, from a function or from a network that holds both.

    A network of `linearize` or `adapters` is recognised by its attributes, because this module comes
    before theirs.
    """
    network = getattr(given, "linearized", given)
    if not hasattr(network, "as_given"):
        return given, trainable
    network = network.as_given()
    if network.scale is not None:
        raise ValueError(
            f"{what}: the model has a scale of its ridge, which this call does not support. Give "
            "the model without it; model.kernel(x1, x2) is the kernel with the scale."
        )
    if trainable is not None:
        return network.apply_fn, trainable
    rows = zip(jax.tree.leaves_with_path(network.params), network.trainable, strict=True)
    names = frozenset(leaf_name(path) for (path, _), used in rows if used)

    def own_choice(path: Any, leaf: Any = None) -> bool:
        """`trainable` in two forms: with keys and leaf as in `linearize`, and by name as in kernels."""
        return (path if isinstance(path, str) else leaf_name(path)) in names

    return network.apply_fn, own_choice


def split_params(params: Any, trainable: Any = None) -> tuple[Split, list[Any], list[Any]]:
    """Split `params`; returns the split, the trainable leaves and the fixed arrays.

    Integer leaves and leaves that are not arrays are never trainable, `statistics` only if `trainable`
    selects them. Half-precision arrays are converted to float32. The kernel is that of the same values,
    without further rounding.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    paths = tuple(leaf_name(path) for path, _ in flat)
    chosen = _choose(params, paths, trainable)
    roles = tuple(_role(leaf, wanted) for (_, leaf), wanted in zip(flat, chosen, strict=True))
    by_role: dict[str, list[Any]] = {"trainable": [], "fixed": [], "static": []}
    for (_, leaf), role in zip(flat, roles, strict=True):
        by_role[role].append(leaf if role == "static" else widen_half(leaf))
    if not by_role["trainable"]:
        raise ValueError(
            f"empirical kernel: no trainable parameters among {len(flat)} leaves "
            f"({', '.join(paths[:8]) or 'none'}). Expected at least one floating-point array "
            "that `trainable` selects; integer leaves and leaves that are not arrays cannot be "
            "selected."
        )
    for path, leaf, role in zip(paths, [leaf for _, leaf in flat], roles, strict=True):
        if role == "trainable" and jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise TypeError(
                f"empirical kernel: parameter {path} is {leaf.dtype}, expected real floating point."
                " Split it into real and imaginary parts."
            )
    split = Split(treedef, roles, tuple(by_role["static"]), paths)
    return split, by_role["trainable"], by_role["fixed"]


def widen_half(x: Any) -> Any:
    """Half precision to float32, NumPy to JAX, everything else unchanged."""
    if isinstance(x, np.ndarray | np.generic):
        x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(x.dtype).itemsize < 4:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, jnp.float32)
        return jnp.asarray(x, jnp.float32)
    return x


def leaf_name(path: Any) -> str:
    """The path of keys to a leaf, such as `dense/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _role(leaf: Any, wanted: bool) -> str:
    if not is_array(leaf):
        return "static"
    return "trainable" if wanted and is_floating(leaf) else "fixed"


def _choose(params: Any, paths: tuple[str, ...], trainable: Any) -> list[bool]:
    if trainable is None:
        return [not held for held in statistics(params)]
    # A pytree of bools may itself be callable (an Equinox module), a predicate is never a pytree.
    if callable(trainable) and jax.tree_util.all_leaves([trainable]):
        return [bool(trainable(path)) for path in paths]
    spread = jax.tree.map(lambda flag, sub: jax.tree.map(lambda _: flag, sub), trainable, params)
    flags = jax.tree.leaves(spread)
    wrong = [flag for flag in flags if not isinstance(flag, bool | np.bool_)]
    if wrong or len(flags) != len(paths):
        raise TypeError(
            "empirical kernel: `trainable` must be a function of a leaf's path or a pytree of"
            f" bools (or a prefix of one), got {wrong[0] if wrong else trainable!r}."
        )
    return [bool(flag) for flag in flags]
