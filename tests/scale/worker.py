"""One program, run on one device, on eight simulated ones, or as one of two processes.

`python worker.py OUT.npz [--mesh] [--others] [--process ID --port PORT]` writes every number that the
results of a fit and of all edits consist of, and what each device holds.
"""

import argparse

import jax
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--mesh", action="store_true")
parser.add_argument("--others", action="store_true")
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

N, C, WIDTH = 77, 3, 24
MESH = jax.devices() if args.mesh else None
results: dict[str, np.ndarray] = {}


def network(params, x):
    hidden = jnp.tanh(x @ params["inner"] + params["bias"])
    return hidden @ params["outer"]


def rbf(x1, x2):
    square = jnp.sum((x1[:, None] - x2[None]) ** 2, axis=-1)
    return jnp.exp(-square / 4)


def make_data():
    rng = np.random.default_rng(0)
    params = {
        "inner": rng.normal(size=(5, WIDTH)) / np.sqrt(5),
        "bias": rng.normal(size=WIDTH),
        "outer": rng.normal(size=(WIDTH, C)) / np.sqrt(WIDTH),
    }
    x, labels = rng.normal(size=(N, 5)), rng.integers(0, C, N)
    new = rng.normal(size=(4, 5)), rng.integers(0, C, 4)
    queries = rng.normal(size=(6, 5)), rng.integers(0, C, 6)
    return jax.tree.map(jnp.asarray, params), x, labels, new, queries


def record(name, tree):
    for path, leaf in jax.tree.leaves_with_path(tree):
        results[name + jax.tree_util.keystr(path)] = np.asarray(leaf)


def shares(name, array):
    """The largest part of `array` that one device of this process holds."""
    held = max(shard.data.nbytes for shard in array.addressable_shards)
    results[f"held/{name}"] = np.asarray([held, array.nbytes])


def read_out(name, model, queries):
    xq, yq = queries
    record(f"{name}/predict", model.predict(xq))
    record(f"{name}/certificate", vars(model.certificate))
    record(f"{name}/bound", model.certificate.distance_bound)
    if (model.source.network is not None and name.count("/") == 0) or name.endswith("/add"):
        record(f"{name}/params", model.params())
        record(f"{name}/network", model.predict(xq, linearised=False))
    if isinstance(model, dfl.Update):
        record(f"{name}/delta_alpha", model.delta_alpha)
        for include_ridge in (False, True):
            change = model.delta_loss(xq, yq, include_ridge=include_ridge)
            record(f"{name}/delta_loss{include_ridge}", change)


def run(name, model, kinds, kernel=None):
    params, x, labels, (x_new, y_new), queries = make_data()
    fitted = dfl.fit(
        model(params),
        x,
        labels,
        loss=dfl.SoftmaxCrossEntropy(),
        ridge=1e-2,
        tolerance=1e-12,
        mesh=MESH,
        solver=dfl.CG(),
        kernel=kernel,
    )
    record(f"{name}/alpha", fitted.alpha)
    record(f"{name}/outputs", fitted.outputs)
    read_out(name, fitted, queries)
    shares(f"{name}/alpha", fitted.state.alpha)
    if MESH is not None and hasattr(fitted.kernel_op, "op"):
        shares(f"{name}/kernel", fitted.kernel_op.op.matrix)
    edits = {
        "remove": dfl.Remove([0, 5, N - 1]),
        "relabel": dfl.Relabel([1, 2], [0, 1]),
        "reweight": dfl.Reweight([3, N - 2], [2.5, 0.5]),
        "replace": dfl.Replace([4, 6, 8, 9], x=x_new),  # as many rows as "add": compiled once
        "add": dfl.Add(x_new, y_new),
    }
    for kind in kinds:
        read_out(f"{name}/{kind}", fitted.edit(edits[kind], rtol=1e-13), queries)
    if name == "dense":
        exact = fitted.edit(edits["remove"], until=1e-9)
        read_out(f"{name}/exact", exact, queries)
        update = fitted.edit(edits["add"], rtol=1e-13).commit()
        again = update.edit([dfl.Add(x_new + 0.1, y_new), dfl.Remove([N + 1, 7])], rtol=1e-13)
        read_out(f"{name}/chain", again, queries)
        record(f"{name}/chain/outputs", again.outputs)


def run_others():
    """What else takes a mesh: a trained network, float32 refined, a model moved to it, a bare `K`."""
    params, x, labels, _, queries = make_data()
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 1e-2}
    gone = dfl.Remove([0, 5, N - 1])
    moved = jax.tree.map(lambda a: a + 0.01 * jnp.sin(jnp.arange(a.size)).reshape(a.shape), params)
    trained = dfl.from_trained(
        dfl.linearize(network, params), moved, x, labels, mesh=MESH, **options
    )
    read_out("trained", trained, queries)
    read_out("trained/remove", trained.edit(gone, rtol=1e-13, solver=dfl.CG()), queries)
    narrow = jax.tree.map(lambda a: a.astype(jnp.float32), params)
    model = dfl.linearize(network, narrow)
    x32 = x.astype(np.float32)
    refined = {"solver": dfl.CG(), "tolerance": 1e-11, "kernel": dfl.KernelOptions(refine=True)}
    fitted = dfl.fit(model, x32, labels, mesh=MESH, **refined, **options)
    read_out("refined", fitted, queries)
    read_out("refined/exact", fitted.edit(gone, until=1e-9), queries)
    net = dfl.infinite.serial(dfl.infinite.Dense(), dfl.infinite.Relu(), dfl.infinite.Dense())
    op = dfl.kernel_operator(net, x, kernel=dfl.KernelOptions(num_outputs=C), mesh=MESH)
    if MESH is not None:
        shares("infinite/kernel", op.op.matrix)
    settings = {"solver": dfl.CG(), "tolerance": 1e-12, **options}
    wide = dfl.fit(net, x, labels, kernel=op, **settings)
    read_out("infinite", wide, queries)
    read_out("infinite/retrain", wide.retrain(gone, tolerance=1e-12), queries)
    if args.process is None:  # moving a model is for one process
        settings["sketch"] = dfl.Sketch(40)
        alone = dfl.fit(dfl.linearize(network, params), x, labels, **settings)
        update = alone.edit(gone, rtol=1e-13, solver=dfl.CG(), mesh=MESH)
        read_out("moved", update, queries)
        record("moved/outputs", update.outputs)
        if MESH is not None:
            shares("moved/kernel", update.before.kernel_op.op.matrix)


EDITS = ("remove", "relabel", "reweight", "replace", "add")
if args.others:
    run_others()
else:
    run("dense", lambda params: dfl.linearize(network, params), EDITS)
    run("kronecker", lambda params: rbf, ("remove",), dfl.KernelOptions(num_outputs=C))
    free = lambda params: dfl.linearize(network, params, batch_size=4)  # noqa: E731
    run("free", free, ("remove",), "matrix-free")
if args.process in (None, 0):
    np.savez(args.out, **results)
