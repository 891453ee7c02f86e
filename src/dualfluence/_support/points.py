"""Inputs that are trees of arrays with the points on axis 0: tokens and mask, image and metadata.

Inside the library a point of such inputs is one row of bytes. Therefore rows are gathered, appended,
stored, spread over devices and overwritten as for any array. Only the network, which unpacks its rows,
knows that they come from a tree. Also here: which leaves of a tree are parameters, and norms of trees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from .checks import as_dtype, as_features, as_jax
from .types import AnyArray, AnyLeaf, Inputs, Numbers


def is_array(leaf: object) -> TypeGuard[AnyLeaf]:
    """Whether `leaf` is an array, or the shape of one."""
    return isinstance(leaf, AnyLeaf)


def is_floating(leaf: object) -> bool:
    """Whether `leaf` can be a parameter: an array of floating-point numbers.

    Python numbers cannot: they are settings, and most libraries do not train them.
    """
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def common_dtype(*arrays_or_dtypes: AnyLeaf | DTypeLike) -> np.dtype:
    """The dtype that holds all of these by JAX's table, even if a user asks for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*arrays_or_dtypes)


def float_leaves(tree: PyTree) -> list[Array]:
    """Floating-point leaves as arrays; numbers, flags and functions are not parameters."""
    leaves = jax.tree.leaves(tree)
    return [jnp.asarray(leaf) for leaf in leaves if is_floating(leaf)]


def tree_norm(tree: PyTree) -> Float[Array, ""]:
    """`√Σ leaf²` over floating leaves, summed in at least float32."""
    leaves = float_leaves(tree)
    dtype = common_dtype(jnp.float32, *leaves)
    squares = (jnp.sum(leaf.astype(dtype) ** 2) for leaf in leaves)
    return jnp.sqrt(sum(squares, start=jnp.zeros((), dtype)))


BYTES = np.dtype(np.uint8)


def is_tree(x: Inputs) -> bool:
    """Whether inputs are a tree of arrays rather than one array.

    A tree is a dict, a tuple of arrays, or any other node that JAX knows. A list is one array made of
    its rows, and so is a tuple of numbers or lists.
    """
    if x is None or isinstance(x, list) or jax.tree_util.all_leaves([x]):
        return False
    plain = type(x) is tuple
    return not plain or all(_is_array(part) or is_tree(part) for part in x)


def _is_array(value: object) -> bool:
    return isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def count_points(x: Inputs) -> int:
    """Length of axis 0 of an array or of a tree of arrays."""
    return jax.tree.leaves(x)[0].shape[0]


@dataclass(frozen=True)
class Form:
    """The form of a point: the tree, and the shape and dtype of each leaf's rows."""

    tree: Any
    leaves: tuple[tuple[tuple[int, ...], str], ...]

    @property
    def size(self) -> int:
        """Bytes of a point."""
        return sum(prod(shape) * _width(dtype) for shape, dtype in self.leaves)

    def struct(self, num_points: int) -> jax.ShapeDtypeStruct:
        """Packed points, as a shape."""
        return jax.ShapeDtypeStruct((num_points, self.size), BYTES)

    def holds(self, x: Inputs) -> bool:
        """Whether `x` are packed points, as the library passes them on internally."""
        kept = isinstance(x, jax.Array | np.ndarray) and x.dtype == BYTES
        return bool(kept and x.ndim == 2 and x.shape[1] == self.size)

    def pack(self, name: str, x: Inputs) -> jax.Array:
        """Points of this form as rows of bytes on the device, checked."""
        if self.holds(x):
            return jnp.asarray(x)
        if not is_tree(x) or jax.tree.structure(x) != self.tree:
            got = jax.tree.structure(x) if is_tree(x) else type(x).__name__
            raise ValueError(
                f"{name}: expected a tree of arrays like the training features, {self.tree}, got {got}."
            )
        wanted = [
            jax.ShapeDtypeStruct((0, *shape), jnp.dtype(dtype)) for shape, dtype in self.leaves
        ]
        rows = [
            _like(f"{name}{jax.tree_util.keystr(path)}", leaf, want)
            for (path, leaf), want in zip(jax.tree.leaves_with_path(x), wanted, strict=True)
        ]
        n = common_length(name, rows)
        parts = [np.ascontiguousarray(np.asarray(a)).reshape(n, -1) for a in rows]
        packed = [p.astype(BYTES) if p.dtype == bool else p.view(BYTES) for p in parts]
        # On the host: on the device every number of points would be a program of its own.
        return jax.device_put(np.concatenate(packed, axis=1))

    def unpack(self, rows: Array) -> Inputs:
        """The tree of arrays; may be traced."""
        arrays, start, n = [], 0, rows.shape[0]
        for shape, name in self.leaves:
            dtype, width = jnp.dtype(name), _width(name)
            stop = start + prod(shape) * width
            part = jax.lax.slice_in_dim(rows, start, stop, axis=1)
            arrays.append(_as_dtype(part.reshape(n, *shape, width), dtype))
            start = stop
        return jax.tree.unflatten(self.tree, arrays)

    def to_plain(self) -> list[object]:
        """The form as lists and names, for the header of a file. Only trees of dicts, tuples and lists
        can be written this way."""
        places = jax.tree.unflatten(self.tree, range(len(self.leaves)))
        return [_plain(places), [[list(shape), dtype] for shape, dtype in self.leaves]]

    @classmethod
    def from_plain(cls, plain: Any) -> "Form":
        """The inverse of `to_plain`; raises `ValueError`, `TypeError` or `KeyError` for anything else."""
        places, given = plain
        tree = _from_plain(places)
        leaves = tuple(
            (tuple(int(n) for n in shape), jnp.dtype(dtype).name) for shape, dtype in given
        )
        if jax.tree.leaves(tree) != list(range(len(leaves))):
            raise ValueError(f"leaves {jax.tree.leaves(tree)} of {len(leaves)}")
        return cls(jax.tree.structure(tree), leaves)


