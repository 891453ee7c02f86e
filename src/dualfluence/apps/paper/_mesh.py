"""`K_rr` with its rows on a mesh: each device holds its rows only, as in the paper's section 4.1."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...operators import AbstractKernelOperator
from ...operators._base import AXIS, Device, Layout, from_parts, map_shards, on_each_device, on_mesh
from ...operators._sharded import EVERY, ROWS


class RetainedRows(eqx.Module):
    """`K` between the retained points, rows spread over the devices, as a map on arrays `(r, c)`.

    A product gathers its result, which is `r·c` times smaller than the block, on every device.

    - `matrix`: the block, or `Σ` of a Kronecker one; rows and columns of padding points are zero.
    - `num_points`: `r`.
    - `placement`: rows on devices.
    - `precision`: of products.
    """

    matrix: Float[Array, "rows rows"]
    num_points: int = eqx.field(static=True)
    placement: Layout = eqx.field(static=True)
    precision: Any = eqx.field(static=True)

    def mv(self, v: Float[Array, "r c"]) -> Float[Array, "r c"]:
        """`K_rr v`, each device with its rows."""
        padding = self.placement.num_rows - self.num_points
        flat = jnp.pad(v, ((0, padding), (0, 0))).reshape(self.matrix.shape[1], -1)

        def local(K: Array, v: Array) -> Array:
            return jax.lax.all_gather(jnp.dot(K, v, precision=self.precision), AXIS, tiled=True)

        product = map_shards(local, self.placement, (ROWS, EVERY), EVERY)(self.matrix, flat)
        return product.reshape(-1, v.shape[1])[: self.num_points]

    @property
    def bytes_per_device(self) -> list[int]:
        """Bytes of the block on each device of this process."""
        return [shard.data.nbytes for shard in self.matrix.addressable_shards]


def retained_rows(op: AbstractKernelOperator, keep: np.ndarray, mesh: Any) -> RetainedRows:
    """The block of the rows `keep`, sorted, of a dense or Kronecker `op`.

    Its entries may be on one device or spread over a mesh.
    Every device takes its rows from where they are. No device holds the whole block at any time.
    """
    K, layout = op.entries(), on_mesh(len(keep), mesh)
    each = K.shape[0] // op.num_points
    columns = (keep[:, None] * each + np.arange(each)).reshape(-1)
    size = layout.num_rows * each

    def take(device: Device, index: slice, report: Any) -> Array:
        start, stop, _ = index.indices(layout.num_rows)
        block = _rows_from(K, columns[start * each : stop * each], columns, device)
        missing = (stop - start) * each - block.shape[0], size - block.shape[1]
        return jnp.pad(block, ((0, missing[0]), (0, missing[1]))) if any(missing) else block

    matrix = from_parts(on_each_device(take, layout), layout, (size, size))
    return RetainedRows(matrix, len(keep), layout, op.product_precision)


def _rows_from(K: Array, rows: np.ndarray, columns: np.ndarray, device: Device) -> Array:
    """`K[rows][:, columns]` on a device, piece by piece from the devices that hold these rows."""
    pieces: list[Array] = []
    done = 0
    for shard in sorted(K.addressable_shards, key=lambda s: s.index[0].start or 0):
        start, stop, _ = shard.index[0].indices(K.shape[0])
        # Rows are sorted; a copy of rows that are already there adds none.
        here = rows[done:][(rows[done:] >= start) & (rows[done:] < stop)]
        if here.size:
            pieces.append(jax.device_put(shard.data[np.ix_(here - start, columns)], device))
            done += here.size
    if not pieces:  # a device with padding alone
        return jnp.zeros((0, len(columns)), K.dtype, device=device)
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)


def everywhere(tree: Any, layout: Layout) -> Any:
    """The arrays of a tree on every device of a layout."""
    put = lambda leaf: jax.device_put(leaf, layout.replicated) if eqx.is_array(leaf) else leaf  # noqa: E731
    return jax.tree.map(put, tree)
