"""A float32 `K` whose products with float64 vectors accumulate in float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._support.compile import HIGHEST
from .._support.memory import panel_rows
from .._support.types import AnyArray
from ._base import AbstractKernelOperator, AbstractWrapper, Layout


class MixedOperator(AbstractWrapper):
    """`K` stored in float32 and multiplied in float64, by the `wide_mv` of its structure.

    For the stored `K` such a product is exact to float64 rounding, as the residual of iterative
    refinement requires. `op` gives the fast float32 products for the solves in between. Made by
    `widen`.
    """

    op: AbstractKernelOperator

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype("float64")

    @property
    def narrow(self) -> AbstractKernelOperator:
        return self.op

    @property
    def grows(self) -> bool:
        return self.op.grows

    def map_narrow(
        self, change: Callable[[AbstractKernelOperator], AbstractKernelOperator]
    ) -> "MixedOperator":
        return MixedOperator(change(self.op))

    def mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        return self.op.wide_mv(v)

    def wide_mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        return self.op.wide_mv(v)

    def diagonal(self) -> Float[Array, "n c"]:
        return self.op.diagonal().astype(self.dtype)

    def dense(self) -> Float[Array, "nc nc"]:
        return self.op.dense().astype(self.dtype)

    def take(self, rows: AnyArray) -> "MixedOperator":
        return MixedOperator(self.op.take(rows))

    def with_precision(self, precision: jax.lax.Precision) -> "MixedOperator":
        return MixedOperator(self.op.with_precision(precision))

    def spread(self, layout: Layout) -> "MixedOperator":
        return MixedOperator(self.op.spread(layout))

    def with_columns(self, columns: Array, start: int, stop: int) -> "MixedOperator":
        return MixedOperator(self.op.with_columns(columns, start, stop))

    def with_features(self, features: Any, start: int, num_rows: int) -> "MixedOperator":
        return MixedOperator(self.op.with_features(features, start, num_rows))

    def cut(self, num_points: int) -> "MixedOperator":
        return MixedOperator(self.op.cut(num_points))


def widen(op: AbstractKernelOperator) -> AbstractKernelOperator:
    """The same `K` multiplied in float64; the operator itself if it is in float64 already."""
    if op.dtype == jnp.float64:
        return op
    if not jax.config.read("jax_enable_x64"):
        raise ValueError(
            "kernel: refine=True keeps residuals in float64, but JAX's 64-bit types are off. Call "
            "jax.config.update('jax_enable_x64', True) first. The kernel may stay float32."
        )
    # Traced once with nothing in it: a structure without such products says so here, not in a solve.
    jax.eval_shape(op.wide_mv, jax.ShapeDtypeStruct((op.num_points, op.num_outputs), jnp.float64))
    return MixedOperator(op)


def wide_product(
    matrix: Float[Array, "rows cols"], v: Float[Array, "cols k"]
) -> Float[Array, "rows k"]:
    """A float32 matrix times a float64 one in float64; one panel of rows is converted at a time."""
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
