"""One removal request: our dual step, compared with the paper's dual form and parameter space."""

from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp

from ... import datasets
from ...dual._course import default_rtol
from ...dual._newton import influence_step
from ...problem._edits import Remove, apply_edits
from ...solvers import CG
from ..compare._machine import describe_machine
from ..compare._methods import Settings
from ..compare._names import ONE_STEP, PAPER, PARAMETER, RETRAINED, TWO_STEPS
from ..compare._networks import fully_connected
from ..compare._removals import WARM_UP, Removals
from ..compare._timing import time_call, time_calls
from ..paper._methods import make_methods

WIDTHS = (784, 1024, 1024, 1024, 10)
"""The paper's fully connected network."""

METHODS = (RETRAINED, ONE_STEP, TWO_STEPS, PAPER, PARAMETER)
SLOW = (PAPER, PARAMETER)
"""Methods with long iterations: they are compiled separately and repeated less often."""


SLOW_REPEATS = 2
RIDGE, PERCENT, SEED = 1e-2, 10.0, 0


def bench_core(*, points: int = 500, repeats: int = 7) -> dict[str, Any]:
    """Times of one removal, parameters included, its error, and peak memory over that of `K`.

    The preconditioner is built at fit and reused, as for a service that answers deletion requests;
    its time is part of `fit_seconds`. Times of repeated calls are medians.
    """
    data = datasets.load("mnist-small")
    model = fully_connected(WIDTHS, SEED)
    _, kernel_seconds = time_calls(lambda: model.kernel(jnp.asarray(data.x_train[:points])), 2)
    made = time_call(lambda: Removals(model, data, points, RIDGE))
    case, fit_seconds = made.result, made.seconds
    gone, methods = case.indices(PERCENT), make_methods(case.trained(Settings()), METHODS)
    truth, _ = methods[RETRAINED](gone)
    retrain = case.fitted.retrain(Remove(gone)).stats
    warm_up: Any = make_methods(case.trained(WARM_UP), SLOW)
    found = {
        name: case.measure(
            name,
            methods[name],
            PERCENT,
            truth,
            repeats=SLOW_REPEATS if name in SLOW else repeats,
            warm_up=warm_up.get(name),
        )
        for name in METHODS[1:]
    }
    ours = found[ONE_STEP].timing.repeat
    solve_only = case.fitted.edit(Remove(gone), on_failure="report").stats.seconds
    return {
        "benchmark": "core",
        "machine": describe_machine(),
        "config": {**case.config(WIDTHS, SEED), "percent": PERCENT},
        "kernel_seconds": {"first": kernel_seconds[0], "repeat": kernel_seconds[1]},
        "fit_seconds": fit_seconds,
        "fit": case.fitted.stats._asdict(),
        "retrain": {"seconds": retrain.seconds, "products": retrain.products},
        "edit_seconds_without_parameters": solve_only,
        "methods": [asdict(outcome) for outcome in found.values()],
        "ratios": {
            "paper_over_ours": found[PAPER].timing.repeat / ours,
            "parameter_space_over_ours": found[PARAMETER].timing.repeat / ours,
        },
        "memory": peak_memory(case, gone),
    }


def peak_memory(case: Removals, gone: Any) -> dict[str, float]:
    """Memory of the compiled step of a removal, divided by the bytes of `K`.

    Arguments, results and temporaries as the compiler reports them, and on a GPU the peak that the
    allocator saw since the process began (fit included).
    """
    fitted = case.fitted
    data = apply_edits(Remove(gone), fitted.data, fitted.loss, fitted.num_outputs)
    dtype = fitted.alpha.dtype
    # Not tuned: the search would hold copies of K, which is what this function is about.
    on_gpu = jax.default_backend() == "gpu"
    step: Any = influence_step.untuned if on_gpu else influence_step.outermost
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