def _plain(node: Any) -> list[object] | int | None:
    if type(node) is int or node is None:
        return node
    if type(node) in (list, tuple):
        return [type(node).__name__, [_plain(part) for part in node]]
    if type(node) is dict and all(type(key) is str for key in node):
        return ["dict", {key: _plain(part) for key, part in node.items()}]
    raise ValueError(
        f"save: the features contain a {type(node).__name__}. A file can hold only dicts with string "
        "keys, tuples and lists. Use a tree of these for the features of the model."
    )


def _from_plain(node: Any) -> Any:
    if type(node) is int or node is None:
        return node
    kind, parts = node
    if kind == "dict":
        return {key: _from_plain(part) for key, part in parts.items()}
    return {"list": list, "tuple": tuple}[kind](_from_plain(part) for part in parts)


def _as_dtype(part: Array, dtype: np.dtype) -> Array:
    """`(..., width)` bytes as `(...)` numbers."""
    if dtype == jnp.bool_:
        return part[..., 0] != 0
    if dtype.itemsize == 1:
        return jax.lax.bitcast_convert_type(part[..., 0], dtype)
    return jax.lax.bitcast_convert_type(part, dtype)


def _width(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


def _like(name: str, leaf: Numbers, want: jax.ShapeDtypeStruct) -> jax.Array:
    array = as_dtype(name, leaf, want.dtype)
    if array.ndim == 0 or array.shape[1:] != want.shape[1:]:
        shape = ", ".join(("q", *map(str, want.shape[1:])))
        raise ValueError(f"{name}: expected shape ({shape}), got {tuple(array.shape)}.")
    return as_features(name, array)


def form_of(name: str, x: Inputs) -> Form | None:
    """The form of a tree of arrays, checked; `None` for one array."""
    if not is_tree(x):
        return None
    rows = jax.tree.leaves_with_path(x)
    if not rows:
        raise ValueError(f"{name}: expected arrays with points on axis 0, got a tree without any.")
    arrays = [_entered(f"{name}{jax.tree_util.keystr(path)}", leaf) for path, leaf in rows]
    common_length(name, arrays)
    return Form(
        jax.tree.structure(x), tuple((tuple(a.shape[1:]), jnp.dtype(a.dtype).name) for a in arrays)
    )


def _entered(name: str, leaf: Numbers) -> AnyArray | jax.ShapeDtypeStruct:
    if not _is_array(leaf):
        raise TypeError(
            f"{name}: expected an array with points on axis 0, got {type(leaf).__name__}. Put "
            "values that are the same for all points into apply_fn or the parameters."
        )
    return as_jax(name, leaf) if not isinstance(leaf, Tracer | jax.ShapeDtypeStruct) else leaf


def common_length(name: str, arrays: Sequence[AnyArray | jax.ShapeDtypeStruct]) -> int:
    """Length of axis 0, which all of these must share."""
    lengths = {a.shape[0] if a.ndim else None for a in arrays}
    if len(lengths) != 1 or None in lengths:
        raise ValueError(
            f"{name}: every array needs the points on axis 0, and the same number of them, got shapes "
            f"{[tuple(a.shape) for a in arrays]}."
        )
    return arrays[0].shape[0]


def enter_points(name: str, x: Inputs, form: Form | None) -> jax.Array:
    """Finite features on the device, one row per point: those of one array, or packed."""
    return as_features(name, x) if form is None else form.pack(name, x)


def shown(rows: AnyArray, form: Form | None) -> np.ndarray | None:
    """Features to show beside scores; `None` for a tree of arrays, which is not a picture."""
    return None if form is not None else np.asarray(rows)
