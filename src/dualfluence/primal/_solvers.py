"""The interface of solvers in parameter space, and conjugate gradients."""

import abc
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._support.checks import NotFinite, check_fraction, check_number
from .._support.compile import filter_jit
from .._support.options import check_choice, check_count, maybe
from ..dual._record import NotConverged, OnFailure
from ..solvers._cg import CGResult, conjugate_gradients
from ._curvature import HESSIANS, Curvature, Hessian, relative_residuals
from ._lanczos import extreme_eigenvalues
from ._update import PRECISION

AT_ONCE = 16
"""Right-hand sides that iterate together. Doubled, twice as many activations are held."""

RESIDUAL_SLACK = 2.0
"""How far the true residual may lie above `rtol` when the running one is below."""


class Solved(NamedTuple):
    """Answers to several right-hand sides, and their accuracy.

    - `value`: `(k, p)`, one answer per row.
    - `residual`: largest `‖b − (C + δ)x‖/‖b‖` that was measured. Approximate inverses measure it for
      the first row only; it shows how far they are from the true inverse.
    - `converged`: whether the solver met its tolerance.
    - `iterations`, `products`: the most iterations of one right-hand side; products with `C`.
    - `facts`: numbers of the method, such as eigenvalues and captured shares, for JSON.
    - `notes`: what the answer leaves out, in words.
    """

    value: Float[Array, "k p"]
    residual: float
    converged: bool
    iterations: int
    products: int
    facts: dict[str, Any]
    notes: tuple[str, ...] = ()


class AbstractInverse(eqx.Module):
    """`(C + δI)⁻¹`, exact or approximate, ready for right-hand sides."""

    @abc.abstractmethod
    def solve(self, b: Float[Array, "k p"]) -> Solved:
        """One answer per row of `b`."""


class AbstractPrimalSolver(eqx.Module):
    """A way to apply `(C + (λ + damping) I)⁻¹`; `λ` comes from the problem."""

    @abc.abstractmethod
    def prepare(self, curvature: Curvature) -> AbstractInverse:
        """The data that all right-hand sides share: eigenvectors, factors, a step size."""


class CG(AbstractPrimalSolver):
    r"""Conjugate gradients: exact to `rtol`, one product with `C` per iteration and query.

    **Fields:**

    - `damping`: added to the ridge.
    - `hessian`: `"gauss-newton"`, or `"exact"`, which for a network may be indefinite; the error then
      names its smallest eigenvalue.
    - `rtol`, `max_steps`: relative residual at which it stops, and the largest number of iterations.
    """

    damping: float = eqx.field(static=True, default=0.0)
    hessian: Hessian = eqx.field(static=True, default="gauss-newton")
    rtol: float = eqx.field(static=True, default=1e-8)
    max_steps: int = eqx.field(static=True, default=1000)

    def __check_init__(self) -> None:
        check_options("CG", self.damping, self.hessian, max_steps=self.max_steps)
        check_fraction("CG: rtol", self.rtol)

    def prepare(self, curvature: Curvature) -> AbstractInverse:
        return _CGInverse(curvature, self)


class _CGInverse(AbstractInverse):
    curvature: Curvature
    solver: CG

    def solve(self, b: Float[Array, "k p"]) -> Solved:
        result, residuals = _iterate(self.curvature, self.solver, b)
        residual, steps = float(residuals.max()), int(result.iterations.max())
        notes: tuple[str, ...] = ()
        facts: dict[str, Any] = {}
        if bool(result.indefinite.any()):
            low, high = extreme_eigenvalues(self.curvature, self.solver.hessian)
            facts = {"smallest_eigenvalue": low, "largest_eigenvalue": high}
            shift = float(self.curvature.shift(self.solver.damping))
            notes = (
                f"indefinite: the smallest eigenvalue of the Hessian is {low:.3g}, and ridge plus "
                f"damping of {shift:.3g} does not lift it above zero",
            )
        done = bool(result.converged.all()) and residual <= RESIDUAL_SLACK * self.solver.rtol
        return Solved(result.x, residual, done and not notes, steps, steps + 1, facts, notes)


@filter_jit
def _iterate(
    curvature: Curvature, solver: CG, b: Float[Array, "k p"]
) -> tuple[CGResult, Float[Array, " k"]]:
    shift = curvature.shift(solver.damping)

    def mv(v: Array) -> tuple[Array, Array]:
        return curvature.product(v, solver.hessian) + shift * v, jnp.zeros((), v.dtype)

    def one(row: Array) -> CGResult:
        return conjugate_gradients(mv, row, rtol=solver.rtol, max_steps=solver.max_steps)

    with jax.default_matmul_precision(PRECISION):
        result = jax.lax.map(one, b, batch_size=min(AT_ONCE, b.shape[0]))
    return result, relative_residuals(curvature, shift, result.x, b, solver.hessian)


MAX_SEED = 2**32 - 1
"""JAX takes seeds of 32 bits in 32-bit mode."""


def check_options(
    name: str, damping: float, hessian: str, seed: int = 0, **counts: int | None
) -> None:
    """Raise on options that no solver can work with."""
    if not 0 <= check_number(f"{name}: damping", damping) < np.inf:
        raise ValueError(f"{name}: damping must be a finite number, at least 0, got {damping}.")
    check_choice(f"{name}: hessian", hessian, HESSIANS)
    check_count(f"{name}: seed", seed, least=0, most=MAX_SEED)
    for what, value in counts.items():
        maybe(check_count, f"{name}: {what}", value)


def check_primal_solver(what: str, solver: Any) -> AbstractPrimalSolver:
    """The solver, or an error that lists what there is."""
    if not isinstance(solver, AbstractPrimalSolver):
        raise TypeError(
            f"{what}: solver must be one of dualfluence.primal's, such as CG(), LiSSA(), Arnoldi(), "
            f"Nystrom(), KFAC() or EKFAC(), got {solver!r}."
        )
    return solver


def check_solved(what: str, solved: Solved, on_failure: OnFailure) -> None:
    """Raise on answers that are not finite, and on those that missed their tolerance."""
    if not bool(jnp.isfinite(solved.value).all()):
        raise NotFinite(
            f"{what}: the solve is not finite (relative residual {solved.residual:.3g}). Check the "
            "outputs at params, or try float64."
        )
    if not solved.converged and on_failure != "report":
        why = (
            "; ".join(solved.notes) or "try float64, more damping, a looser rtol or more max_steps"
        )
        raise NotConverged(
            f"{what}: stopped after {solved.iterations} iterations at a relative residual of "
            f"{solved.residual:.3g}: {why}. on_failure='report' returns this answer."
        )
