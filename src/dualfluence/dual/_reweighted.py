"""One model for each of many sample weights, in one batch of Newton runs.

Columns share kernel, targets and ridge, so that a product with `K` is one with a block of columns and
reads `K` once for all of them.
"""

from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._support.memory import memory_budget
from ..problem._objective import normalised
from ..solvers import CG, AbstractPreconditioner, resolve
from ._course import MAX_STEPS, Goal, default_rtol
from ._model import TrainedModel
from ._newton import repeated
from ._train import Machine, take_one_step, train

LIVE_COPIES = 24
"""Arrays of shape `(n, c, k)` alive in a step: three points of four arrays each, and those of CG."""

MEMORY_SHARE = 0.25
"""Share of the kernel's memory budget that a batch may take. Doubled, batches are twice as wide."""

MAX_COLUMNS = 512
"""Columns of a batch at most: a product with more of them takes as long for each."""


class Reweighted(NamedTuple):
    """Dual variables for each column, and what is proved of them.

    - `alpha`, `k_alpha`: `α` and `Kα`, shape `(n, c, k)`, one row for each of `fitted.state`.
    - `distance_bound`: bound on `‖θ − θ_retrained‖`, one per column.
    - `converged`: for a single step, whether its linear solve converged; for a run, whether it met its
      tolerance or reached the rounding floor.
    """

    alpha: Array
    k_alpha: Array
    distance_bound: np.ndarray
    converged: np.ndarray


def columns_at_once(fitted: TrainedModel) -> int:
    """How many columns a batch may have in the memory there is."""
    n, c = fitted.state.alpha.shape
    each = LIVE_COPIES * n * c * fitted.state.alpha.dtype.itemsize
    network = fitted.source.network
    if network is not None and fitted.kernel_op.num_bytes == 0:
        # A product without entries of K holds one parameter vector for every column.
        each += 4 * network.num_params * jnp.dtype(network.dtype).itemsize
    return int(max(1, min(MAX_COLUMNS, MEMORY_SHARE * memory_budget() // each)))


def reweighted(
    fitted: TrainedModel,
    sample_weights: np.ndarray,
    *,
    until: float | None = None,
    relative: float | None = None,
    preconditioner: AbstractPreconditioner | None = None,
    what: str = "attribute",
) -> Reweighted:
    r"""The model trained with each column of sample weights, `(n, k)`, in one batch.

    Without a tolerance: one undamped Newton step from the fit, the influence function. With `until` (a
    limit for the distance bound) or `relative` (a limit for the bound divided by `‖θ − θ₀‖`): damped
    steps until every column meets the limit or reaches the rounding floor.

    **Arguments:**

    - `preconditioner`: for CG; by default the one kept from the fit.
    - `what`: the name of the calling function, for messages.
    """
    op, dtype = fitted.kernel_op, fitted.state.alpha.dtype
    machine = Machine(
        op,
        fitted.kernel_diagonal,
        # A direct solve would factor a matrix for each column.
        resolve(CG(), op).solver,
        fitted.preconditioner if preconditioner is None else preconditioner,
        fitted.ridge,
        what,
    )
    weights = fitted.layout.place(normalised(sample_weights).astype(dtype))
    problem = eqx.tree_at(lambda p: p.weights, fitted.problem(), weights)
    start, rtol = repeated(fitted.state, weights.shape[1]), default_rtol(dtype)
    if until is None and relative is None:
        point, outcomes = take_one_step(machine, problem, start, rtol)
        good = [o.solved for o in outcomes]
    else:
        # However near the fit is to what a column asks for, it is not the answer for other weights.
        goal = Goal(until, relative, MAX_STEPS, min_steps=1)
        point, outcomes = train(machine, problem, start, goal, rtol=rtol, progress=False)
        good = [o.ending == "met" or o.near_floor for o in outcomes]
    return Reweighted(
        point.state.alpha,
        point.state.k_alpha,
        np.array([fitted._widened(o.certificate).distance_bound for o in outcomes]),
        np.array(good),
    )
