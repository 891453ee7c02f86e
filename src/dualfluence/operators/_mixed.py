"""A float32 `K` whose products with float64 vectors accumulate in float64."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from .._support.memory import panel_rows
from ._base import HIGHEST, AbstractKernelOperator, AbstractWrapper
from ._dense import DenseOperator, KroneckerOperator
from ._implicit import LowRankOperator, MatrixFreeOperator
from ._layout import AXIS, map_shards
from ._sharded import BorderedOperator, ShardedMatrixFreeOperator, ShardedOperator


class MixedOperator(AbstractWrapper):
    """`K` held in float32 and multiplied in float64, one panel of rows at a time.

    With `K` taken as it is stored, such a product is exact to float64 rounding: what a residual
    needs for iterative refinement. `op` gives the fast float32 products for the solves between.
    """

    op: AbstractKernelOperator

    def __check_init__(self) -> None:
        if isinstance(self.op, (MatrixFreeOperator, ShardedMatrixFreeOperator)):
            raise ValueError(
                "fit: refine=True needs the entries of K, and a matrix-free kernel has none. Use "
                "form='dense', a store, or float64 parameters."
            )
        if not jax.config.read("jax_enable_x64"):
            raise ValueError(
                "fit: refine=True keeps residuals in float64; call "
                "jax.config.update('jax_enable_x64', True) first. The kernel may stay float32."
            )

    @property
    def dtype(self) -> Any:
        return jnp.dtype("float64")

    @property
    def solve_dtype(self) -> Any:
        return self.op.dtype

    def mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        op = self.op
        if isinstance(op, (DenseOperator, KroneckerOperator)):
            return _wide_product(op.matrix, v.reshape(op.matrix.shape[1], -1)).reshape(v.shape)
        if isinstance(op, ShardedOperator):
            matrix, everywhere = op.op.matrix, v.reshape(op.op.matrix.shape[1], -1)
            rows, every = PartitionSpec(AXIS), PartitionSpec()
            product = map_shards(_wide_product, op.layout, (rows, every), rows)
            return product(matrix, everywhere).reshape(v.shape)
        if isinstance(op, BorderedOperator):
            wide = op.cross.astype(self.dtype)
            return BorderedOperator(MixedOperator(op.op), wide, MixedOperator(op.corner)).mv(v)
        if isinstance(op, LowRankOperator):
            return LowRankOperator(op.features.astype(self.dtype)).mv(v)
        return op.mv(v)  # on disk: tiles are widened one by one

    def diagonal(self) -> Float[Array, "n c"]:
        return self.op.diagonal().astype(self.dtype)

    def dense(self) -> Float[Array, "nc nc"]:
        return self.op.dense().astype(self.dtype)

    def cut(self, num_points: int) -> "MixedOperator":
        return MixedOperator(self.op.cut(num_points))


def _wide_product(matrix: Float[Array, "rows cols"], v: Float[Array, "cols k"]) -> Array:
    rows, cols = matrix.shape
    panel = panel_rows(rows, cols * jnp.dtype(v.dtype).itemsize)

    def add(i: Array, result: Array) -> Array:
        # The last panel starts early instead of being short: some rows are written twice.
        start = jnp.minimum(i * panel, rows - panel)
        part = jax.lax.dynamic_slice_in_dim(matrix, start, panel).astype(v.dtype)
        value = jnp.dot(part, v, precision=HIGHEST)
        return jax.lax.dynamic_update_slice_in_dim(result, value, start, axis=0)

    empty = jnp.zeros((rows, v.shape[1]), v.dtype)
    return jax.lax.fori_loop(0, -(-rows // panel), add, empty)
