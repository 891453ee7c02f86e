r"""A Cholesky factor whose rows are spread over the devices of a mesh.

Each device holds as many rows of `A`, in order, and eliminates a block of them in turn: the first blocks of
all devices, then the second ones, and so on, so that no device runs out of work. That is the factor of a
permuted matrix; columns are held in the order of elimination, and solves return rows in the caller's order.

A step broadcasts one diagonal block and gathers one panel of columns, `m` times the size of a block. Nothing
of size `m²` ever moves.
"""

from functools import partial
from math import ceil

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jax.sharding import Mesh
from jaxtyping import Array, Float

from .._support.compile import HIGHEST, jit
from .._support.shards import AXIS, EVERY, ROWS, on_shards

BLOCK = 256
"""Rows that a device eliminates at once. Twice as many: half of the steps, but twice the work that every
device repeats."""

STAGES = 4
"""Parts of the elimination that shrink with what is left. With one, three times the operations; with twice as
many, a tenth less, and programs twice as long."""


class SpreadCholesky(eqx.Module):
    """`L` of a matrix with `rows` rows on each device of `mesh`, filled up to whole blocks."""

    factor: Float[Array, "m s"]
    rows: int = eqx.field(static=True)
    block: int = eqx.field(static=True)
    mesh: Mesh = eqx.field(static=True)

    def half(self, v: Float[Array, "m q"]) -> Float[Array, "s q"]:
        """`L⁻¹ v`, in rows of its own on each device."""
        solve = partial(_forward, rows=self.rows, block=self.block)
        return on_shards(solve, self.mesh, (ROWS, ROWS), ROWS)(self.factor, v)

    def back(self, u: Float[Array, "s q"]) -> Float[Array, "m q"]:
        """`L⁻ᵀ u`, where `u` is as `half` returns it."""
        solve = partial(_backward, rows=self.rows, block=self.block)
        return on_shards(solve, self.mesh, (ROWS, ROWS), ROWS)(self.factor, u)

    def solve(self, v: Float[Array, "m q"]) -> Float[Array, "m q"]:
        """`A⁻¹ v`. The rows of `v` and of the result are on the devices that hold the rows of `A`."""
        return self.back(self.half(v))


def spread_cholesky(A: Float[Array, "m m"], ridge: Float[Array, ""], mesh: Mesh) -> SpreadCholesky:
    """The factor of `A + λI`, where the rows of `A` are on `mesh` in equal parts.

    While it is made, a device holds up to four times its share of `A`.
    """
    rows = A.shape[0] // mesh.size
    block = ceil(rows / ceil(rows / BLOCK))
    return SpreadCholesky(_factor(A, ridge, mesh, block), rows, block, mesh)


@partial(jit, static_argnums=(2, 3))
def _factor(A: Array, ridge: Array, mesh: Mesh, block: int) -> Array:
    local = partial(_eliminate, devices=mesh.size, block=block)
    return on_shards(local, mesh, (ROWS, EVERY), ROWS)(A, ridge)


