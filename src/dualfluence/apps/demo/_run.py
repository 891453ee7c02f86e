"""Numbers of the demo."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ... import datasets
from ..compare._kit import WARM_UP_RTOL, Comparison, Outcome, describe_machine, fully_connected

WIDTHS = (784, 512, 512, 10)
PERCENTAGES = (1.0, 10.0, 30.0, 50.0, 70.0, 90.0)
METHODS = (
    "retraining",
    "dual, one step",
    "dual, two steps",
    "paper's dual form",
    "parameter space",
    "random perturbation",
)


def run_demo(
    *,
    points: int = 300,
    widths: tuple[int, ...] = WIDTHS,
    ridge: float = 1e-2,
    percentages: tuple[float, ...] = PERCENTAGES,
    seed: int = 0,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Fit on `mnist-small`, remove points, and compare every method with exact retraining."""
    start = time.perf_counter()
    data = datasets.load("mnist-small")
    report(f"fitting {'-'.join(map(str, widths))} on {points} images")
    model = fully_connected(widths, seed)
    case = Comparison(model, data, points, ridge)
    outcomes: list[Outcome] = []
    for percent in percentages:
        report(f"removing {percent} %")
        outcomes += _all_methods(case, percent)
    stats = case.fitted.stats
    return {
        "machine": describe_machine(),
        "config": {
            "network": "-".join(map(str, widths)),
            "parameters": model.num_params,
            "points": points,
            "outputs": widths[-1],
            "ridge": ridge,
            "loss": "softmax cross-entropy",
            "dtype": str(case.fitted.alpha.dtype),
            "data": data.origin,
            "seed": seed,
        },
        "fit": {**stats._asdict(), "relative_bound": case.fitted.certificate.relative_bound},
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "seconds": time.perf_counter() - start,
    }


def _all_methods(case: Comparison, percent: float) -> list[Outcome]:
    gone = case.indices(percent)
    truth, _ = case.retrain(gone)
    return [
        case.measure("retraining", case.retrain, percent, truth, repeats=1),
        case.measure("dual, one step", case.step, percent, truth),
        case.measure("dual, two steps", lambda g: case.step(g, 2), percent, truth),
        case.measure(
            "paper's dual form",
            case.paper,
            percent,
            truth,
            repeats=1,
            warm_up=lambda g: case.paper(g, WARM_UP_RTOL),
        ),
        case.measure(
            "parameter space",
            case.parameter_space,
            percent,
            truth,
            repeats=1,
            warm_up=lambda g: case.parameter_space(g, WARM_UP_RTOL),
        ),
        case.perturbed(percent, truth),
    ]
