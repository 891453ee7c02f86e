"""The Hessian of all points beside that of the retained ones: `python benchmarks/full_hessian.py --out FILE`.

The paper names this approximation for small removals. A linearised network of figure 1's kind, with fewer
points and units, loses 1 to 50 % of its points. Both forms take one step in float64 from the same optimum.
Their distance to exact retraining is a share of what the removal changes. Every seed draws other sets.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from measure import num_cores

PER_CLASS, CLASSES, WIDTH = 10, 10, 256
RIDGE = 1e-2
PERCENTAGES = (1, 2, 5, 10, 20, 50)
SEEDS = 5


def measure(
    percentages: tuple[int, ...] = PERCENTAGES, seeds: int = SEEDS, per_class: int = PER_CLASS
) -> dict[str, Any]:
    """One row for every loss and percentage, with one value for every seed."""
    import jax

    jax.config.update("jax_enable_x64", True)
    import dualfluence as dfl
    from dualfluence import datasets, metrics
    from dualfluence.apps.compare._machine import commit, describe_machine
    from dualfluence.apps.compare._names import FULL_HESSIAN, PAPER
    from dualfluence.apps.compare._networks import fully_connected
    from dualfluence.apps.compare._timing import time_call
    from dualfluence.apps.paper import FullDataHessian, PaperCG, remove

    part = datasets.subset(
        datasets.load("mnist-small"),
        per_class_train=per_class,
        per_class_test=1,
        classes=range(CLASSES),
    )
    x, classes = np.asarray(part.x_train, np.float64), np.asarray(part.y_train)
    model = fully_connected((x.shape[1], WIDTH, WIDTH, CLASSES), 0)
    one_hot = np.eye(CLASSES)[classes]
    forms = {PAPER: PaperCG(max_steps=5000), FULL_HESSIAN: FullDataHessian()}
    rows = []
    for name, loss, y in (
        ("softmax", dfl.SoftmaxCrossEntropy(), classes),
        ("squared", dfl.SquaredError(), one_hot),
    ):
        fitted = dfl.fit(model, x, y, loss=loss, ridge=RIDGE, progress=False)
        for percent in percentages:
            count = max(1, round(len(x) * percent / 100))
            row: dict[str, Any] = {"loss": name, "percent": percent, "removed": count}
            row |= {"error": {form: [] for form in forms}, "seconds": {form: [] for form in forms}}
            row["iterations"] = {form: [] for form in forms}
            row["converged"] = True
            for seed in range(seeds):
                gone = np.random.default_rng([seed, percent]).choice(len(x), count, replace=False)
                edit = dfl.Remove(gone)
                truth = fitted.retrain(edit, progress=False).params()
                change = metrics.distance(fitted.params(), truth)
                for form, how in forms.items():
                    call = time_call(
                        lambda e=edit, h=how, f=fitted: remove(f, e, form=h, on_failure="report")
                    )
                    update = call.result
                    row["error"][form].append(metrics.distance(update.params(), truth) / change)
                    row["seconds"][form].append(call.seconds)
                    row["iterations"][form].append(update.stats.iterations)
                    row["converged"] &= update.stats.converged
            rows.append(row)
            print(row, flush=True)
    return {
        "benchmark": "full_hessian",
        "machine": describe_machine() | {"cores": num_cores()},
        "commit": commit(),
        "settings": {
            "points": len(x),
            "outputs": CLASSES,
            "width": WIDTH,
            "ridge": RIDGE,
            "seeds": seeds,
            "dtype": "float64",
        },
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from dualfluence.apps.paper._results import write_json

    found = measure(seeds=args.seeds)
    if args.out:
        write_json(args.out, found)
    else:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
