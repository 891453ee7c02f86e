"""Leaving out every point in turn of a fit whose rows are on a mesh.

Where `K` has entries, one factor whose rows are spread over the devices (`_spread_system`). Elsewhere, and
for many distinct weights, conjugate gradients for a block of points at a time.
"""

from collections.abc import Iterator
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._support.compile import filter_jit
from .._support.memory import total_memory
from .._support.types import AnyArray
from ..dual._course import UNSOLVED, default_rtol
from ..dual._model import TrainedModel, problem_on_device
from ..dual._newton import op_mv
from ..dual._reweighted import reweighted
from ..linalg import SpreadCholesky
from ..losses import AbstractFactor, DiagonalFactor
from ..operators import AbstractKernelOperator
from ..operators._base import Layout
from ..solvers import CG, AbstractDualSolver, AbstractPreconditioner, LinearSystem, resolve
from ._leave_one_out import FACTOR_SHARE, MAX_FACTORS, AbstractLeaveOneOut, Part, Steps, Terms
from ._spread_system import (
    SpreadSystem,
    at_points,
    left_out_steps,
    over_outputs,
    own_copy,
    share_of_memory,
)

COPIES = 6
"""Matrices as large as `K` that making a factor holds: `K`, `RᵀKR`, and four times the factor."""


class SpreadForm(AbstractLeaveOneOut):
    """One factor for points of equal weight; one for each output where outputs are not coupled."""

    systems: tuple[SpreadSystem, ...]
    layout: Layout = eqx.field(static=True)

    @property
    def describe(self) -> str:
        size, count = self.systems[0].K.shape[0], np.unique(self.ridges).size * len(self.systems)
        factors = "one Cholesky factor" if count == 1 else f"{count} Cholesky factors"
        return f"{factors} of size {size} on {self.layout.num_devices} devices"

    def parts(self, points: np.ndarray) -> Iterator[Part]:
        pieces = [self._terms_of(j) for j in range(len(self.systems))]
        folded = [system.folded() for system in self.systems]
        pairs = [
            -system.times(jnp.stack([g, alpha], axis=2))
            for system, (alpha, g) in zip(self.systems, pieces, strict=True)
        ]
        for part, ridge in self.by_ridge(points):
            chols = [s.cholesky(ridge, A) for s, A in zip(self.systems, folded, strict=True)]
            yield part, partial(self._steps, chols, pieces, pairs, ridge)

    def _terms_of(self, j: int) -> tuple[Array, Array]:
        where = slice(None) if len(self.systems) == 1 else slice(j, j + 1)
        return self.terms.alpha[:, where], self.terms.loss_grad[:, where]

    def _steps(
        self,
        chols: list[SpreadCholesky],
        pieces: list[tuple[Array, Array]],
        pairs: list[Array],
        ridge: float,
        block: AnyArray,
    ) -> Steps:
        rows = self.layout.positions[np.asarray(block)]
        lam = np.asarray(ridge, self.terms.alpha.dtype)
        found = [
            left_out_steps(system, chol, *own, pair, rows, lam, self.first_order)
            for system, chol, own, pair in zip(self.systems, chols, pieces, pairs, strict=True)
        ]
        if len(found) == 1:
            return Steps(found[0][0], own_copy(found[0][1]))
        deltas, owns = zip(*found, strict=True)
        return Steps(
            jnp.concatenate(deltas, axis=1), jnp.concatenate([own_copy(o) for o in owns], axis=1)
        )


