r"""Removal by the paper's own systems, `KWK + λK` instead of `λI + WK`, for comparison.

If `K` has full rank, the solution is that of the step (★). The condition number is that of (★) times,
about, that of `K`, and an iteration takes two products with `K`. The systems hold for a removal from a
stationary point.
"""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from ..._support.compile import HIGHEST, filter_jit
from ..._support.memory import memory_budget
from ..._support.types import AnyArray
from ...losses import AbstractFactor
from ...operators import AbstractKernelOperator, DenseOperator
from ...problem._objective import Problem, State
from ...solvers import conjugate_gradients
from ._mesh import RetainedRows, everywhere, retained_rows

RESIDUAL_SLACK = 2.0
"""Factor by which the residual, computed after conjugate gradients, may exceed `rtol`.

It detects a recurrence that reports a smaller residual than the solution has. With twice this value, a
residual of four times the tolerance would pass.
"""

REMOVE_ALONE = (
    "remove: the paper's forms can only remove points. Use Fitted.edit, which takes every edit."
)


class FormSolution(NamedTuple):
    """The result of a form.

    - `delta`: `Δα` at all rows.
    - `iterations`: steps of conjugate gradients; 0 for a direct solve.
    - `products`: products with `K` or with its retained block.
    - `residual`: `‖rhs − H·Δα‖ / ‖rhs‖` of the system of the form, computed from the solution.
    - `converged`: whether that residual is within the tolerance.
    """

    delta: Float[Array, "n c"]
    iterations: int
    products: int
    residual: float
    converged: bool


class AbstractPaperForm(abc.ABC):
    """One step of removal by a system as printed in the paper."""

    @abc.abstractmethod
    def solve(
        self, op: AbstractKernelOperator, before: Problem, after: Problem, state: State
    ) -> FormSolution:
        """`Δα` of the removal that leads from `before` to `after`, at the optimum `state`."""


@dataclass(frozen=True)
class PaperDirect(AbstractPaperForm):
    """Eq. 12, reduced to the retained points: `K_rr W K_rr + λK_rr` is formed and solved directly.

    - `rtol`: relative residual that counts as solved. By default the root of the dtype's precision:
      at a small ridge the condition number is about that of `K` squared, which costs half of the digits.
    """

    rtol: float | None = None

    def solve(
        self, op: AbstractKernelOperator, before: Problem, after: Problem, state: State
    ) -> FormSolution:
        keep, gone = split_removal(before, after)
        K_rr = DenseOperator(_slice(op, keep).dense(), op.num_outputs)
        rhs = _reduced_rhs(op, before, after, state, jnp.asarray(keep), jnp.asarray(gone))
        mass, rows = _retained_mass(before, keep, rhs.dtype), jnp.asarray(keep)
        delta_r, residual = _direct(K_rr, after, state, rows, mass, rhs)
        limit = float(jnp.finfo(rhs.dtype).eps) ** 0.5 if self.rtol is None else self.rtol
        reached = float(residual) <= limit
        return FormSolution(
            _at_all_rows(state, delta_r, keep, gone), 0, 8, float(residual), reached
        )


@dataclass(frozen=True)
class PaperCG(AbstractPaperForm):
    """Eq. 12, reduced, as an operator under conjugate gradients, as measured in the paper.

    Float32 cannot attain the paper's residual of 1e-8. Such an answer has not converged;
    `on_failure="report"` returns it nevertheless.

    - `max_steps`: iterations at most; 500 in the paper's experiments.
    - `rtol`: relative residual to stop at; 1e-8 in the paper's experiments.
    - `mesh`: devices that share the rows of `K_rr`, as in the paper's second version. Each holds its
      rows only, padded where they do not divide. By default the devices of a `K` that was fitted on a
      mesh, else none.
    """

    max_steps: int = 500
    rtol: float = 1e-8
    mesh: Mesh | Sequence[Any] | None = None

    def solve(
        self, op: AbstractKernelOperator, before: Problem, after: Problem, state: State
    ) -> FormSolution:
        keep, gone = split_removal(before, after)
        rows = jnp.asarray(keep)
        rhs = _reduced_rhs(op, before, after, state, rows, jnp.asarray(gone))
        mass, rtol = _retained_mass(before, keep, rhs.dtype), jnp.asarray(self.rtol, rhs.dtype)
        place = self.mesh
        if place is None and op.layout.sharding is not None:
            place = op.layout.sharding.mesh
        given: Any = (after, state, rows, mass, rhs)
        if place is None:
            block = _slice(op, keep)
        else:
            block = retained_rows(_with_entries(op), keep, place)
            *given, rtol = everywhere((*given, rtol), block.placement)
        found = _reduced_cg(block, *given, rtol=rtol, max_steps=self.max_steps)
        if place is not None:
            # To the host, or the whole of K would follow the solution onto the mesh.
            found = jax.device_get(found)
        delta = _at_all_rows(state, found.x, keep, gone)
        return after_cg(found, delta, products=8, rtol=self.rtol)


