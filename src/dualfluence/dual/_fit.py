"""Fitting: damped Newton from `α = 0`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from .._support.checks import as_features, check_fraction
from .._support.options import (
    check_choice,
    check_count,
    check_flag,
    check_instance,
    check_on_failure,
    check_positive,
    check_progress,
    check_solver,
    maybe,
)
from .._support.progress import ProgressFn
from ..losses import AbstractLoss
from ..models._checks import check_network
from ..models._sources import FORMS, as_source
from ..operators import (
    AbstractKernelOperator,
)
from ..operators._layout import Device
from ..solvers import (
    AbstractDualSolver,
    Auto,
    resolve,
)
from ._fitted import Fitted, Settings
from ._record import Clock, OnFailure
from ._setup import (
    check_sketch,
    choose_form,
    make_preconditioner,
    mesh_of,
    place_source,
    prepare,
    with_precision,
)
from ._train import MAX_STEPS, Goal, default_tolerance


def fit(
    model: Any,
    x: Any,
    y: Any,
    *,
    loss: AbstractLoss,
    ridge: float,
    weights: Any = None,
    num_outputs: int | None = None,
    form: str = "auto",
    mesh: Mesh | Sequence[Device] | None = None,
    kernel_op: AbstractKernelOperator | None = None,
    refine: bool = False,
    precision: jax.lax.Precision | None = None,
    solver: AbstractDualSolver | Auto | None = None,
    tolerance: float | None = None,
    rtol: float | None = None,
    max_steps: int = MAX_STEPS,
    rank: int | None = None,
    key: PRNGKeyArray | None = None,
    on_failure: OnFailure = "raise",
    progress: bool | ProgressFn = True,
) -> Fitted:
    r"""Train a linearised (or infinitely wide) network to the optimum of

    $$\sum_i w_i\,\ell(f_i, y_i) + \tfrac{\lambda}{2}\|\theta-\theta_0\|^2,\qquad w_i = s_i/\sum_j s_j,$$

    by damped Newton steps in data space. Tens of products with `K`, where gradient descent takes
    thousands.

    **Arguments:**

    - `model`: from `linearize` or `dualfluence.infinite`, anything with `kernel(x1, x2)`, such a
      function, or a precomputed kernel matrix (then `x` may be `None`).
    - `x`, `y`: training features and targets, points on axis 0.
    - `loss`, `ridge`: `ℓ` and `λ > 0`.
    - `weights`: sample weights `s`, 1 by default.
    - `num_outputs`: `c`, when neither model nor targets tell.
    - `form`: `"dense"` holds `K`, `"matrix-free"` does not, `"auto"` holds it if it fits in memory.
    - `mesh`: devices (or a `jax.sharding.Mesh`) that share the rows of `K` and of every `(n, c)`
      array. Under `jax.distributed`, call this in every process with the same data.
    - `kernel_op`: `K` on these points, if you have it: `store.build(...).operator()` for one on
      disk, `kernel_operator(...)`, or any operator. `model` then serves base outputs and queries.
    - `refine`: with a float32 kernel, keep dual variables and residuals in float64 and refine the
      float32 solves, here and in edits: float64 accuracy (for `K` as it is stored) at float32's price.
    - `precision`: of products with a dense `K`; `jax.lax.Precision.DEFAULT` allows TF32 or bfloat16
      on accelerators, and the error that makes is in `stats.notes`.
    - `solver`: `Auto()` by default.
    - `tolerance`: on `certificate.relative_bound`; by default near what the dtype allows.
    - `rtol`: relative residual of the last linear solves.
    - `rank`: columns of the preconditioner kept for later edits; 0 for none.
    - `key`: randomness of that preconditioner's sketch.
    - `on_failure`: `"report"` returns a fit that missed its tolerance, marked in `stats`.

    **Returns:** `Fitted`.
    """
    check_solver("fit", solver, (AbstractDualSolver, Auto))
    check_fraction("fit: rtol", rtol)
    tolerance = maybe(check_positive, "fit: tolerance", tolerance)
    max_steps = check_count("fit: max_steps", max_steps)
    refine = check_flag("fit: refine", refine)
    example = "one of jax.lax.Precision, e.g. jax.lax.Precision.HIGHEST"
    maybe(check_instance, "fit: precision", precision, kinds=jax.lax.Precision, example=example)
    rank = check_sketch("fit", rank, key)
    check_on_failure("fit", on_failure)
    clock = Clock()
    source = place_source(as_source(model, x), mesh_of(kernel_op) if mesh is None else mesh)
    setup = prepare(source, x, y, loss, ridge, weights, num_outputs, form, progress, kernel_op)
    data, op, offset, notes = with_precision(setup, loss, y, refine, precision)
    picked = resolve(solver or Auto(), op)
    preconditioner, sketched = make_preconditioner(source, data.x, op, picked.solver, rank, key)
    untrained = Fitted.untrained(source, data, loss, float(ridge), op, offset, preconditioner)
    limit = default_tolerance(offset.dtype) if tolerance is None else tolerance
    goal = Goal(None, limit, max_steps)
    settings = Settings("fit", goal, solver or Auto(), rtol, on_failure, progress)
    update = untrained.run(data, untrained.state, settings, clock, notes + sketched.notes)
    stats = update.stats._replace(products=update.stats.products + sketched.products)
    return replace(update.commit(), stats=stats)


def kernel_operator(
    model: Any,
    x: Any,
    *,
    num_outputs: int | None = None,
    form: str = "auto",
    mesh: Mesh | Sequence[Device] | None = None,
    progress: bool | ProgressFn = True,
) -> AbstractKernelOperator:
    """`K` on these points, to be multiplied with or given to `fit(kernel_op=...)`.

    **Arguments:**

    - `model`, `form`: as in `fit`.
    - `num_outputs`: `c` for a kernel without a network; 1 by default.
    - `mesh`: devices that share the rows; each computes its own, and none ever holds more.
    """
    check_choice("kernel_operator: form", form, FORMS)
    check_progress("kernel_operator", progress)
    c = maybe(check_count, "kernel_operator: num_outputs", num_outputs) or 1
    source = place_source(as_source(model, x), mesh)
    features = as_features("x", x)
    network = source.network
    if network is not None:
        c = check_network(network, features, num_outputs)
    dtype = network.dtype if network is not None else jnp.result_type(float)
    form, _ = choose_form(source, form, features.shape[0], c, dtype)
    op = source.operator(features, c, form=form, progress=progress)
    op.check()
    return op
