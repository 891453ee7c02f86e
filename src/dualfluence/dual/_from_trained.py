"""Taking over a network that the user trained."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PRNGKeyArray, PyTree

from .._support.checks import check_finite
from .._support.progress import ProgressFn
from .._support.trees import tree_norm
from ..kernels._linearized import Linearized
from ..losses import AbstractLoss
from ..models._sources import NetworkSource, pull_back
from ..operators._layout import Device
from ..problem._objective import State, make_problem
from ..solvers import (
    Auto,
    resolve,
)
from ._fitted import (
    Fidelity,
    Fitted,
)
from ._newton import inspect_jit, op_diagonal, op_mv
from ._readout import Reference, outputs_at
from ._record import Clock, Stats
from ._setup import (
    make_preconditioner,
    place_source,
    prepare,
)


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
