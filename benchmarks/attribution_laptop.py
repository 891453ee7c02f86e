"""Scores of a small run on a laptop: 1,000 digits, a 784-64-10 network, 20 checkpoints; writes JSON.

    python benchmarks/attribution_laptop.py --out FILE            # 50 queries, default arguments
    python benchmarks/attribution_laptop.py --exact --out FILE    # and every direction of outputs: minutes

SGD 0.05 with batches of 50 for 20 epochs, a checkpoint after each. The first call includes compilation, with
nothing cached. `cpu` counts seconds of all threads together, those that wait in a loop included. On a
machine that others use `OPENBLAS_NUM_THREADS=1` avoids such waiting; one core then needs `cpu` seconds.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import dualfluence as dfl
from dualfluence.apps.compare._machine import describe_machine
from dualfluence.attribution import Trajectory

POINTS, QUERIES, WIDTHS, EPOCHS, BATCH, RATE = 1000, 50, (784, 64, 10), 20, 50, 0.05


def network(params, x):
    for W, b in params[:-1]:
        x = jax.nn.relu(x @ W + b)
    W, b = params[-1]
    return x @ W + b


def trained(x, y):
    """Parameters after every epoch."""
    keys = jax.random.split(jax.random.key(0), len(WIDTHS))
    params = [
        (jax.random.normal(key, (a, b)) * (2 / a) ** 0.5, jnp.zeros(b))
        for key, a, b in zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=False)
    ]

    def loss(params, x, y):
        logs = jax.nn.log_softmax(network(params, x))
        return -jnp.take_along_axis(logs, y[:, None], axis=1).mean()

    @jax.jit
    def epoch(params, order):
        def step(params, rows):
            grads = jax.grad(loss)(params, x[rows], y[rows])
            return jax.tree.map(lambda p, g: p - RATE * g, params, grads), None

        return jax.lax.scan(step, params, order.reshape(-1, BATCH))[0]

    found = []
    for k in range(EPOCHS):
        params = epoch(params, jax.random.permutation(jax.random.key(k + 1), len(x)))
        found.append(params)
    return found


def measured(call):
    start, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, {
        "wall": round(time.perf_counter() - start, 2),
        "cpu": round(time.process_time() - cpu, 2),
    }


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--exact", action="store_true")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
    data = dfl.datasets.load("mnist-small")
    x, y = jnp.asarray(data.x_train[:POINTS]), jnp.asarray(data.y_train[:POINTS])
    xq, yq = data.x_test[:QUERIES], data.y_test[:QUERIES]
    checkpoints = trained(x, y)
    steps = [POINTS // BATCH * (k + 1) for k in range(EPOCHS)]
    run = Trajectory(network, checkpoints, steps, RATE)
    accuracy = dfl.metrics.accuracy(network(checkpoints[-1], jnp.asarray(xq)), yq)
    record = {
        "machine": describe_machine(),
        "cores": os.cpu_count(),
        "load average at the start": [round(v, 1) for v in os.getloadavg()],
        "points": POINTS,
        "widths": WIDTHS,
        "checkpoints": EPOCHS,
        "queries": QUERIES,
        "accuracy of the queries": float(np.asarray(accuracy)),
        "calls": {},
    }
    calls = {"default arguments": {}} | ({"exact": {"probes": None}} if given.exact else {})
    for name, how in calls.items():
        call = lambda how=how: run.attribute(x, y, xq, yq, **how)  # noqa: E731
        _, first = measured(call)
        result, again = measured(call)
        record["calls"][name] = {
            "probes": result.stats["probes"],
            "first call": first,
            "repeated call": again,
        }
        print(name, record["calls"][name], flush=True)
    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
