r"""Influence functions as in the literature: a linear system in parameter space.

$$\mathbf{H}\,\Delta\theta = \tfrac{|D_f|}{|D|}\,\nabla L_{D_f}(\theta^\star),\qquad
  \mathbf{H} = \tfrac{|D_r|}{|D|}\,\nabla^2 L_{D_r}(\theta^\star)$$

(paper, eqs. 1 and 4). The system is divided by $|D_r|/|D|$ before it is solved; this changes neither
`Δθ` nor the iterations of conjugate gradients.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from .._support.checks import (
    NotFinite,
    as_array,
    check_fraction,
    check_ridge,
    check_rows,
    training_weights,
)
from .._support.compile import filter_jit
from .._support.options import (
    check_count,
    check_flag,
    check_instance,
    check_loss,
    check_on_failure,
    maybe,
)
from .._support.points import enter_points
from .._support.wide import double
from ..dual._newton import CURVATURE_SLACK
from ..dual._readout import outputs_at
from ..dual._record import Clock, NotConverged, OnFailure, Stats
from ..kernels._linearized import Linearized, as_network
from ..losses import AbstractLoss
from ..models._checks import check_network, check_params
from ..models._sources import bound_network
from ..problem._edits import AbstractEdit, Remove, TrainingSet, apply_edits
from ..solvers._cg import CGResult, conjugate_gradients
from ._hessian import linearised_product, make_rows, network_product
from ._precision import in_float64
from ._step import step_with
from ._update import PRECISION, PrimalUpdate, moved_params, tangent_model

RESIDUAL_SLACK = 2.0
"""How far the true residual may lie above `rtol` when the running one of CG is below."""

COUNTERS = {"traces": 0}
"""How often the solve was traced, i.e. compiled; tests read it."""


def influence(
    model: Any,
    params: PyTree,
    x: Any,
    y: Any,
    edit: AbstractEdit | Sequence[AbstractEdit],
    *,
    loss: AbstractLoss,
    ridge: float,
    weights: Any = None,
    linearised: bool = True,
    rtol: float = 1e-8,
    max_steps: int = 500,
    batch_size: int | None = None,
    on_failure: OnFailure = "raise",
    solver: Any = None,
) -> PrimalUpdate:
    r"""Estimate the parameters after an edit of the training set, in parameter space.

    Removals follow the paper's eq. 1 as printed, with sums of sample weights in place of counts:
    $$\theta_r \approx \theta^\star + \tfrac{|D_f|}{|D|}\mathbf{H}^{-1}\nabla L_{D_f}(\theta^\star),
    \qquad L_S(\theta) = \tfrac{1}{|S|}\sum_{i\in S}\ell_i(\theta) +
    \tfrac{\lambda}{2}\|\theta-\theta_0\|^2 .$$ Any other edit is the Newton step $-(\nabla^2
    L')^{-1}\nabla L'(\theta^\star)$ on the edited objective. The two agree if $\nabla L_D(\theta^\star)
    = 0$, as eq. 1 assumes. Then they equal one step of `Fitted.edit`, which works in data space.

    Exact for squared error on a linearised model. Each iteration passes over all training points;
    removed ones stay as rows of weight zero, so that a request with other indices compiles nothing.

    **Arguments:**

    - `model`: from `linearize` or `adapters`; its parameters are the ridge's `θ₀`. With a scale, the
      system and the damping of solvers are in its units, `P^{1/2}HP^{1/2} + λI`.
    - `params`: the trained `θ*`, a pytree like `θ₀`.
    - `x`, `y`, `weights`: training features, targets and sample weights before the edit.
    - `edit`: `Remove`, `Relabel`, `Reweight`, `Replace`, `Add`, or several in a list.
    - `loss`, `ridge`: `ℓ` and `λ > 0`.
    - `linearised`: `θ*` belongs to the model linearised at `θ₀`. `False`: the network itself, whose
      full Hessian may be indefinite; conjugate gradients then stop, and this counts as a failure.
    - `rtol`, `max_steps`: of conjugate gradients, by default as in the paper's experiments. Float32
      solves cannot attain 1e-8, so on a CPU a float32 model is computed in float64. On an accelerator
      use a larger `rtol`, or follow the paper with `on_failure="report"`, which stays in float32.
    - `batch_size`: points per Hessian-vector product; the model's by default.
    - `on_failure`: `"report"` returns the answer of a solve that did not converge, marked in `stats`.
    - `solver`: one of `dualfluence.primal`, e.g. `EKFAC()` or `LiSSA(damping=1e-3)`, which have their
      own options; by default conjugate gradients with `rtol` and `max_steps`.

    **Returns:** `PrimalUpdate`.
    """
    model = as_network(model)
    check_instance("influence: model", model, Linearized, "made by linearize")
    if on_failure == "raise" and solver is None:
        model = in_float64(model)
    with double(model.widening is not None):
        return _influence(
            model,
            params,
            x,
            y,
            edit,
            loss=loss,
            ridge=ridge,
            weights=weights,
            linearised=linearised,
            rtol=rtol,
            max_steps=max_steps,
            batch_size=batch_size,
            on_failure=on_failure,
            solver=solver,
        )


def _influence(
    model: Linearized,
    params: PyTree,
    x: Any,
    y: Any,
    edit: AbstractEdit | Sequence[AbstractEdit],
    *,
    loss: AbstractLoss,
    ridge: float,
    weights: Any,
    linearised: bool,
    rtol: float,
    max_steps: int,
    batch_size: int | None,
    on_failure: OnFailure,
    solver: Any,
) -> PrimalUpdate:
    """`influence` in the precision of the model."""
    check_fraction("influence: rtol", rtol)
    max_steps = check_count("influence: max_steps", max_steps)
    batch_size = maybe(check_count, "influence: batch_size", batch_size)
    linearised = check_flag("influence: linearised", linearised)
    check_on_failure("influence", on_failure)
    ridge = check_ridge(ridge, model.dtype)
    clock = Clock()
    theta = check_params("influence: params", model, params)
    model = bound_network(model, x)
    theta = model.enter(theta)
    data = _training_set(model, x, y, weights, loss)
    num_outputs = model.apply_shape(data.x)[1]
    edits: Any = edit if isinstance(edit, (list, tuple)) else [edit]
    edited = apply_edits(edits, data, loss, num_outputs)
    pull, ridge_pull, rule = _right_hand_side(edits, data, edited)
    sized = _with_batches(model, edited.x, batch_size)
    if solver is not None:
        options: dict[str, Any] = {"loss": loss, "linearised": linearised, "clock": clock}
        options |= {"ridge": check_ridge(ridge), "on_failure": on_failure}
        return step_with(solver, sized, theta, edited, (pull, ridge_pull, rule), **options)
    dtype = model.dtype
    result, residual, delta, curvature = _solve(
        sized,
        theta,
        edited.x,
        jnp.asarray(edited.targets),
        jnp.asarray(edited.weights),
        jnp.asarray(pull),
        jnp.asarray(ridge_pull, dtype),
        loss,
        jnp.asarray(ridge, dtype),
        jnp.asarray(rtol, dtype),
        linearised,
        max_steps,
    )
    _check_solution(result, residual, curvature, linearised)
    converged = bool(result.converged) and float(residual) <= RESIDUAL_SLACK * rtol
    iterations = int(result.iterations)
    stats = Stats(
        steps=1,
        iterations=iterations,
        products=iterations + 1,
        converged=converged and not bool(result.indefinite),
        residual=float(residual),
        seconds=clock.stop(delta),
        solver=f"conjugate gradients on {sized.num_params} parameters",
        reason=rule,
        notes=("indefinite Hessian: stopped early",) if bool(result.indefinite) else (),
    )
    _check_outcome(stats, rtol, on_failure)
    return PrimalUpdate(model, theta, delta, edited, loss, float(ridge), linearised, stats)


def _right_hand_side(
    edits: Sequence[AbstractEdit], before: TrainingSet, after: TrainingSet
) -> tuple[np.ndarray, float, str]:
    """`(u, κ)` of the right-hand side `Σ uᵢ∇ℓᵢ + κλ(θ* − θ₀)`, and the rule it follows."""
    if not all(isinstance(edit, Remove) for edit in edits):
        return -after.weights, -1.0, "Newton step on the edited objective"
    # The largest weight is taken out first, so that no sum leaves the range of floats.
    largest = max(before.sample_weights.max(), after.sample_weights.max())
    kept = (after.sample_weights / largest).sum()
    gone = (before.sample_weights - after.sample_weights) / largest
    return gone / kept, float(gone.sum() / kept), "removal by eq. 1"


@filter_jit
def _solve(
    model: Linearized,
    params: PyTree,
    x: Array,
    targets: Array,
    weights: Float[Array, " n"],
    pull: Float[Array, " n"],
    ridge_pull: Float[Array, ""],
    loss: AbstractLoss,
    ridge: Float[Array, ""],
    rtol: Float[Array, ""],
    linearised: bool,
    max_steps: int,
) -> tuple[CGResult, Float[Array, ""], PyTree, Float[Array, ""]]:
    """CG's report, the true relative residual, `Δθ`, and the smallest curvature of the loss."""
    COUNTERS["traces"] += 1
    tangent = tangent_model(model, params, linearised)
    product = linearised_product if linearised else network_product
    with jax.default_matmul_precision(PRECISION):
        f = outputs_at(model, params, x, linearised)
        weights, pull = weights.astype(f.dtype), pull.astype(f.dtype)
        loss_part = tangent.vjp(x, pull[:, None] * loss.grad(f, targets))
        moved = moved_params(model, params)
        b_tree = jax.tree.map(lambda g, d: g + ridge_pull * ridge * d, loss_part, moved)
        b, unravel = ravel_pytree(b_tree)
        rows = make_rows(x, targets, weights, f, model.batch(x))

        def hess_mv(v: Array) -> tuple[Array, Array]:
            curved, _ = ravel_pytree(product(tangent, loss, rows, unravel(v)))
            return curved + ridge * v, jnp.zeros((), v.dtype)

        result = conjugate_gradients(hess_mv, b, rtol=rtol, max_steps=max_steps)
        scale = jnp.maximum(jnp.linalg.norm(b), jnp.finfo(b.dtype).tiny)
        # The running residual of CG goes on falling in low precision after the true one has not.
        residual = jnp.linalg.norm(b - hess_mv(result.x)[0]) / scale
    curvature = loss.hess_factor(f, targets, weights).min_curvature
    return result, residual, unravel(result.x), curvature


def _with_batches(model: Linearized, x: Array, batch_size: int | None) -> Linearized:
    """The model with the size of its batches fixed: as asked, or its own."""
    sized = model if batch_size is None else replace(model, batch_size=batch_size)
    return replace(model, batch_size=sized.batch(x))


def _training_set(
    model: Linearized, x: Any, y: Any, weights: Any, loss: AbstractLoss
) -> TrainingSet:
    check_loss("influence", loss, AbstractLoss)
    features, targets = enter_points("x", x, model.form), as_array("y", y)
    check_rows("y", targets, features.shape[0], "point of x")
    samples = training_weights("influence", weights, features.shape[0])
    num_outputs = check_network(model, features, None)
    dtype = jax.eval_shape(model.base_outputs, features).dtype
    prepared = loss.prepare_targets(targets, num_outputs, dtype)
    return TrainingSet(features, prepared, samples, form=model.form)


def _check_solution(
    result: CGResult, residual: Float[Array, ""], curvature: Float[Array, ""], linearised: bool
) -> None:
    """Raise on NaN or on a loss that is not convex. Waits for the solve."""
    if float(curvature) < -CURVATURE_SLACK * float(jnp.finfo(residual.dtype).eps):
        raise ValueError(
            f"influence: the loss has negative curvature (smallest Hessian eigenvalue "
            f"{float(curvature):.3g} of the largest). It must be convex in the outputs."
        )
    finite = jnp.isfinite(residual) & jnp.isfinite(result.residual) & jnp.isfinite(result.x).all()
    if not bool(finite):
        raise NotFinite(
            "influence: the step is not finite. "
            + ("The linearised model" if linearised else "The network")
            + " or its loss overflows at params; check outputs there, or try float64."
        )


def _check_outcome(stats: Stats, rtol: float, on_failure: OnFailure) -> None:
    if stats.converged or on_failure == "report":
        return
    cause = (
        "met a direction of negative curvature: the network's Hessian is indefinite at params. "
        "Train closer to a minimum, use a larger ridge or linearised=True"
        if stats.notes
        else "stopped short of its tolerance. Try float64, a larger ridge, a looser rtol or more "
        "max_steps"
    )
    raise NotConverged(
        f"influence: conjugate gradients, after {stats.iterations} iterations at a relative residual "
        f"of {stats.residual:.3g} (rtol {rtol:.3g}), {cause}, or on_failure='report' to get the "
        "answer as it is."
    )
