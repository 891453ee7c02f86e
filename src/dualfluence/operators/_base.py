"""The kernel matrix K as an operator on arrays of shape `(n, c)`."""

import abc
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float

from ._layout import Layout, whole

HIGHEST = jax.lax.Precision.HIGHEST
"""Products in the full precision of the dtype: float32 means float32, also on a GPU."""


class UnsupportedStructure(NotImplementedError):
    """A structure of `K` was asked for what it does not do. The message names both."""


class AbstractKernelOperator(eqx.Module):
    """`K`, symmetric positive semidefinite. The type is the structure; solvers look at it."""

    @property
    @abc.abstractmethod
    def num_outputs(self) -> int:
        """`c`."""

    @property
    @abc.abstractmethod
    def num_points(self) -> int:
        """`n`, the rows of the arrays it takes; on a mesh that counts padding rows."""

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Bytes that hold `K` in this form."""

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """Dtype of `K`."""

    @property
    def solve_dtype(self) -> Any:
        """Dtype that linear solves with `K` run in; narrower than `dtype` where they are refined."""
        return self.dtype

    @property
    def layout(self) -> Layout:
        """Which rows are points, and where rows live."""
        return whole(self.num_points)

    @property
    def in_memory(self) -> bool:
        """Whether the entries of `K`, if it has any, are in memory rather than on disk."""
        return True

    @abc.abstractmethod
    def mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        """`K v`."""

    @abc.abstractmethod
    def diagonal(self) -> Float[Array, "n c"]:
        """`K[i, a, i, a]`."""

    @abc.abstractmethod
    def dense(self) -> Float[Array, "nc nc"]:
        """`K` flattened point-major: row `i·c + a`."""

    def mm(self, v: Float[Array, "n c k"]) -> Float[Array, "n c k"]:
        """`K V` for `k` columns at once."""
        return jax.vmap(self.mv, in_axes=2, out_axes=2)(v)

    def with_columns(self, columns: Any, start: int, stop: int) -> "AbstractKernelOperator":
        """`K` with the points `start:stop` written into spare rows, of which there may be more after.

        `columns` is the kernel of all rows, spare ones included, with those points: `(rows, m)` or
        `(rows, c, m, c)`. Spare rows have a kernel of zero, or a weight of zero.
        """
        raise UnsupportedStructure(
            f"kernel: a {type(self).__name__} takes no columns of new points."
        )

    def cut(self, num_points: int) -> "AbstractKernelOperator":
        """`K` without the rows after the first `num_points`."""
        raise UnsupportedStructure(f"kernel: a {type(self).__name__} has no spare rows to cut.")


class AbstractWrapper(AbstractKernelOperator):
    """Another way to multiply with the same `K`: what `op` says of itself stays."""

    op: eqx.AbstractVar[Any]

    @property
    def layout(self) -> Layout:
        return self.op.layout

    @property
    def in_memory(self) -> bool:
        return self.op.in_memory

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
