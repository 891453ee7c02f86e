r"""The system of a fit on a mesh, `B = λI + RᵀKR`, with the rows of `K` and of its factor on the devices.

The entries of `K` never leave the device that holds them. What moves is a block of the factor at a time, and
arrays of the size of a few columns of `K`.
"""

from collections import Counter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from .._support.compile import HIGHEST, filter_jit
from .._support.shards import AXIS, EVERY, ROWS
from .._support.types import AnyArray
from ..linalg import SpreadCholesky, solve_each, spread_cholesky
from ..losses import AbstractFactor
from ..operators._base import Layout, map_shards, rows_on


def own_copy(array: Array) -> Array:
    """An array that is the same on every device of a mesh, as an array on one device of this process."""
    return array.addressable_data(0)


def mesh_of(layout: Layout) -> Mesh:
    """The devices of a layout on a mesh."""
    mesh = rows_on(layout).mesh
    assert isinstance(mesh, Mesh)
    return mesh


def share_of_memory(layout: Layout) -> float:
    """The part of a spread array that lies in one memory: simulated devices share that of their host."""
    devices = list(mesh_of(layout).devices.flat)
    if devices[0].platform != "cpu":
        return 1 / len(devices)
    counts = Counter(device.process_index for device in devices)
    return max(counts.values()) / len(devices)


def by_rows(tree: Any) -> Any:
    """How the arrays of `tree` enter a function of the rows of one device; numbers enter as they are."""
    return jax.tree.map(lambda a: ROWS if jnp.ndim(a) else EVERY, tree)


class SpreadSystem(eqx.Module):
    """`K` with its rows on a mesh, and the curvature at the fit.

    - `K`: `(n·c, n·c)` in rows of `layout`, in the dtype of the dual variables.
    - `c`: rows of `K` per point.
    - `factor`: `R`, which may have fewer than `c` columns per point.
    """

    K: Float[Array, "m m"]
    factor: AbstractFactor
    c: int = eqx.field(static=True)
    layout: Layout = eqx.field(static=True)

    def folded(self) -> Float[Array, "s s"]:
        """`RᵀKR`."""
        return _folded(self)

    def cholesky(self, ridge: float, folded: Float[Array, "s s"] | None = None) -> SpreadCholesky:
        """The factor of `B`."""
        A = self.folded() if folded is None else folded
        return spread_cholesky(A, self.layout.scalar(ridge, A.dtype), mesh_of(self.layout))

    def times(self, v: Float[Array, "n c k"]) -> Float[Array, "n c k"]:
        """`K v`."""
        return _times(self, v)


