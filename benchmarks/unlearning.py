"""A stream of single deletions beside one `edit` each, in one run; writes JSON.

    python benchmarks/unlearning.py                                   # n = 500, 2 cores, minutes
    python benchmarks/unlearning.py --points 2000 --deletions 1000    # one H200

Every deletion comes with its certificate; parameters are computed on demand and not counted. Times are
with and without the ledger's fsync. After the stream the state is compared with retraining on what is left.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

jax.config.update("jax_enable_x64", True)

import dualfluence as dfl  # noqa: E402
from dualfluence.unlearning._engine import Engine  # noqa: E402


def network(params, x):
    for W in params[:-1]:
        x = jax.nn.relu(x @ W)
    return x @ params[-1]


def fit(points, width, ridge):
    data, rng = dfl.datasets.load("mnist-small"), np.random.default_rng(0)
    rows = rng.permutation(len(data.x_train))[:points]
    x = np.asarray(data.x_train, np.float64).reshape(len(data.x_train), -1)[rows]
    y = np.asarray(data.y_train)[rows].astype(np.int32)
    widths = (x.shape[1], width, width, 10)
    keys = jax.random.split(jax.random.key(0), len(widths) - 1)
    shapes = zip(keys, widths[:-1], widths[1:], strict=True)
    params = [jax.random.normal(k, (a, b), "float64") * (2 / a) ** 0.5 for k, a, b in shapes]
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": ridge, "progress": False}
    return dfl.fit(dfl.linearize(network, params), x, y, on_failure="report", **options)


def seconds_of(call):
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def bench_stream(points, deletions, width, ridge, drift, edits):
    fitted = fit(points, width, ridge)
    found = {
        "points": points,
        "outputs": 10,
        "deletions": deletions,
        "ridge": ridge,
        "drift": drift,
    }
    found["factorisation_seconds"], engine = seconds_of(
        lambda: settled(Engine(fitted, drift=drift))
    )
    # One of each kind first: compilation is not what is compared.
    bound = engine.propose([dfl.Remove([0])]).fitted.certificate.distance_bound
    engine.propose([dfl.Remove([0])], 0.3 * bound)
    jax.block_until_ready(fitted.edit(dfl.Remove([0]), progress=False).state.alpha)
    settled_edit(fitted, 0, drift)
    times, hows, edit_times, same_promise, refreshes = [], {}, [], [], []
    by_edit, every = fitted, max(1, deletions // edits)
    for point in range(deletions):
        spent, work = seconds_of(lambda point=point: engine.propose([dfl.Remove([point])]))
        if work.anchor is not engine.work.anchor:
            refreshes.append(spent)
        engine.accept(work)
        times.append(spent)
        hows[work.how] = hows.get(work.how, 0) + 1
        if point % every == 0:
            # In turns, so that what else the machine does falls on both.
            call = lambda point=point: jax.block_until_ready(  # noqa: E731
                fitted.edit(dfl.Remove([point]), progress=False).state.alpha
            )
            edit_times.append(seconds_of(call)[0])
            # The same promise: on top of the deletions before it, and within the drift.
            call = lambda point=point, by=by_edit: settled_edit(by, point, drift)  # noqa: E731
            spent, by_edit = seconds_of(call)
            same_promise.append(spent)
    want = fitted.retrain(dfl.Remove(np.arange(deletions)), progress=False)
    change = np.asarray(engine.fitted.state.alpha - want.state.alpha)
    away = float(
        np.sqrt(np.sum(change * np.asarray(fitted.kernel_op.mv(jax.numpy.asarray(change)))))
    )
    found |= {
        "median_seconds": float(np.median(times)),
        "mean_seconds": float(np.mean(times)),
        "worst_seconds": float(np.max(times)),
        # Requests that made a new factorisation: what the mean has over the median, for the most part.
        "refreshes": len(refreshes),
        "refresh_seconds": float(np.sum(refreshes)),
        "edit_median_seconds": float(np.median(edit_times)),
        "edit_over_deletion": float(np.median(edit_times) / np.median(times)),
        "edit_over_deletion_means": float(np.mean(edit_times) / np.mean(times)),
        # One `edit(drift=...)` and `commit` after another, which is what a desk without the inverse does.
        "edit_within_drift_median_seconds": float(np.median(same_promise)),
        "edit_within_drift_over_deletion": float(np.median(same_promise) / np.median(times)),
        "edit_within_drift_over_deletion_means": float(np.mean(same_promise) / np.mean(times)),
        "how": hows,
        "distance_to_retraining": away,
        "certified_distance": engine.fitted.certificate.distance_bound,
        "parameter_norm": engine.fitted.certificate.parameter_norm,
    }
    return found | bench_desk(fitted, min(deletions, 50))


def settled_edit(fitted, point, drift):
    after = fitted.edit(dfl.Remove([point]), drift=drift, progress=False).commit()
    jax.block_until_ready(after.state.alpha)
    return after


def settled(engine):
    jax.block_until_ready(engine.work.anchor.N)
    return engine


def bench_desk(fitted, deletions):
    """The same through a desk: digest, ledger and fsync included."""
    with tempfile.TemporaryDirectory() as folder, dfl.unlearning.open(folder, fitted) as desk:
        times = [seconds_of(lambda i=i: desk.remove([i]))[0] for i in range(deletions)]
    return {"desk_median_seconds": float(np.median(times))}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=500)
    parser.add_argument("--deletions", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--ridge", type=float, default=1e-2)
    parser.add_argument("--drift", type=float, default=1e-2)
    parser.add_argument("--edits", type=int, default=10, help="edits timed in between")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = jax.devices()[0]
    results = {"device": f"{device.platform} {device.device_kind}", "jax": jax.__version__}
    sizes = (args.points, args.deletions, args.width, args.ridge)
    results |= bench_stream(*sizes, args.drift, args.edits)
    print(json.dumps(results, indent=2))
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
