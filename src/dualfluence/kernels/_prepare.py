"""Check a function and its inputs, make a recipe of its kernel once, and keep the compiled pieces."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._support.compile import jit
from .._support.points import common_length, count_points
from ._apart import Apart
from ._features import feature_bytes, make_features, workspace_bytes
from ._gram import Features, contract, take_points
from ._params import Split, opened, split_params, widen_half
from ._recipe import Method, Recipe
from ._report import make_report, read_uses
from ._snapshot import Kept, Snapshot, reads

MAX_KEPT = 16
"""Number of compiled kernels that are kept for repeated calls."""


class Prepared:
    """A recipe with its compiled features and tiles, and the guard of its function."""

    def __init__(
        self, single: Any, batched: Any, split: Split, shapes: Any, recipe: Recipe
    ) -> None:
        leaves, rest, point = shapes
        self.recipe = recipe
        self.report = make_report(recipe, split, read_uses(single, leaves, rest, point))
        self.feature_bytes = feature_bytes(recipe, leaves, rest, point)
        self.workspace_bytes = workspace_bytes(recipe)
        self._features = jit(partial(make_features, recipe), static_argnames="chunk")
        tile = partial(contract, dtype=recipe.dtype, precision=recipe.precision)
        self.tile = jit(tile, static_argnames="traced")
        self.tile_at = jit(
            lambda f1, f2, i, j, traced: tile(
                take_points(f1, i), take_points(f2, j), traced=traced
            ),
            static_argnames="traced",
        )
        self._apart = Apart(batched, leaves, rest, jax.tree.map(_as_batch, point))

    def features(self, leaves: Any, rest: Any, x: Any, chunk: int) -> Features:
        return self._features(leaves, rest, x, chunk=chunk)

    def check_apart(self, leaves: Any, rest: Any, x: Any) -> None:
        """Raise if outputs or derivatives of a point change with the other points."""
        self._apart.check(leaves, rest, x)


_KEPT = Kept[Prepared](MAX_KEPT)


def prepare_kernel(
    apply_fn: Callable[..., Any],
    params: Any,
    x: Any,
    trainable: Any,
    method: Method,
    precision: Any,
) -> tuple[Prepared, list[Any], list[Any]]:
    """Make a recipe for the kernel of `apply_fn`, or reuse that of an earlier call with the same shapes.

    **Returns:** the prepared kernel, the trainable leaves and the fixed arrays.
    """
    if method not in ("auto", "structured", "jacobian"):
        raise ValueError(
            f'empirical kernel: method must be "auto", "structured" or "jacobian", got {method!r}.'
        )
    apply_fn, trainable = opened("empirical kernel", apply_fn, trainable)
    split, leaves, rest = split_params(params, trainable)
    args = (leaves, rest, x)
    found = _KEPT.get(_key(apply_fn, split, args, (method, precision)))
    if found is None:
        found = _build(apply_fn, split, args, method, precision)
        # The key of now: a function that counts its calls has changed what it closes over.
        _KEPT.put(_key(apply_fn, split, args, (method, precision)), found)
    return found, leaves, rest


def _build(apply_fn: Any, split: Split, args: Any, method: Method, precision: Any) -> Prepared:
    def batched(leaves: Any, rest: Any, x: Any) -> Any:
        return apply_fn(split.merge(leaves, rest), x)

    leaves, rest, x = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    check_outputs("empirical kernel", jax.eval_shape(batched, leaves, rest, x), count_points(x))
    point = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), x)

    def single(leaves: Any, rest: Any, x: Any) -> Any:
        out = batched(leaves, rest, jax.tree.map(lambda a: a[None], x))
        return jnp.reshape(out, (out.shape[1],))

    recipe = Recipe(single, leaves, rest, point, method=method, precision=precision)
    return Prepared(single, batched, split, (leaves, rest, point), recipe)


def _as_batch(point: Any) -> Any:
    return jax.ShapeDtypeStruct((1, *point.shape), point.dtype)


def _key(apply_fn: Any, split: Split, args: Any, options: Any) -> Any:
    """The key of a recipe; `None`, so that a new one is made, if it is not hashable or is being traced."""
    arrays, structure = jax.tree.flatten(args)
    if any(isinstance(a, Tracer) for a in arrays):
        return None
    shapes = tuple((a.shape, str(a.dtype)) for a in jax.tree.leaves(args[:2]))
    shapes += tuple((a.shape[1:], str(a.dtype)) for a in jax.tree.leaves(args[2]))
    read = () if isinstance(apply_fn, Snapshot) else reads(apply_fn)
    key = (apply_fn, read, split, structure, shapes, options, str(jnp.result_type(float)))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def as_inputs(x1: Any, x2: Any | None) -> tuple[Any, Any | None]:
    """Both inputs as arrays (NumPy stays in host memory), checked against each other."""
    first = _as_points("x1", x1)
    if x2 is None:
        return first, None
    second = _as_points("x2", x2)
    kinds = [
        (jax.tree.structure(x), [(a.shape[1:], str(a.dtype)) for a in jax.tree.leaves(x)])
        for x in (first, second)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError(
            "empirical kernel: x1 and x2 must agree in all but the number of points, got"
            f" {kinds[0][1]} and {kinds[1][1]} per point (shape, dtype)."
        )
    return first, second


def _as_points(name: str, x: Any) -> Any:
    arrays = jax.tree.map(_as_input, x)
    if common_length(f"empirical kernel: {name}", jax.tree.leaves(arrays)) == 0:
        raise ValueError(f"empirical kernel: {name} needs one or more points on axis 0, got none.")
    return arrays


def _as_input(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return widen_half(x)
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
        return x.astype(jax.dtypes.canonicalize_dtype(widen_dtype(x.dtype)), copy=False)
    return widen_half(x)


def widen_dtype(dtype: Any) -> Any:
    """The dtype that `widen` gives."""
    half = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.float32 if half else dtype


def check_outputs(what: str, out: Any, n: int) -> int:
    """The number of outputs `c`, or an error if `out` is not one real array of shape `(n, c)`."""
    arrays = jax.tree.leaves(out)
    alone = len(arrays) == 1 and arrays[0] is out
    shape = tuple(out.shape) if alone else f"{len(arrays)} arrays in a {type(out).__name__}"
    if not alone or len(shape) != 2 or shape[0] != n or shape[1] == 0:
        raise ValueError(
            f"{what}: apply_fn(params, x) must return an array of shape (n, c) = ({n}, c), got {shape}. A "
            "scalar output still needs its axis: return f[:, None]. Flatten other axes, drop auxiliary "
            "outputs."
        )
    if not jnp.issubdtype(out.dtype, jnp.floating):
        raise ValueError(
            f"{what}: apply_fn(params, x) must return real floating-point numbers, got {out.dtype}. "
            "Return scores before any argmax, rounding or comparison."
        )
    return out.shape[1]
