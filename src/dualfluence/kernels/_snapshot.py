"""A network with the present values of everything that `apply_fn` closes over; these values are part of
its identity.

Compiled programs keep the arrays that a function closes over, and JAX finds programs by the function
alone: after a change of such an array the old program would silently be used. A `Snapshot` is the
function together with a checksum of everything it reads, so a changed function counts as another
function. Programs compiled from a snapshot can still be used. But after a change no other program is
compiled from it, so that no model mixes old and new values.

`widened_fn` computes such a network of float32 parameters and points in float64.
"""

import functools
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jaxtyping import PyTree

from .._support.compile import PRECISION, has_float64, types_of_64_bits, widened
from .._support.points import is_array
from .._support.types import ApplyFn, Inputs
from ._params import InScale, Reading
from ._program import Arithmetic, arithmetic, array_checksum, program_checksum, shapes_of, trace

T = TypeVar("T")

POINTS = 3
"""Number of points at which a snapshot is traced; any number is possible."""

DEPTH = 6
"""How many steps from a function `reads` follows its closure."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Kept(Generic[T]):
    """The results of the last `size` keys; a key of `None` is never kept."""

    def __init__(self, size: int) -> None:
        self._size, self._items = size, OrderedDict[Hashable, T]()

    def get(self, key: Hashable) -> T | None:
        if key is None or key not in self._items:
            return None
        self._items.move_to_end(key)
        return self._items[key]

    def put(self, key: Hashable, value: T) -> T:
        if key is not None:
            self._items[key] = value
            while len(self._items) > self._size:
                self._items.popitem(last=False)
        return value


@dataclass(frozen=True)
class Snapshot:
    """`fn` at one moment. Two snapshots of the same function are equal if it reads the same values.

    - `args`: shapes of the parameters and of `POINTS` points at which it was traced.
    - `outputs`: shape and dtype of the outputs there.
    - `arithmetic`: the least precise rounding on the way to them.
    - `wide`: whether 64-bit types were on.
    """

    fn: ApplyFn
    checksum: str
    args: tuple[PyTree, Inputs] = field(compare=False, repr=False)
    outputs: PyTree = field(compare=False, repr=False)
    arithmetic: Arithmetic = field(compare=False, repr=False)
    wide: bool = field(compare=False, repr=False, default_factory=has_float64)

    def __call__(self, params: PyTree, x: Inputs) -> PyTree:
        """`fn(params, x)`, or an error if `fn` has changed."""
        self.require_unchanged()
        return self.fn(params, x)

    def require_unchanged(self) -> None:
        """Raise if `fn` has changed."""
        with types_of_64_bits(self.wide):  # numbers made inside of `fn` have other types otherwise
            now = program_checksum(_trace_exactly(self.fn, self.args)[0])
        if now != self.checksum:
            raise ChangedError(
                "apply_fn: an array or number that it closes over has changed since this model was"
                " made, so that old and new results would mix. Call linearize and fit (or kernel)"
                " again, or make what changes a parameter."
            )

    def fits(self, x: Inputs) -> bool:
        """Whether `x` has points of the shape and dtype that the snapshot was taken for."""
        own, given = (jax.tree.leaves(tree) for tree in (self.args[1], x))
        return len(own) == len(given) and all(
            (a.shape[1:], a.dtype) == (b.shape[1:], b.dtype)
            for a, b in zip(own, given, strict=True)
        )


class ChangedError(ValueError):
    """A value that `apply_fn` closes over changed after a model was made from it."""


def take_snapshot(fn: ApplyFn, params: PyTree, x: Inputs) -> Snapshot:
    """A snapshot of `fn` for inputs like `x`; it costs one trace."""
    args = (shapes_of(params), shapes_of(x, POINTS))
    closed, outputs = _trace_exactly(fn, args)
    count = len([leaf for leaf in jax.tree.leaves(params) if is_array(leaf)])
    return Snapshot(fn, program_checksum(closed), args, outputs, arithmetic(closed, count))


def _trace_exactly(fn: ApplyFn, args: tuple[PyTree, Inputs]) -> tuple[ClosedJaxpr, PyTree]:
    """The jaxpr and outputs at full precision, whatever the caller's default is."""
    with jax.default_matmul_precision(PRECISION):
        return trace(fn, *args, return_shape=True)


def reads(fn: ApplyFn) -> tuple[Hashable, ...]:
    """The values that `fn` closes over, found without calling it: cells, defaults, globals, attributes
    of `self`.

    Contents of arrays and plain values, up to `DEPTH` steps away.
    """
    return tuple(_reads(fn, DEPTH, set()))


def _reads(value: object, depth: int, seen: set[int]) -> Iterable[Hashable]:
    if isinstance(value, PLAIN):
        yield (type(value).__name__, value)
    elif isinstance(value, jax.Array | np.ndarray | np.generic):
        yield id(value) if isinstance(value, Tracer) else array_checksum(value)
    elif depth and id(value) not in seen and not isinstance(value, ModuleType | type):
        seen.add(id(value))
        for part in _inside(value):
            yield from _reads(part, depth - 1, seen)


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, FunctionType):
        return () if _of_jax(value) else _of_function(value)
    return list(getattr(value, "__dict__", {}).values())


def _of_jax(value: FunctionType) -> bool:
    return (value.__module__ or "").split(".")[0] in ("jax", "jaxlib", "numpy")


def _of_function(fn: FunctionType) -> list[object]:
    cells = [cell.cell_contents for cell in fn.__closure__ or () if _is_filled(cell)]
    named = [fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__]
    return [*cells, *named, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Widened:
    """`apply_fn` on points cast to float64; its parameters are float64 already.

    - `dtypes`: of the leaves of the given parameters, `None` for leaves that are not arrays.
    """

    fn: ApplyFn
    dtypes: tuple[str | None, ...]

    def __call__(self, params: PyTree, x: Inputs) -> PyTree:
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


def widened_fn(fn: ApplyFn, dtypes: tuple[str | None, ...]) -> ApplyFn:
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


def widening_of(fn: ApplyFn) -> Widened | None:
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
