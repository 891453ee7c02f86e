"""Removals with 10, 100 and 1,000 classes: `python benchmarks/classes.py --out FILE`.

One, two and three digits of 7 by 7 pixels side by side make the classes. Two models are trained: a linear
read-out of a fixed random layer, and a whole linearised network of one hidden layer. The kernel has `(n·c)²`
numbers and is not stored where it does not fit; the paper's dual form, which needs its entries, is left out
there. Every method removes a tenth of the points from the same model in float32 and hands out new
parameters; a kernel that is held is there before, as in the paper.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from crossover import SIDE
from measure import compare_removals, num_cores

DIGITS = (1, 2, 3)
POINTS = {"linear read-out": 200, "whole network": 200}
WIDTH = 256
ENTRIES = 4 * 2**30
"""Bytes of a kernel up to which the paper's dual form, which needs its entries, is measured."""
RIDGE = 1e-2
REPEATS = 3


def points(digits: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """So many digits side by side, in float32, and the number that they write."""
    from dualfluence import datasets

    whole = datasets.load("mnist-small")
    blocks = np.asarray(whole.x_train).reshape(-1, SIDE, 28 // SIDE, SIDE, 28 // SIDE)
    images = blocks.mean(axis=(2, 4)).reshape(-1, SIDE**2).astype(np.float32)
    drawn = np.random.default_rng(digits).integers(0, len(images), (count, digits))
    x = images[drawn].reshape(count, -1) / np.sqrt(digits)
    return x, np.asarray(whole.y_train)[drawn] @ 10 ** np.arange(digits)[::-1]


def models(pixels: int, classes: int, width: int) -> dict[str, Any]:
    """The two models by name, at parameters whose outputs are zero."""
    import jax
    import jax.numpy as jnp

    import dualfluence as dfl
    from dualfluence.apps.compare._networks import fully_connected_from_zero

    hidden = jax.random.normal(jax.random.key(0), (pixels, width), jnp.float32)
    hidden, scale = hidden * float(np.sqrt(2 / pixels)), float(1 / np.sqrt(width))
    return {
        "linear read-out": dfl.linearize(
            lambda readout, x: jax.nn.relu(x @ hidden) @ readout * scale,
            jnp.zeros((width, classes), jnp.float32),
        ),
        "whole network": fully_connected_from_zero((pixels, width, classes), 0),
    }


def measure(
    digits: tuple[int, ...] = DIGITS,
    counts: dict[str, int] = POINTS,
    repeats: int = REPEATS,
    width: int = WIDTH,
) -> dict[str, Any]:
    """One row for every model and number of classes."""
    from dualfluence.apps.compare._machine import commit, describe_machine

    rows = []
    for name, count in counts.items():
        for k in digits:
            rows.append({"model": name} | measure_one(name, k, count, repeats, width))
            print(rows[-1], flush=True)
    return {
        "benchmark": "classes",
        "machine": describe_machine() | {"cores": num_cores()},
        "commit": commit(),
        "settings": {
            "width": width,
            "ridge": RIDGE,
            "repeats": repeats,
            "loss": "softmax",
            "dtype": "float32",
        },
        "rows": rows,
    }


def measure_one(name: str, digits: int, count: int, repeats: int, width: int) -> dict[str, Any]:
    import dualfluence as dfl
    from dualfluence.apps.compare._names import ONE_STEP, PAPER, PARAMETER
    from dualfluence.apps.compare._timing import time_call

    x, y = points(digits, count)
    classes = 10**digits
    model = models(x.shape[1], classes, width)[name]
    options = {"kernel": dfl.KernelOptions(refine=False), "on_failure": "report"}
    fit = time_call(
        lambda: dfl.fit(
            model, x, y, loss=dfl.SoftmaxCrossEntropy(), ridge=RIDGE, progress=False, **options
        )
    )
    fitted = fit.result
    rng = np.random.default_rng(0)
    sets = [rng.choice(count, max(1, count // 10), replace=False) for _ in range(repeats + 1)]
    held = 4 * (count * classes) ** 2 <= ENTRIES
    names = (PARAMETER, PAPER, ONE_STEP) if held else (PARAMETER, ONE_STEP)
    methods, change = compare_removals(fitted, y, sets, names)
    one = fitted.edit(dfl.Remove(sets[0]), progress=False)
    return {
        "classes": classes,
        "points": count,
        "unknowns": count * classes,
        "num_params": model.num_params,
        "kernel": type(fitted.kernel_op).__name__,
        "kernel_bytes": fitted.kernel_op.num_bytes,
        "entries_bytes": 4 * (count * classes) ** 2,
        "fit_seconds": fit.seconds,
        "fit_converged": bool(fitted.stats.converged),
        "change": change,
        "relative_bound": float(one.certificate.relative_bound),
        "methods": methods,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from dualfluence.apps.paper._results import write_json

    found = measure(repeats=args.repeats)
    if args.out:
        write_json(args.out, found)


if __name__ == "__main__":
    main()
