"""A kernel on disk as an operator: a product streams the stored tiles once."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..operators import AbstractKernelOperator
from ._format import Store

PREFETCH = 2
"""Tiles read ahead of the one in use."""


class StoredOperator(AbstractKernelOperator):
    """`K` streamed from a `Store`: memory of a few tiles, one pass over the disk per product.

    Each tile above the diagonal serves both of its places. Products accumulate in the dtype of the
    vector, so a float32 store multiplies float64 vectors in float64.
    """

    store: Store = eqx.field(static=True)

    @property
    def num_outputs(self) -> int:
        return self.store.header.num_outputs

    @property
    def num_points(self) -> int:
        return self.store.header.num_points

    @property
    def num_bytes(self) -> int:
        return self.store.num_bytes

    @property
    def in_memory(self) -> bool:
        return False

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.store.header.dtype)

    def mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        shape = jax.ShapeDtypeStruct(v.shape, v.dtype)
        return jax.pure_callback(self._product, shape, v, vmap_method="sequential")

    def mm(self, v: Float[Array, "n c k"]) -> Float[Array, "n c k"]:
        shape = jax.ShapeDtypeStruct(v.shape, v.dtype)
        return jax.pure_callback(self._product, shape, v, vmap_method="sequential")

    def diagonal(self) -> Float[Array, "n c"]:
        shape = jax.ShapeDtypeStruct((self.num_points, self.num_outputs), self.dtype)
        return jax.pure_callback(self._diagonal, shape, vmap_method="sequential")

    def dense(self) -> Float[Array, "nc nc"]:
        size = self.num_points * self.num_outputs
        eye = jnp.eye(size, dtype=self.dtype).reshape(self.num_points, self.num_outputs, size)
        return self.mm(eye).reshape(size, size)

    def _product(self, v: Any) -> np.ndarray:
        header = self.store.header
        v = np.asarray(v)
        flat = v.reshape(header.side, -1)
        result = np.zeros_like(flat)
        for (i, j), tile in self._tiles(header.tiles):
            T = tile.astype(v.dtype, copy=False)
            rows, cols = header.rows(i), header.rows(j)
            result[rows] += T @ flat[cols]
            if i != j:
                result[cols] += T.T @ flat[rows]
        return result.reshape(v.shape)

    def _diagonal(self) -> np.ndarray:
        header = self.store.header
        entries = np.empty(header.side, header.dtype)
        for (i, _), tile in self._tiles([(i, i) for i in range(header.tiles_per_side)]):
            entries[header.rows(i)] = np.diagonal(tile).astype(header.dtype)
        column = entries.reshape(header.num_points, -1)
        return np.broadcast_to(column, (header.num_points, header.num_outputs)).copy()

    def _tiles(self, order: list[tuple[int, int]]) -> Any:
        """Verified tiles in order, the next ones already on their way."""
        futures = {tile: self.store.request(tile) for tile in order[:PREFETCH]}
        for place, tile in enumerate(order):
            ahead = order[place + PREFETCH : place + PREFETCH + 1]
            futures.update({each: self.store.request(each) for each in ahead})
            yield tile, self.store.receive(tile, futures.pop(tile))
