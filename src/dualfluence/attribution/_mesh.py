r"""Scores at a checkpoint with the points spread over a mesh.

As in `_checkpoint`, with the rows of `B = λI + PᵀKP` and of its factor on the devices of their points. Each
device computes the kernel of its own points; the kernel is that of the network folded along the directions
`P`, so that `K` itself is never formed. Queries and scores are the same on every device.
"""

from functools import partial
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, PyTree

from .._support.compile import HIGHEST, PRECISION, jit
from .._support.shards import AXIS, EVERY, ROWS, on_shards
from .._support.types import AnyPath
from ..kernels import empirical_kernel
from ..kernels._along import kernel_along
from ..kernels._linearized import Linearized
from ..linalg import SpreadCholesky, solve_each, spread_cholesky
from ..losses import AbstractLoss
from ..operators._base import Device, Layout, from_parts, on_each_device, on_mesh
from ..problem._quantity import Quantity
from ._probes import Probes, RandomProbes
from ._solves import correlation
from ._terms import Folded, Scored, directed_terms
from ._view import QUERIES_AT_ONCE, rows_at_once

COLUMNS_AT_ONCE = 1024
"""Columns of `L⁻¹` that leverage takes at once. Twice as many take twice the memory and half of the steps."""


def mesh_scores(
    model: Linearized,
    x: Array,
    targets: Array,
    xq: Array,
    quantity: Quantity,
    *,
    mesh: Mesh,
    loss: AbstractLoss,
    ridge: float,
    key: Array,
    probes: Probes | None = None,
    leverage: bool = False,
) -> Scored:
    """`checkpoint_scores` of a model whose points are spread over the devices of `mesh`."""
    terms = directed_terms(model, x, targets, xq, quantity, loss, probes, key)
    v, g, P, left_out = terms.v, terms.g, terms.P, terms.left_out
    n, layout = x.shape[0], on_mesh(x.shape[0], mesh)
    # A point of the filling has no directions: its rows of the kernel are zero.
    directions = layout.expand(np.asarray(jnp.concatenate([P, g[:, :, None]], axis=2)), "zero")
    train = layout.expand(np.asarray(x)), directions
    lam = jax.device_put(np.asarray(ridge, g.dtype), layout.replicated)
    B, T = _rows(model, train, layout)
    halves = []
    if isinstance(probes, RandomProbes) and probes.m > 1:
        for odd in (0, 1):
            half_B, half_T = _half_system(B, T, mesh, odd)
            halves.append((spread_cholesky(half_B, lam, mesh), half_T))
    factor = spread_cholesky(B, lam, mesh)
    del B
    gain = _gain(factor, T, mesh) if leverage else None
    parts, agreement, rows = [], [], min(xq.shape[0], QUERIES_AT_ONCE)
    for first in range(0, xq.shape[0], rows):
        start = min(first, xq.shape[0] - rows)  # the last block starts early: one shape
        here = slice(start, start + rows)
        thin = _query_rows(model, train, np.asarray(xq[here]), np.asarray(v[here]), layout)
        scores = _scores(factor, T, thin, gain, lam, mesh)
        parts.append(scores[first - start :, :n])
        if halves:
            each = [
                _half_scores(half, half_T, thin, lam, mesh, odd)[:, :n]
                for odd, (half, half_T) in enumerate(halves)
            ]
            agreement.append(correlation(*each)[first - start :])
    agree = jnp.concatenate(agreement) if halves else None
    return Scored(jnp.concatenate(parts), left_out, agree)


