"""Fitting: damped Newton from `α = 0`, or taking over a network that the user trained."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PRNGKeyArray, PyTree

from ._checks import check_finite, check_fraction, check_solver
from ._fitted import (
    MAX_STEPS,
    Fidelity,
    Fitted,
    OnFailure,
    check_outcome,
    default_rtol,
    default_tolerance,
    make_problem,
    make_stats,
)
from ._kernel_checks import check_kernel
from ._layout import Device
from ._linearize import Linearized
from ._models import NetworkSource, as_source, pull_back
from ._newton import Clock, Stats, Tolerances, inspect_jit, minimise, op_diagonal, op_mv
from ._problem import State
from ._progress import ProgressFn
from ._readout import Reference, outputs_at
from ._setup import (
    choose_form,
    make_preconditioner,
    mesh_of,
    place_source,
    prepare,
    with_precision,
)
from ._trees import tree_norm
from .losses import AbstractLoss
from .operators import (
    AbstractKernelOperator,
)
from .solvers import (
    AbstractDualSolver,
    Auto,
    resolve,
)


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
      disk, `low_rank(...)`, or any operator. `model` then serves base outputs and queries.
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
    if tolerance is not None and not 0 < tolerance < np.inf:
        raise ValueError(f"fit: tolerance must be a positive number, got {tolerance}.")
    clock = Clock()
    source = place_source(as_source(model), mesh_of(kernel_op) if mesh is None else mesh)
    setup = prepare(source, x, y, loss, ridge, weights, num_outputs, form, progress, kernel_op)
    setup = with_precision(setup, loss, y, refine, precision)
    data, op, offset, notes = setup
    solver = solver or Auto()
    picked = resolve(solver, op)
    preconditioner, sketched = make_preconditioner(source, data.x, op, picked.solver, rank, key)
    diagonal = op_diagonal(op)
    problem = make_problem(data, loss, float(ridge), offset, op.layout)
    zero = op.layout.place(np.zeros((data.num_points, offset.shape[1]), offset.dtype))
    start = inspect_jit(op, problem, State(zero, zero), diagonal)
    dtype = offset.dtype
    limit = default_tolerance(dtype) if tolerance is None else tolerance
    point, facts = minimise(
        op,
        problem,
        start,
        diagonal,
        solver=picked.solver,
        preconditioner=preconditioner,
        ridge=float(ridge),
        rtol=default_rtol(dtype) if rtol is None else rtol,
        tolerances=Tolerances(None, limit, max_steps),
        what="fit",
        progress=progress,
    )
    if facts["at_floor"] and not facts["converged"]:
        facts["converged"] = True
        notes += (f"stopped at the rounding floor of {dtype}, short of tolerance {limit:.1e}",)
    facts["products"] += sketched.products
    notes += sketched.notes
    stats = make_stats(facts, clock.stop(point), picked.solver.describe(op), picked.reason, notes)
    check_outcome(stats, on_failure, "fit", facts["certificate"], dtype)
    return Fitted(
        source=source,
        data=data,
        state=point.state,
        reference=None,
        loss=loss,
        ridge=float(ridge),
        kernel_op=op,
        offset=offset,
        kernel_diagonal=diagonal,
        preconditioner=preconditioner,
        certificate=facts["certificate"],
        stats=stats,
    )


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
    source = place_source(as_source(model), mesh)
    features = jnp.asarray(x)
    check_finite("x", features)
    network = source.network
    c = network.apply_shape(features)[1] if network is not None else num_outputs or 1
    dtype = network.dtype if network is not None else jnp.result_type(float)
    form, _ = choose_form(source, form, features.shape[0], c, dtype)
    op = source.operator(features, c, form=form, progress=progress)
    check_kernel(op)
    return op


def from_trained(
    model: Linearized,
    trained_params: PyTree,
    x: Any,
    y: Any,
    *,
    loss: AbstractLoss,
    ridge: float,
    weights: Any = None,
    tangent: Literal["initial", "trained"] = "initial",
    linearised: bool = False,
    form: str = "auto",
    mesh: Mesh | Sequence[Device] | None = None,
    rank: int | None = None,
    key: PRNGKeyArray | None = None,
    progress: bool | ProgressFn = True,
) -> Fitted:
    r"""Take over a network that was trained elsewhere on
    $\sum_i w_i\ell(f_i,y_i)+\frac{\lambda}{2}\|\theta-\theta_0\|^2$.

    Outputs and gradients come from the network itself and `α = −g/λ`, as at a stationary point.
    Nothing is trained here; how far the network is from stationary and from its linearisation is
    in `fidelity`. Edits then move `θ` by `JᵀΔα` from the trained parameters.

    **Arguments:**

    - `model`: `linearize(apply_fn, θ₀)` with the parameters that the ridge pulls towards.
    - `trained_params`: `θ`, a pytree like `θ₀`.
    - `tangent`: Jacobian at `θ₀` (as the paper does) or at `θ`, where `θ − θ₀ = Jᵀα` holds exactly at
      any stationary point of the nonlinear objective.
    - `linearised`: the network that was trained is the linearisation itself.
    - other arguments: as in `fit`.
    """
    if not isinstance(model, Linearized):
        raise TypeError("from_trained: model must come from linearize; a kernel has no parameters.")
    if jax.tree.structure(trained_params) != jax.tree.structure(model.params):
        raise ValueError(
            "from_trained: trained_params must have the tree structure of the parameters given to "
            f"linearize, {jax.tree.structure(model.params)}."
        )
    if tangent not in ("initial", "trained"):
        raise ValueError(f"from_trained: tangent must be 'initial' or 'trained', got {tangent!r}.")
    for own, given in zip(*map(jax.tree.leaves, (model.params, trained_params)), strict=True):
        if np.shape(own) != np.shape(given):
            raise ValueError(
                f"from_trained: trained_params must have the shapes of those given to linearize; one "
                f"leaf is {np.shape(given)} instead of {np.shape(own)}."
            )
    clock = Clock()
    tangent_model = replace(model, params=trained_params) if tangent == "trained" else model
    source = place_source(NetworkSource(tangent_model), mesh)
    data, op, _, notes = prepare(source, x, y, loss, ridge, weights, None, form, progress)
    theta, theta_0 = model.split(trained_params)[0], model.split(model.params)[0]
    change = jax.tree.map(jnp.subtract, theta, theta_0)
    linear_outputs = outputs_at(model, trained_params, data.x, linearised=True)
    outputs = outputs_at(model, trained_params, data.x, linearised)
    check_finite("from_trained outputs", outputs)
    gradient_model = model if linearised else replace(model, params=trained_params)
    w = jnp.asarray(data.weights, outputs.dtype)[:, None]
    g = w * loss.grad(outputs, data.targets)
    alpha = -g / float(ridge)
    placed = op.layout.place(alpha)
    state = State(placed, op_mv(op, placed))
    offset = op.layout.place(outputs, "last") - state.k_alpha
    fidelity = _fidelity(
        model,
        tangent_model,
        gradient_model,
        data.x,
        g,
        alpha,
        change,
        outputs,
        linear_outputs,
        ridge,
    )
    diagonal = op_diagonal(op)
    problem = make_problem(data, loss, float(ridge), offset, op.layout)
    point = inspect_jit(op, problem, state, diagonal)
    picked = resolve(Auto(), op)
    preconditioner, sketched = make_preconditioner(source, data.x, op, picked.solver, rank, key)
    stats = Stats(
        steps=0,
        iterations=0,
        products=2 + sketched.products,
        converged=True,
        residual=0.0,
        seconds=clock.stop(point),
        solver="none",
        reason="trained by the user",
        notes=(*notes, *sketched.notes),
    )
    return Fitted(
        source=source,
        data=data,
        state=state,
        reference=Reference(trained_params, op.layout.points(placed), linearised),
        loss=loss,
        ridge=float(ridge),
        kernel_op=op,
        offset=offset,
        kernel_diagonal=diagonal,
        preconditioner=preconditioner,
        certificate=point.norms.certificate(float(ridge)),
        stats=stats,
        fidelity=fidelity,
    )


def _fidelity(
    model: Linearized,
    tangent_model: Linearized,
    gradient_model: Linearized,
    x: Array,
    g: Array,
    alpha: Array,
    change: PyTree,
    outputs: Array,
    linear_outputs: Array,
    ridge: float,
) -> Fidelity:
    gradient = jax.tree.map(lambda a, b: a + ridge * b, pull_back(gradient_model, x, g), change)
    gap = jax.tree.map(jnp.subtract, change, pull_back(tangent_model, x, alpha))
    base = outputs_at(model, model.params, x, linearised=False)
    moved = float(jnp.linalg.norm(linear_outputs - base))
    return Fidelity(
        gradient_norm=float(tree_norm(gradient)),
        parameter_gap=float(tree_norm(gap)) / max(float(tree_norm(change)), 1e-30),
        output_gap=float(jnp.linalg.norm(outputs - linear_outputs)) / max(moved, 1e-30),
    )
