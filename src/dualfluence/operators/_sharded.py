"""`K` with its rows on a mesh, and `K` with a border of new points. Neither is ever gathered."""

from functools import partial
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from .._support.compile import jit
from ._base import HIGHEST, AbstractKernelOperator, AbstractWrapper
from ._dense import DenseOperator, KroneckerOperator
from ._layout import AXIS, Layout, map_shards

if TYPE_CHECKING:
    from ..kernels._linearized import Linearized


class ShardedOperator(AbstractWrapper):
    """A dense or Kronecker `K` whose rows live on the devices of a mesh.

    A product gathers the vector, which is `n·c` times smaller than `K`, and leaves its own rows
    of the result on each device.
    """

    op: DenseOperator | KroneckerOperator
    placement: Layout = eqx.field(static=True)

    @property
    def layout(self) -> Layout:
        return self.placement

    def mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        return self._local(self.op.mv, v)

    def mm(self, v: Float[Array, "n c k"]) -> Float[Array, "n c k"]:
        return self._local(self.op.mm, v)

    def _local(self, product: Any, v: Array) -> Array:
        everywhere = jax.lax.with_sharding_constraint(v, self.placement.replicated)
        return jax.lax.with_sharding_constraint(product(everywhere), self.placement.sharding)

    def diagonal(self) -> Float[Array, "n c"]:
        # A masked sum, because the partitioner may gather all of K to pick its diagonal.
        K = self.op.matrix
        rows, cols = (jax.lax.broadcasted_iota(jnp.int32, K.shape, axis) for axis in (0, 1))
        entries = jnp.sum(jnp.where(rows == cols, K, 0), axis=1)
        column = entries.reshape(self.num_points, -1)
        column = jnp.broadcast_to(column, (self.num_points, self.num_outputs))
        return jax.lax.with_sharding_constraint(column, self.placement.sharding)

    def dense(self) -> Float[Array, "nc nc"]:
        raise ValueError(
            f"kernel: this needs all of K in one place, but its rows are on "
            f"{self.placement.num_devices} devices and are not gathered. Use CG, or fit without "
            "mesh."
        )


class ShardedMatrixFreeOperator(AbstractKernelOperator):
    """`v ↦ J(Jᵀv)` with each device's own points: one sum of a parameter vector per product."""

    model: "Linearized"
    x: Shaped[Array, "n ..."]
    c: int = eqx.field(static=True)
    placement: Layout = eqx.field(static=True)

    @property
    def layout(self) -> Layout:
        return self.placement

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
    def dtype(self) -> Any:
        return self.model.dtype

    def mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        params, static = eqx.partition(self.model, eqx.is_array)

        def local(params: Any, x: Array, v: Array) -> Array:
            model = eqx.combine(params, static)
            return model.jvp(x, jax.lax.psum(model.vjp(x, v), AXIS))

        rows, every = PartitionSpec(AXIS), PartitionSpec()
        product = map_shards(local, self.placement, (every, rows, rows), rows)
        return product(params, self.x, v)

    def diagonal(self) -> Float[Array, "n c"]:
        params, static = eqx.partition(self.model, eqx.is_array)
        rows, every = PartitionSpec(AXIS), PartitionSpec()
        local = map_shards(
            lambda p, x: eqx.combine(p, static).kernel_diagonal(x),
            self.placement,
            (every, rows),
            rows,
        )
        return local(params, self.x)

    def dense(self) -> Float[Array, "nc nc"]:
        raise ValueError("kernel: a matrix-free kernel on a mesh is never formed. Use CG.")


class BorderedOperator(AbstractKernelOperator):
    """`[[K, C], [Cᵀ, D]]`: `K` stays as and where it is, only the border is new.

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
    def num_outputs(self) -> int:
        return self.op.num_outputs

    @property
    def num_points(self) -> int:
        return self.op.num_points + self.corner.num_points

    @property
    def num_bytes(self) -> int:
        border = self.cross.size * self.cross.dtype.itemsize
        return self.op.num_bytes + border + self.corner.num_bytes

    @property
    def dtype(self) -> Any:
        return self.op.dtype

    def mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        n = self.op.num_points
        old, new = v[:n], v[n:]
        C, c = self.cross, self.num_outputs
        width = 1 if C.shape[0] == n * c else c  # right-hand sides: one, or one per output
        down = jnp.dot(C, new.reshape(-1, width), precision=HIGHEST).reshape(n, c)
        up = jnp.dot(C.T, old.reshape(-1, width), precision=HIGHEST).reshape(-1, c)
        both = jnp.concatenate([self.op.mv(old) + down, up + self.corner.mv(new)])
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

    @classmethod
    def around(cls, op: AbstractKernelOperator, columns: Array) -> "BorderedOperator":
        """`op` with an empty border that takes `columns` like these."""
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
