"""The kernel matrix K as an operator on arrays of shape `(n, c)`.

A structure of `K` is one subclass in one file. It must define the abstract methods and properties.
Every other method has a default: it is right for any `K`, or raises `UnsupportedStructure` and names an
alternative. A `Layout` says which rows are points and which padding, and on which devices they are.
"""

import abc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NoReturn, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .._support.compile import has_float64, types_of_64_bits
from .._support.options import ProgressFn
from .._support.shards import AXIS as AXIS
from .._support.shards import on_shards
from .._support.types import AnyArray, Inputs
from ._checks import check_by_products

MIN_SPARE, MAX_SPARE = 32, 256
"""Spare rows of a kernel that has to grow. With more of them a stream of additions compiles less often,
but empty rows take more memory; 256 rows are 5 % of a kernel of 10,000 points."""

Device = Any
"""A `jax.Device`; JAX exports the class in a form that type checkers do not follow."""


def as_mesh(mesh: "Mesh | Sequence[Device]") -> Mesh:
    """One axis over the devices of a mesh of any shape, or over a list of devices.

    Checked here: Other objects are refused, because JAX ends the process if a mesh contains them.
    """
    if isinstance(mesh, Mesh):
        devices = list(mesh.devices.flat)
    elif isinstance(mesh, (list, tuple, np.ndarray)):
        devices = list(np.ravel(np.asarray(mesh, dtype=object)))
    else:
        raise TypeError(f"mesh: expected a list of devices, e.g. jax.devices(), got {mesh!r}.")
    if not devices:
        raise ValueError("mesh: expected at least one device, got none. Try jax.devices().")
    for device in devices:
        if not isinstance(device, jax.Device):
            raise TypeError(
                f"mesh: expected devices, e.g. jax.devices(), got {device!r} among them. For "
                "devices of one kind use jax.devices('gpu')."
            )
    if len(set(devices)) != len(devices):
        raise ValueError(f"mesh: expected every device once, got {devices}.")
    return Mesh(np.array(devices, dtype=object), (AXIS,))


@dataclass(frozen=True)
class Layout:
    """Which rows are training points, and on which devices the rows are.

    `blocks` are pairs `(points, rows)`, one after another; in each the points come first and the
    other rows are padding, so that rows divide evenly among devices. A padding row is a point of
    weight zero: its dual variables stay exactly zero and no result depends on it.
    """

    blocks: tuple[tuple[int, int], ...]
    sharding: NamedSharding | None = None

    @property
    def num_points(self) -> int:
        return sum(points for points, _ in self.blocks)

    @property
    def num_rows(self) -> int:
        return sum(rows for _, rows in self.blocks)

    @property
    def positions(self) -> np.ndarray:
        """The row of every point."""
        parts, start = [], 0
        for points, rows in self.blocks:
            parts.append(start + np.arange(points))
            start += rows
        return np.concatenate(parts)

    @property
    def replicated(self) -> NamedSharding | None:
        """The same array on every device."""
        return None if self.sharding is None else NamedSharding(self.sharding.mesh, PartitionSpec())

    @property
    def num_devices(self) -> int:
        return 1 if self.sharding is None else self.sharding.mesh.size

    def holding(self, num_points: int) -> "Layout":
        """The same rows; the first `num_points` are points and the others are spare."""
        if self.sharding is not None or num_points == self.num_points:
            return self
        return Layout(((num_points, self.num_rows),))

    def extended(self, num_points: int) -> "Layout":
        """Room for more points after the existing rows."""
        rows = num_points + -num_points % self.num_devices
        return Layout((*self.blocks, (num_points, rows)), self.sharding)

    def expand(self, values: np.ndarray, padding: Literal["zero", "last"] = "last") -> np.ndarray:
        """One entry per row, from an array with one entry per point, on the host; padding repeats the
        last entry of a block."""
        parts, start = [], 0
        for points, rows in self.blocks:
            part = values[start : start + points]
            tail = np.repeat(part[-1:], rows - points, axis=0)
            parts += [part, tail if padding == "last" else np.zeros_like(tail)]
            start += points
        return np.concatenate(parts)

    def place(self, values: Any, padding: Literal["zero", "last"] = "zero") -> Array:
        """One entry per point as an array of rows on the devices."""
        if self.sharding is None and self.num_rows == self.num_points:
            return jnp.asarray(values)
        host = self.expand(np.asarray(values), padding)
        if self.sharding is None:
            return jax.device_put(host)
        host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
        return jax.make_array_from_callback(host.shape, self.sharding, lambda index: host[index])

    def scalar(self, value: float, dtype: DTypeLike) -> Array:
        """A number on every device."""
        if self.replicated is None:
            return jnp.asarray(value, dtype)
        host = np.asarray(value, dtype)
        return jax.make_array_from_callback((), self.replicated, lambda _: host)

    def points(self, rows: Array) -> Array:
        """The entries of the points, in order and without padding, the same on every device."""
        if self.sharding is not None:
            return _gather_points(self)(rows)
        if rows.shape[0] == self.num_points:
            return rows
        # On the host: a slice on the device, and `jnp.asarray` too, would compile anew for every
        # number of points.
        return jax.device_put(np.asarray(rows)[: self.num_points])

    def grow(self, rows: Array, num_rows: int) -> Array:
        """Zero rows appended, up to `num_rows`; `self` is the layout afterwards."""
        if num_rows == rows.shape[0]:
            return rows
        widths = ((0, num_rows - rows.shape[0]), *[(0, 0)] * (rows.ndim - 1))
        if self.sharding is None:
            return jnp.pad(rows, widths)
        return _grower(widths, self.sharding)(rows)