class SolvedForm(AbstractLeaveOneOut):
    """Any `K` on a mesh: conjugate gradients for a block of points at a time."""

    fitted: TrainedModel = eqx.field(static=True)
    until: float | None = eqx.field(static=True)

    @property
    def describe(self) -> str:
        steps = "one step each" if self.until is None else f"to a distance of {self.until:g}"
        devices = self.fitted.layout.num_devices
        return f"conjugate gradients on {devices} devices for blocks of left-out points, {steps}"

    def parts(self, points: np.ndarray) -> Iterator[Part]:
        yield points, self._first_order if self.first_order else self._left_out

    def _left_out(self, block: AnyArray) -> Steps:
        fitted, block = self.fitted, np.asarray(block)
        weights = np.repeat(fitted.data.sample_weights[:, None], block.size, axis=1)
        weights[block, np.arange(block.size)] = 0
        many = reweighted(fitted, weights, until=self.until)
        k_delta = many.k_alpha - fitted.state.k_alpha[:, :, None]
        own = at_points(k_delta, fitted.layout.positions[block], fitted.layout)
        delta = many.alpha - fitted.state.alpha[:, :, None]
        return Steps(delta, own_copy(own), many.distance_bound)

    def _first_order(self, block: AnyArray) -> Steps:
        fitted, terms = self.fitted, self.terms
        op, rows = fitted.kernel_op, fitted.layout.positions[np.asarray(block)]
        dtype = terms.alpha.dtype
        numbers = np.asarray(fitted.ridge, dtype), np.asarray(default_rtol(dtype), dtype)
        solver = resolve(CG(), op).solver
        b = _pushes(terms.loss_grad, rows)
        found = _solved(op, terms.factor, solver, fitted.preconditioner, b, op_mv(op, b), *numbers)
        delta, k_delta, residual = found
        if not (worst := float(np.max(np.asarray(residual)))) <= UNSOLVED:
            raise ValueError(
                f"attribute: conjugate gradients left {worst:.2g} of a right-hand side. Raise the ridge, "
                "use float64, or fit with a larger sketch (sketch=Sketch(rank))."
            )
        return Steps(delta, own_copy(at_points(k_delta, rows, fitted.layout)))


@filter_jit
def _pushes(loss_grad: Float[Array, "n c"], rows: Int[AnyArray, " k"]) -> Float[Array, "n c k"]:
    """`E_i g_i`, one column per point."""
    count = loss_grad.shape[0]
    here = jnp.arange(count, dtype=jnp.int32)[:, None] == jnp.asarray(rows, jnp.int32)[None, :]
    return jnp.where(here[:, None], loss_grad[:, :, None], 0)


@filter_jit
def _solved(
    op: AbstractKernelOperator,
    factor: AbstractFactor,
    solver: AbstractDualSolver,
    preconditioner: AbstractPreconditioner,
    b: Float[Array, "n c k"],
    k_b: Float[Array, "n c k"],
    ridge: Float[AnyArray, ""],
    rtol: Float[AnyArray, ""],
) -> tuple[Float[Array, "n c k"], Float[Array, "n c k"], Float[Array, " k"]]:
    """`(λI + WK)⁻¹b` of every column, its product with `K`, and the relative residual."""

    def column(b: Array, k_b: Array) -> tuple[Array, Array, Array]:
        found = solver.solve(
            LinearSystem(op, factor, jnp.asarray(ridge), b, k_b, preconditioner, jnp.asarray(rtol))
        )
        return found.value, found.k_value, found.residual

    return jax.vmap(column, in_axes=-1, out_axes=-1)(b, k_b)


def leave_one_out_on_mesh(
    fitted: TrainedModel, *, first_order: bool = False, until: float | None = None
) -> AbstractLeaveOneOut:
    """`leave_one_out` of a fit on a mesh."""
    problem, weights = problem_on_device(fitted), np.asarray(fitted.data.weights)
    terms = Terms(fitted.state.alpha, problem.loss_grad(fitted.state), problem.factor(fitted.state))
    ridges = fitted.ridge * (np.ones_like(weights) if first_order else 1 - weights)
    few = np.unique(ridges[weights > 0]).size <= MAX_FACTORS
    systems = spread_systems(fitted, terms.factor) if until is None and few else ()
    if systems:
        return SpreadForm(terms, ridges, first_order, systems, fitted.layout)
    return SolvedForm(terms, ridges, first_order, fitted, until)


def spread_systems(fitted: TrainedModel, factor: AbstractFactor) -> tuple[SpreadSystem, ...]:
    """The system of a fit whose `K` has its entries on a mesh, or one for each output where outputs are
    not coupled; nothing where there are no entries or no room for a factor."""
    op, layout, dtype = fitted.kernel_op.narrow, fitted.layout, fitted.state.alpha.dtype
    K, c = op.entries_on_mesh, fitted.num_outputs
    if K is None:
        return ()
    split = op.is_kronecker and isinstance(factor, DiagonalFactor)
    size = layout.num_rows * (1 if split else c)
    num_bytes = size**2 * dtype.itemsize * share_of_memory(layout)
    if COPIES * num_bytes > FACTOR_SHARE * total_memory():
        return ()
    K = K.astype(dtype)
    if not split:
        K = over_outputs(K, c, layout) if op.is_kronecker else K
        return (SpreadSystem(K, factor.narrow(), c, layout),)
    assert isinstance(factor, DiagonalFactor)
    scale = jnp.broadcast_to(factor.scale, fitted.state.alpha.shape)
    return tuple(SpreadSystem(K, DiagonalFactor(scale[:, a : a + 1]), 1, layout) for a in range(c))
