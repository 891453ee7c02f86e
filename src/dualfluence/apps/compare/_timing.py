"""The stopwatch of all benchmarks: every time ends when the result is ready on the device."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


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