def rows_for(num_points: int, num_rows: int) -> int:
    """The number of rows for this many points: the present number, or a larger number with some spare
    rows.

    A stream of single points then meets few shapes, each of which is compiled once.
    """
    if num_points <= num_rows:
        return num_rows
    return num_points + min(max(num_points // 8, MIN_SPARE), MAX_SPARE)


def every_row(num_points: int) -> Layout:
    """Every row a point, on the default device."""
    return Layout(((num_points, num_points),))


def on_mesh(num_points: int, mesh: "Mesh | Sequence[Device]") -> Layout:
    """Points in order, then padding up to a multiple of the number of devices."""
    mesh = as_mesh(mesh)
    rows = num_points + -num_points % mesh.size
    return Layout(((num_points, rows),), NamedSharding(mesh, PartitionSpec(AXIS)))


def map_shards(
    fn: Callable[..., Any], layout: Layout, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """A function of the rows of each device of the layout."""
    assert layout.sharding is not None
    return on_shards(fn, layout.sharding.mesh, in_specs, out_specs)


@lru_cache(maxsize=256)
def _gather_points(layout: Layout) -> Callable[[Array], Array]:
    def gather(rows: Array) -> Array:
        parts, start = [], 0
        for points, num_rows in layout.blocks:
            parts.append(rows[start : start + points])
            start += num_rows
        return jnp.concatenate(parts)

    return jax.jit(gather, out_shardings=layout.replicated)


@lru_cache(maxsize=256)
def _grower(widths: Any, sharding: NamedSharding) -> Callable[[Array], Array]:
    return jax.jit(partial(jnp.pad, pad_width=widths), out_shardings=sharding)


class UnsupportedStructure(TypeError, ValueError):
    """A structure of `K` cannot do what was asked. The message names both, and what to try.

    It is a `TypeError` and a `ValueError`, because either the type of `K` is wrong for the call, or the
    option (`refine`, `precision`, `mesh`) is.
    """


class AbstractKernelOperator(eqx.Module):
    """`K`, symmetric positive semidefinite. Each structure is a class. To add one, write a subclass
    with the abstract methods below. It can be given to `fit(kernel=...)`, and edits that keep the
    points (`Remove`, `Relabel`, `Reweight`) need nothing else. `Add` puts a border around it.
    """

    @property
    @abc.abstractmethod
    def num_outputs(self) -> int:
        """`c`."""

    @property
    @abc.abstractmethod
    def num_points(self) -> int:
        """`n`, the rows of the arrays it takes; on a mesh this includes padding rows."""

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Bytes of `K` in this form."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype:
        """Dtype of `K`."""

    @abc.abstractmethod
    def mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        """`K v`."""

    @abc.abstractmethod
    def diagonal(self) -> Float[Array, "n c"]:
        """`K[i, a, i, a]`."""

    @abc.abstractmethod
    def dense(self) -> Float[Array, "nc nc"]:
        """`K` flattened point-major: row `i·c + a`."""

    @property
    def layout(self) -> Layout:
        """Which rows are points, and on which devices they are."""
        return every_row(self.num_points)

    @property
    def in_memory(self) -> bool:
        """Whether the entries of `K`, if it has any, are in memory rather than on disk."""
        return True

    @property
    def has_entries(self) -> bool:
        """Whether `entries()` are one array on one device."""
        return False

    @property
    def is_kronecker(self) -> bool:
        """Whether `K = Σ ⊗ I_c`; `entries()` are then the entries of `Σ`."""
        return False

    @property
    def rank(self) -> int | None:
        """`r` if `K` is stored as features of shape `(n, c, r)`, else `None`."""
        return None

    @property
    def follows_points(self) -> bool:
        """Whether `K` is computed from the points in every product; see `at_points`."""
        return False

    @property
    def grows(self) -> bool:
        """Whether new points go into spare rows (`with_columns`); otherwise they go into a border."""
        return False

    @property
    def product_precision(self) -> jax.lax.Precision | None:
        """Precision of products, if one can be chosen (`with_precision`)."""
        return None

    @property
    def narrow(self) -> "AbstractKernelOperator":
        """The operator for solves: this operator, or, if it multiplies in float64, the float32 operator
        inside it."""
        return self

    @property
    def solve_dtype(self) -> np.dtype:
        """Dtype of linear solves with `K`; narrower than `dtype` if solves are refined."""
        return self.narrow.dtype

    def mm(self, v: Float[Array, "n c k"]) -> Float[Array, "n c k"]:
        """`K V` for `k` columns at once."""
        return jax.vmap(self.mv, in_axes=2, out_axes=2)(v)

    def check(self) -> str:
        """Raise if this is not a kernel; else describe how this was checked.

        Finite, symmetric and positive semidefinite in random directions. Structures that are kernels by
        construction, and those whose entries can be checked, override this.
        """
        return check_by_products(self)

    def map_narrow(
        self, change: Callable[["AbstractKernelOperator"], "AbstractKernelOperator"]
    ) -> "AbstractKernelOperator":
        """The operator whose `narrow` is `change(narrow)`, with the same precision of products."""
        return change(self)

    def entries(self) -> Float[Array, "m m"]:
        """`K` (or `Σ`, if Kronecker) as the stored array; see `has_entries`."""
        self._lacks("entries", "Use mv, or dense(), which may compute the entries.")

    @property
    def entries_on_mesh(self) -> Float[Array, "m m"] | None:
        """The stored array (see `entries`) if its rows are on the devices of a mesh, else `None`."""
        return None

    def take(self, rows: AnyArray) -> "AbstractKernelOperator":
        """`K` between the points at `rows`, which may repeat, in the same structure: a copy."""
        self._lacks("take", "Fit again on these points.")

    def wide_mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        """`K v` for a float64 `v` and a narrower `K`, exact to float64 rounding for the stored `K`."""
        self._lacks("wide_mv", "refine=True needs it. Fit without refine, or give K in float64.")

    def with_precision(self, precision: jax.lax.Precision) -> "AbstractKernelOperator":
        """The same `K` with products in this precision."""
        self._lacks(
            "with_precision", "precision applies to a dense or Kronecker K in memory; leave it out."
        )

    def spread(self, layout: Layout) -> "AbstractKernelOperator":
        """The same `K` with its rows on the devices of `layout`."""
        self._lacks("spread", "Fit again with mesh=..., which computes every row on its device.")

    def at_points(self, x: Inputs, layout: Layout) -> "AbstractKernelOperator":
        """The same kernel function at other points, one for each row of `layout`."""
        self._lacks(
            "at_points",
            ("It has stored numbers and no network to compute others. Fit again at these points."),
        )

    def with_columns(self, columns: Array, start: int, stop: int) -> "AbstractKernelOperator":
        """`K` after the points `start:stop` are written into spare rows; spare rows may remain after them.

        `columns` is the kernel of all rows, spare ones included, with those points: `(rows, m)` or
        `(rows, c, m, c)`. Spare rows have a kernel of zero, or a weight of zero. Call `grow`, which
        adds a border if there are no spare rows.
        """
        self._lacks("with_columns", "Use operators.grow, or fit again with the new points.")

    def with_features(self, features: Any, start: int, num_rows: int) -> "AbstractKernelOperator":
        """`ΦΦᵀ` with the features of new points from row `start` on, in `num_rows` rows."""
        self._lacks("with_features", "Fit without kernel: low_rank makes one.")

    def cut(self, num_points: int) -> "AbstractKernelOperator":
        """`K` without the rows after the first `num_points`."""
        self._lacks("cut", "It has one row per point and no spare rows.")

    def _lacks(self, call: str, instead: str) -> NoReturn:
        raise UnsupportedStructure(f"kernel: a {type(self).__name__} has no {call}. {instead}")


class AbstractWrapper(AbstractKernelOperator):
    """Another way to multiply with the same `K`; the properties of `op` stay."""

    op: eqx.AbstractVar[Any]

    @property
    def layout(self) -> Layout:
        return self.op.layout

    @property
    def in_memory(self) -> bool:
        return self.op.in_memory

    @property
    def is_kronecker(self) -> bool:
        return self.op.is_kronecker

    @property
    def rank(self) -> int | None:
        return self.op.rank

    @property
    def follows_points(self) -> bool:
        return self.op.follows_points

    @property
    def product_precision(self) -> jax.lax.Precision | None:
        return self.op.product_precision

    @property
    def num_outputs(self) -> int:
        return self.op.num_outputs

    @property
    def num_points(self) -> int:
        return self.op.num_points

    @property
    def num_bytes(self) -> int:
        return self.op.num_bytes

    @property
    def dtype(self) -> np.dtype:
        return self.op.dtype

    def check(self) -> str:
        return self.op.check()


T = TypeVar("T")


def on_each_device(
    fn: Callable[[Device, slice, Any], T],
    layout: Layout,
    progress: bool | ProgressFn = False,
) -> list[T]:
    """`fn(device, rows, progress)` for this process's devices, in parallel; the first one reports."""
    index_map = rows_on(layout).addressable_devices_indices_map((layout.num_rows,))
    work = [(device, index[0]) for device, index in index_map.items() if index is not None]
    wide = has_float64()  # a scope holds in one thread only: the threads below enter their own

    def run(job: tuple[int, tuple[Device, slice]]) -> T:
        place, (device, index) = job
        with jax.default_device(device), types_of_64_bits(wide):
            made = fn(device, index, progress if place == 0 else False)
        return jax.device_put(made, device)

    with ThreadPoolExecutor(max_workers=len(work)) as pool:
        return list(pool.map(run, enumerate(work)))


def from_parts(parts: list[Array], layout: Layout, shape: tuple[int, ...]) -> Array:
    """One array whose rows are on the devices that made them."""
    return jax.make_array_from_single_device_arrays(shape, rows_on(layout), parts)


def rows_on(layout: Layout) -> NamedSharding:
    """The devices of a layout on a mesh."""
    assert layout.sharding is not None
    return layout.sharding
