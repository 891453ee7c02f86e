"""A fit: damped Newton from `α = 0`, at a given ridge or at the best one.

It passes three stages: `_options` checks what was asked for, `_setup` prepares data and kernel, `_run` takes
the steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .._support.checks import check_ridge
from .._support.compile import NotFinite, double, has_float64
from .._support.options import Clock, ProgressFn, check_count, check_positive, check_progress, maybe
from .._support.points import enter_points
from .._support.types import Inputs, Numbers
from ..attribution._ridge_path import GRID, make_grid, ridge_path
from ..dual._course import MAX_STEPS, Goal, check_outcome, fit_goal
from ..dual._model import Trained, TrainedModel
from ..dual._newton import op_diagonal
from ..losses import AbstractLoss, SquaredError
from ..models._passes import check_network
from ..models._sources import AbstractSource, as_source
from ..operators import AbstractKernelOperator, widen
from ..operators._base import Device
from ..problem._certificate import Certificate, OnFailure, Stats
from ..problem._objective import State
from ..solvers import AbstractDualSolver, Auto, resolve
from ._fitted import Fitted
from ._options import (
    KernelArgument,
    KernelOptions,
    Settings,
    Sketch,
    as_sketch,
    is_auto,
    kernel_options,
    settings,
)
from ._run import Task, as_given, run, starts_wide, widened_model
from ._setup import (
    Setup,
    make_operator,
    make_preconditioner,
    place_source,
    prepare,
    rounding_unit,
    start_norm,
    widening,
)

WHAT = "fit: ridge='auto'"

STRIDE = 4
"""For a loss that is not quadratic, first every fourth ridge (one per decade) is tried, then the ridges
two places and one place beside the best so far. With twice this value, a narrow minimum is missed more
often, and four fits are saved."""

SAFE = 1e3
"""Ridges of the default grid are at least this many rounding units of the mean diagonal of `K`: below,
the difference that leave-one-out outputs are made of is rounding."""


def auto_ridge(
    fit_at: Callable[[float], Trained], untrained: Trained, grid: Numbers | None = None
) -> tuple[Trained, str]:
    """The fit whose ridge has the least leave-one-out loss, and why.

    For squared error the ridge path computed from the untrained model is exact, so a single fit at the
    best ridge is enough. For other losses, one fit is made for each ridge tried, first on a coarse grid
    and then on a finer one; in each fit, every point is left out by one Newton step. One Newton step from
    the fit at one ridge to another ridge would be too inaccurate to compare ridges.

    **Arguments:**

    - `fit_at`: a function that takes a ridge and returns a fit of the same problem; it should reuse the
      kernel.
    - `untrained`: the model at `α = 0`.
    - `grid`: ridges to choose from.
    """
    ridges = _default_grid(untrained) if grid is None else make_grid(untrained, grid, WHAT)
    if isinstance(untrained.loss, SquaredError):
        path = ridge_path(untrained, ridges, WHAT)
        return fit_at(path.best), path.reason
    return _search(fit_at, ridges)


def _size(model: TrainedModel) -> float:
    size = float(jnp.mean(model.layout.points(model.kernel_diagonal)))
    if not 0 < size < np.inf:
        raise NotFinite(
            f"{WHAT}: the mean diagonal of K is {size:.3g}, so no grid of ridges can be made. "
            "Give ridge= a number."
        )
    return size


def _default_grid(model: TrainedModel) -> np.ndarray:
    eps = float(jnp.finfo(model.kernel_diagonal.dtype).eps)
    return _size(model) * GRID[SAFE * eps <= GRID]


def _search(fit_at: Callable[[float], Trained], ridges: np.ndarray) -> tuple[Trained, str]:
    """The least leave-one-out loss of a fit at its own ridge: first among ridges at a stride, then at
    half the stride beside the best."""
    losses: dict[int, float] = {}
    best: tuple[float, Trained] | None = None
    at, stride = 0, STRIDE
    wanted = list(range(0, ridges.size, stride))
    while stride:
        for index in (i for i in wanted if 0 <= i < ridges.size and i not in losses):
            fitted = fit_at(float(ridges[index]))
            losses[index] = _own_loss(fitted)
            if best is None or losses[index] < best[0]:
                best, at = (losses[index], fitted), index
        stride //= 2
        wanted = [at - stride, at + stride]
    assert best is not None  # a grid has a ridge
    loss, fitted = best
    edge = ", at the edge of the grid" if at in (0, ridges.size - 1) else ""
    reason = (
        f"ridge {fitted.ridge:.3g}: least leave-one-out loss, {loss:.4g}, of {len(losses)} fits on a grid "
        f"of {ridges.size} (each point left out by one Newton step){edge}"
    )
    return fitted, reason


def _own_loss(fitted: TrainedModel) -> float:
    """Leave-one-out loss at the fit's own ridge; infinite for a fit that did not converge."""
    own = float(ridge_path(fitted, [fitted.ridge], WHAT).leave_one_out[0])
    return own if np.isfinite(own) and fitted.stats.converged else float("inf")


