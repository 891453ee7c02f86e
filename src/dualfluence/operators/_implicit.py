"""`K` without its entries: matrix-free `J(Jᵀv)` and low rank `ΦΦᵀ`."""

from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from .._support.compile import HIGHEST, jit
from .._support.types import AnyArray, Inputs
from ..kernels._linearized import Linearized
from ._base import AbstractKernelOperator, Layout
from ._sharded import AbstractTangentOperator, ShardedMatrixFreeOperator


class MatrixFreeOperator(AbstractTangentOperator):
    """`v ↦ J(Jᵀv)` by batched vjp, then jvp. Memory of one parameter vector and one batch."""

    model: Linearized = eqx.field(converter=Linearized.in_scale)
    x: Shaped[Array, "n ..."]
    c: int = eqx.field(static=True)

    def mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        return self.model.jvp(self.x, self.model.vjp(self.x, v))

    def diagonal(self) -> Float[Array, "n c"]:
        return self.model.kernel_diagonal(self.x)

    def dense(self) -> Float[Array, "nc nc"]:
        kernel = self.model.kernel_block(self.x, self.x)
        return kernel.reshape(self.num_points * self.num_outputs, -1)

    def at_points(self, x: Inputs, layout: Layout) -> "MatrixFreeOperator":
        return replace(self, x=x)

    def take(self, rows: AnyArray) -> "MatrixFreeOperator":
        return replace(self, x=self.x[rows])

    def spread(self, layout: Layout) -> ShardedMatrixFreeOperator:
        rows = layout.place(self.x, "last")
        return ShardedMatrixFreeOperator(self.model, rows, self.c, layout)

    def cut(self, num_points: int) -> "MatrixFreeOperator":
        return replace(self, x=self.x[:num_points])

    def wide_mv(self, v: Float[Array, "n c"]) -> NoReturn:
        self._lacks(
            "wide_mv",
            "refine=True needs the entries of K, and a matrix-free kernel has none. Use kernel='dense', "
            "a store, or float64 parameters.",
        )


class LowRankOperator(AbstractKernelOperator):
    """`ΦΦᵀ` with features `Φ` of shape `(n, c, r)`: exact for `r` features, cheap for small `r`."""

    features: Float[Array, "n c r"]

    @property
    def num_outputs(self) -> int:
        return self.features.shape[1]

    @property
    def num_points(self) -> int:
        return self.features.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.features.size * self.features.dtype.itemsize

    @property
    def dtype(self) -> np.dtype:
        return self.features.dtype

    def _flat(self) -> Float[Array, "nc r"]:
        return self.features.reshape(-1, self.features.shape[2])

    def mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        phi = self._flat()
        inner = jnp.dot(phi.T, v.reshape(-1), precision=HIGHEST)
        return jnp.dot(phi, inner, precision=HIGHEST).reshape(v.shape)

    def mm(self, v: Float[Array, "n c k"]) -> Float[Array, "n c k"]:
        phi = self._flat()
        inner = jnp.dot(phi.T, v.reshape(-1, v.shape[2]), precision=HIGHEST)
        return jnp.dot(phi, inner, precision=HIGHEST).reshape(v.shape)

    def diagonal(self) -> Float[Array, "n c"]:
        return jnp.sum(self.features**2, axis=2)

    def dense(self) -> Float[Array, "nc nc"]:
        phi = self._flat()
        return jnp.dot(phi, phi.T, precision=HIGHEST)

    @property
    def rank(self) -> int:
        return self.features.shape[2]

    @property
    def grows(self) -> bool:
        return True

    def check(self) -> str:
        return "positive semidefinite by construction"

    def wide_mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        return LowRankOperator(self.features.astype(v.dtype)).mv(v)

    def take(self, rows: AnyArray) -> "LowRankOperator":
        return LowRankOperator(self.features[rows])

    def with_columns(self, columns: Array, start: int, stop: int) -> NoReturn:
        self._lacks(
            "with_columns",
            "New points need features, which a kernel function does not have. Fit low_rank(...) as the "
            "model, or fit again with the new points.",
        )

    def with_features(
        self, features: Float[Array, "m c r"], start: int, num_rows: int
    ) -> "LowRankOperator":
        """`Φ` after the points from `start` on are written into spare rows; later rows stay zero."""
        return LowRankOperator(
            _write_rows(self.features, features, np.asarray(start), num_rows=num_rows)
        )

    def cut(self, num_points: int) -> "LowRankOperator":
        return LowRankOperator(self.features[:num_points])


@partial(jit, static_argnames="num_rows")
def _write_rows(
    rows: Float[Array, "old c r"], new: Float[Array, "m c r"], start: Int[Any, ""], *, num_rows: int
) -> Float[Array, "num_rows c r"]:
    grown = jnp.pad(rows, ((0, num_rows - rows.shape[0]), (0, 0), (0, 0)))
    return jax.lax.dynamic_update_slice_in_dim(grown, new.astype(rows.dtype), start, axis=0)
