"""Preconditioner, refinement and bandwidth at λ = 1e-4 on MNIST; writes JSON.

    python benchmarks/scale.py                                     # minutes on a laptop
    python benchmarks/scale.py --points 2000 --width 1024 --out precision.json   # n·c = 20,000
    python benchmarks/scale.py --points 10000 --width 1024 --only large --ridge 1e-2 --out large.json

`large` builds the kernel of 784-w-w-w-10, fits it, removes a tenth with parameters, and compares the
bandwidth of products with K to that of a copy measured in the same run.
"""

import argparse
import json
import platform
import time
from functools import partial
from pathlib import Path

import jax

jax.config.update("jax_enable_x64", True)  # for refinement; data and parameters are float32

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import dualfluence as dfl  # noqa: E402
from dualfluence.apps.paper._results import write_json  # noqa: E402
from dualfluence.dual._newton import op_mv  # noqa: E402
from dualfluence.infinite import Dense, Relu, serial  # noqa: E402
from dualfluence.operators import DenseOperator  # noqa: E402


def make_model(width, seed=0):
    """The paper's fully connected network, 784-w-w-w-10, in float32."""
    dense = partial(Dense, W_std=2.0, b_std=0.1)
    net = serial(*[dense(width=width), Relu()] * 3, dense())
    params = net.init(jax.random.key(seed), (784,), outputs=10)
    return dfl.linearize(net.apply, jax.tree.map(lambda a: a.astype(jnp.float32), params))


def load_points(count, data_dir):
    name = "mnist-small" if count <= 2000 else "mnist"
    data = dfl.datasets.load(name, data_dir=data_dir) if data_dir else dfl.datasets.load(name)
    order = np.random.default_rng(0).permutation(len(data.x_train))[:count]
    x = np.asarray(data.x_train, np.float32).reshape(len(data.x_train), -1)[order]
    return jnp.asarray(x), np.asarray(data.y_train)[order].astype(np.int32)


def timed(fn, repeats=5):
    """Best of `repeats`, after a first call that compiles."""
    jax.block_until_ready(fn())
    best = np.inf
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(fn())
        best = min(best, time.perf_counter() - start)
    return best


def summary(model):
    return {
        "steps": model.stats.steps,
        "iterations": model.stats.iterations,
        "products": model.stats.products,
        "seconds": model.stats.seconds,
        "converged": model.stats.converged,
        "residual": model.stats.residual,
        "relative_bound": model.certificate.relative_bound,
        "notes": list(model.stats.notes),
    }


def bench_preconditioner(model, x, y, op, options, ranks, removed):
    """The same fit and removal without and with the sketch, whose products and time are counted."""
    results = {}
    for rank in ranks:
        fitted = dfl.fit(model, x, y, kernel_op=op, rank=rank, refine=True, **options)
        request = {"solver": options["solver"], "on_failure": "report"}
        update = fitted.edit(dfl.Remove(removed), **request)
        results[f"rank {rank}"] = {"fit": summary(fitted), "remove": summary(update)}
    first, last = (results[f"rank {rank}"] for rank in ranks)
    for what in ("fit", "remove"):
        for count in ("iterations", "products", "seconds"):
            ratio = first[what][count] / last[what][count]
            results[f"{what}, {count}: fewer by"] = ratio
    return results


def bench_refinement(model, x, y, op, options, rank):
    fits = {
        name: dfl.fit(model, x, y, kernel_op=op, rank=rank, refine=refine, **options)
        for name, refine in (("float32", False), ("refined", True))
    }
    return {name: summary(fitted) for name, fitted in fits.items()}


def copy_bandwidth(num_bytes):
    """Bytes read and written per second by a copy of an array of that size."""
    array = jnp.ones(num_bytes // 4, jnp.float32)
    copy = jax.jit(lambda a: a + 1)
    return 2 * array.nbytes / timed(lambda: copy(array))


def bench_large(model, x, y, options, removed, copy_bytes):
    start = time.perf_counter()
    kernel = jax.block_until_ready(model.kernel(x))
    build = time.perf_counter() - start
    del kernel
    copy = copy_bandwidth(copy_bytes)
    fitted = dfl.fit(model, x, y, **options)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        update = fitted.edit(dfl.Remove(removed), on_failure="report")
        jax.block_until_ready(update.params())
        times.append(time.perf_counter() - start)
    op = fitted.kernel_op
    v = jnp.ones((op.num_points, op.num_outputs), op.dtype)
    product = timed(lambda: op_mv(op, v), repeats=10)
    return {
        "kernel_bytes": op.num_bytes,
        "build_seconds_first_call": build,
        "fit": summary(fitted),
        "remove": summary(update),
        "remove_with_parameters_seconds": times,
        "copy_bytes_per_second": copy,
        "product_seconds": product,
        "product_bytes_per_second": op.num_bytes / product,
        "product_share_of_copy": op.num_bytes / product / copy,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--ridge", type=float, default=1e-4)
    parser.add_argument("--rank", type=int, default=400)
    parser.add_argument("--only", choices=["precision", "large", "all"], default="all")
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    x, y = load_points(args.points, args.data_dir)
    model = make_model(args.width)
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": args.ridge, "on_failure": "report"}
    options |= {"solver": dfl.CG(max_steps=4000)}
    removed = np.arange(0, args.points, 10)
    device = jax.devices()[0]
    results = {
        "device": f"{device.platform} {device.device_kind}",
        "machine": platform.machine(),
        "jax": jax.__version__,
        "points": args.points,
        "unknowns": args.points * 10,
        "width": args.width,
        "ridge": args.ridge,
    }
    if args.only in ("precision", "all"):
        rank = min(args.rank, args.points * 10 // 4)
        start = time.perf_counter()
        matrix = jax.block_until_ready(model.kernel(x)).reshape(args.points * 10, -1)
        results["kernel_seconds_first_call"] = time.perf_counter() - start
        op = DenseOperator(matrix, 10)
        results["preconditioner"] = bench_preconditioner(
            model, x, y, op, options, (0, rank), removed
        )
        results["refinement"] = bench_refinement(model, x, y, op, options, rank)
    if args.only in ("large", "all"):
        size = min((args.points * 10) ** 2 * 4, 8 * 2**30)
        results["large"] = bench_large(model, x, y, options, removed, size)
    print(json.dumps(results, indent=2))
    if args.out:
        write_json(args.out, results)


if __name__ == "__main__":
    main()
