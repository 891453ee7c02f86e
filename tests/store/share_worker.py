"""Builds a share of a store with a slow kernel: `PATH SECONDS_PER_TILE I N`."""

import sys
import time

import jax

jax.config.update("jax_platforms", "cpu")

import numpy as np  # noqa: E402

import dualfluence as dfl  # noqa: E402

path, seconds, worker = sys.argv[1], float(sys.argv[2]), (int(sys.argv[3]), int(sys.argv[4]))
x = np.random.default_rng(0).normal(size=(61, 3)).astype(np.float32)


def kernel(x1, x2):
    time.sleep(seconds * (len(x1) > 2))  # not the header's probe
    return np.exp(-np.sum((np.asarray(x1)[:, None] - np.asarray(x2)[None]) ** 2, -1))


print("started", flush=True)
dfl.store.build(kernel, x, path, tile=4, progress=False, verify=False, worker=worker)
