"""Ways to forget on a linearised model, for comparison by `measures`."""

import time
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from dualfluence import primal
from dualfluence.dual._newton import op_mv
from dualfluence.fitted._fitted import Fitted
from dualfluence.fitted._update import Update
from dualfluence.problem._edits import Remove, apply_edits
from dualfluence.problem._objective import State, TrainingSet

from .measures import Judged, Setting

ASCENT_STEPS, DESCENT_STEPS = 10, 50
"""Steps of the two baselines by gradients."""

STEPS = {"ours, one step": 1, "ours, two steps": 2}

METHODS = (*STEPS, "parameter space", "gradient ascent", "fine-tuning", "no unlearning")

BY_GRADIENTS = ("gradient ascent", "fine-tuning")
"""Methods whose rate must be chosen."""


def forget_linear(
    fitted: Fitted, exact: Update[Fitted], setting: Setting, method: str, rate: float = 1.0
) -> Judged:
    """Outputs of a linearised model after a method, and its distance to retraining.

    **Arguments:**

    - `exact`: `fitted.retrain` without the forgotten points, the same for every method.
    - `rate`: of gradient methods, in units of `1/(trace + λ)`, at which descent is certainly stable.
    """
    start = time.perf_counter()
    size = _distance(fitted, exact.state.alpha, fitted.state.alpha)
    if method == "parameter space":
        update = _parameter_space(fitted, setting)
        train, test = (np.asarray(update.predict(x)) for x in (fitted.x, setting.x_test))
        seconds = time.perf_counter() - start
        gap = fitted.network.distance(update.params(), exact.params())
        return Judged(train, test, gap / size, seconds)
    model = exact.commit() if method == "retraining" else _unlearn(fitted, setting, method, rate)
    train = np.asarray(fitted.layout.points(fitted.offset + model.state.k_alpha))
    test = np.asarray(model.predict(setting.x_test))
    seconds = time.perf_counter() - start
    gap = _distance(fitted, model.state.alpha, exact.state.alpha)
    return Judged(train, test, gap / size, seconds)


def _unlearn(fitted: Fitted, setting: Setting, method: str, rate: float) -> Fitted:
    gone = setting.forgotten
    if method in STEPS:
        return fitted.edit(Remove(gone), steps=STEPS[method], progress=False).commit()
    if method in BY_GRADIENTS:
        return _by_gradients(fitted, gone, rate, ascent=method == "gradient ascent")
    if method == "no unlearning":
        return fitted
    names = ", ".join(("retraining", *METHODS))
    raise ValueError(f"forget_linear: no method {method!r}; there are {names}.")


def _parameter_space(fitted: Fitted, setting: Setting) -> primal.PrimalUpdate:
    options: dict[str, Any] = {"loss": fitted.loss, "ridge": fitted.ridge, "on_failure": "report"}
    x, gone = fitted.data.features, Remove(setting.forgotten)
    return primal.influence(fitted.network, fitted.params(), x, setting.y, gone, **options)


def _by_gradients(fitted: Fitted, gone: np.ndarray, rate: float, *, ascent: bool) -> Fitted:
    """Steps up the mean loss of what goes, or down the objective of what stays."""
    data = apply_edits([Remove(gone)], fitted.data, fitted.loss, fitted.num_outputs)
    if ascent:
        weights = np.zeros_like(data.sample_weights)
        weights[gone] = 1.0
        data = TrainingSet(data.x, data.targets, weights, form=data.form)
    problem, op, alpha = fitted.problem(data), fitted.kernel_op, fitted.state.alpha
    # The curvature of every loss here is at most one: trace(WK) + λ bounds it, and 2/that is stable.
    top = float(jnp.max(jnp.sum(fitted.kernel_diagonal, axis=1)))
    step = rate / (top + fitted.ridge)
    for _ in range(ASCENT_STEPS if ascent else DESCENT_STEPS):
        state = State(alpha, op_mv(op, alpha))
        uphill = problem.loss_grad(state) if ascent else -problem.residual(state)
        alpha = alpha + step * uphill
    return replace(fitted, data=data, state=State(alpha, op_mv(op, alpha)))


def _distance(fitted: Fitted, a: Any, b: Any) -> float:
    """`‖Jᵀ(a − b)‖`."""
    change = a - b
    return float(np.sqrt(max(float(jnp.sum(change * op_mv(fitted.kernel_op, change))), 0.0)))
