"""Builds a store with a slow kernel that logs every tile it computes: `PATH LOG SECONDS_PER_TILE`."""

import sys
import time

import jax

jax.config.update("jax_platforms", "cpu")

import numpy as np  # noqa: E402

import dualfluence as dfl  # noqa: E402

path, log, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
x = np.random.default_rng(0).normal(size=(61, 3)).astype(np.float32)


def kernel(x1, x2):
    if len(x1) > 2:  # not the header's probe
        with open(log, "a") as file:
            file.write("tile\n")
        time.sleep(seconds)
    return np.exp(-np.sum((np.asarray(x1)[:, None] - np.asarray(x2)[None]) ** 2, -1))


print("started", flush=True)
dfl.store.build(kernel, x, path, tile=4, progress=False, verify=False)
