r"""Influence functions as in the literature: a linear system in parameter space.

$$\mathbf{H}\,\Delta\theta = \tfrac{|D_f|}{|D|}\,\nabla L_{D_f}(\theta^\star),\qquad
  \mathbf{H} = \tfrac{|D_r|}{|D|}\,\nabla^2 L_{D_r}(\theta^\star)$$

(paper, eqs. 1 and 4). The system is divided by $|D_r|/|D|$ before it is solved; this changes neither
`Δθ` nor the iterations of conjugate gradients.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from .._support.checks import check_fraction, check_ridge
from .._support.compile import PRECISION, double, filter_jit
from .._support.options import Clock, check_count, check_flag, check_on_failure
from .._support.types import Inputs, Numbers
from ..kernels._linearized import Linearized
from ..losses import AbstractLoss
from ..losses._losses import check_convex
from ..problem._certificate import OnFailure, Stats
from ..problem._edits import AbstractEdit, Remove, apply_edits
from ..problem._objective import TrainingSet
from ._curvature import Curvature
from ._solvers import CG, check_primal_solver, check_solved
from ._start import curvature_at, entered_network, training_start
from ._update import PrimalUpdate, displacement


def influence(
    model: object,
    params: PyTree,
    x: Inputs,
    y: Numbers,
    edit: AbstractEdit | Sequence[AbstractEdit],
    *,
    loss: AbstractLoss,
    ridge: float,
    weights: Numbers | None = None,
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
    check_fraction("influence: rtol", rtol)
    max_steps = check_count("influence: max_steps", max_steps)
    linearised = check_flag("influence: linearised", linearised)
    check_on_failure("influence", on_failure)
    wide = on_failure == "raise" and solver is None
    if solver is None:
        hessian = "gauss-newton" if linearised else "exact"
        solver = CG(hessian=hessian, rtol=rtol, max_steps=max_steps)
    solver = check_primal_solver("influence", solver)
    model = entered_network("influence", model, wide)
    with double(model.widening is not None):
        clock = Clock()
        ridge = check_ridge(ridge, model.dtype)
        start = training_start("influence", model, params, x, y, weights, loss)
        edits: Any = edit if isinstance(edit, (list, tuple)) else [edit]
        edited = apply_edits(edits, start.data, loss, start.num_outputs)
        pull, ridge_pull, rule = _pulls(edits, start.data, edited)
        curvature, f = curvature_at("influence", start, edited, ridge, batch_size, linearised)
        pulls = jnp.asarray(pull), jnp.asarray(ridge_pull, start.model.dtype)
        rows = edited.x, jnp.asarray(edited.targets), jnp.asarray(edited.weights)
        b, lowest = _right_hand_side(curvature, start.model, start.theta, f, rows, pulls)
        check_convex("influence", float(lowest), f.dtype)
        solved = solver.inverse(curvature).solve(b[None])
        check_solved("influence", solved, on_failure)
        _, unravel = ravel_pytree(start.model.split(start.model.params)[0])
        delta = unravel(solved.value[0])
        stats = Stats(
            steps=1,
            iterations=solved.iterations,
            products=solved.products,
            converged=solved.converged,
            residual=solved.residual,
            seconds=clock.stop(delta),
            solver=f"{solver!r} on {start.model.num_params} parameters",
            reason=rule,
            notes=(*solved.notes, *(f"{name} {value}" for name, value in solved.facts.items())),
        )
        about = (edited, loss, float(ridge), linearised, stats)
        return PrimalUpdate(start.model, start.theta, delta, *about)


def _pulls(
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
def _right_hand_side(
    curvature: Curvature,
    model: Linearized,
    params: PyTree,
    f: Float[Array, "n c"],
    edited: tuple[Array, Array, Array],
    pulls: tuple[Float[Array, " n"], Float[Array, ""]],
) -> tuple[Float[Array, " p"], Float[Array, ""]]:
    """`Σ uᵢ∇ℓᵢ + κλ(θ* − θ₀)`, and the smallest curvature of the loss."""
    (x, targets, weights), (u, ridge_pull), loss = edited, pulls, curvature.loss
    with jax.default_matmul_precision(PRECISION):
        pulled = curvature.model.vjp(x, u.astype(f.dtype)[:, None] * loss.grad(f, targets))
    shift, moved = ridge_pull * curvature.ridge, displacement(model, params)
    b = ravel_pytree(jax.tree.map(lambda g, d: g + shift * d, pulled, moved))[0]
    return b, loss.hess_factor(f, targets, weights.astype(f.dtype)).min_curvature
