"""The stopwatch of all benchmarks: every time ends when the result is ready on the device."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Timing:
    """Seconds of a request.

    - `first`: seconds of the first call, compilation included; `None` if it was not timed.
    - `repeat`: median of the later calls.
    - `repeats`: number of later calls.
    """

    first: float | None
    repeat: float
    repeats: int


@dataclass(frozen=True)
class Call:
    """One timed call.

    - `result`: what the call returned, ready on the device.
    - `seconds`: wall time.
    - `cpu_seconds`: processor time of this process, over all of its threads.
    """

    result: Any
    seconds: float
    cpu_seconds: float


def time_call(call: Callable[[], Any]) -> Call:
    """Run once."""
    start, start_cpu = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(call())
    return Call(result, time.perf_counter() - start, time.process_time() - start_cpu)


def time_calls(call: Callable[[], Any], repeats: int) -> tuple[Any, list[float]]:
    """The last result, and the seconds of each of `repeats` calls."""
    calls, result = [], None
    for _ in range(repeats):
        done = time_call(call)
        calls.append(done.seconds)
        result = done.result
    return result, calls


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
    """Median of the later calls of `time_first_and_repeats`, which one slow call does not change."""
    return float(np.median(seconds["repeat"]))


def median_seconds(call: Callable[[], Any], repeats: int = 7) -> float:
    """Median of `repeats` calls, after one that compiles."""
    time_call(call)
    return float(np.median(time_calls(call, repeats)[1]))


def _without_result(call: Call) -> Call:
    """Large results must not pile up while a benchmark repeats."""
    return Call(None, call.seconds, call.cpu_seconds)