def _eliminate(A: Array, ridge: Array, devices: int, block: int) -> Array:
    """The rows of this device of the factor."""
    rows, me = A.shape[0], _here()
    count = ceil(rows / block)
    more = count * block - rows
    B = jnp.pad(A.reshape(rows, devices, rows), ((0, more), (0, 0), (0, more)))
    B = B.reshape(-1, devices, count, block).swapaxes(1, 2).reshape(count * block, -1)
    here = jnp.arange(count * block)
    own = (here // block * devices + me) * block + here % block
    # A row of the filling is one of the identity.
    B = B.at[here, own].add(jnp.where(here < rows, ridge, 1).astype(B.dtype))
    step = ceil(count / STAGES)
    for first in range(0, count, step):
        top, left = first * block, first * devices * block
        body = partial(_eliminate_block, devices=devices, block=block)
        steps = min(step, count - first) * devices
        rest = jax.lax.fori_loop(0, steps, body, B[top:, left:])
        B = B.at[top:, left:].set(rest)
    return jnp.where(jnp.arange(B.shape[1])[None, :] <= own[:, None], B, 0)


def _eliminate_block(j: Array, B: Array, devices: int, block: int) -> Array:
    """Block `j` in the order of elimination: its columns of `L`, and `B` less their products."""
    me, at, col = _here(), j // devices * block, j * block
    mine = me == j % devices
    corner = jax.lax.dynamic_slice(B, (at, col), (block, block))
    corner = jnp.linalg.cholesky(jax.lax.psum(jnp.where(mine, corner, 0), AXIS))
    panel = jax.lax.dynamic_slice(B, (jnp.zeros_like(at), col), (B.shape[0], block))
    panel = solve_triangular(corner, panel.T, lower=True).T
    below = _order(B.shape[0], devices, block) > j
    low = jnp.where(below[:, None], panel, 0)
    every = jax.lax.all_gather(low, AXIS).reshape(devices, -1, block, block)
    every = every.swapaxes(0, 1).reshape(-1, block)
    B = B - jnp.dot(low, every.T, precision=HIGHEST)
    done = jax.lax.dynamic_update_slice(low, corner, (at, jnp.zeros_like(at)))
    return jax.lax.dynamic_update_slice(B, jnp.where(mine, done, low), (jnp.zeros_like(at), col))


def _here() -> Array:
    """The number of this device, as wide as JAX's whole numbers are."""
    return jax.lax.axis_index(AXIS).astype(int)


def _order(rows: int, devices: int, block: int) -> Array:
    """The place of each row's block in the order of elimination."""
    return jnp.arange(rows) // block * devices + _here()


def _forward(L: Array, v: Array, rows: int, block: int) -> Array:
    devices = L.shape[1] // L.shape[0]
    order, me = _order(L.shape[0], devices, block), _here()
    v = jnp.pad(v, ((0, L.shape[0] - rows), (0, 0)))

    def step(j: Array, v: Array) -> Array:
        at, mine = j // devices * block, me == j % devices
        here = jax.lax.dynamic_slice(v, (at, jnp.zeros_like(at)), (block, v.shape[1]))
        x = jax.lax.psum(jnp.where(mine, _corner(L, at, j, mine, block, here, 0), 0), AXIS)
        low = jnp.where((order > j)[:, None], _columns(L, j, block), 0)
        v = v - jnp.dot(low, x, precision=HIGHEST)
        solved = jax.lax.dynamic_update_slice(v, x, (at, jnp.zeros_like(at)))
        return jnp.where(mine, solved, v)

    return jax.lax.fori_loop(0, L.shape[1] // block, step, v)


def _backward(L: Array, u: Array, rows: int, block: int) -> Array:
    devices = L.shape[1] // L.shape[0]
    order, me = _order(L.shape[0], devices, block), _here()
    steps = L.shape[1] // block

    def step(i: Array, x: Array) -> Array:
        j = steps - 1 - i
        at, mine = j // devices * block, me == j % devices
        low = jnp.where((order > j)[:, None], _columns(L, j, block), 0)
        later = jax.lax.psum(jnp.dot(low.T, x, precision=HIGHEST), AXIS)
        here = jax.lax.dynamic_slice(x, (at, jnp.zeros_like(at)), (block, x.shape[1])) - later
        here = _corner(L, at, j, mine, block, here, 1)
        solved = jax.lax.dynamic_update_slice(x, here, (at, jnp.zeros_like(at)))
        return jnp.where(mine, solved, x)

    return jax.lax.fori_loop(0, steps, step, u)[:rows]


def _columns(L: Array, j: Array, block: int) -> Array:
    return jax.lax.dynamic_slice(L, (jnp.zeros_like(j), j * block), (L.shape[0], block))


def _corner(L: Array, at: Array, j: Array, mine: Array, block: int, v: Array, trans: int) -> Array:
    """A solve with the diagonal block `j`, on the device that has it."""
    corner = jax.lax.dynamic_slice(L, (at, j * block), (block, block))
    corner = jnp.where(mine, corner, jnp.eye(block, dtype=L.dtype))
    return solve_triangular(corner, v, lower=True, trans=trans)
