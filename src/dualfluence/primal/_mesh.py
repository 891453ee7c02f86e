"""Curvature and gradients of points that are spread over a mesh."""

from typing import NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from .._support.compile import filter_jit
from .._support.shards import AXIS, EVERY, ROWS
from ..kernels._linearized import Linearized
from ..models._passes import gradient_products
from ..operators._base import Layout, map_shards, on_mesh
from ._curvature import Curvature


def spread_curvature(curvature: Curvature, mesh: Mesh) -> Curvature:
    """The same curvature with an equal part of every batch on each device.

    The compiler divides a product by it, and adds up one parameter vector for each batch.
    """
    sharding = NamedSharding(mesh, PartitionSpec(None, AXIS))

    def place(leaf: Array) -> Array:
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return eqx.tree_at(lambda c: c.rows, curvature, jax.tree.map(place, curvature.rows))


class SpreadPoints(NamedTuple):
    """Training points and a cotangent of each, on the devices of a mesh."""

    layout: Layout
    x: Array
    g: Float[Array, "n c"]

    @staticmethod
    def of(x: Array, g: Float[Array, "n c"], mesh: Mesh) -> "SpreadPoints":
        layout = on_mesh(x.shape[0], mesh)
        return SpreadPoints(layout, layout.place(x, "last"), layout.place(g))

    def products(self, model: Linearized, v: Float[Array, "k p"]) -> Float[Array, "k n"]:
        """`v_k · J(x_i)ᵀ g_i`, the same on every device."""
        return _products(model, self.layout, self.x, self.g, v)[:, : self.layout.num_points]


@filter_jit
def _products(model: Linearized, layout: Layout, x: Array, g: Array, v: Array) -> Array:
    params, static = eqx.partition(model, eqx.is_array)

    def local(params: PyTree, x: Array, g: Array, v: Array) -> Array:
        own = gradient_products(eqx.combine(params, static), x, g, v)
        return jax.lax.all_gather(own, AXIS, axis=1, tiled=True)

    return map_shards(local, layout, (EVERY, ROWS, ROWS, EVERY), EVERY)(params, x, g, v)
