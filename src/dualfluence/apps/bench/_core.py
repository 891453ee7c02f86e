"""One removal request: our dual step against the paper's dual form and parameter space."""

import time
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp

from ... import datasets
from ...dual._newton import influence_step
from ...dual._train import default_rtol
from ...problem._edits import Remove, apply_edits
from ...solvers import CG
from ..compare._kit import WARM_UP_RTOL, Comparison, describe_machine, fully_connected, time_calls

WIDTHS = (784, 1024, 1024, 1024, 10)


def bench_core(
    *,
    points: int = 500,
    widths: tuple[int, ...] = WIDTHS,
    ridge: float = 1e-2,
    percent: float = 10.0,
    repeats: int = 7,
    slow_repeats: int = 2,
    seed: int = 0,
) -> dict[str, Any]:
    """Times of one removal, parameters included, its error, and peak memory over that of `K`.

    The preconditioner is built at fit and reused, as for a service that answers deletion requests;
    its time is part of `fit_seconds`. Times of repeated calls are medians.
    """
    data = datasets.load("mnist-small")
    model = fully_connected(widths, seed)
    _, kernel_seconds = time_calls(lambda: model.kernel(jnp.asarray(data.x_train[:points])), 2)
    start = time.perf_counter()
    case = Comparison(model, data, points, ridge)
    fit_seconds = time.perf_counter() - start
    gone = case.indices(percent)
    truth, retrain = case.retrain(gone)
    ours = case.measure("dual, one step", case.step, percent, truth, repeats=repeats)
    two = case.measure(
        "dual, two steps", lambda g: case.step(g, 2), percent, truth, repeats=repeats
    )
    paper = case.measure(
        "paper's dual form",
        case.paper,
        percent,
        truth,
        repeats=slow_repeats,
        warm_up=lambda g: case.paper(g, WARM_UP_RTOL),
    )
    primal = case.measure(
        "parameter space",
        case.parameter_space,
        percent,
        truth,
        repeats=slow_repeats,
        warm_up=lambda g: case.parameter_space(g, WARM_UP_RTOL),
    )
    solve_only = case.fitted.edit(Remove(gone), on_failure="report").stats.seconds
    return {
        "benchmark": "core",
        "machine": describe_machine(),
        "config": {
            "network": "-".join(map(str, widths)),
            "parameters": model.num_params,
            "points": points,
            "outputs": widths[-1],
            "loss": "softmax cross-entropy",
            "ridge": ridge,
            "percent": percent,
            "dtype": str(case.fitted.alpha.dtype),
            "seed": seed,
        },
        "kernel_seconds": {"first": kernel_seconds[0], "repeat": kernel_seconds[1]},
        "fit_seconds": fit_seconds,
        "fit": case.fitted.stats._asdict(),
        "retrain": {"seconds": retrain.stats.seconds, "products": retrain.stats.products},
        "edit_seconds_without_parameters": solve_only,
        "methods": [asdict(m) for m in (ours, two, paper, primal)],
        "ratios": {
            "paper_over_ours": paper.timing.repeat / ours.timing.repeat,
            "parameter_space_over_ours": primal.timing.repeat / ours.timing.repeat,
        },
        "memory": peak_memory(case, gone),
    }


def peak_memory(case: Comparison, gone: Any) -> dict[str, float]:
    """Bytes of a removal over the bytes of `K`: what the compiled step holds at once.

    Arguments, results and temporaries as the compiler reports them, and on a GPU the peak that the
    allocator saw since the process began (fit included).
    """
    fitted = case.fitted
    data = apply_edits(Remove(gone), fitted.data, fitted.loss, fitted.num_outputs)
    dtype = fitted.alpha.dtype
    step: Any = influence_step.outermost
    compiled = step.lower(
        fitted.kernel_op,
        fitted.problem(data),
        fitted.state,
        fitted.kernel_diagonal,
        CG(),
        fitted.preconditioner,
        jnp.asarray(default_rtol(dtype), dtype),
    ).compile()
    analysis = compiled.compiled.memory_analysis()
    held = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )
    kernel = fitted.kernel_op.num_bytes
    result = {"kernel_bytes": kernel, "step_bytes": held, "step_over_kernel": held / kernel}
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        result["process_peak_bytes"] = stats["peak_bytes_in_use"]
        result["process_peak_over_kernel"] = stats["peak_bytes_in_use"] / kernel
    return result
