r"""Newton's method on the dual variables: the step (★) and the damped loop around it.

$$(\lambda I + W'K)\,\Delta\alpha = -(g' + \lambda\alpha)$$

One step is the influence function. Repeated, it is exact retraining.
"""

import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._support.checks import NotFinite, check_concrete
from .._support.compile import filter_jit
from .._support.progress import ProgressFn, Ticker
from ..operators import AbstractKernelOperator
from ..problem._certificate import Certificate, Norms, measure_norms
from ..problem._objective import Problem, State
from ..solvers import AbstractDualSolver, AbstractPreconditioner

ARMIJO = 1e-4
MAX_HALVINGS = 40
STALLED_STEPS = 3
MAX_REFRESHES = 3
FLOOR_SLACK = 3.0
CURVATURE_SLACK = 1e3
"""A Hessian eigenvalue below `-CURVATURE_SLACK·eps` of the largest is not rounding."""

COUNTERS = {"traces": 0}
"""How often the step was traced, i.e. compiled; tests read it."""


class StepReport(NamedTuple):
    """What one Newton step did, on the host; one transfer brings all of it."""

    iterations: int
    products: int
    residual: float
    converged: bool
    step_size: float
    min_curvature: float
    gradient_norm: float
    rounding: float
    parameter_norm: float

    @classmethod
    def unpack(cls, packed: Float[Array, " k"]) -> "StepReport":
        check_concrete("edit", packed)
        values = cls(*np.asarray(packed).tolist())
        return values._replace(
            iterations=int(values.iterations),
            products=int(values.products),
            converged=bool(values.converged),
        )

    def certificate(self, ridge: float) -> Certificate:
        return Certificate(self.gradient_norm, self.rounding, self.parameter_norm, ridge)


class Point(eqx.Module):
    """A state with its residual `ρ`, the product `Kρ` and what its certificate is made of.

    The next step needs `Kρ` anyway, so the certificate costs no product of its own in a loop.
    """

    state: State
    rho: Float[Array, "n c"]
    k_rho: Float[Array, "n c"]
    norms: Norms


def inspect(
    op: AbstractKernelOperator, problem: Problem, state: State, diagonal: Float[Array, "n c"]
) -> Point:
    """Residual and certificate at `state`: one product with `K`."""
    rho = problem.residual(state)
    k_rho = op.mv(rho)
    return Point(state, rho, k_rho, measure_norms(problem, state, rho, k_rho, diagonal))


inspect_jit = filter_jit(inspect)


