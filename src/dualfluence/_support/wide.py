"""Float64 inside the library for users who stay in JAX's default float32.

If float32 is not accurate enough for a model, the model keeps its dual variables and outputs in
float64. Its methods run in a local scope that switches 64-bit types on, and return float32 if the
caller has them off.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .checks import NotFinite

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


def has_float64() -> bool:
    """Whether 64-bit types are on here, switched on by the caller or by a `double` scope."""
    return jnp.dtype(jax.dtypes.canonicalize_dtype(float)) == jnp.float64


def double(wanted: bool = True) -> AbstractContextManager[Any]:
    """A scope with 64-bit types, in this thread only. It does nothing if they are on or not wanted."""
    return nullcontext() if not wanted or has_float64() else _switched(True)


def _switched(on: bool) -> AbstractContextManager[Any]:
    own: Any = getattr(jax, "enable_x64", None)
    if own is None:  # the name that it has in JAX 0.6 and 0.7
        own = importlib.import_module("jax.experimental").enable_x64
    return own(on)


def types_of_64_bits(on: bool) -> AbstractContextManager[Any]:
    """A scope with 64-bit types, or without them."""
    return double() if on else _switched(False)


def widened(tree: PyTree) -> PyTree:
    """Floating-point arrays as float64; everything else as it is."""
    return jax.tree.map(_wider, tree)


def narrowed(tree: PyTree) -> PyTree:
    """Arrays in float64 as float32; records that define how they are narrowed; everything else
    unchanged."""
    own = getattr(tree, "_in_float32", None)
    return own() if own is not None else jax.tree.map(_narrower, tree)


def in_own_precision(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], T]:
    """A method of an object with `is_wide`: computed in float64, returned in float32.

    Inside a scope with 64-bit types it does neither, because such callers want all digits.
    """

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if has_float64() or not getattr(self, "is_wide", False):
            return method(self, *args, **kwargs)
        with double():
            return narrowed(method(self, *args, **kwargs))

    return call


def _wider(leaf: Any) -> Any:
    return leaf.astype(jnp.float64) if _is_float_array(leaf) else leaf


def _narrower(leaf: Any) -> Any:
    if not (isinstance(leaf, jax.Array) and leaf.dtype == jnp.float64):
        return leaf
    narrow = leaf.astype(jnp.float32)
    if bool((jnp.isfinite(leaf) & ~jnp.isfinite(narrow)).any()):
        raise NotFinite(
            "a result overflows float32, the dtype in which it is returned: "
            f"{float(jnp.max(jnp.abs(leaf))):.3g}. Scale features and targets, or call "
            "jax.config.update('jax_enable_x64', True) first."
        )
    return narrow


def _is_float_array(leaf: Any) -> bool:
    return hasattr(leaf, "astype") and jnp.issubdtype(leaf.dtype, jnp.floating)
