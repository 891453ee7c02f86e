"""What a request costs when most points go, and what holding the Jacobian saves; writes JSON.

    python benchmarks/requests.py                      # a minute on a laptop
    python benchmarks/requests.py --points 2000 --images 2000 --channels 128 --out requests.json

The same removals with the whole of `K` in every product and with the retained block, then
parameters of a convolutional network with and without `J` in memory. Medians of repeated calls.
"""

import argparse
import json
import platform
import time
from pathlib import Path

import jax
import numpy as np

import dualfluence as dfl
from dualfluence.apps.compare._networks import Architecture, fully_connected, make_network
from dualfluence.apps.compare._removals import Removals
from dualfluence.apps.compare._timing import median_seconds
from dualfluence.apps.paper._results import write_json
from dualfluence.solvers import _auto


def bench_removals(points):
    data = dfl.datasets.load("mnist-small")
    case = Removals(fully_connected((784, 1024, 1024, 1024, 10), 0), data, points, 1e-2)
    results = {}
    for percent in (10, 50, 70, 90):
        edit = dfl.Remove(case.indices(percent))
        found = {}
        for name, limit in (("whole", 10**9), ("block", 1024)):
            _auto.GATHER_SIZE = limit
            found[f"{name}, solver"] = case.fitted.edit(edit, progress=False).stats.solver
            found[f"{name}, seconds"] = median_seconds(
                lambda edit=edit: case.fitted.edit(edit, progress=False).state.alpha
            )
        results[f"{percent} %"] = found
    return results


def bench_read_outs(images, channels):
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=500)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
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