def _rows(
    model: Linearized, train: tuple[np.ndarray, np.ndarray], layout: Layout
) -> tuple[Float[Array, "m m"], Float[Array, "m n"]]:
    """`PᵀKP` and `PᵀK_nn g`, each device making its own rows."""
    (n, c, width), dtype = train[1].shape, model.dtype
    r, size = width - 1, rows_at_once(n, c**2, dtype)

    def fill(device: Device, index: slice, report: Any) -> tuple[Array, Array]:
        params, points = jax.device_put((model.params, train), device)
        own = tuple(a[index] for a in train)
        total = own[0].shape[0]
        B, T = jnp.zeros((total * r, n * r), dtype), jnp.zeros((total * r, n), dtype)
        for first in range(0, total, size):
            start = max(0, min(first, total - size))
            some = tuple(jnp.asarray(a[start : start + size]) for a in own)
            with jax.default_matmul_precision(PRECISION):
                block = empirical_kernel(
                    Folded(model.apply_fn),
                    params,
                    some,
                    points,
                    trainable=_mask(model),
                    progress=False,
                ).value
            B, T = _put(B, T, block, jnp.asarray(start))
        return B, T

    made = on_each_device(fill, layout)
    rows = layout.num_rows * r
    return (
        from_parts([B for B, _ in made], layout, (rows, rows)),
        from_parts([T for _, T in made], layout, (rows, n)),
    )


@partial(jit, donate_argnums=(0, 1))
def _put(B: Array, T: Array, block: Array, start: Array) -> tuple[Array, Array]:
    rows, n, r = block.shape[0], T.shape[1], block.shape[1] - 1
    at = (start * r, jnp.zeros_like(start))
    B = jax.lax.dynamic_update_slice(B, block[:, :r, :, :r].reshape(rows * r, n * r), at)
    return B, jax.lax.dynamic_update_slice(T, block[:, :r, :, r].reshape(rows * r, n), at)


def _query_rows(
    model: Linearized,
    train: tuple[np.ndarray, np.ndarray],
    xq: np.ndarray,
    v: np.ndarray,
    layout: Layout,
) -> Float[Array, "n q r"]:
    """`v_qᵀK_qn` along every direction of each point, on the devices of the points."""
    width = train[1].shape[2]
    first = np.concatenate([v[:, :, None], np.zeros((*v.shape, width - 1), v.dtype)], axis=2)
    unit = np.zeros((v.shape[0], width), v.dtype)
    unit[:, 0] = 1

    def fill(device: Device, index: slice, report: Any) -> Array:
        own = tuple(a[index] for a in train)
        given = jax.device_put((model.params, (xq, first), unit, own), device)
        params, queries, along, points = given
        with jax.default_matmul_precision(PRECISION):
            folded = Folded(model.apply_fn)
            return kernel_along(
                folded, params, queries, along, points, trainable=_mask(model)
            ).swapaxes(0, 1)

    parts = on_each_device(fill, layout)
    return from_parts(parts, layout, (layout.num_rows, xq.shape[0], width))


def _mask(model: Linearized) -> PyTree:
    return jax.tree.unflatten(jax.tree.structure(model.params), model.trainable)


@partial(jit, static_argnames=("mesh",))
def _scores(
    factor: SpreadCholesky, T: Array, thin: Array, gain: Array | None, ridge: Array, mesh: Mesh
) -> Float[Array, "q n"]:
    V = factor.solve(_along_probes(thin, mesh))

    def local(V: Array, T: Array, thin: Array, gain: Array | None) -> Array:
        direct = thin[:, :, -1].T
        if gain is not None:
            own = V.reshape(direct.shape[1], -1, V.shape[1])
            direct = direct + jnp.einsum("nrq,nr->qn", own, gain, precision=HIGHEST)
        indirect = jax.lax.psum(jnp.dot(V.T, T, precision=HIGHEST), AXIS)
        return jax.lax.all_gather(direct, AXIS, axis=1, tiled=True) - indirect

    return on_shards(local, mesh, ROWS, EVERY)(V, T, thin, gain) / ridge


