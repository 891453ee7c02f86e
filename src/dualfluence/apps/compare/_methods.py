"""The methods of this library as one kind of function: points to remove in, parameters out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree

from ... import primal
from ...dual._model import ROOM
from ...fitted._fitted import Fitted
from ...fitted._update import Update
from ...metrics import tree_norm
from ...problem._edits import Remove
from ._names import ITERATED, ONE_STEP, PARAMETER, RETRAINED, TWO_STEPS

Method = Callable[[np.ndarray], tuple[PyTree, dict[str, Any]]]
"""Positions of the points to remove ↦ the new parameters, and facts about the solve for JSON."""


class Settings(NamedTuple):
    """Settings of the methods that iterate.

    - `cg_steps`: iterations of conjugate gradients at most, in the published methods.
    - `cg_rtol`: relative residual that they stop at.
    - `until`: certified distance that our iterated form stops at, over the norm of the parameters; a
      larger one where parameters in float32 round by more.
    """

    cg_steps: int = 500
    cg_rtol: float = 1e-8
    until: float = 1e-7


class TrainedCase(NamedTuple):
    """A trained model in the form that the methods use.

    - `base`: the model in data space.
    - `params`: its parameters, where parameter space starts.
    - `targets`: targets as they were given to the fit.
    - `settings`: of the methods that iterate.
    """

    base: Fitted
    params: PyTree
    targets: Any
    settings: Settings


def as_stationary(base: Fitted) -> Fitted:
    """The trained network, treated as the optimum of its linearisation, as in the paper.

    Iterating `until` then converges to the edited optimum of that objective.
    """
    if base.reference is None:
        return base
    return replace(base, reference=replace(base.reference, gap=0.0, certified=True))


def attainable(base: Fitted, until: float) -> float:
    """`until`, or twice what parameters in float32 round by, if that is larger."""
    return max(until, 2 * ROOM * base._reading(base.certificate.parameter_norm))


def in_data_space(base: Fitted, **options: Any) -> Method:
    """A removal by `base.edit`, parameters included."""
    edited = as_stationary(base) if "until" in options else base

    def method(gone: np.ndarray) -> tuple[PyTree, dict[str, Any]]:
        update = edited.edit(Remove(gone), on_failure="report", progress=False, **options)
        # The bound that is kept is of the model as it was trained.
        return read_out(replace(update, certificate=base._widened(update.certificate)))

    return method


def by_retraining(base: Fitted) -> Method:
    """Training from scratch without the removed points: the truth to compare with."""
    return lambda gone: read_out(base.retrain(Remove(gone), progress=False))


def in_parameter_space(trained: TrainedCase) -> Method:
    """A removal by the influence function in parameter space."""
    base, settings = trained.base, trained.settings
    linearised = base.reference is None or base.reference.linearised

    def method(gone: np.ndarray) -> tuple[PyTree, dict[str, Any]]:
        update = primal.influence(
            base.network,
            trained.params,
            base.x,
            trained.targets,
            Remove(gone),
            loss=base.loss,
            ridge=base.ridge,
            linearised=linearised,
            rtol=settings.cg_rtol,
            max_steps=settings.cg_steps,
            on_failure="report",
        )
        return update.params(), facts(update.stats)

    return method


MAKERS: dict[str, Callable[[TrainedCase], Method]] = {
    RETRAINED: lambda t: by_retraining(t.base),
    ONE_STEP: lambda t: in_data_space(t.base),
    TWO_STEPS: lambda t: in_data_space(t.base, steps=2),
    ITERATED: lambda t: in_data_space(
        t.base, until=attainable(t.base, t.settings.until * tree_norm(t.params))
    ),
    PARAMETER: in_parameter_space,
}
"""The functions that make each method of this library. `apps.paper` adds the paper's own."""


def read_out(update: Update) -> tuple[PyTree, dict[str, Any]]:
    """Parameters and facts of an update in data space."""
    certificate = update.certificate
    bound = {"bound": certificate.distance_bound} if certificate.certified else {}
    return update.params(), facts(update.stats) | bound


def facts(stats: Any) -> dict[str, Any]:
    """The facts of a solve that are kept."""
    return {
        "steps": stats.steps,
        "iterations": stats.iterations,
        "converged": stats.converged,
        "residual": stats.residual,
        "solver": stats.solver,
        "notes": list(stats.notes),
    }
