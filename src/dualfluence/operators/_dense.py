"""Dense `K` and Kronecker `Σ ⊗ I`."""

from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._support.compile import jit
from .._support.memory import panel_rows
from ._base import HIGHEST, AbstractKernelOperator


class DenseOperator(AbstractKernelOperator):
    """`K` held as an `(n·c, n·c)` array, point-major. One product reads it once."""

    matrix: Float[Array, "nc nc"]
    c: int = eqx.field(static=True)
    precision: jax.lax.Precision = eqx.field(static=True, default=HIGHEST)

    @property
    def num_outputs(self) -> int:
        return self.c

    @property
    def num_points(self) -> int:
        return self.matrix.shape[0] // self.c

    @property
    def num_bytes(self) -> int:
        return self.matrix.size * self.matrix.dtype.itemsize

    @property
    def dtype(self) -> Any:
        return self.matrix.dtype

    def mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        return jnp.dot(self.matrix, v.reshape(-1), precision=self.precision).reshape(v.shape)

    def mm(self, v: Float[Array, "n c k"]) -> Float[Array, "n c k"]:
        flat = v.reshape(-1, v.shape[2])
        return jnp.dot(self.matrix, flat, precision=self.precision).reshape(v.shape)

    def diagonal(self) -> Float[Array, "n c"]:
        return jnp.diagonal(self.matrix).reshape(-1, self.c)

    def dense(self) -> Float[Array, "nc nc"]:
        return self.matrix

    def with_columns(self, columns: Array, start: int, stop: int) -> "DenseOperator":
        rows, c, m, _ = columns.shape
        where = np.asarray([start, stop]) * c
        return replace(self, matrix=_write(self.matrix, columns.reshape(rows * c, m * c), where))

    def cut(self, num_points: int) -> "DenseOperator":
        size = num_points * self.c
        return replace(self, matrix=self.matrix[:size, :size])


class KroneckerOperator(AbstractKernelOperator):
    """`Σ ⊗ I_c` with `Σ` of shape `(n, n)`: every output has the same kernel, no cross terms."""

    matrix: Float[Array, "n n"]
    c: int = eqx.field(static=True)
    precision: jax.lax.Precision = eqx.field(static=True, default=HIGHEST)

    @property
    def num_outputs(self) -> int:
        return self.c

    @property
    def num_points(self) -> int:
        return self.matrix.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.matrix.size * self.matrix.dtype.itemsize

    @property
    def dtype(self) -> Any:
        return self.matrix.dtype

    def mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        return jnp.dot(self.matrix, v, precision=self.precision)

    def mm(self, v: Float[Array, "n c k"]) -> Float[Array, "n c k"]:
        flat = v.reshape(v.shape[0], -1)
        return jnp.dot(self.matrix, flat, precision=self.precision).reshape(v.shape)

    def diagonal(self) -> Float[Array, "n c"]:
        column = jnp.diagonal(self.matrix).reshape(-1, 1)
        return jnp.broadcast_to(column, (self.num_points, self.c))

    def dense(self) -> Float[Array, "nc nc"]:
        return jnp.kron(self.matrix, jnp.eye(self.c, dtype=self.matrix.dtype))

    def with_columns(self, columns: Array, start: int, stop: int) -> "KroneckerOperator":
        return replace(self, matrix=_write(self.matrix, columns, np.asarray([start, stop])))

    def cut(self, num_points: int) -> "KroneckerOperator":
        return replace(self, matrix=self.matrix[:num_points, :num_points])


@jit
def _write(
    K: Float[Array, "old old"], columns: Float[Array, "rows m"], where: Int[Any, "2"]
) -> Float[Array, "rows rows"]:
    """`K` with columns and, transposed, rows `where[0]:where[1]`; rows past those stay zero.

    The place is data, not shape: one program for every point that finds room.
    """
    start, stop = where
    spare = columns.shape[0] - K.shape[0]
    inside = jnp.arange(columns.shape[0]) < stop
    columns = jnp.where(inside[:, None], columns, 0).astype(K.dtype)
    grown = jnp.pad(K, ((0, spare), (0, spare)))
    grown = jax.lax.dynamic_update_slice(grown, columns, (jnp.zeros_like(start), start))
    return jax.lax.dynamic_update_slice(grown, columns.T, (start, jnp.zeros_like(start)))


def take_block(op: DenseOperator | KroneckerOperator, rows: Any) -> AbstractKernelOperator:
    """`K` between the points at `rows`, a copy; besides it only a panel of rows is held."""
    if isinstance(op, DenseOperator):
        rows = (rows[:, None] * op.c + np.arange(op.c, dtype=np.int32)).reshape(-1)
    K, rows = op.matrix, jnp.asarray(rows)
    size = rows.shape[0]
    panel = panel_rows(size, K.shape[1] * K.dtype.itemsize)

    def copy(i: Array, block: Array) -> Array:
        # The last panel starts early instead of being short: some rows are written twice.
        start = jnp.minimum(i * panel, size - panel)
        part = K[jax.lax.dynamic_slice_in_dim(rows, start, panel)][:, rows]
        return jax.lax.dynamic_update_slice_in_dim(block, part, start, axis=0)

    block = jax.lax.fori_loop(0, -(-size // panel), copy, jnp.zeros((size, size), K.dtype))
    return replace(op, matrix=block)