NO_CERTIFICATE = Certificate(float("inf"), 0.0, 0.0, 1.0)
NOT_TRAINED = "not trained yet"


def fit(
    model: object,
    x: Inputs,
    y: Numbers,
    *,
    loss: AbstractLoss,
    ridge: float | Literal["auto"],
    weights: Numbers | None = None,
    kernel: KernelArgument = None,
    mesh: Mesh | Sequence[Device] | None = None,
    solver: AbstractDualSolver | Auto | None = None,
    tolerance: float | None = None,
    rtol: float | None = None,
    max_steps: int = MAX_STEPS,
    sketch: Sketch | None = None,
    on_failure: OnFailure = "raise",
    progress: bool | ProgressFn = True,
) -> Fitted:
    r"""Train a linearised (or infinitely wide) network to the optimum of

    $$\sum_i w_i\,\ell(f_i, y_i) + \tfrac{\lambda}{2}\|\theta-\theta_0\|^2,\qquad w_i = s_i/\sum_j s_j,$$

    by damped Newton steps in data space: tens of products with the kernel matrix `K`, compared with
    thousands in gradient descent.

    **Arguments:**

    - `model`: from `linearize`, `adapters` or `infinite`, an object with a method `kernel(x1, x2)`, a
      function like it, or a precomputed kernel matrix (then `x` may be `None`).
    - `x`, `y`, `weights`: features, targets, sample weights `s` (1 by default), points on axis 0. For a
      network, features may be a tree of arrays (a dict of tokens and mask), and then every later call
      takes such a tree.
    - `loss`, `ridge`: `ℓ` and `λ > 0`; `"auto"` takes the `λ` with the least leave-one-out loss over a
      grid and explains it in `stats.notes` (only with `K` in memory).
    - `kernel`: how `K` is stored, or `K` itself: see `KernelOptions`.
    - `mesh`: devices (or a `jax.sharding.Mesh`) that share the rows of `K` and of every `(n, c)`
      array. Under `jax.distributed`, call this in every process with the same data.
    - `solver`, `rtol`: `Auto()` by default; the relative residual that the linear solves of the last
      Newton steps must reach (earlier steps may be looser).
    - `tolerance`, `max_steps`: the largest `certificate.relative_bound`, by default near the limit of
      the dtype, and the largest number of steps.
    - `sketch`: the preconditioner, which is kept for later edits: see `Sketch`.
    - `on_failure`: `"report"` returns a fit that missed its tolerance, marked in `stats`.
    - `progress`: `False` for silence, or a function `(done, total, label)`.
    """
    how = settings("fit", solver, rtol, on_failure, progress)
    tolerance = maybe(check_positive, "fit: tolerance", tolerance)
    max_steps, sketch = check_count("fit: max_steps", max_steps), as_sketch("fit", sketch)
    given, options = None if is_auto(ridge) else check_ridge(ridge), kernel_options("fit", kernel)
    clock = Clock()
    source = place_source("fit", as_source(model, x), mesh, options.operator)
    # The operator of a model in float64 brings its precision along.
    own = options.operator
    brought = own is not None and own.dtype == jnp.float64 and not has_float64()
    with double(brought):
        source = source.widened(x) if brought and source.can_widen else source
        setup = prepare("fit", source, x, y, loss, given, weights, options, progress)
        start = _untrained(source, setup, loss, given or 1.0, how, sketch, options)
    if starts_wide(start, any_ridge=given is None):
        start = widened_model(as_given(start, model, x, y))
    goal = fit_goal(tolerance, max_steps, start.offset.dtype)
    train = _train if given else _train_at_best
    with double(start.is_wide):
        return train(start, goal, how, clock)


