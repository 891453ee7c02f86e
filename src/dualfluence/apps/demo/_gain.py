"""The time to leave out every point in one call, compared with training without one point at a time."""

import time
from typing import Any

import jax
import numpy as np

from ...fitted._fitted import Fitted
from ...problem._edits import Remove
from ..compare._removals import Removals
from ..compare._timing import time_calls

RETRAINED = 8
"""Number of points, drawn at random, without which the model is trained again. Using all points would
take minutes."""

REPEATS = 2
"""Repeated calls of the attribution."""


def leave_out_each(case: Removals, chosen: list[int], first: float, seed: int) -> dict[str, Any]:
    """Seconds of both, and how well the effects on the chosen queries agree.

    Every retraining reuses the kernel, which is most of the work of a training from scratch, and the
    program that the fit compiled.

    - `first`, `repeat`: seconds of leaving out every point, with its compilation and without (a median).
    - `each`: median of one retraining, in seconds; `retrained` of them were made.
    - `ratio`: the time of one retraining for every point, divided by `repeat`.
    - `error`: root mean square difference of the effects, divided by the root mean square of the effects.
    """
    x, y = case.x_test[np.asarray(chosen)], np.asarray(case.y_test)[chosen]
    fitted = case.fitted
    found, seconds = time_calls(lambda: fitted.attribute(x, y, progress=False).values, REPEATS)
    count = min(RETRAINED, len(case.y) - 1)
    points = np.random.default_rng(seed).choice(len(case.y), count, replace=False)
    before, calls, effects = _losses(fitted, x, y), [], []
    for point in points:
        without, took = _train_without(fitted, int(point))
        calls.append(took)
        effects.append(_losses(without, x, y) - before)
    truth, got = np.stack(effects, axis=1), found[:, points]
    each, repeat = float(np.median(calls)), float(np.median(seconds))
    return {
        "points": len(case.y),
        "queries": len(chosen),
        "first": first,
        "repeat": repeat,
        "retrained": count,
        "each": each,
        "ratio": len(case.y) * each / repeat,
        "error": float(np.sqrt(np.mean((got - truth) ** 2) / np.mean(truth**2))),
    }


def _train_without(fitted: Fitted, point: int) -> tuple[Any, float]:
    start = time.perf_counter()
    without = fitted.retrain(Remove([point]), progress=False)
    jax.block_until_ready(without.state.alpha)
    return without, time.perf_counter() - start


def _losses(model: Any, x: Any, y: np.ndarray) -> np.ndarray:
    """Cross-entropy of each query."""
    outputs = np.asarray(model.predict(x), float)
    outputs = outputs - outputs.max(axis=1, keepdims=True)
    return np.log(np.exp(outputs).sum(axis=1)) - outputs[np.arange(len(y)), y]
