"""What it costs to leave out every point for every query, beside one Cholesky factor; writes JSON.

    python benchmarks/attribution_speed.py --points 300 --queries 300         # a laptop
    python benchmarks/attribution_speed.py --out speed.json                   # n = q = 2,000, c = 10

A 784-1024³-10 network on mnist-small, softmax, ridge 1e-2, float32. `first order` is the equation of
section 8 of the design; `leave-one-out` is the renormalised step in closed form with differences
of losses. Medians of repeated calls, kernels of the queries included, compilation not.
"""

import argparse
import json
import platform
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dualfluence as dfl
from dualfluence.apps.compare._networks import fully_connected
from dualfluence.dual._model import problem_on_device


def median_seconds(call, repeats):
    jax.block_until_ready(call())  # compiles
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def cholesky_seconds(fitted, repeats):
    """One factor of the fit's own `B = λI + RᵀKR`."""
    factor = problem_on_device(fitted).factor(fitted.state)
    B = factor.folded(fitted.kernel_op.matrix, fitted.num_outputs)
    B = B + fitted.ridge * jnp.eye(B.shape[0], dtype=B.dtype)
    return median_seconds(lambda: jax.scipy.linalg.cho_factor(B, lower=True)[0], repeats)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    data = dfl.datasets.load("mnist-small")
    x, y = data.x_train[: args.points], data.y_train[: args.points]
    xq, yq = data.x_test[: args.queries], data.y_test[: args.queries]
    model = fully_connected((784, 1024, 1024, 1024, 10), 0)
    fitted = dfl.fit(model, x, y, loss=dfl.SoftmaxCrossEntropy(), ridge=1e-2)
    chol = cholesky_seconds(fitted, args.repeats)
    result = {
        "device": f"{jax.devices()[0].platform}: {jax.devices()[0].device_kind}",
        "host": platform.machine(),
        "jax": jax.__version__,
        "points": args.points,
        "queries": args.queries,
        "cholesky_seconds": chol,
    }
    for name, options in (("first order", {"first_order": True}), ("leave-one-out", {})):
        seconds = median_seconds(
            lambda options=options: fitted.attribute(xq, yq, progress=False, **options).values,
            args.repeats,
        )
        result[name] = {"seconds": seconds, "over_cholesky": seconds / chol}
    print(json.dumps(result, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