@filter_jit
def _folded(system: SpreadSystem) -> Float[Array, "s s"]:
    c, factor = system.c, system.factor

    def local(K: Array, own: AbstractFactor, every: AbstractFactor) -> Array:
        m = K.shape[1]
        half = own.rmv(K.reshape(-1, c, m)).reshape(-1, m)
        rows = half.shape[0]
        return every.rmv(half.T.reshape(m // c, c, rows)).reshape(-1, rows).T

    specs = (ROWS, by_rows(factor), EVERY)
    return map_shards(local, system.layout, specs, ROWS)(system.K, factor, factor)


@filter_jit
def _times(system: SpreadSystem, v: Float[Array, "n c k"]) -> Float[Array, "n c k"]:
    k = v.shape[2]

    def local(K: Array, v: Array) -> Array:
        return jnp.dot(K, v.reshape(-1, k), precision=HIGHEST).reshape(-1, system.c, k)

    return map_shards(local, system.layout, (ROWS, EVERY), ROWS)(system.K, v)


@filter_jit
def over_outputs(S: Float[Array, "n n"], c: int, layout: Layout) -> Float[Array, "m m"]:
    """`S ⊗ I_c`, each device its own rows."""

    def local(S: Array) -> Array:
        return jnp.kron(S, jnp.eye(c, dtype=S.dtype))

    return map_shards(local, layout, ROWS, ROWS)(S)


@filter_jit
def left_out_steps(
    system: SpreadSystem,
    chol: SpreadCholesky,
    alpha: Float[Array, "n c"],
    loss_grad: Float[Array, "n c"],
    k_pair: Float[Array, "n c 2"],
    points: Int[AnyArray, " k"],
    ridge: Float[AnyArray, ""],
    first_order: bool,
) -> tuple[Float[Array, "n c k"], Float[Array, "k c"]]:
    r"""`Δα = (b − Rz)/λ_i` of every left-out point, and the change of its own outputs.

    `z = B⁻¹RᵀKb` on all rows except those of the point, as in `DenseForm`. `k_pair` is `−K[g, α]`, and
    `points` are rows of the layout. `Δα` has its rows on their devices.
    """
    c, factor, layout, k = system.c, system.factor, system.layout, points.shape[0]
    columns = (points[:, None] * c + jnp.arange(c)[None, :]).reshape(-1)

    def kernel(K: Array) -> Array:
        return K[:, columns].reshape(-1, c, k, c)

    def right_sides(
        K: Array, own: AbstractFactor, alpha: Array, g: Array, k_pair: Array
    ) -> tuple[Array, Array, Array]:
        chosen = _chosen(g.shape[0], points).astype(g.dtype)
        g_at = jax.lax.psum(jnp.dot(chosen.T, g, precision=HIGHEST), AXIS)
        b = chosen[:, None, :] * g_at.T[None]
        k_b = jnp.einsum("iakb,kb->iak", kernel(K), g_at, precision=HIGHEST)
        if not first_order:
            b = b - (g[:, :, None] + alpha[:, :, None] * ridge)
            k_b = k_b + k_pair[:, :, :1] + k_pair[:, :, 1:] * ridge
        h = own.rmv(k_b)
        r = h.shape[1]
        eye = chosen[:, None, :, None] * jnp.eye(r, dtype=h.dtype)[None, :, None, :]
        return b, h.reshape(-1, k), eye.reshape(-1, k * r)

    specs = (ROWS, by_rows(factor), ROWS, ROWS, ROWS)
    b, h, units = map_shards(right_sides, layout, specs, ROWS)(
        system.K, factor, alpha, loss_grad, k_pair
    )
    half = chol.half(h)
    if not first_order:
        X = chol.half(units)

        def blocks(X: Array, half: Array) -> tuple[Array, Array]:
            each = X.reshape(half.shape[0], k, -1)
            gram = jnp.einsum("ska,skb->kab", each, each, precision=HIGHEST)
            at_point = jnp.einsum("ska,sk->ka", each, half, precision=HIGHEST)
            return jax.lax.psum((gram, at_point), AXIS)

        share = solve_each(*map_shards(blocks, layout, ROWS, EVERY)(X, half))

        def without(X: Array, half: Array, share: Array) -> Array:
            each = X.reshape(half.shape[0], k, -1)
            return half - jnp.einsum("ska,ka->sk", each, share, precision=HIGHEST)

        half = map_shards(without, layout, (ROWS, ROWS, EVERY), ROWS)(X, half, share)
    z = chol.back(half)

    def changes(K: Array, own: AbstractFactor, b: Array, z: Array) -> tuple[Array, Array]:
        delta = (b - own.mv(z.reshape(b.shape[0], -1, k))) / ridge
        own_change = jnp.einsum("iakb,iak->kb", kernel(K), delta, precision=HIGHEST)
        return delta, jax.lax.psum(own_change, AXIS)

    specs = (ROWS, by_rows(factor), ROWS, ROWS)
    return map_shards(changes, layout, specs, (ROWS, EVERY))(system.K, factor, b, z)


def _chosen(rows: int, points: Int[AnyArray, " k"]) -> Bool[Array, "n k"]:
    """Which rows of this device are which of the points."""
    here = jax.lax.axis_index(AXIS) * rows + jnp.arange(rows, dtype=jnp.int32)
    return here[:, None] == jnp.asarray(points, jnp.int32)[None, :]


@filter_jit
def at_points(
    values: Float[Array, "n c k"], points: Int[AnyArray, " k"], layout: Layout
) -> Float[Array, "k c"]:
    """`values[points[j], :, j]` of every column `j`, the same on every device."""

    def local(values: Array) -> Array:
        chosen = _chosen(values.shape[0], points)
        return jax.lax.psum(jnp.sum(jnp.where(chosen[:, None], values, 0), axis=0).T, AXIS)

    return map_shards(local, layout, ROWS, EVERY)(values)


@filter_jit
def summed_over_points(
    cross: Float[Array, "rows cols"], reading: Float[Array, "n c k"], layout: Layout
) -> Float[Array, "q c k"]:
    """`Σ_i K(xq, x_i) v_i` for a kernel whose rows are those of the points, the same on every device."""
    c = reading.shape[1]
    split = cross.shape[0] == reading.shape[0]

    def local(cross: Array, reading: Array) -> Array:
        if split:
            change = jnp.einsum("nq,nck->qck", cross, reading, precision=HIGHEST)
        else:
            flat = reading.reshape(cross.shape[0], -1)
            change = jnp.dot(cross.T, flat, precision=HIGHEST)
            change = change.reshape(-1, c, reading.shape[2])
        return jax.lax.psum(change, AXIS)

    return map_shards(local, layout, (ROWS, ROWS), EVERY)(cross, reading)


@filter_jit
def summed_along(
    along: Float[Array, "n q c"], reading: Float[Array, "n c k"], layout: Layout
) -> Float[Array, "q k"]:
    """`Σ_i v_qᵀ K(xq, x_i) v_i`, the same on every device."""

    def local(along: Array, reading: Array) -> Array:
        return jax.lax.psum(jnp.einsum("nqc,nck->qk", along, reading, precision=HIGHEST), AXIS)

    return map_shards(local, layout, (ROWS, ROWS), EVERY)(along, reading)
