"""What a request costs when most points go, and what holding the Jacobian saves; writes JSON.

    python benchmarks/request_speed.py                      # a minute on a laptop
    python benchmarks/request_speed.py --points 2000 --images 2000 --channels 128 --out requests.json
    python benchmarks/request_speed.py --points 2000 --against /path/to/another/checkout/src

The same removals with the whole of `K` in every product and with the retained block, then
parameters of a convolutional network with and without `J` in memory. Medians of repeated calls.

`--against` compares this checkout with another one instead: the same small and large requests by both,
in processes that take turns, so that what else the machine does falls on both alike.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
from measure import median_seconds

import dualfluence as dfl


def write_json(path, results):
    path.write_text(json.dumps(results, indent=2) + "\n")


def bench_removals(points):
    # Not at the top: another checkout, which `--against` runs, may keep them elsewhere.
    from dualfluence.apps.compare._networks import fully_connected
    from dualfluence.apps.compare._removals import Removals

    data = dfl.datasets.load("mnist-small")
    case = Removals(fully_connected((784, 1024, 1024, 1024, 10), 0), data, points, 1e-2)
    results = {}
    for percent in (10, 50, 70, 90):
        edit = dfl.Remove(case.indices(percent))
        found = {}
        for name, limit in (("whole", 10**9), ("block", 1024)):
            options = {"solver": dfl.Auto(gather_size=limit), "progress": False}
            found[f"{name}, solver"] = case.fitted.edit(edit, **options).stats.solver
            found[f"{name}, seconds"] = median_seconds(
                lambda edit=edit, options=options: case.fitted.edit(edit, **options).state.alpha
            )
        results[f"{percent} %"] = found
    return results


def bench_read_outs(images, channels):
    from dualfluence.apps.compare._networks import Architecture, make_network

    net = make_network(Architecture("cnn", 3, channels))
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(images, 32, 32, 3)).astype(np.float32)
    y = np.sign(rng.normal(size=(images, 1))).astype(np.float32)
    model = dfl.linearize(net.apply, net.init(jax.random.key(0), (32, 32, 3), outputs=1))
    fitted = dfl.fit(model, x, y, loss=dfl.SquaredError(), ridge=0.1, on_failure="report")
    start = time.perf_counter()
    held = fitted.with_jacobian()
    jax.block_until_ready(held.source.jacobian)
    results = {"parameters": model.num_params, "jacobian_seconds": time.perf_counter() - start}
    for name, base in (("through the network", fitted), ("J held", held)):
        update = base.edit(dfl.Remove(np.arange(images // 10)), on_failure="report")
        results[f"{name}, seconds"] = median_seconds(update.params)
    return results


def time_requests(points, repeats):
    """Medians of one checkout: the host's part, which a tiny problem shows, and whole requests."""
    rng = np.random.default_rng(0)
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 1e-2, "progress": False}
    options |= {"on_failure": "report"}
    x = rng.normal(size=(40, 3)).astype(np.float32)
    start = jax.numpy.asarray(rng.normal(size=(3, 2)), "float32")
    tiny = dfl.fit(dfl.linearize(lambda p, x: x @ p, start), x, rng.integers(0, 2, 40), **options)
    found = {}

    def measure(name, call, count):
        call()
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - begin)
        found[name] = float(np.median(times))

    gone = dfl.Remove([3])
    measure("host overhead: tiny removal", lambda: tiny.edit(gone).state.alpha, 50 * repeats)
    update = tiny.edit(gone)
    measure("host overhead: parameters", lambda: update.params(), 50 * repeats)
    measure("host overhead: prediction", lambda: update.predict(x[:5]), 50 * repeats)
    data = dfl.datasets.load("mnist-small")
    x = np.asarray(data.x_train, np.float32).reshape(len(data.x_train), -1)[:points]
    y = np.asarray(data.y_train)[:points].astype(np.int32)
    widths = (784, 1024, 1024, 1024, 10)
    keys = jax.random.split(jax.random.key(0), len(widths) - 1)
    shapes = zip(keys, widths[:-1], widths[1:], strict=True)
    params = [jax.random.normal(k, (a, b), "float32") / a**0.5 for k, a, b in shapes]

    def network(params, x):
        for W in params[:-1]:
            x = jax.nn.relu(x @ W)
        return x @ params[-1]

    begin = time.perf_counter()
    fitted = dfl.fit(dfl.linearize(network, params), x, y, **options)
    found["first fit"] = time.perf_counter() - begin
    for percent in (10, 50, 90):
        edit = dfl.Remove(np.arange(points * percent // 100))
        call = lambda edit=edit: fitted.edit(edit, on_failure="report").state.alpha  # noqa: E731
        measure(f"removal of {percent} %", call, repeats)
    removal = dfl.Remove(np.arange(points // 10))
    call = lambda: fitted.edit(removal, on_failure="report").params()  # noqa: E731
    measure("removal of 10 % with parameters", call, repeats)
    return found


def compare(other, points, repeats, rounds):
    """Both checkouts in turns; the smallest median of each, and their ratio."""
    here = Path(__file__).resolve().parents[1] / "src"
    runs = {"here": [], "other": []}
    for turn in range(rounds):
        for name, path in (("here", here), ("other", other))[:: 1 if turn % 2 == 0 else -1]:
            command = [sys.executable, __file__, "--worker", "--points", str(points)]
            command += ["--repeats", str(repeats)]
            environment = dict(os.environ, PYTHONPATH=str(path))
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{name} ({path}) failed:\n{done.stderr[-3000:]}")
            runs[name].append(json.loads(done.stdout.splitlines()[-1]))
    results = {}
    for what in runs["here"][0]["seconds"]:
        times = {name: [run["seconds"][what] for run in found] for name, found in runs.items()}
        ratio = min(times["here"]) / min(times["other"])
        spread = max(max(t) / min(t) for t in times.values())
        results[what] = {**times, "here_over_other": ratio, "spread_of_rounds": spread}
        print(
            f"{what:<34} {1e3 * min(times['here']):9.3f} ms here, {1e3 * min(times['other']):9.3f} ms "
            f"there: {ratio:.2f} (rounds differ by {spread:.2f})",
            flush=True,
        )
    return results | {"checkouts": {name: found[0]["package"] for name, found in runs.items()}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=500)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--against", type=Path, help="src folder of another checkout")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each checkout")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.worker:
        seconds = time_requests(args.points, args.repeats)
        print(json.dumps({"seconds": seconds, "package": dfl.__file__}))
        return
    if args.against:
        results = compare(args.against.resolve(), args.points, args.repeats, args.rounds)
        if args.out:
            write_json(args.out, results)
        return
    device = jax.devices()[0]
    results = {
        "device": f"{device.platform} {device.device_kind}",
        "machine": platform.machine(),
        "jax": jax.__version__,
        "dtype": "float32",
        "points": args.points,
        "removals": bench_removals(args.points),
        "images": args.images,
        "channels": args.channels,
        "read-outs": bench_read_outs(args.images, args.channels),
    }
    print(json.dumps(results, indent=2))
    if args.out:
        write_json(args.out, results)


if __name__ == "__main__":
    main()
