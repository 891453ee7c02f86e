"""Scores of training points on one device, on eight simulated ones, or as one of two processes.

`python scores_worker.py OUT.npz [--mesh] [--process ID --port PORT]` writes all scores.
"""

import argparse

import jax
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--mesh", action="store_true")
parser.add_argument("--process", type=int)
parser.add_argument("--port", type=int)
args = parser.parse_args()

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_platforms", "cpu")
if args.process is not None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{args.port}", 2, args.process)

import jax.numpy as jnp  # noqa: E402

import dualfluence as dfl  # noqa: E402
from dualfluence.attribution import RandomProbes, Trajectory  # noqa: E402
from dualfluence.linalg import _spread  # noqa: E402

N, C, WIDTH = 21, 3, 6
MESH = jax.devices() if args.mesh else None
_spread.BLOCK = 4  # several steps for each device
results: dict[str, np.ndarray] = {}


def network(params, x):
    return jnp.tanh(x @ params["inner"]) @ params["outer"]


def make_params(rng):
    shapes = {"inner": (5, WIDTH), "outer": (WIDTH, C)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def make_data():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(N, 5)), rng.integers(0, C, N)
    return x, y, rng.normal(size=(4, 5)), rng.integers(0, C, 4)


def trajectories():
    rng = np.random.default_rng(1)
    saved = [make_params(rng) for _ in range(2)]
    run = Trajectory(network, saved, steps=[10, 30], learning_rate=0.1)
    for name, options in {
        "exact": {"probes": None, "leverage": True},
        "random": {"probes": RandomProbes(2, seed=1)},
    }.items():
        found = run.attribute(*make_data(), mesh=MESH, progress=False, **options)
        results[f"trajectory/{name}"] = found.values
        results[f"trajectory/{name}/agreement"] = np.asarray(found.stats["agreement"])


def primal():
    params = make_params(np.random.default_rng(2))
    x, y, xq, yq = make_data()
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 0.1, "mesh": MESH}
    model = dfl.linearize(network, jax.tree.map(jnp.asarray, params), batch_size=5)
    solver = dfl.primal.CG(rtol=1e-13)
    found = dfl.primal.attribute(
        model, params, x, y, xq, yq, solver=solver, self_influence=True, **options
    )
    results["primal/cg"], results["primal/own"] = found.values, found.own
    found = dfl.primal.attribute(model, params, x, y, xq, yq, solver=dfl.primal.EKFAC(), **options)
    results["primal/ekfac"] = found.values


trajectories()
primal()
if args.process in (None, 0):
    np.savez(args.out, **results)
