r"""The changes of outputs at another ridge for a fit whose rows are on a mesh.

A factor of `B = λI + RᵀKR` for each ridge takes the place of an eigendecomposition:
`Q = (K − KRB⁻¹RᵀK)/λ`, of which only the diagonal blocks and a product are needed. With `X_i = L⁻¹RᵀK_{:i}`
a block is `(K_{ii} − X_iᵀX_i)/λ`.
"""

from collections.abc import Callable
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._support.compile import HIGHEST, filter_jit
from .._support.shards import AXIS, EVERY, ROWS
from .._support.types import AnyArray
from ..dual._model import TrainedModel, problem_on_device
from ..linalg import SpreadCholesky
from ..losses import AbstractFactor, DiagonalFactor
from ..operators import UnsupportedStructure
from ..operators._base import map_shards
from ._leave_one_out import MAX_FACTORS, Terms
from ._leave_one_out_mesh import spread_systems
from ._ridge_moves import Moves, left_out_moves
from ._spread_system import SpreadSystem, by_rows, own_copy

COLUMNS_AT_ONCE = 1024
"""Columns of `L⁻¹RᵀK` at once. Twice as many take twice the memory and half of the steps."""


def moves_on_mesh(
    fitted: TrainedModel, what: str
) -> Callable[[Array, Array], tuple[list[Moves], float]]:
    """The moves at a ridge for the weights, output by output, and the trace of the smoother there."""
    problem, layout, data = problem_on_device(fitted), fitted.layout, fitted.data
    g, alpha = problem.loss_grad(fitted.state), fitted.state.alpha
    systems = spread_systems(fitted, problem.factor(fitted.state))
    shares = np.unique(data.weights[data.sample_weights > 0])
    _check(fitted, systems, shares, what)
    terms = _terms_here(fitted, len(systems))
    folded = [system.folded() for system in systems]
    columns = [slice(None)] if len(systems) == 1 else [slice(a, a + 1) for a in range(len(systems))]
    pairs = [
        -system.times(jnp.stack([g[:, where], alpha[:, where]], axis=2))
        for system, where in zip(systems, columns, strict=True)
    ]

    def smooth(j: int, ridge: float) -> tuple[Array, Array]:
        number = np.asarray(ridge, alpha.dtype)
        chol = systems[j].cholesky(ridge, folded[j])
        Q_b, Q_own = _smoothed(systems[j], chol, pairs[j], number)
        return own_copy(layout.points(Q_b)), own_copy(layout.points(Q_own))

    def at(ridge: Array, weights: Array) -> tuple[list[Moves], float]:
        moves, dof = [], 0.0
        for j, own in enumerate(terms):
            kept, Q_whole = smooth(j, float(ridge))
            dof += float(jnp.einsum("naa->", own.factor.hess_mv(Q_whole)))
            Q_b, Q_own = kept, Q_whole
            for share in shares:
                same = jnp.asarray(data.weights == share)
                there = smooth(j, float(ridge) * (1 - float(share)))
                Q_b = jnp.where(same[:, None], there[0], Q_b)
                Q_own = jnp.where(same[:, None, None], there[1], Q_own)
            moves.append(Moves(left_out_moves(own, ridge * (1 - weights), Q_b, Q_own), kept))
        return moves, dof

    return at


def _check(
    fitted: TrainedModel, systems: tuple[SpreadSystem, ...], shares: np.ndarray, what: str
) -> None:
    op, devices = fitted.kernel_op.narrow, fitted.layout.num_devices
    if op.entries_on_mesh is None:
        raise UnsupportedStructure(
            f"{what}: needs the entries of K as one matrix over the devices, not {type(op).__name__}. Fit "
            "all points at once with kernel='dense'."
        )
    if not systems:
        raise ValueError(
            f"{what}: the factor would not fit into the memory of {devices} devices. Use more devices, or "
            "choose the ridge on a subset of the points."
        )
    if shares.size > MAX_FACTORS:
        raise ValueError(
            f"{what}: each of the {shares.size} distinct weights needs a factor of its own on a mesh, and at "
            f"most {MAX_FACTORS} are made. Fit without mesh, or choose the ridge with equal weights."
        )


def _terms_here(fitted: TrainedModel, count: int) -> list[Terms]:
    """The terms of all points, in order and on one device of this process: one for each system."""
    layout, data = fitted.layout, fitted.data
    f, g = fitted.outputs, problem_on_device(fitted).loss_grad(fitted.state)
    weights = jnp.asarray(data.weights, fitted.state.alpha.dtype)
    factor = fitted.loss.hess_factor(own_copy(f), data.targets, weights)
    alpha, g = own_copy(fitted.alpha), own_copy(layout.points(g))
    if count == 1:
        return [Terms(alpha, g, factor)]
    assert isinstance(factor, DiagonalFactor)
    scale = jnp.broadcast_to(factor.scale, alpha.shape)
    return [Terms(alpha[:, [a]], g[:, [a]], DiagonalFactor(scale[:, [a]])) for a in range(count)]


@filter_jit
def _smoothed(
    system: SpreadSystem,
    chol: SpreadCholesky,
    k_pair: Float[Array, "n c 2"],
    ridge: Float[AnyArray, ""],
) -> tuple[Float[Array, "n c"], Float[Array, "n c c"]]:
    """`Qb` for `b = −(g + λα)`, and the diagonal blocks of `Q`."""
    c, layout, factor = system.c, system.layout, system.factor
    n, specs = layout.num_rows, by_rows(factor)
    k_b = k_pair[:, :, 0] + ridge * k_pair[:, :, 1]

    def fold(own: AbstractFactor, v: Array) -> Array:
        return own.rmv(v).reshape(-1, 1)

    def unfold(own: AbstractFactor, z: Array) -> Array:
        return own.mv(z.reshape(n // layout.num_devices, -1, 1))

    right = map_shards(fold, layout, (specs, ROWS), ROWS)(factor, k_b[:, :, None])
    z = map_shards(unfold, layout, (specs, ROWS), ROWS)(factor, chol.solve(right))
    Q_b = (k_b - system.times(z)[:, :, 0]) / ridge
    each = ceil(n / ceil(n * c / COLUMNS_AT_ONCE))

    def some(first: Array) -> Array:
        points = jnp.minimum(first + jnp.arange(each), n - 1)
        columns = (points[:, None] * c + jnp.arange(c)[None, :]).reshape(-1)

        def sides(own: AbstractFactor, K: Array) -> Array:
            chosen = K[:, columns].reshape(-1, c, each * c)
            return own.rmv(chosen).reshape(-1, each * c)

        X = chol.half(map_shards(sides, layout, (specs, ROWS), ROWS)(factor, system.K))

        def squares(X: Array) -> Array:
            X = X.reshape(-1, each, c)
            return jax.lax.psum(jnp.einsum("sia,sib->iab", X, X, precision=HIGHEST), AXIS)

        return map_shards(squares, layout, ROWS, EVERY)(X)

    taken = jax.lax.map(some, jnp.arange(0, n, each)).reshape(-1, c, c)[:n]

    def blocks(K: Array) -> Array:
        rows = K.shape[0] // c
        here = jnp.arange(rows)
        at = jax.lax.axis_index(AXIS).astype(here.dtype) * rows + here
        return K.reshape(rows, c, -1, c)[here, :, at, :]

    return Q_b, (map_shards(blocks, layout, ROWS, ROWS)(system.K) - taken) / ridge
