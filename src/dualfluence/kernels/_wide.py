"""A network of float32 parameters and points, computed in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._support.wide import widened
from ._scale import InScale, Reading
from ._snapshot import Snapshot


@dataclass(frozen=True)
class Widened:
    """`apply_fn` on points cast to float64; its parameters are float64 already.

    - `dtypes`: of the leaves of the given parameters, `None` for leaves that are not arrays.
    """

    fn: Callable[..., Any]
    dtypes: tuple[str | None, ...]

    def __call__(self, params: Any, x: Any) -> Any:
        # A number of float32 that the function closes over meets float64 here, also under strict promotion.
        with jax.numpy_dtype_promotion("standard"):
            return self.fn(params, widened(x))

    def narrow(self, params: PyTree) -> PyTree:
        """Parameters in the dtypes in which they were given."""
        leaves, treedef = jax.tree.flatten(params)
        # A tree without its frozen leaves, as a step is, has fewer.
        if len(leaves) != len(self.dtypes):
            return params
        pairs = zip(leaves, self.dtypes, strict=True)
        return jax.tree.unflatten(
            treedef, [leaf if own is None else leaf.astype(own) for leaf, own in pairs]
        )


def widened_fn(fn: Any, dtypes: tuple[str | None, ...]) -> Any:
    """`fn` with a `Widened` directly around the user's function, inside all other wrappers of the
    library."""
    if isinstance(fn, Snapshot):
        fn.require_unchanged()
        return widened_fn(fn.fn, dtypes)
    if isinstance(fn, InScale):
        return InScale(widened_fn(fn.fn, dtypes))
    if isinstance(fn, Reading):
        return Reading(widened_fn(fn.fn, dtypes), fn.form)
    return Widened(fn, dtypes)


def widening_of(fn: Any) -> Widened | None:
    """The `Widened` inside of `fn`, if there is one."""
    while isinstance(fn, Snapshot | InScale | Reading):
        fn = fn.fn
    return fn if isinstance(fn, Widened) else None


def dtypes_of(params: PyTree) -> tuple[str | None, ...]:
    """Dtypes of floating-point leaves."""
    return tuple(
        jnp.dtype(leaf.dtype).name
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        else None
        for leaf in jax.tree.leaves(params)
    )