@filter_jit
def op_mv(op: AbstractKernelOperator, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
    """`K v`, compiled."""
    return op.mv(v)


@filter_jit
def op_diagonal(op: AbstractKernelOperator) -> Float[Array, "n c"]:
    """Diagonal of `K`, compiled."""
    return op.diagonal()


def _newton_step(
    op: AbstractKernelOperator,
    problem: Problem,
    point: Point,
    diagonal: Float[Array, "n c"],
    solver: AbstractDualSolver,
    preconditioner: AbstractPreconditioner,
    rtol: Float[Array, ""],
    damped: bool,
) -> tuple[Point, Float[Array, " k"]]:
    """One step of (★) from `point`, with a line search on the objective if `damped`."""
    COUNTERS["traces"] += 1
    factor = problem.factor(point.state)
    solution = solver.solve(
        op,
        factor,
        problem.ridge,
        -point.rho,
        -point.k_rho,
        preconditioner=preconditioner,
        rtol=rtol,
    )
    delta, k_delta = solution.value, solution.k_value
    t = jnp.ones((), delta.dtype)
    if damped:
        t = _line_search(problem, point, delta, k_delta)
    new = inspect(op, problem, point.state.moved(t * delta, t * k_delta), diagonal)
    packed = (
        solution.iterations,
        solution.products + 1,
        solution.residual,
        solution.converged,
        t,
        factor.min_curvature,
        new.norms.gradient,
        new.norms.rounding,
        new.norms.parameters,
    )
    return new, jnp.stack([jnp.asarray(value, delta.dtype) for value in packed])


newton_step = filter_jit(_newton_step)


@filter_jit
def influence_step(
    op: AbstractKernelOperator,
    problem: Problem,
    state: State,
    diagonal: Float[Array, "n c"],
    solver: AbstractDualSolver,
    preconditioner: AbstractPreconditioner,
    rtol: Float[Array, ""],
) -> tuple[Point, Float[Array, " k"]]:
    """`inspect` and an undamped `newton_step` in one compiled program: the influence function."""
    start = inspect(op, problem, state, diagonal)
    return _newton_step(op, problem, start, diagonal, solver, preconditioner, rtol, damped=False)


def _line_search(
    problem: Problem, point: Point, delta: Float[Array, "n c"], k_delta: Float[Array, "n c"]
) -> Float[Array, ""]:
    """Backtracking on `L_w` along the step: only `(n, c)` work, no product with `K`."""
    start = problem.value(point.state)
    slope = jnp.sum(point.rho * k_delta)
    slack = 10 * jnp.finfo(delta.dtype).eps * jnp.abs(start)

    def too_high(carry: tuple[Array, Array]) -> Array:
        t, halvings = carry
        value = problem.value(point.state.moved(t * delta, t * k_delta))
        enough = value <= start + ARMIJO * t * slope + slack
        return ~enough & (halvings < MAX_HALVINGS)

    def halve(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        return carry[0] / 2, carry[1] + 1

    return jax.lax.while_loop(too_high, halve, (jnp.ones((), delta.dtype), jnp.asarray(0)))[0]


class Stats(NamedTuple):
    """How an answer was reached: steps, products with `K`, convergence, time, solver and why."""

    steps: int
    iterations: int
    products: int
    converged: bool
    residual: float
    seconds: float
    solver: str
    reason: str
    notes: tuple[str, ...] = ()


class Tolerances(NamedTuple):
    """When the loop stops: `distance` bounds `‖θ − θ*‖`, `relative` that over `‖θ − θ₀‖`."""

    distance: float | None
    relative: float | None
    max_steps: int

    def met(self, cert: Certificate) -> bool:
        by_distance = self.distance is not None and cert.distance_bound <= self.distance
        return by_distance or (self.relative is not None and cert.relative_bound <= self.relative)


class NotConverged(RuntimeError):
    """A solve or a fit did not reach its tolerance. The message says how far it came."""


def check_report(report: StepReport, dtype: Any, what: str) -> None:
    """Raise on NaN or on a loss that is not convex."""
    if report.min_curvature < -CURVATURE_SLACK * float(jnp.finfo(dtype).eps):
        raise ValueError(
            f"{what}: the loss has negative curvature (smallest Hessian eigenvalue "
            f"{report.min_curvature:.3g} of the largest). It must be convex in the outputs."
        )
    check_finite_norm(report.gradient_norm + report.rounding, what)


def check_finite_norm(gradient_norm: float, what: str) -> None:
    """Raise unless the certificate is a number."""
    if not np.isfinite(gradient_norm):
        raise NotFinite(
            f"{what}: the gradient is not finite. The kernel may be indefinite, the numbers may "
            "overflow, or the ridge may be below the kernel's rounding; try float64, a larger ridge, "
            "or features and targets of ordinary size."
        )


def minimise(
    op: AbstractKernelOperator,
    problem: Problem,
    point: Point,
    diagonal: Float[Array, "n c"],
    *,
    solver: AbstractDualSolver,
    preconditioner: AbstractPreconditioner,
    ridge: float,
    rtol: float,
    tolerances: Tolerances,
    what: str,
    progress: bool | ProgressFn,
    loosest: float = 0.1,
) -> tuple[Point, dict[str, Any]]:
    """Damped Newton from `point` until a tolerance on the certificate or `max_steps`.

    Early steps solve to `loosest`, later ones to `rtol`: the inner tolerance follows the gradient.
    Stops as well when the gradient no longer falls, i.e. at the floor that rounding sets. The
    certificate that is returned comes from a product `Kα` of its own, not from the running sum of
    steps: where that sum had drifted and the tolerance is missed after all, the loop goes on.
    """
    dtype = point.rho.dtype
    best, cert = point, point.norms.certificate(ridge)
    check_finite_norm(cert.distance_bound, what)
    first = norm = cert.gradient_norm
    stalled, inner, met = 0, True, tolerances.met(cert)
    steps = iterations = 0
    products, residual = 1, 0.0
    refreshes = 0

    def finished() -> bool:
        return met or cert.at_floor or steps == tolerances.max_steps or stalled == STALLED_STEPS

    with Ticker(tolerances.max_steps, what, progress) as ticker:
        while not finished():
            loose = loosest * min(1.0, norm / max(first, 1e-300))
            step_rtol: Any = np.asarray(max(rtol, loose), dtype)
            point, packed = newton_step(
                op, problem, point, diagonal, solver, preconditioner, step_rtol, True
            )
            report = StepReport.unpack(packed)
            check_report(report, dtype, what)
            steps, iterations = steps + 1, iterations + report.iterations
            products, residual = products + report.products, report.residual
            norm, inner = report.gradient_norm, inner and report.converged
            slow = norm > 0.9 * cert.gradient_norm and report.step_size == 1
            stalled = stalled + 1 if slow else 0
            if norm <= cert.gradient_norm:
                best, cert = point, report.certificate(ridge)
                met = tolerances.met(cert)
            ticker.tick()
            if finished():
                promised, alpha = met or cert.at_floor, best.state.alpha
                best = inspect_jit(op, problem, State(alpha, op_mv(op, alpha)), diagonal)
                cert = best.norms.certificate(ridge)
                met, refreshes, products = tolerances.met(cert), refreshes + 1, products + 2
                if met or _near_floor(cert) or not promised or refreshes == MAX_REFRESHES:
                    break
                point, norm, stalled = best, cert.gradient_norm, 0
    return best, {
        "steps": steps,
        "iterations": iterations,
        "products": products,
        "residual": residual,
        "converged": met,
        "at_floor": _near_floor(cert),
        "certificate": cert,
        "inner_converged": inner,
    }


def _near_floor(cert: Certificate) -> bool:
    """At the floor as another product of the same accuracy sees it."""
    return cert.gradient_norm <= FLOOR_SLACK * cert.rounding


class Clock:
    """Wall time until a result is ready."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def stop(self, result: Any) -> float:
        jax.block_until_ready(result)
        return time.perf_counter() - self._start
