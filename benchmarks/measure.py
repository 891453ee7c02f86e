"""What scripts here share: first and repeated calls, cores, a network as a stranger would write it."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dualfluence.apps.compare._timing import Call, time_call, time_calls


def time_first_and_repeats(call: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Seconds and processor seconds of a first call and of `repeats` later ones, for JSON."""
    first, *later = (_without_result(time_call(call)) for _ in range(repeats + 1))
    return {
        "first": first.seconds,
        "first_cpu": first.cpu_seconds,
        "repeat": [c.seconds for c in later],
        "repeat_cpu": [c.cpu_seconds for c in later],
    }


def median_repeat(seconds: dict[str, Any]) -> float:
    """Of the later calls of `time_first_and_repeats`; one slow call does not move it."""
    return float(np.median(seconds["repeat"]))


def median_seconds(call: Callable[[], Any], repeats: int = 7) -> float:
    """Median of `repeats` calls, after one that compiles."""
    time_call(call)
    return float(np.median(time_calls(call, repeats)[1]))


def _without_result(call: Call) -> Call:
    """Large results must not pile up while a benchmark repeats."""
    return Call(None, call.seconds, call.cpu_seconds)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def plain_relu_network(widths: Sequence[int]) -> tuple[Callable[..., Array], Any]:
    """A ReLU network in plain JAX and float32 parameters, as a stranger would write it.

    Inputs and parameters are those of `benchmarks/peer_neural_tangents.py`.
    """
    rng = np.random.default_rng(0)
    params = [
        (jnp.asarray(rng.normal(size=(a, b)) / np.sqrt(a), jnp.float32), jnp.zeros(b, jnp.float32))
        for a, b in pairwise(widths)
    ]

    def apply(params: Any, x: Array) -> Array:
        for W, b in params[:-1]:
            x = jax.nn.relu(x @ W + b[None])
        return x @ params[-1][0] + params[-1][1][None]

    return apply, params


def compare_removals(
    fitted: Any, y: Any, sets: Sequence[Any], names: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], float]:
    """Seconds, steps and distance to exact retraining of every method, and how far retraining moves.

    The first set is removed by a first call and compared with retraining; the others are repeated calls.
    """
    import dualfluence as dfl
    from dualfluence import metrics
    from dualfluence.apps.compare._methods import Settings, TrainedCase
    from dualfluence.apps.paper._methods import make_methods

    params = fitted.params()
    truth = fitted.retrain(dfl.Remove(sets[0]), progress=False).params()
    found: dict[str, dict[str, Any]] = {}
    trained = TrainedCase(fitted, params, y, Settings())
    for name, method in make_methods(trained, names).items():
        first = time_call(lambda m=method: m(sets[0]))
        new, facts = first.result
        calls = [time_call(lambda s=s, m=method: m(s)[0]) for s in sets[1:]]
        found[name] = {
            "first": first.seconds,
            "seconds": [call.seconds for call in calls],
            "cpu_seconds": [call.cpu_seconds for call in calls],
            "iterations": max(1, facts["iterations"]),
            "distance": metrics.relative_distance(new, truth),
        }
    return found, metrics.relative_distance(params, truth)


def keep(
    found: dict[str, Any], out: Path | None, draw: Callable[[dict[str, Any], Path], None]
) -> None:
    """Print a record, or write it and draw it from the file."""
    from dualfluence.apps.paper._results import write_json

    if out is None:
        print(json.dumps(found, indent=1))
    else:
        write_json(out, found)
        draw_again(out, draw)


def draw_again(path: Path, draw: Callable[[dict[str, Any], Path], None]) -> None:
    """The plot of a record, beside it."""
    draw(json.loads(path.read_text()), path.with_suffix(".svg"))
