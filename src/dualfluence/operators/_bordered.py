"""`K` with a border of new points, for a structure that has no spare rows."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._support.compile import HIGHEST, jit
from ._base import AbstractKernelOperator, Layout
from ._dense import DenseOperator, KroneckerOperator


class BorderedOperator(AbstractKernelOperator):
    """`[[K, C], [Cᵀ, D]]`: `K` stays unchanged and in its place; only the border is new.

    `C` is `(n·c, m·c)`, or `(n, m)` when `K` and `D` are Kronecker.
    """

    op: AbstractKernelOperator
    cross: Float[Array, "rows cols"]
    corner: AbstractKernelOperator

    @property
    def layout(self) -> Layout:
        old, new = self.op.layout, self.corner.layout
        return Layout((*old.blocks, *new.blocks), old.sharding)

    @property
    def in_memory(self) -> bool:
        return self.op.in_memory

    @property
    def is_kronecker(self) -> bool:
        return self.op.is_kronecker

    @property
    def product_precision(self) -> jax.lax.Precision | None:
        return self.op.product_precision

    @property
    def grows(self) -> bool:
        return True

    @property
    def num_outputs(self) -> int:
        return self.op.num_outputs

    @property
    def dtype(self) -> np.dtype:
        return self.op.dtype

    @property
    def num_points(self) -> int:
        return self.op.num_points + self.corner.num_points

    @property
    def num_bytes(self) -> int:
        border = self.cross.size * self.cross.dtype.itemsize
        return self.op.num_bytes + border + self.corner.num_bytes

    def mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        n = self.op.num_points
        return self._product(self.op.mv(v[:n]), self.cross, self.corner.mv(v[n:]), v)

    def wide_mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        n, wide = self.op.num_points, self.cross.astype(v.dtype)
        return self._product(self.op.wide_mv(v[:n]), wide, self.corner.wide_mv(v[n:]), v)

    def _product(self, old: Array, C: Array, new: Array, v: Array) -> Array:
        """`K v` from the results of the diagonal blocks."""
        n, c = old.shape
        width = 1 if C.shape[0] == n * c else c  # right-hand sides: one, or one per output
        down = jnp.dot(C, v[n:].reshape(-1, width), precision=HIGHEST).reshape(n, c)
        up = jnp.dot(C.T, v[:n].reshape(-1, width), precision=HIGHEST).reshape(-1, c)
        both = jnp.concatenate([old + down, up + new])
        if self.layout.sharding is None:
            return both
        return jax.lax.with_sharding_constraint(both, self.layout.sharding)

    def diagonal(self) -> Float[Array, "n c"]:
        return jnp.concatenate([self.op.diagonal(), self.corner.diagonal()])

    def dense(self) -> Float[Array, "nc nc"]:
        C, c = self.cross, self.num_outputs
        if C.shape[0] == self.op.num_points and c > 1:
            C = jnp.kron(C, jnp.eye(c, dtype=C.dtype))
        return jnp.block([[self.op.dense(), C], [C.T, self.corner.dense()]])

    def with_precision(self, precision: jax.lax.Precision) -> "BorderedOperator":
        """The precision of both blocks; the border itself keeps full precision."""
        op, corner = (part.with_precision(precision) for part in (self.op, self.corner))
        return BorderedOperator(op, self.cross, corner)

    @classmethod
    def around(cls, op: AbstractKernelOperator, columns: Array) -> "BorderedOperator":
        """`op` with an empty border, for columns of the same kind as `columns`."""
        each = 1 if columns.ndim == 2 else op.num_outputs
        kind = KroneckerOperator if columns.ndim == 2 else DenseOperator
        corner = kind(jnp.zeros((0, 0), columns.dtype), op.num_outputs)
        return cls(op, jnp.zeros((op.num_points * each, 0), columns.dtype), corner)

    def with_columns(self, columns: Array, start: int, stop: int) -> "BorderedOperator":
        n, m = self.op.num_points, stop - start
        each = 1 if columns.ndim == 2 else self.num_outputs
        width = (columns.shape[0] - n) * each
        top = columns[:n].reshape(n * each, m * each)
        cross = _write_border(self.cross, top, np.asarray((start - n) * each), width=width)
        corner = self.corner.with_columns(columns[n:], start - n, stop - n)
        return BorderedOperator(self.op, cross, corner)

    def cut(self, num_points: int) -> "BorderedOperator":
        left = num_points - self.op.num_points
        each = self.cross.shape[1] // max(self.corner.num_points, 1)
        return BorderedOperator(self.op, self.cross[:, : left * each], self.corner.cut(left))


@partial(jit, static_argnames="width")
def _write_border(
    cross: Float[Array, "rows old"], top: Float[Array, "rows m"], start: Int[Any, ""], *, width: int
) -> Float[Array, "rows width"]:
    grown = jnp.pad(cross, ((0, 0), (0, width - cross.shape[1])))
    return jax.lax.dynamic_update_slice_in_dim(grown, top.astype(cross.dtype), start, axis=1)


def grow(
    op: AbstractKernelOperator, columns: Array, start: int, stop: int
) -> AbstractKernelOperator:
    """`K` with new points, in spare rows or in a border; see `with_columns`."""

    def change(narrow: AbstractKernelOperator) -> AbstractKernelOperator:
        inside = narrow if narrow.grows else BorderedOperator.around(narrow, columns)
        return inside.with_columns(columns, start, stop)

    return op.map_narrow(change)
