"""The interface of solvers in parameter space, and conjugate gradients."""

import abc
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._support.checks import check_fraction, check_number
from .._support.compile import PRECISION, NotFinite, filter_jit
from .._support.options import check_choice, check_count, maybe
from .._support.types import Json
from ..problem._certificate import NotConverged, OnFailure
from ..solvers._cg import CGResult, conjugate_gradients
from ._curvature import HESSIANS, Curvature, Hessian, extreme_eigenvalues, relative_residuals

AT_ONCE = 16
"""Right-hand sides that iterate together. Doubled, twice as many activations are held."""

RESIDUAL_SLACK = 2.0
"""How far the true residual may lie above `rtol` when the running one is below."""

COUNTERS = {"traces": 0}
"""How often conjugate gradients were traced, i.e. compiled; tests read it."""


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
    facts: Json
    notes: tuple[str, ...] = ()


class AbstractPrimalInverse(eqx.Module):
    """`(C + δI)⁻¹`, exact or approximate, ready for right-hand sides."""

    @abc.abstractmethod
    def solve(self, b: Float[Array, "k p"]) -> Solved:
        """One answer per row of `b`."""


class AbstractPrimalSolver(eqx.Module):
    """A way to apply `(C + (λ + damping) I)⁻¹`, where `C` is the curvature matrix of the losses; `λ` comes
    from the problem."""

    @abc.abstractmethod
    def inverse(self, curvature: Curvature) -> AbstractPrimalInverse:
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

    def inverse(self, curvature: Curvature) -> AbstractPrimalInverse:
        return _CGInverse(curvature, self)


class _CGInverse(AbstractPrimalInverse):
    curvature: Curvature
    solver: CG

    def solve(self, b: Float[Array, "k p"]) -> Solved:
        solver, shift = self.solver, self.curvature.shift(self.solver.damping)
        rtol = jnp.asarray(solver.rtol, b.dtype)
        result, residuals = _iterate(
            self.curvature, shift, b, rtol, solver.max_steps, solver.hessian
        )
        residual, steps = float(residuals.max()), int(result.iterations.max())
        notes: tuple[str, ...] = ()
        facts: Json = {}
        if bool(result.indefinite.any()):
            low, high = extreme_eigenvalues(self.curvature, solver.hessian)
            facts = {"smallest_eigenvalue": low, "largest_eigenvalue": high}
            notes = (
                f"indefinite Hessian: stopped early; its smallest eigenvalue is {low:.3g}, and ridge "
                f"plus damping of {float(shift):.3g} does not lift it above zero",
            )
        done = bool(result.converged.all()) and residual <= RESIDUAL_SLACK * solver.rtol
        return Solved(result.x, residual, done and not notes, steps, steps + 1, facts, notes)


@filter_jit
def _iterate(
    curvature: Curvature,
    shift: Float[Array, ""],
    b: Float[Array, "k p"],
    rtol: Float[Array, ""],
    max_steps: int,
    hessian: Hessian,
) -> tuple[CGResult, Float[Array, " k"]]:
    COUNTERS["traces"] += 1

    def mv(v: Array) -> tuple[Array, Array]:
        return curvature.product(v, hessian) + shift * v, jnp.zeros((), v.dtype)

    def one(row: Array) -> CGResult:
        return conjugate_gradients(mv, row, rtol=rtol, max_steps=max_steps)

    with jax.default_matmul_precision(PRECISION):
        if b.shape[0] == 1:  # no axis of right-hand sides in the products
            result = jax.tree.map(lambda a: a[None], one(b[0]))
        else:
            result = jax.lax.map(one, b, batch_size=min(AT_ONCE, b.shape[0]))
    return result, relative_residuals(curvature, shift, result.x, b, hessian)


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


def check_primal_solver(what: str, solver: object) -> AbstractPrimalSolver:
    """The solver, or an error that lists what there is."""
    if not isinstance(solver, AbstractPrimalSolver):
        raise TypeError(
            f"{what}: solver must be one of dualfluence.primal's, such as CG(), LiSSA(), Arnoldi(), "
            f"Nystrom(), KFAC() or EKFAC(), got {solver!r}."
        )
    return solver


def check_solved(what: str, solved: Solved, on_failure: OnFailure) -> None:
    """Raise on answers that are not finite, and on those that missed their tolerance."""
    if not (np.isfinite(solved.residual) and bool(jnp.isfinite(solved.value).all())):
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
