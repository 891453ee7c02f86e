"""Takes over a network that the user trained."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from .._support.checks import check_finite, check_ridge
from .._support.compile import double, filter_jit
from .._support.options import Clock, ProgressFn, check_choice, check_flag, check_instance
from .._support.points import tree_norm
from .._support.types import Inputs, Numbers
from ..dual._fidelity import FAR, Fidelity, SeenNetwork, measure_fidelity, see, warn_if_far
from ..dual._model import Reference
from ..dual._newton import inspect_jit, op_diagonal, op_mv
from ..kernels._affine import is_affine
from ..kernels._linearized import Linearized, as_network
from ..losses import AbstractLoss
from ..models._passes import check_params
from ..models._sources import NetworkSource, bound_network
from ..operators._base import Device
from ..problem._certificate import Stats
from ..problem._objective import Problem, State, make_problem
from ..solvers import Auto, resolve
from ._fitted import Fitted
from ._options import (
    KernelArgument,
    KernelOptions,
    Sketch,
    as_sketch,
    kernel_options,
)
from ._run import WIDENED, kept_operator, starts_wide
from ._setup import make_preconditioner, place_source, prepare, rounding_unit, start_norm, widening

FOUND_LINEAR = "found linear at a few parameters: every answer is compared with the network itself"

GAP_ROUNDING = 4.0
"""Safety factor on the rounding of the gap, in units of eps; doubled, bounds of converged models
double where that rounding is all there is."""


def from_trained(
    model: Any,
    trained_params: PyTree,
    x: Inputs,
    y: Numbers,
    *,
    loss: AbstractLoss,
    ridge: float,
    weights: Numbers | None = None,
    tangent: Literal["initial", "trained"] = "trained",
    linearised: bool = False,
    kernel: KernelArgument = None,
    mesh: Mesh | Sequence[Device] | None = None,
    sketch: Sketch | None = None,
    progress: bool | ProgressFn = True,
) -> Fitted:
    r"""Take over a network that was trained elsewhere on
    $\sum_i w_i\ell(f_i,y_i)+\frac{\lambda}{2}\|\theta-\theta_0\|^2$.

    Nothing is trained here. Outputs and gradients come from the network itself, and $\alpha =
    -g/\lambda$ as at a stationary point. The error that training left is the gap $\gamma =
    \theta-\theta_0-J^\top\alpha$, so that $\theta = (\theta_0+\gamma)+J^\top\alpha$: the model is
    exactly stationary for the same objective with its ridge around $\theta_0+\gamma$. Edits move
    $\theta$ by $J^\top\Delta\alpha$ and keep $\gamma$; one step is exact for squared error with
    the ridge around that centre.

    **Linear models** (`linearised=True`, proven linear by the operations of `apply_fn`, or found linear
    up to rounding; in the last case every answer checks it again). With $f=f_0+J(\theta-\theta_0)$ the
    gradient of the true objective at any $\theta = \theta_0+\gamma+J^\top\alpha$ is
    $$\nabla L_w = J^\top g+\lambda(\theta-\theta_0) = J^\top\rho+\lambda\gamma,$$
    so that $\|\theta-\theta^\star\|\le\|J^\top\rho\|/\lambda+\|\gamma\|$, here and after every edit.
    That is `certificate.distance_bound`, with $\|\gamma\|$ as `certificate.gap`. A model that was never
    trained has a large gap and so a large bound; `fit` finds the optimum, without a gap.

    **Nonlinear networks** have no certificate: `certificate.certified` is `False`, its bounds are `inf`.
    `fidelity` says how far the network is from a stationary point and from its linearisation. If one of
    these distances is large, there is a `FidelityWarning`.

    With a scale `P` of the ridge, `PJᵀ` replaces `Jᵀ`, and all norms, also the norm of the gap, are
    taken with `P⁻¹`.

    **Arguments:**

    - `model`: `linearize(apply_fn, θ₀)` with the parameters towards which the ridge pulls, or a model of
      `adapters` at these parameters. Its scale must describe the penalty of your training, e.g. a
      weight-decay mask.
    - `trained_params`: `θ`, a pytree like `θ₀`.
    - `tangent`: where the Jacobian is taken: at `θ` (then `γ = 0` if `θ` is a stationary point of the
      nonlinear objective), or at `θ₀` (`"initial"`, as the paper does). For linear models both are the
      same.
    - `linearised`: set it if you trained the linearisation at `θ₀` itself.
    - `kernel`: as in `fit`; a given operator must be the kernel at the `tangent`.
    - other arguments: as in `fit`.
    """
    model = as_network(model)
    _check_trained(model, trained_params, tangent)
    linearised = check_flag("from_trained: linearised", linearised)
    sketch = as_sketch("from_trained", sketch)
    ridge, options = check_ridge(ridge), kernel_options("from_trained", kernel)
    # A linearisation has the Jacobian at θ₀ everywhere.
    tangent = "initial" if linearised else tangent
    how = _How(ridge, weights, tangent, linearised, options, mesh, sketch, progress)
    fitted = _taken_over(model, trained_params, x, y, loss, how)
    if not starts_wide(fitted):
        return fitted
    # In float64 from the start: from the caller's own numbers, and with `J`, `K` and the gap in it.
    with double():
        kept = kept_operator(fitted)
        if kept is not None:
            how = how._replace(options=KernelOptions(operator=kept))
        again = _taken_over(model.widened(), trained_params, x, y, loss, how)
        return replace(again, widening=fitted.widening)


class _How(NamedTuple):
    """How a network is taken over: the options of `from_trained`, checked."""

    ridge: float
    weights: Numbers | None
    tangent: str
    linearised: bool
    options: KernelOptions
    mesh: Mesh | Sequence[Device] | None
    sketch: Sketch
    progress: bool | ProgressFn


def _taken_over(
    model: Linearized, trained_params: PyTree, x: Inputs, y: Numbers, loss: AbstractLoss, how: _How
) -> Fitted:
    """The network as a fit, in the precision of `model`."""
    ridge, tangent, linearised = how.ridge, how.tangent, how.linearised
    clock = Clock()
    trained_params = check_params("from_trained: trained_params", model, trained_params)
    model = bound_network(model, x)
    trained_params = model.enter(trained_params)
    at_theta = replace(model, params=trained_params)
    network = NetworkSource(at_theta if tangent == "trained" else model)
    source = place_source("from_trained", network, how.mesh, how.options.operator)
    setup = prepare(
        "from_trained", source, x, y, loss, ridge, how.weights, how.options, how.progress
    )
    data, op, _, notes = setup
    trained = see(model, trained_params, data.x, linearised)
    check_finite("from_trained outputs", trained.outputs)
    outputs = trained.outputs.astype(op.dtype)
    w = jnp.asarray(data.weights, outputs.dtype)[:, None]
    g = w * loss.grad(outputs, data.targets)
    alpha = -g / ridge
    placed = op.layout.place(alpha)
    state = State(placed, op_mv(op, placed))
    offset = op.layout.place(outputs, "last") - state.k_alpha
    gap = jax.tree.map(jnp.subtract, trained.change, source.pull_back(data.x, alpha))
    fidelity = measure_fidelity(trained, model if linearised else at_theta, g, gap, ridge)
    diagonal = op_diagonal(op)
    unit = rounding_unit(source, op)
    problem = make_problem(data, loss, ridge, offset, op.layout, unit)
    point = inspect_jit(op, problem, state, diagonal)
    certificate = point.norms.certificate(ridge)
    left = float(tree_norm(gap)) + float(_gap_rounding(problem, state, diagonal, trained.size))
    _check_ridge_in_reach(ridge, offset.dtype, certificate.distance_bound + left)
    proven = linearised or is_affine(model, data.x)
    certified = proven or trained.is_linear
    stationary = _is_stationary(fidelity, ridge, trained)
    warn_if_far(fidelity, stationary=stationary, certified=certified)
    reference = Reference(
        trained_params,
        op.layout.points(placed),
        linearised,
        tangent,
        left,
        certified,
        proven=proven,
    )
    picked = resolve(Auto(), op)
    preconditioner, products, said = make_preconditioner(
        source, data.x, op, picked.solver, how.sketch
    )
    stats = Stats(
        steps=0,
        iterations=0,
        products=2 + products,
        converged=stationary,
        residual=0.0,
        seconds=clock.stop(point),
        solver="none",
        reason="trained by the user",
        notes=(*notes, *_precision_notes(model, certified, proven), *said),
    )
    fitted = Fitted(
        source=source,
        data=data,
        state=state,
        reference=reference,
        loss=loss,
        ridge=ridge,
        kernel_op=op,
        offset=offset,
        kernel_diagonal=diagonal,
        preconditioner=preconditioner,
        certificate=certificate,
        stats=stats,
        fidelity=fidelity,
        epsilon=unit,
        start_norm=start_norm(source),
        widening=widening(how.options),
    )
    return replace(fitted, certificate=fitted._widened(certificate))


def _precision_notes(model: Linearized, certified: bool, proven: bool) -> tuple[str, ...]:
    notes = () if model.widening is None else (WIDENED,)
    return (*notes, FOUND_LINEAR) if certified and not proven else notes


def _check_trained(model: Any, trained_params: PyTree, tangent: object) -> None:
    example = "made by linearize; a kernel has no parameters"
    check_instance("from_trained: model", model, Linearized, example)
    check_params("from_trained: trained_params", model, trained_params)
    check_choice("from_trained: tangent", tangent, ("initial", "trained"))


def _check_ridge_in_reach(ridge: float, dtype: DTypeLike, distance: float) -> None:
    """`α = −g/λ` and the norms made of it must be finite, and `λ` must be a positive number in the
    model's dtype."""
    if ridge < float(jnp.finfo(dtype).tiny) or not np.isfinite(distance):
        raise ValueError(
            f"from_trained: α = −g/λ or its norm overflows {dtype} at ridge {ridge:.3g}. Give the ridge "
            "that the network was trained with; without one, try 1e-4."
        )


@filter_jit
def _gap_rounding(
    problem: Problem, state: State, diagonal: Float[Array, "n c"], size: Float[Array, ""]
) -> Float[Array, ""]:
    """Rounding of `θ − θ₀ − Jᵀα`, and of the outputs at `θ` carried to the gradient over `λ`."""
    eps, dtype = jnp.finfo(diagonal.dtype).eps, state.alpha.dtype
    diagonal, size = jnp.maximum(diagonal, 0).astype(dtype), size.astype(dtype)
    reach = jnp.sqrt(jnp.sum(diagonal * state.alpha**2))
    slope = jnp.sqrt(jnp.sum((diagonal * problem.factor(state).hess_diagonal()) ** 2))
    outputs = slope * size / problem.ridge
    return GAP_ROUNDING * float(eps) * (size + reach + outputs)


def _is_stationary(fidelity: Fidelity, ridge: float, trained: SeenNetwork) -> bool:
    """Whether the trained parameters are near the optimum: `‖∇L‖/λ` is small beside `‖θ − θ₀‖`."""
    return fidelity.gradient_norm / ridge <= FAR * float(tree_norm(trained.change))
