"""Numbers of the demo."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ... import datasets
from ..compare._machine import describe_machine
from ..compare._methods import Settings
from ..compare._names import ONE_STEP, PAPER, PARAMETER, RANDOM, RETRAINED, TWO_STEPS
from ..compare._networks import fully_connected_from_zero
from ..compare._removals import WARM_UP, Measurement, Removals
from ..paper._methods import make_methods
from ._gain import leave_out_each
from ._story import tell

WIDTHS = (784, 1024, 10)
"""The network of the demo: small enough for a laptop."""

RIDGE = 1e-3
"""Trained on 300 digits, the network recognises 0.767 of the test digits with it; scikit-learn's
logistic regression 0.757."""

PERCENTAGES = (1.0, 10.0, 30.0)
METHODS = (RETRAINED, ONE_STEP, TWO_STEPS, PAPER, PARAMETER, RANDOM)
REPEATS = {ONE_STEP: 3, TWO_STEPS: 3}
"""Repeated calls of the fast methods; the others run once after their warm-up."""


def run_demo(
    *,
    points: int = 300,
    widths: tuple[int, ...] = WIDTHS,
    ridge: float = RIDGE,
    percentages: tuple[float, ...] = PERCENTAGES,
    seed: int = 0,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Fit on `mnist-small`, explain, audit, remove points, and compare with retraining."""
    start = time.perf_counter()
    data = datasets.load("mnist-small")
    report(f"fitting {'-'.join(map(str, widths))} on {points} images")
    model = fully_connected_from_zero(widths, seed)
    case = Removals(model, data, points, ridge)
    report("finding the points behind two predictions, and wrong labels")
    story = tell(case, seed)
    report("training without single points, to compare")
    gain = leave_out_each(case, story["chosen"], story["first_seconds"], seed)
    measured: list[Measurement] = []
    for percent in percentages:
        report(f"removing {percent} %")
        measured += _all_methods(case, percent)
    stats = case.fitted.stats
    return {
        "machine": describe_machine(),
        "config": {**case.config(widths, seed), "data": data.origin},
        "fit": {**stats._asdict(), "relative_bound": case.fitted.certificate.relative_bound},
        "story": story,
        "gain": gain,
        "outcomes": [asdict(each) for each in measured],
        "seconds": time.perf_counter() - start,
    }


def _all_methods(case: Removals, percent: float) -> list[Measurement]:
    methods = make_methods(case.trained(Settings()), METHODS[:-1])
    truth, _ = again = methods[RETRAINED](case.indices(percent))
    # The truth has compiled retraining; the methods that iterate compile without their iterations.
    warm_up = make_methods(case.trained(WARM_UP), (PAPER, PARAMETER)) | {RETRAINED: lambda _: again}
    measured = [
        case.measure(
            name,
            method,
            percent,
            truth,
            repeats=REPEATS.get(name, 1),
            warm_up=warm_up.get(name),
        )
        for name, method in methods.items()
    ]
    return [*measured, case.perturbed(percent, truth)]