@partial(jit, static_argnames=("mesh", "odd"))
def _half_scores(
    factor: SpreadCholesky, T: Array, thin: Array, ridge: Array, mesh: Mesh, odd: int
) -> Float[Array, "q n"]:
    local = partial(_every_second, odd=odd)
    return _scores(factor, T, on_shards(local, mesh, ROWS, ROWS)(thin), None, ridge, mesh)


def _every_second(thin: Float[Array, "n q r"], odd: int) -> Array:
    """Every second probe, in the size that these alone would have, and `g` as it was."""
    m = thin.shape[2] - 1
    own = thin[:, :, odd:m:2]
    root = jnp.sqrt(jnp.asarray(m / own.shape[2], thin.dtype))
    return jnp.concatenate([root * own, thin[:, :, m:]], axis=2)


def _along_probes(thin: Float[Array, "n q r"], mesh: Mesh) -> Float[Array, "m q"]:
    def local(thin: Array) -> Array:
        return jnp.transpose(thin[:, :, :-1], (0, 2, 1)).reshape(-1, thin.shape[1])

    return on_shards(local, mesh, ROWS, ROWS)(thin)


@partial(jit, static_argnames=("mesh", "odd"))
def _half_system(B: Array, T: Array, mesh: Mesh, odd: int) -> tuple[Array, Array]:
    """The system of every second probe, in the size that these alone would have."""
    n, m = T.shape[1], B.shape[0] // T.shape[1]

    def local(B: Array, T: Array) -> tuple[Array, Array]:
        own = B.reshape(-1, m, n, m)[:, odd::2, :, odd::2]
        share = m / own.shape[1]
        root = jnp.sqrt(jnp.asarray(share, T.dtype))
        some = root * T.reshape(-1, m, n)[:, odd::2]
        return share * own.reshape(-1, n * own.shape[3]), some.reshape(-1, n)

    return on_shards(local, mesh, (ROWS, ROWS), (ROWS, ROWS))(B, T)


@partial(jit, static_argnames=("mesh",))
def _gain(factor: SpreadCholesky, T: Array, mesh: Mesh) -> Float[Array, "n r"]:
    """`C_{ii}⁻¹ (C T_i)_i` of every point, a few columns of `L⁻¹` at a time."""
    n, r = T.shape[1], T.shape[0] // T.shape[1]
    each = ceil(n / ceil(n * r / COLUMNS_AT_ONCE))
    spread = NamedSharding(mesh, ROWS)
    row = jnp.arange(n * r)

    def some(first: Array) -> Array:
        points = jnp.minimum(first + jnp.arange(each), n - 1)
        columns = (points[:, None] * r + jnp.arange(r)[None, :]).reshape(-1)
        units = (row[:, None] == columns[None, :]).astype(T.dtype)
        X = factor.half(jax.lax.with_sharding_constraint(units, spread)).reshape(-1, each, r)
        # `Cᵀ` of the points' own columns times their pushes: L⁻¹E against L⁻¹T.
        half = factor.half(T[:, points])
        gram = jnp.einsum("kia,kib->iab", X, X, precision=HIGHEST)
        at_point = jnp.einsum("kia,ki->ia", X, half, precision=HIGHEST)
        return solve_each(gram, at_point)

    parts = jax.lax.map(some, jnp.arange(0, n, each))
    gain = parts.reshape(-1, r)[:n]
    return jax.lax.with_sharding_constraint(gain, spread)


def check_mesh(folder: AnyPath | None, method: str, mesh: Any) -> None:
    """Raise for what a mesh cannot do here."""
    if method == "projected":
        raise ValueError(
            "Trajectory: mesh cannot be used with method='projected', which solves a system of size rank on "
            "one device. Leave mesh out."
        )
    processes = {device.process_index for device in mesh.devices.flat}
    if folder is not None and len(processes) > 1:
        raise ValueError(
            f"Trajectory: folder=... and a mesh over {len(processes)} processes exclude each other: "
            "processes that find different files would wait for each other. Give every process a mesh "
            "of its own devices and worker=(i, N)."
        )