@dataclass(frozen=True)
class PaperFull(AbstractPaperForm):
    """Eq. 5, not reduced: all points, removed ones included, under conjugate gradients.

    `max_steps` and `rtol` are those of `PaperCG`.
    """

    max_steps: int = 500
    rtol: float = 1e-8

    def solve(
        self, op: AbstractKernelOperator, before: Problem, after: Problem, state: State
    ) -> FormSolution:
        keep, _ = split_removal(before, after)
        mass = _retained_mass(before, keep, state.alpha.dtype)
        rtol = jnp.asarray(self.rtol, state.alpha.dtype)
        found = _full_cg(op, before, after, state, mass, rtol, self.max_steps)
        return after_cg(found, found.x, products=6, rtol=self.rtol)


def split_removal(before: Problem, after: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Positions kept and removed; an error if the edit is anything but a removal."""
    old, new = np.asarray(before.weights), np.asarray(after.weights)
    gone = np.flatnonzero((new == 0) & (old > 0))
    keep = np.flatnonzero(new > 0)
    scaled = new[keep] * old[keep].sum()
    same = np.allclose(scaled, old[keep], rtol=1e-5) and np.array_equal(
        np.asarray(before.targets)[keep], np.asarray(after.targets)[keep]
    )
    if not same or gone.size == 0:
        raise ValueError(REMOVE_ALONE)
    return keep, gone


def _retained_mass(before: Problem, keep: np.ndarray, dtype: Any) -> Float[Array, ""]:
    """`|D_r| / |D|`."""
    return jnp.asarray(np.asarray(before.weights)[keep].sum(), dtype)


def _with_entries(op: AbstractKernelOperator) -> AbstractKernelOperator:
    """`op`, what it holds on a mesh, or the entries of one that holds none."""
    held = op if op.layout.sharding is None else getattr(op, "op", op)
    if held.has_entries:
        return held
    rows = op.num_points * op.num_outputs
    size = rows**2 * np.dtype(op.dtype).itemsize
    if size > memory_budget():
        raise MemoryError(
            f"The paper's dual form needs the entries of K, and {rows:,} rows take {size / 2**30:.3g} GiB, "
            f"more than may be used here ({memory_budget() / 2**30:.3g} GiB). Use fitted.edit, which needs "
            "only products with K, or fewer points."
        )
    return DenseOperator(op.dense(), op.num_outputs)


def _slice(op: AbstractKernelOperator, keep: np.ndarray) -> AbstractKernelOperator:
    return _with_entries(op).take(keep)


def _forget_gradient(
    op: AbstractKernelOperator, before: Problem, after: Problem, state: State
) -> Float[Array, "n c"]:
    """`(|D_f|/|D|) ∇L̃_{D_f}(0)`, eq. 7, at all rows."""
    present_before, present = before.weights > 0, after.weights > 0
    gone = (present_before & ~present).astype(state.alpha.dtype)[:, None]
    mass = jnp.sum(before.weights * gone[:, 0])
    return op.mv(gone * before.loss_grad(state)) + mass * before.ridge * op.mv(state.alpha)


@filter_jit
def _reduced_rhs(
    op: AbstractKernelOperator,
    before: Problem,
    after: Problem,
    state: State,
    keep: Array,
    gone: Array,
) -> Float[Array, "r c"]:
    """Right-hand side of eq. 12: `(|D_f|/|D|) ∇L̃_{D_f}(0)_r − H^{rf} Δα_f`, `Δα_f = −α_f`."""
    mass = jnp.sum(before.weights[keep])
    delta_f = jnp.zeros_like(state.alpha).at[gone].set(-state.alpha[gone])
    k_delta = op.mv(delta_f)
    h_delta = mass * (op.mv(after.factor(state).hess_mv(k_delta)) + before.ridge * k_delta)
    return (_forget_gradient(op, before, after, state) - h_delta)[keep]


def _retained_factor(after: Problem, state: State, keep: Array) -> AbstractFactor:
    """`R` with `RRᵀ = W` at the retained points."""
    f = after.outputs(state)
    return after.loss.hess_factor(f[keep], after.targets[keep], after.weights[keep])


class CGSolution(NamedTuple):
    """`x`, whether its recurrence got there, its iterations and the residual computed from `x`."""

    x: Array
    reached: Array
    iterations: Array
    residual: Array


def _solve_paper_system(
    op: AbstractKernelOperator | RetainedRows,
    factor: AbstractFactor,
    mass: Float[Array, ""],
    ridge: Any,
    rhs: Array,
    rtol: Float[Array, ""],
    max_steps: int,
) -> CGSolution:
    """Conjugate gradients on `mass·(KWK + λK)`."""

    def mv(v: Array) -> tuple[Array, Array]:
        k_v = op.mv(v)
        return mass * (op.mv(factor.hess_mv(k_v)) + ridge * k_v), k_v

    return solve_by_cg(mv, rhs, rtol, max_steps)


def solve_by_cg(
    mv: Callable[[Array], tuple[Array, Array]],
    rhs: Array,
    rtol: Float[Array, ""],
    max_steps: int,
) -> CGSolution:
    """Conjugate gradients, and the residual of what they return."""
    found = conjugate_gradients(mv, rhs, rtol=rtol, max_steps=max_steps)
    residual = _relative(rhs - mv(found.x)[0], rhs)
    return CGSolution(found.x, found.converged & ~found.indefinite, found.iterations, residual)


@filter_jit
def _reduced_cg(
    K_rr: AbstractKernelOperator | RetainedRows,
    after: Problem,
    state: State,
    keep: Array,
    mass: Float[Array, ""],
    rhs: Float[Array, "r c"],
    *,
    rtol: Float[Array, ""],
    max_steps: int,
) -> CGSolution:
    factor = _retained_factor(after, state, keep)
    return _solve_paper_system(K_rr, factor, mass, after.ridge, rhs, rtol, max_steps)


@filter_jit
def _full_cg(
    op: AbstractKernelOperator,
    before: Problem,
    after: Problem,
    state: State,
    mass: Float[Array, ""],
    rtol: Float[Array, ""],
    max_steps: int,
) -> CGSolution:
    rhs = _forget_gradient(op, before, after, state)
    return _solve_paper_system(op, after.factor(state), mass, after.ridge, rhs, rtol, max_steps)


@filter_jit
def _direct(
    K_rr: DenseOperator,
    after: Problem,
    state: State,
    keep: Array,
    mass: Float[Array, ""],
    rhs: Float[Array, "r c"],
) -> tuple[Float[Array, "r c"], Float[Array, ""]]:
    """The solution and its relative residual."""
    (r, c), K, factor = rhs.shape, K_rr.matrix, _retained_factor(after, state, keep)
    WK = factor.hess_mv(K.reshape(r, c, r * c)).reshape(r * c, r * c)
    H = mass * (jnp.dot(K, WK, precision=HIGHEST) + after.ridge * K)
    delta = jnp.linalg.solve(H, rhs.reshape(-1))
    defect = rhs.reshape(-1) - jnp.dot(H, delta, precision=HIGHEST)
    return delta.reshape(r, c), _relative(defect, rhs)


def _relative(defect: Array, rhs: Array) -> Float[Array, ""]:
    tiny = jnp.finfo(rhs.dtype).tiny
    return jnp.linalg.norm(defect) / jnp.maximum(jnp.linalg.norm(rhs), tiny)


def _at_all_rows(
    state: State, delta_r: Float[AnyArray, "r c"], keep: np.ndarray, gone: np.ndarray
) -> Float[Array, "n c"]:
    """`Δα` of the retained points, and `−α` at the removed ones."""
    return jnp.zeros_like(state.alpha).at[keep].set(delta_r).at[gone].set(-state.alpha[gone])


def after_cg(
    found: CGSolution, delta: Float[Array, "n c"], *, products: int, rtol: float
) -> FormSolution:
    residual = float(found.residual)
    converged = bool(found.reached) and residual <= RESIDUAL_SLACK * rtol
    return FormSolution(delta, int(found.iterations), products, residual, converged)
