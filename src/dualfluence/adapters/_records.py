"""The record of an optimiser, in the form that `attribution.Trajectory` takes."""

from typing import Any

import numpy as np


def sgd_record(optimizer: Any, steps: Any, *, momentum: float | None = None) -> dict[str, Any]:
    """`steps`, `learning_rate` and `momentum` of an SGD run, for `Trajectory(..., **record)`.

    The learning rate of each checkpoint is the mean over the steps up to it.

    **Arguments:**

    - `optimizer`: an Optax schedule (a function of the step, from 0), a constant, a sequence with the
      learning rate of every step (as `get_last_lr()` of a PyTorch scheduler returns it), or a
      `torch.optim.SGD` with a constant rate, from which the momentum is read too.
    - `steps`: optimiser steps before each checkpoint.
    - `momentum`: that of training, 0 by default; not needed with a PyTorch optimiser.
    """
    counts = [int(step) for step in steps]
    if hasattr(optimizer, "param_groups"):
        rate, read = _from_torch(optimizer)
        return _record(counts, [rate] * len(counts), read if momentum is None else momentum)
    rates = _rates(optimizer, max(counts, default=0))
    means = [float(np.mean(rates[:count])) for count in counts]
    return _record(counts, means, 0.0 if momentum is None else momentum)


def _record(steps: list[int], rates: list[float], momentum: float) -> dict[str, Any]:
    return {"steps": steps, "learning_rate": rates, "momentum": float(momentum)}


def _rates(source: Any, last: int) -> np.ndarray:
    """The learning rate of each of the first `last` steps."""
    if callable(source):
        schedule: Any = source
        return np.asarray([float(schedule(step)) for step in range(last)])
    rates = np.asarray(source, float)
    if rates.ndim == 0:
        return np.full(last, float(rates))
    if rates.ndim != 1 or rates.size < last:
        raise ValueError(
            f"sgd_record: expected the learning rate of each of {last} steps, got shape {rates.shape}."
        )
    return rates


def _from_torch(optimizer: Any) -> tuple[float, float]:
    groups = optimizer.param_groups
    if any("momentum" not in group for group in groups):
        raise ValueError(
            f"sgd_record: {type(optimizer).__name__} is not SGD. For Adam and similar optimisers "
            "give Trajectory a `preconditioner`."
        )
    found = {(float(g["lr"]), float(g["momentum"]), float(g["dampening"])) for g in groups}
    if len(found) > 1 or any(dampening for _, _, dampening in found):
        raise ValueError(
            "sgd_record: expected one learning rate and momentum for all parameters and no dampening, "
            f"got {sorted(found)} as (rate, momentum, dampening)."
        )
    if any(g.get("initial_lr", g["lr"]) != g["lr"] for g in groups):
        raise ValueError(
            "sgd_record: a scheduler has changed the learning rate of this optimiser. Give the rate of "
            "every step in a sequence, and momentum=..."
        )
    rate, momentum, _ = found.pop()
    return rate, momentum
