"""What a fit answers beside edits, on one device, on eight simulated ones, or as one of two processes.

`python answers_worker.py OUT.npz [--mesh] [--process ID --port PORT]` writes all values. Numbers of points
divide by neither count of devices.
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

jax.config.update("jax_platforms", "cpu")
if args.process is not None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{args.port}", 2, args.process)

import jax.numpy as jnp  # noqa: E402

import dualfluence as dfl  # noqa: E402
from dualfluence.linalg import _spread  # noqa: E402

C, WIDTH = 3, 8
MESH = jax.devices() if args.mesh else None
_spread.BLOCK = 4  # several steps for each device
results: dict[str, np.ndarray] = {}


def network(params, x):
    return jnp.tanh(x @ params["inner"]) @ params["outer"]


def rbf(x1, x2):
    return jnp.exp(-jnp.sum((x1[:, None] - x2[None]) ** 2, axis=-1) / 4)


def make(n, dtype):
    """A network, and points and queries with labels and with numbers as targets."""
    rng = np.random.default_rng(0)
    params = {"inner": rng.normal(size=(5, WIDTH)) / 2, "outer": rng.normal(size=(WIDTH, C)) / 3}
    x, xq = rng.normal(size=(n, 5)).astype(dtype), rng.normal(size=(4, 5)).astype(dtype)
    labels = rng.integers(0, C, n), rng.integers(0, C, 4)
    numbers = rng.normal(size=(n, C)).astype(dtype), rng.normal(size=(4, C)).astype(dtype)
    model = dfl.linearize(network, jax.tree.map(lambda a: jnp.asarray(a, dtype), params))
    return model, x, xq, labels, numbers


def fits(n, dtype):
    """Structures of `K`, coupled and separate outputs, a border."""
    model, x, xq, labels, numbers = make(n, dtype)
    softmax, squared = dfl.SoftmaxCrossEntropy(), dfl.SquaredError()
    how = {"ridge": 0.05, "mesh": MESH, "progress": False}
    entries = dfl.KernelOptions(num_outputs=C)
    dense = dfl.fit(model, x, labels[0], loss=softmax, kernel="dense", **how)
    yield "dense", dense, xq, labels[1]
    yield (
        "kronecker",
        dfl.fit(rbf, x, numbers[0], loss=squared, kernel=entries, **how),
        xq,
        numbers[1],
    )
    if dtype == np.float32:
        return
    free = dfl.fit(model, x, labels[0], loss=softmax, kernel="matrix-free", **how)
    yield "free", free, xq, labels[1]
    coupled = dfl.fit(rbf, x, labels[0], loss=softmax, kernel=entries, **how)
    yield "coupled", coupled, xq, labels[1]
    edits = [dfl.Add(xq + 1, labels[1]), dfl.Remove([3, n + 1])]
    grown = dense.edit(edits, until=1e-9, progress=False).commit()
    yield "grown", grown, xq, labels[1]


def attribution(name, fitted, xq, yq):
    options = {"plain": {}, "first order": {"first_order": True}}
    if name.startswith("free"):  # one device has no first order without entries of K
        options.pop("first order")
    if name == "dense/float64":
        options |= {"margin": {"of": "margin"}, "refined": {"refine": 1e-3}}
    for kind, how in options.items():
        found = fitted.attribute(xq, yq, progress=False, **how)
        results[f"{name}/{kind}"], results[f"{name}/{kind}/own"] = found.values, found.own
        results[f"{name}/{kind}/without"] = found.outputs_without
    groups = {"first": [0, 1, 2], "ends": [0, fitted.data.num_points - 1]}
    found = fitted.attribute_groups(groups, xq, yq, interactions=True, progress=False)
    results[f"{name}/groups"], results[f"{name}/sums"] = found.values, found.sums
    results[f"{name}/pairs"] = found.interactions


def ridges(name, fitted):
    path = fitted.ridge_path([1e-3, 0.05, 1.0])
    for field in ("leave_one_out", "gcv", "training", "dof"):
        results[f"{name}/{field}"] = getattr(path, field)


def removals(name, fitted, xq):
    """A stream of removals by the explicit inverse: how each was answered, the model and its certificate."""
    engine = dfl.unlearning.Engine(fitted, drift=100.0)
    points = [3], [0, 5], [fitted.data.num_points - 1]
    for place, (gone, until) in enumerate(zip(points, (None, None, 1e-2), strict=True)):
        engine.accept(engine.propose([dfl.Remove(gone)], until))
        results[f"{name}/removal/{place}"] = np.asarray(engine.fitted.predict(xq))
        bound = engine.fitted.certificate.distance_bound
        results[f"{name}/removal/{place}/bound"] = np.asarray(bound)
        results[f"{name}/removal/{place}/how"] = np.asarray(engine.work.how.startswith("closed"))


def subsets(name, fitted, xq, yq):
    keep = np.random.default_rng(2).random((3, fitted.data.num_points)) < 0.8
    retrain = dfl.attribution.evaluate.retrain_linearised
    results[f"{name}/subsets"] = retrain(fitted, keep, xq, yq, relative=1e-9).targets


for n, dtype in ((33, np.float64), (101, np.float32)):
    jax.config.update("jax_enable_x64", dtype == np.float64)
    for name, *given in fits(n, dtype):
        tagged = f"{name}/{np.dtype(dtype).name}"
        attribution(tagged, *given)
        if name in ("dense", "kronecker", "coupled"):
            ridges(tagged, given[0])
            removals(tagged, *given[:2])
        if tagged == "dense/float64":
            subsets(tagged, *given)
if args.process in (None, 0):
    np.savez(args.out, **results)
