"""Fit and remove with a float32 kernel larger than this process may address: `PATH OUT.json`."""

import json
import sys

import jax

jax.config.update("jax_platforms", "cpu")

import numpy as np  # noqa: E402

import dualfluence as dfl  # noqa: E402

POINTS, FEATURES, RTOL = 65600, 8, 1e-4
rng = np.random.default_rng(0)
x = rng.normal(size=(POINTS, FEATURES)).astype(np.float32)
y = np.sin(x[:, :1])


def kernel(x1, x2):
    return 1 + np.asarray(x1) @ np.asarray(x2).T


store = dfl.store.build(kernel, x, sys.argv[1], tile=4100, verify=False)
fitted = dfl.fit(
    kernel,
    x,
    y,
    loss=dfl.SquaredError(),
    ridge=1e-2,
    kernel=store.operator(),
    rtol=RTOL,
    tolerance=1e-3,
    sketch=dfl.Sketch(16),
)
update = fitted.edit(dfl.Remove(np.arange(0, POINTS, 10)), rtol=RTOL)
facts = {
    "stored_bytes": store.num_bytes,
    "rtol": RTOL,
    "fit_residual": fitted.stats.residual,
    "edit_residual": update.stats.residual,
    "converged": fitted.stats.converged and update.stats.converged,
    "products": fitted.stats.products + update.stats.products,
    "seconds": fitted.stats.seconds + update.stats.seconds,
}
with open(sys.argv[2], "w") as file:
    json.dump(facts, file)
print(facts)
