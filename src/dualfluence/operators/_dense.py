"""Dense `K` and Kronecker `Σ ⊗ I`."""

import abc
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._support.compile import HIGHEST, jit
from .._support.memory import panel_rows
from .._support.types import AnyArray
from ._base import AbstractKernelOperator, Device, Layout, from_parts, on_each_device
from ._checks import check_entries
from ._mixed import wide_product
from ._sharded import ShardedOperator


class AbstractMatrixOperator(AbstractKernelOperator):
    """`K` stored as one array. A product reads every entry once.

    - `matrix`: the entries.
    - `c`: outputs per point.
    - `precision`: of products.
    """

    matrix: eqx.AbstractVar[Float[Array, "m m"]]
    c: eqx.AbstractVar[int]
    precision: eqx.AbstractVar[jax.lax.Precision]

    @property
    @abc.abstractmethod
    def each(self) -> int:
        """Rows of the matrix per point."""

    @property
    def num_outputs(self) -> int:
        return self.c

    @property
    def num_points(self) -> int:
        return self.matrix.shape[0] // self.each

    @property
    def num_bytes(self) -> int:
        return self.matrix.size * self.matrix.dtype.itemsize

    @property
    def dtype(self) -> np.dtype:
        return self.matrix.dtype

    @property
    def has_entries(self) -> bool:
        return True

    @property
    def grows(self) -> bool:
        return True

    @property
    def product_precision(self) -> jax.lax.Precision:
        return self.precision

    def mm(self, v: Float[Array, "n c k"]) -> Float[Array, "n c k"]:
        flat = v.reshape(self.matrix.shape[1], -1)
        return jnp.dot(self.matrix, flat, precision=self.precision).reshape(v.shape)

    def wide_mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        return wide_product(self.matrix, v.reshape(self.matrix.shape[1], -1)).reshape(v.shape)

    def check(self) -> str:
        return check_entries(self.matrix)

    def entries(self) -> Float[Array, "m m"]:
        return self.matrix

    def take(self, rows: AnyArray) -> "AbstractMatrixOperator":
        """A copy; besides the copy only a panel of rows takes memory."""
        return replace(self, matrix=_take(self.matrix, self._rows_of(rows).reshape(-1)))

    def with_precision(self, precision: jax.lax.Precision) -> "AbstractMatrixOperator":
        return replace(self, precision=precision)

    def spread(self, layout: Layout) -> ShardedOperator:
        flat = self._rows_of(layout.expand(np.arange(self.num_points)))

        def take(device: Device, index: slice, report: Any) -> Array:
            return self.matrix[flat[index].reshape(-1)][:, flat.reshape(-1)]

        parts = on_each_device(take, layout)
        matrix = from_parts(parts, layout, (flat.size, flat.size))
        return ShardedOperator(replace(self, matrix=matrix), layout)

    def with_columns(self, columns: Array, start: int, stop: int) -> "AbstractMatrixOperator":
        rows, m = columns.shape[0], stop - start
        if columns.ndim == 4 and self.each < self.c:
            self._lacks("with_columns of outputs that interact", "Fit again with kernel='dense'.")
        if columns.ndim == 2 and self.each > 1:
            eye = jnp.eye(self.c, dtype=columns.dtype)
            columns = jnp.einsum("nm,ab->namb", columns, eye, precision=HIGHEST)
        flat = columns.reshape(rows * self.each, m * self.each)
        where = np.asarray([start, stop]) * self.each
        return replace(self, matrix=_write(self.matrix, flat, where))

    def cut(self, num_points: int) -> "AbstractMatrixOperator":
        size = num_points * self.each
        return replace(self, matrix=self.matrix[:size, :size])

    def _rows_of(self, points: Any) -> Any:
        """Rows of the matrix for these points, `(m, each)`."""
        return points[:, None] * self.each + np.arange(self.each, dtype=points.dtype)[None]


class DenseOperator(AbstractMatrixOperator):
    """`K` stored as an `(n·c, n·c)` array, point-major."""

    matrix: Float[Array, "nc nc"]
    c: int = eqx.field(static=True)
    precision: jax.lax.Precision = eqx.field(static=True, default=HIGHEST)

    @property
    def each(self) -> int:
        return self.c

    def mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        return jnp.dot(self.matrix, v.reshape(-1), precision=self.precision).reshape(v.shape)

    def diagonal(self) -> Float[Array, "n c"]:
        return jnp.diagonal(self.matrix).reshape(-1, self.c)

    def dense(self) -> Float[Array, "nc nc"]:
        return self.matrix


class KroneckerOperator(AbstractMatrixOperator):
    """`Σ ⊗ I_c` with `Σ` of shape `(n, n)`: every output has the same kernel, no cross terms."""

    matrix: Float[Array, "n n"]
    c: int = eqx.field(static=True)
    precision: jax.lax.Precision = eqx.field(static=True, default=HIGHEST)

    @property
    def each(self) -> int:
        return 1

    @property
    def is_kronecker(self) -> bool:
        return True

    def mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        return jnp.dot(self.matrix, v, precision=self.precision)

    def diagonal(self) -> Float[Array, "n c"]:
        column = jnp.diagonal(self.matrix).reshape(-1, 1)
        return jnp.broadcast_to(column, (self.num_points, self.c))

    def dense(self) -> Float[Array, "nc nc"]:
        return jnp.kron(self.matrix, jnp.eye(self.c, dtype=self.matrix.dtype))


@jit
def _write(
    K: Float[Array, "old old"], columns: Float[Array, "rows m"], where: Int[Any, "2"]
) -> Float[Array, "rows rows"]:
    """`K` with columns and, transposed, rows `where[0]:where[1]`; rows after those stay zero.

    The position is data, not shape, so one program serves every point that fits.
    """
    start, stop = where
    spare = columns.shape[0] - K.shape[0]
    inside = jnp.arange(columns.shape[0]) < stop
    columns = jnp.where(inside[:, None], columns, 0).astype(K.dtype)
    grown = jnp.pad(K, ((0, spare), (0, spare)))
    grown = jax.lax.dynamic_update_slice(grown, columns, (jnp.zeros_like(start), start))
    return jax.lax.dynamic_update_slice(grown, columns.T, (start, jnp.zeros_like(start)))


def _take(K: Float[Array, "m m"], rows: AnyArray) -> Float[Array, "k k"]:
    rows = jnp.asarray(rows)
    size = rows.shape[0]
    panel = panel_rows(size, K.shape[1] * K.dtype.itemsize)

    def copy(i: Array, block: Array) -> Array:
        # The last panel starts early instead of being short: some rows are written twice.
        start = jnp.minimum(i * panel, size - panel)
        # Both at once: rows first and then columns leaves a block that is slow to multiply with.
        part = K[jax.lax.dynamic_slice_in_dim(rows, start, panel)[:, None], rows[None]]
        return jax.lax.dynamic_update_slice_in_dim(block, part, start, axis=0)

    return jax.lax.fori_loop(0, -(-size // panel), copy, jnp.zeros((size, size), K.dtype))
