"""One influence step in parameter space by a solver of the user's choice."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from .._support.compile import filter_jit
from ..dual._record import Clock, OnFailure, Stats
from ..kernels._linearized import Linearized
from ..losses import AbstractLoss
from ..problem._edits import TrainingSet
from ._curvature import Curvature, make_curvature
from ._solvers import check_primal_solver, check_solved
from ._update import PRECISION, PrimalUpdate, moved_params


def step_with(
    solver: Any,
    model: Linearized,
    params: PyTree,
    edited: TrainingSet,
    pull: tuple[Any, float, str],
    *,
    loss: AbstractLoss,
    ridge: float,
    linearised: bool,
    on_failure: OnFailure,
    clock: Clock,
) -> PrimalUpdate:
    """`Δθ` for the right-hand side `Σ uᵢ∇ℓᵢ + κλ(θ* − θ₀)`; `pull` is `(u, κ, rule)`."""
    solver = check_primal_solver("influence", solver)
    u, ridge_pull, rule = pull
    lam, weights = jnp.asarray(ridge, model.dtype), jnp.asarray(edited.weights)
    targets = jnp.asarray(edited.targets)
    curvature, f = make_curvature(model, params, edited.x, targets, weights, loss, lam, linearised)
    directions = jnp.asarray(u).astype(f.dtype)[:, None] * loss.grad(f, targets)
    moved = jax.tree.map(lambda d: ridge_pull * lam * d, moved_params(model, params))
    b = _right_hand_side(curvature, edited.x, directions, moved)
    solved = solver.prepare(curvature).solve(b[None])
    check_solved("influence", solved, on_failure)
    _, unravel = ravel_pytree(model.split(model.params)[0])
    delta = unravel(solved.value[0])
    stats = Stats(
        steps=1,
        iterations=solved.iterations,
        products=solved.products,
        converged=solved.converged,
        residual=solved.residual,
        seconds=clock.stop(delta),
        solver=f"{solver!r} on {model.num_params} parameters",
        reason=rule,
        notes=(*solved.notes, *(f"{k} {v}" for k, v in solved.facts.items())),
    )
    return PrimalUpdate(model, params, delta, edited, loss, float(ridge), linearised, stats)


@filter_jit
def _right_hand_side(
    curvature: Curvature, x: Array, directions: Float[Array, "n c"], moved: PyTree
) -> Float[Array, " p"]:
    with jax.default_matmul_precision(PRECISION):
        pulled = curvature.model.vjp(x, directions)
    return ravel_pytree(jax.tree.map(jnp.add, pulled, moved))[0]
