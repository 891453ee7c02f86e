"""Scores points of a network with 50,000 outputs in a process that may hold no array of `c²` numbers."""

import resource
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from dualfluence.attribution import RandomProbes, Trajectory  # noqa: E402


def scores(c, n, d=5, **options):
    rng = np.random.default_rng(0)
    params = {"E": jnp.asarray(rng.normal(size=(d, c)) / d, jnp.float32)}
    x, y = rng.normal(size=(n, d)).astype(np.float32), rng.integers(0, c, n)
    run = Trajectory(lambda p, x: x @ p["E"], [params], steps=[10], learning_rate=0.1)
    return run.attribute(x, y, x[:3], y[:3], progress=False, **options)


scores(500, 4, probes=RandomProbes(8))  # threads and programs
status = Path("/proc/self/status").read_text()
held = int(status[status.index("VmData") :].split()[1]) * 1024
limit = held + 2 * 2**30  # c² float32 are 9.3 GiB
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
for options in (
    {"probes": RandomProbes(8)},
    {"probes": 8},
    {},
    {"probes": 4, "question": "point"},
):
    got = scores(50_000, 33, **options)
    assert np.isfinite(got.values).all(), options
    assert got.stats["probes"].startswith("RandomProbes"), options
    assert (np.argmax(got.values, axis=1) == np.arange(3)).all(), options
try:
    np.ones(50_000**2, np.float32)  # the limit holds
except MemoryError:
    print("bounded")
else:
    raise SystemExit("the limit of memory has no effect")
