"""The methods that fig. 1 and fig. 3 compare. Each returns the unlearned parameters."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from ... import primal
from ...dual._fitted import Fitted, Update
from ...metrics import tree_norm
from ...problem._edits import Remove
from ._forms import AbstractPaperForm, PaperCG
from ._released import released_dual, released_parameter_space
from ._remove import remove

PARAMETER = "parameter space"
PAPER = "paper's dual form"
SHARDED = "paper's dual form, sharded"
ONE_STEP = "ours, one step"
ITERATED = "ours, iterated"
TANGENT = "ours, tangent at θ*"
HELD = "ours, one step, J held"
PARAMETER_RELEASED = "parameter space, as released"
PAPER_RELEASED = "paper's dual form, as released"
RANDOM = "random perturbation"
RETRAINED = "retraining"

COMPARED = (PARAMETER, PAPER, SHARDED, ONE_STEP, ITERATED)
HELD_BYTES = 4 * 2**30
"""The largest Jacobian that is held for read-outs."""

RELEASED = (PARAMETER_RELEASED, PAPER_RELEASED)
RELEASED_PRECISION = "default"
"""The authors' code leaves the precision of matrix products to JAX: TF32 on recent GPUs."""

Method = Callable[[np.ndarray], tuple[PyTree, dict[str, Any]]]


class Settings(NamedTuple):
    """Of conjugate gradients in the published methods, and of our iterated form."""

    cg_steps: int
    cg_rtol: float
    until: float


def device_mesh() -> Mesh:
    """All devices in one row."""
    return Mesh(np.asarray(jax.devices()), ("rows",))


def make_methods(base: Fitted, params: PyTree, y: Any, settings: Settings) -> dict[str, Method]:
    """The five methods for a trained model: `base` in data space, `params` in parameter space."""
    form = PaperCG(max_steps=settings.cg_steps, rtol=settings.cg_rtol)
    linearised = base.reference is None or base.reference.linearised
    until = settings.until * tree_norm(params)

    def in_parameters(gone: np.ndarray) -> tuple[PyTree, dict[str, Any]]:
        update = primal.influence(
            base.network,
            params,
            base.x,
            y,
            Remove(gone),
            loss=base.loss,
            ridge=base.ridge,
            linearised=linearised,
            rtol=settings.cg_rtol,
            max_steps=settings.cg_steps,
            on_failure="report",
        )
        return update.params(), facts(update.stats)

    return {
        PARAMETER: in_parameters,
        PAPER: in_paper_form(base, form),
        SHARDED: in_paper_form(base, replace(form, mesh=device_mesh())),
        ONE_STEP: in_data_space(base),
        ITERATED: in_data_space(base, until=until),
    }


def as_stationary(base: Fitted) -> Fitted:
    """The trained network taken for the optimum of its linearisation, as the paper takes it.

    Iterating `until` then converges to the edited optimum of that objective.
    """
    if base.reference is None:
        return base
    return replace(base, reference=replace(base.reference, gap=0.0, certified=True))


def in_data_space(base: Fitted, **options: Any) -> Method:
    """A removal by `base.edit`, parameters included."""
    edited = as_stationary(base) if "until" in options else base

    def method(gone: np.ndarray) -> tuple[PyTree, dict[str, Any]]:
        update = edited.edit(Remove(gone), on_failure="report", progress=False, **options)
        # The bound that is kept is of the model as it was trained.
        return _read_out(replace(update, certificate=base._widened(update.certificate)))

    return method


def in_paper_form(base: Fitted, form: AbstractPaperForm) -> Method:
    """A removal by one of the paper's systems, parameters included."""
    return lambda gone: _read_out(remove(base, Remove(gone), form=form, on_failure="report"))


def _read_out(update: Update) -> tuple[PyTree, dict[str, Any]]:
    certificate = update.certificate
    bound = {"bound": certificate.distance_bound} if certificate.certified else {}
    return update.params(), facts(update.stats) | bound


def make_held(base: Fitted) -> dict[str, Method]:
    """Our one step with `J` in memory, where it is not too large; `J` is made here, once."""
    rows = base.data.num_points * base.num_outputs
    size = rows * base.network.num_params * jnp.dtype(base.network.dtype).itemsize
    return {HELD: in_data_space(base.with_jacobian())} if size <= HELD_BYTES else {}


def make_released(base: Fitted, params: PyTree, settings: Settings) -> dict[str, Method]:
    """The two published methods as their authors run them, matrix products at JAX's default."""

    def wrap(solve: Callable[..., PyTree]) -> Method:
        def method(gone: np.ndarray) -> tuple[PyTree, dict[str, Any]]:
            with jax.default_matmul_precision(RELEASED_PRECISION):
                return solve(base, params, gone, settings.cg_steps, settings.cg_rtol), {}

        return method

    return {PARAMETER_RELEASED: wrap(released_parameter_space), PAPER_RELEASED: wrap(released_dual)}


def facts(stats: Any) -> dict[str, Any]:
    """What to keep of a solve's stats."""
    return {
        "steps": stats.steps,
        "iterations": stats.iterations,
        "converged": stats.converged,
        "residual": stats.residual,
        "solver": stats.solver,
        "notes": list(stats.notes),
    }
