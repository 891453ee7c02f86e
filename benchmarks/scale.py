"""Preconditioner, refinement, bandwidth and memory on MNIST; writes JSON.

    python benchmarks/scale.py                                     # minutes on a laptop
    python benchmarks/scale.py --points 2000 --width 1024 --out precision.json   # n·c = 20,000
    python benchmarks/scale.py --points 10000 --width 1024 --only large --ridge 1e-2 --out large.json
    python benchmarks/scale.py --points 10000 --width 1024 --only memory --ridge 1e-2 --out memory.json

`large` builds the kernel of 784-w-w-w-10, fits it, removes a tenth with parameters, and compares the
bandwidth of products with K to that of a copy measured in the same run.

`memory` does the same for every form of K, each in a process of its own under JAX's default settings,
and sets the peak that the allocator saw beside K and beside what `plan` predicts.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax

jax.config.update("jax_enable_x64", True)  # for refinement; data and parameters are float32

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import dualfluence as dfl  # noqa: E402
from dualfluence._plan import DEFAULT_RANK  # noqa: E402
from dualfluence.apps.bench._core import peak_memory  # noqa: E402
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
    results, kernel = {}, dfl.KernelOptions(operator=op, refine=True)
    for rank in ranks:
        fitted = dfl.fit(model, x, y, kernel=kernel, sketch=dfl.Sketch(rank), **options)
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
    results = {}
    for name, refine in (("float32", False), ("refined", True)):
        kernel = dfl.KernelOptions(operator=op, refine=refine)
        fitted = dfl.fit(model, x, y, kernel=kernel, sketch=dfl.Sketch(rank), **options)
        results[name] = summary(fitted)
    return results


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


FORMS = {
    "dense": 1.0,
    "kronecker": 3.0,
    "matrix-free": 1.0,
    "low-rank": 1.0,
    "stored": 0.06,
}
"""Forms of K, and the points of each as a share of `--points`: what makes a run of seconds."""


def peak_bytes():
    """The most that the device has held since the process began; of a CPU, the process itself."""
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def load_or_draw(count, data_dir):
    """MNIST, or where it is not at hand, noise of the same shape: memory is the same."""
    try:
        return *load_points(count, data_dir), "MNIST"
    except Exception as error:  # no network, no files: whatever it is, the run goes on and says so
        rng = np.random.default_rng(0)
        x = jnp.asarray(rng.uniform(size=(count, 784)), jnp.float32)
        return x, rng.integers(0, 10, count).astype(np.int32), f"noise ({type(error).__name__})"


def make_form(form, args, x, folder):
    """The model and what `fit` and `kernel_operator` are told."""
    if form in ("kronecker", "stored"):
        dense = partial(Dense, W_std=2.0, b_std=0.1)
        model = serial(*[dense(), Relu()] * 3, dense())
    else:
        model = make_model(args.width)
    if form == "stored":
        store = dfl.store.build(model, np.asarray(x), folder, num_outputs=10, progress=False)
        return model, store.operator()
    if form == "low-rank":
        model = dfl.low_rank(model, x, args.rank)
        return model, None
    kernel = form if form in ("dense", "matrix-free") else dfl.KernelOptions(num_outputs=10)
    return model, dfl.kernel_operator(model, x, kernel=kernel, progress=False)


def bench_form(form, args):
    """Seconds and peak of one form: build, fit, removal of a tenth with parameters."""
    n = int(args.points * FORMS[form])
    before = peak_bytes()
    x, y, origin = load_or_draw(n, args.data_dir)
    device = jax.devices()[0]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        model, op = make_form(form, args, x, folder)
        jax.block_until_ready(getattr(op, "matrix", ()))
        build = time.perf_counter() - start
        stages = {"build": peak_bytes()}
        options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": args.ridge, "progress": False}
        options |= {"on_failure": "report"}
        start = time.perf_counter()
        fitted = dfl.fit(model, x, y, kernel=op, **options)
        fit = time.perf_counter() - start
        stages["fit"] = peak_bytes()
        times = []
        for _ in range(3):
            start = time.perf_counter()
            update = fitted.edit(dfl.Remove(np.arange(0, n, 10)), on_failure="report")
            has_params = fitted.source.network is not None
            jax.block_until_ready(update.params() if has_params else update.state.alpha)
            times.append(time.perf_counter() - start)
        peak = peak_bytes() - (before if device.platform == "cpu" else 0)
        held = fitted.kernel_op
        network = fitted.source.network
        planned = dfl.plan(
            n,
            10,
            None if network is None else network.num_params,
            structure="kronecker" if form in ("kronecker", "stored") else "dense",
            rank=args.rank if form == "low-rank" else DEFAULT_RANK,
            platform=device.platform,
        )[form]
        result = {
            "points": n,
            "data": origin,
            "kernel_bytes": held.num_bytes,
            "build_seconds": build,
            "fit_seconds": fit,
            "remove_with_parameters_seconds": times,
            "fit": summary(fitted),
            "remove": summary(update),
            "features_and_parameters_bytes": x.nbytes + 4 * getattr(network, "num_params", 0),
            "peak_bytes": peak,
            "peak_bytes_after": stages,
            "peak_over_kernel": peak / held.num_bytes if held.num_bytes else None,
            "predicted_peak_bytes": planned.peak_bytes,
            "predicted_over_measured": planned.peak_bytes / peak,
        }
        if form == "dense":
            analysis = peak_memory(SimpleNamespace(fitted=fitted), np.arange(0, n, 10))
            result["removal_step_over_kernel"] = analysis["step_over_kernel"]
    return result


def bench_memory(args):
    """Every form in a process of its own, because the allocator's peak cannot be set back."""
    results = {}
    for form in FORMS:
        command = [
            sys.executable,
            __file__,
            "--points",
            str(args.points),
            "--width",
            str(args.width),
        ]
        command += ["--ridge", str(args.ridge), "--rank", str(args.rank), "--form", form]
        command += ["--data-dir", args.data_dir] if args.data_dir else []
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            results[form] = {"error": done.stderr[-2000:]}
            print(f"{form}: failed\n{done.stderr[-2000:]}", flush=True)
            continue
        found = results[form] = json.loads(done.stdout.splitlines()[-1])
        ratio = found["peak_over_kernel"]
        print(
            f"{form:<12} n = {found['points']:<6} build {found['build_seconds']:6.2f} s, fit "
            f"{found['fit_seconds']:6.2f} s, removal {min(found['remove_with_parameters_seconds']):.3f} s, "
            f"peak {found['peak_bytes'] / 1e9:.2f} GB{f' = {ratio:.2f} K' if ratio else ''}, predicted "
            f"{found['predicted_over_measured']:.2f} of that"
            + (f"; removal {found['removal_step_over_kernel']:.3f} K" if form == "dense" else ""),
            flush=True,
        )
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--ridge", type=float, default=1e-4)
    parser.add_argument("--rank", type=int, default=400)
    parser.add_argument("--only", choices=["precision", "large", "memory", "all"], default="all")
    parser.add_argument(
        "--form", choices=FORMS, help=argparse.SUPPRESS
    )  # one form, in this process
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.form:
        print(json.dumps(bench_form(args.form, args)))
        return
    # Before this process takes its share of the device.
    memory = bench_memory(args) if args.only in ("memory", "all") else None
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
    if memory is not None:
        results["memory"] = memory
    if args.only != "memory":
        bench_large_and_precise(args, results)
    print(json.dumps(results, indent=2))
    if args.out:
        write_json(args.out, results)


def bench_large_and_precise(args, results):
    x, y = load_points(args.points, args.data_dir)
    model = make_model(args.width)
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": args.ridge, "on_failure": "report"}
    options |= {"solver": dfl.CG(max_steps=4000)}
    removed = np.arange(0, args.points, 10)
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


if __name__ == "__main__":
    main()
