"""The kernel matrix K as an operator on arrays of shape `(n, c)`.

A structure of `K` is one subclass in one file. It must define the abstract methods and properties.
Every other method has a default: it is right for any `K`, or raises `UnsupportedStructure` and names an
alternative.
"""

import abc
from collections.abc import Callable
from typing import Any, NoReturn

import equinox as eqx
import jax
from jaxtyping import Array, Float

from ._checks import check_by_products
from ._layout import Layout, whole


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
    def dtype(self) -> Any:
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
        return whole(self.num_points)

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
        """Whether `K = Σ ⊗ I_c`; its entries are then those of `Σ`."""
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
        """The operator for solves: itself, or the float32 operator inside one that multiplies in
        float64."""
        return self

    @property
    def solve_dtype(self) -> Any:
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

    def take(self, rows: Any) -> "AbstractKernelOperator":
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

    def at_points(self, x: Any, layout: Layout) -> "AbstractKernelOperator":
        """The same kernel function at other points, one for each row of `layout`."""
        self._lacks(
            "at_points",
            ("It has stored numbers and no network to compute others. Fit again at these points."),
        )

    def with_columns(self, columns: Any, start: int, stop: int) -> "AbstractKernelOperator":
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
    def dtype(self) -> Any:
        return self.op.dtype

    def check(self) -> str:
        return self.op.check()
