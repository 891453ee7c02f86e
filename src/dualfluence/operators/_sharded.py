"""`K` with its rows on a mesh, with entries or without. It is never collected on one device."""

from dataclasses import replace
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from .._support.shards import EVERY, ROWS
from .._support.types import Inputs
from ..kernels._linearized import Linearized
from ._base import (
    AXIS,
    AbstractKernelOperator,
    AbstractWrapper,
    Layout,
    UnsupportedStructure,
    map_shards,
)
from ._checks import check_by_products
from ._mixed import wide_product


class ShardedOperator(AbstractWrapper):
    """A dense or Kronecker `K` whose rows are spread over the devices of a mesh.

    A product gathers the vector, which is `n·c` times smaller than `K`, and leaves the rows of the
    result on their devices. `op` has entries, spread over the devices of `placement`.
    """

    op: AbstractKernelOperator
    placement: Layout = eqx.field(static=True)

    @property
    def layout(self) -> Layout:
        return self.placement

    @property
    def entries_on_mesh(self) -> Float[Array, "m m"]:
        return self.op.entries()

    def mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        return self._local(self.op.mv, v)

    def mm(self, v: Float[Array, "n c k"]) -> Float[Array, "n c k"]:
        return self._local(self.op.mm, v)

    def wide_mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        K = self.op.entries()
        product = map_shards(wide_product, self.placement, (ROWS, EVERY), ROWS)
        return product(K, v.reshape(K.shape[1], -1)).reshape(v.shape)

    def check(self) -> str:
        return check_by_products(self)

    def with_precision(self, precision: jax.lax.Precision) -> "ShardedOperator":
        return replace(self, op=self.op.with_precision(precision))

    def _local(self, product: Any, v: Array) -> Array:
        everywhere = jax.lax.with_sharding_constraint(v, self.placement.replicated)
        return jax.lax.with_sharding_constraint(product(everywhere), self.placement.sharding)

    def diagonal(self) -> Float[Array, "n c"]:
        # A masked sum, because the partitioner may gather all of K to pick its diagonal.
        K = self.op.entries()
        rows, cols = (jax.lax.broadcasted_iota(jnp.int32, K.shape, axis) for axis in (0, 1))
        entries = jnp.sum(jnp.where(rows == cols, K, 0), axis=1)
        column = entries.reshape(self.num_points, -1)
        column = jnp.broadcast_to(column, (self.num_points, self.num_outputs))
        return jax.lax.with_sharding_constraint(column, self.placement.sharding)

    def dense(self) -> NoReturn:
        raise UnsupportedStructure(
            f"kernel: ShardedOperator.dense needs all of K in one place, but its rows are on "
            f"{self.placement.num_devices} devices and are not gathered. Use CG, or fit without "
            "mesh."
        )


class AbstractTangentOperator(AbstractKernelOperator):
    """`v ↦ J(Jᵀv)` from a network and points, which it follows; no entry of `K` is held."""

    model: eqx.AbstractVar[Linearized]
    x: eqx.AbstractVar[Shaped[Array, "n ..."]]
    c: eqx.AbstractVar[int]

    @property
    def num_outputs(self) -> int:
        return self.c

    @property
    def num_points(self) -> int:
        return self.x.shape[0]

    @property
    def num_bytes(self) -> int:
        return 0

    @property
    def dtype(self) -> np.dtype:
        return self.model.dtype

    @property
    def follows_points(self) -> bool:
        return True

    def check(self) -> str:
        return "positive semidefinite by construction"


class ShardedMatrixFreeOperator(AbstractTangentOperator):
    """`v ↦ J(Jᵀv)` with each device's own points: one sum of a parameter vector per product."""

    model: Linearized = eqx.field(converter=Linearized.in_scale)
    x: Shaped[Array, "n ..."]
    c: int = eqx.field(static=True)
    placement: Layout = eqx.field(static=True)

    @property
    def layout(self) -> Layout:
        return self.placement

    def mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        params, static = eqx.partition(self.model, eqx.is_array)

        def local(params: Any, x: Array, v: Array) -> Array:
            model = eqx.combine(params, static)
            return model.jvp(x, jax.lax.psum(model.vjp(x, v), AXIS))

        product = map_shards(local, self.placement, (EVERY, ROWS, ROWS), ROWS)
        return product(params, self.x, v)

    def diagonal(self) -> Float[Array, "n c"]:
        params, static = eqx.partition(self.model, eqx.is_array)
        local = map_shards(
            lambda p, x: eqx.combine(p, static).kernel_diagonal(x),
            self.placement,
            (EVERY, ROWS),
            ROWS,
        )
        return local(params, self.x)

    def dense(self) -> NoReturn:
        raise UnsupportedStructure(
            "kernel: a ShardedMatrixFreeOperator cannot give K as a dense matrix, because it never computes "
            "the entries of K. Use CG."
        )

    def at_points(self, x: Inputs, layout: Layout) -> "ShardedMatrixFreeOperator":
        return replace(self, x=layout.place(x, "last"), placement=layout)