def _untrained(
    source: AbstractSource,
    setup: Setup,
    loss: AbstractLoss,
    ridge: float,
    how: Settings,
    sketch: Sketch,
    options: KernelOptions,
) -> Fitted:
    """The model at `α = 0`, with its preconditioner; `stats` count what that took."""
    data, op, offset, notes = setup
    solver = resolve(how.solver, op).solver
    preconditioner, products, said = make_preconditioner(source, data.x, op, solver, sketch)
    zero = op.layout.place(np.zeros((data.num_points, offset.shape[1]), offset.dtype))
    notes += said
    inf = float("inf")
    return Fitted(
        source=source,
        data=data,
        state=State(zero, zero),
        reference=None,
        loss=loss,
        ridge=ridge,
        kernel_op=op,
        offset=offset,
        kernel_diagonal=op_diagonal(op),
        preconditioner=preconditioner,
        certificate=NO_CERTIFICATE,
        stats=Stats(0, 0, products, False, inf, 0.0, "none", NOT_TRAINED, notes),
        epsilon=rounding_unit(source, op),
        widening=widening(options),
        start_norm=start_norm(source),
    )


def _train(start: Fitted, goal: Goal, how: Settings, clock: Clock) -> Fitted:
    task = Task(start, start.data, start.state, goal, how, clock, start.stats.notes)
    fitted = run(task).after
    products = fitted.stats.products + start.stats.products
    return replace(fitted, stats=fitted.stats._replace(products=products))


def _train_at_best(start: Fitted, goal: Goal, how: Settings, clock: Clock) -> Fitted:
    """Train at the best ridge. Fits at other ridges may miss their tolerance; the fit that is returned
    may not."""
    trials: list[Fitted] = []

    def fit_at(ridge: float) -> Fitted:
        trial = replace(start, ridge=check_ridge(ridge, start.kernel_op.narrow.dtype))
        trials.append(_train(trial, goal, how._replace(on_failure="report"), clock))
        return trials[-1]

    fitted, reason = auto_ridge(fit_at, start)
    stats = fitted.stats._replace(
        products=sum(trial.stats.products for trial in trials),
        seconds=trials[-1].stats.seconds,
        notes=(*fitted.stats.notes, reason),
    )
    check_outcome(stats, how.on_failure, how.what, fitted.certificate, fitted.offset.dtype)
    return replace(fitted, stats=stats)


def kernel_operator(
    model: object,
    x: Inputs,
    *,
    kernel: KernelArgument = None,
    mesh: Mesh | Sequence[Device] | None = None,
    progress: bool | ProgressFn = True,
) -> AbstractKernelOperator:
    """The kernel matrix `K` of these points, for products with `K` or for `fit(kernel=...)` and similar
    calls.

    **Arguments:**

    - `model`, `x`: as in `fit`.
    - `kernel`: how to store it, see `KernelOptions`; `num_outputs` is 1 by default for a kernel without
      a network.
    - `mesh`: devices that share the rows; each device computes and holds only its own rows.
    - `progress`: `False` for silence, or a function `(done, total, label)`.
    """
    options = kernel_options("kernel_operator", kernel)
    check_progress("kernel_operator", progress)
    if options.operator is not None:
        raise ValueError(
            "kernel_operator: kernel is an operator already. Give the form in which K should be "
            "stored."
        )
    source = place_source("kernel_operator", as_source(model, x), mesh, None)
    features = enter_points("x", x, source.form)
    network, c = source.network, options.num_outputs or 1
    if network is not None:
        c = check_network(network, features, options.num_outputs)
    dtype = network.dtype if network is not None else jnp.result_type(float)
    op = make_operator("kernel_operator", source, features, c, options, dtype, progress)[0]
    if not options.refine:
        return op
    with double():
        return widen(op)
