"""The public calls, on problems of six points, with the kind of every argument that can be bent."""

import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dualfluence as dfl

N, D, C = 6, 2, 2


class Argument(NamedTuple):
    """A kind of corruption, a value that works, and words of which one names the argument."""

    kind: str
    good: Any
    words: str


class Entry(NamedTuple):
    name: str
    call: Callable[..., Any]
    arguments: dict[str, Argument]


class Unset:
    """Stands for an argument that was not given, where None is something to be refused."""


X = r"\bx\b|features|kernel|queries"
Y = r"\by\b|targets|labels"
rng = np.random.default_rng(0)
x, y, y2 = rng.normal(size=(N, D)), rng.normal(size=(N, 1)), rng.normal(size=(N, C))
labels = np.arange(N) % C
theta = jnp.asarray(rng.normal(size=(D, 1)))
device = jax.devices()[:1]
ones, two, key, removal = np.ones(N), np.array([1, 3]), jax.random.key(0), dfl.Remove([1])


def linear(w: Any, x: Any) -> Any:
    return x @ w


def rbf(a: Any, b: Any) -> Any:
    return jnp.exp(-jnp.sum((a[:, None] - b[None]) ** 2, axis=2))


def arg(kind: str, good: Any, words: str) -> Argument:
    return Argument(kind, good, words)


KERNEL = {
    "num_outputs": arg("count", 1, "num_outputs"),
    "form": arg("name", "dense", "form"),
    "refine": arg("flag or none", False, "refine"),
    "precision": arg("option", jax.lax.Precision.HIGHEST, "precision"),
}
SKETCH = {"rank": arg("rank", 2, "rank"), "key": arg("key", key, "key")}


def grouped(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of `KernelOptions` and `Sketch` put into their records."""
    groups = {
        "kernel": (dfl.KernelOptions, {*KERNEL, "operator"}),
        "sketch": (dfl.Sketch, {*SKETCH}),
    }
    rest = dict(options)
    for name, (record, fields) in groups.items():
        given = {field: rest.pop(field) for field in fields & set(rest)}
        if given:
            rest[name] = record(**given)
    return rest


def models() -> dict[str, Any]:
    one, two = (dfl.linearize(linear, jnp.zeros((D, c))) for c in (1, C))
    convex = dfl.Convex(lambda f, y: jnp.sum((f - y) ** 2))
    quiet: dict[str, Any] = {"ridge": 0.1, "progress": False}
    return {
        "one": one,
        "squared": dfl.fit(one, x, y, loss=dfl.SquaredError(), **quiet),
        "softmax": dfl.fit(two, x, labels, loss=dfl.SoftmaxCrossEntropy(), **quiet),
        "convex": dfl.fit(two, x, y2, loss=convex, **quiet),
        "two": two,
        "loss": convex,
    }


def entries() -> list[Entry]:
    m = models()
    update = m["squared"].edit(dfl.Remove([0]))
    folder = Path(tempfile.mkdtemp())
    file = folder / "fitted.npz"
    m["squared"].save(file)
    primal = dfl.primal.influence(
        m["one"], m["squared"].params(), x, y, dfl.Remove([0]), loss=dfl.SquaredError(), ridge=0.1,
        on_failure="report",
    )  # fmt: skip
    made = [*_fits(m), *_edits(m), *_reads(update, m, primal), *_tools(m, folder, file)]
    return [*made, *_primal(m)]


def _fits(m: dict[str, Any]) -> list[Entry]:
    data = {"x": arg("features", x, X), "y": arg("numbers", y, Y)}
    options = {
        "ridge": arg("positive", 0.1, "ridge"),
        "weights": arg("weights", np.ones(N), "weights"),
        **KERNEL,
        "operator": arg("option", m["squared"].kernel_op, "operator"),
        "kernel": arg("option", m["squared"].kernel_op, "kernel"),
        "mesh": arg("mesh", device, "mesh"),
        "solver": arg("option", dfl.CG(), "solver"),
        "tolerance": arg("positive", 1e-3, "tolerance"),
        "rtol": arg("fraction", 1e-3, "rtol"),
        "max_steps": arg("count", 50, "max_steps"),
        **SKETCH,
        "sketch": arg("option", dfl.Sketch(2), "sketch"),
        "on_failure": arg("name", "raise", "on_failure"),
        "progress": arg("progress", False, "progress"),
        "loss": arg("thing", dfl.SquaredError(), "loss"),
    }

    def fit(model: Any = m["one"], **given: Any) -> Any:
        options = {"x": x, "y": y, "loss": dfl.SquaredError(), "ridge": 0.1, "progress": False}
        options |= given
        return dfl.fit(model, options.pop("x"), options.pop("y"), **grouped(options))

    def trained(**given: Any) -> Any:
        options = {"x": x, "y": y, "loss": dfl.SquaredError(), "ridge": 0.1, "progress": False}
        options |= {"trained_params": theta, "model": m["one"], **given}
        first = [options.pop(name) for name in ("model", "trained_params", "x", "y")]
        return dfl.from_trained(*first, **grouped(options))

    def descend(**given: Any) -> Any:
        options = {"x": x, "y": y, "loss": dfl.SquaredError(), "ridge": 0.1, "progress": False}
        options |= {"rate": 0.1, "epochs": 3, **given}
        first = [options.pop(name) for name in ("x", "y")]
        return dfl.kernel_gradient_descent(m["one"], *first, **grouped(options))

    shared = ("ridge", "weights", "mesh", "progress", "loss", "kernel", "operator", "sketch")
    shared += (*KERNEL, *SKETCH)
    model = arg("thing", m["one"], "model|kernel|outputs")
    return [
        Entry("fit", fit, {**data, **options, "model": model}),
        Entry(
            "fit(kernel)",
            lambda **g: fit(rbf, **g),
            {"x": arg("points", x, X), "y": arg("scores", y, Y)},
        ),
        Entry(
            "fit(matrix)",
            lambda model: fit(model, x=None),
            {"model": arg("held matrix", np.eye(N), "kernel|model")},
        ),
        Entry(
            "fit(softmax)",
            lambda y=labels, x=x: fit(m["two"], x=x, y=y, loss=dfl.SoftmaxCrossEntropy()),
            {"x": data["x"], "y": arg("labels", labels, Y)},
        ),
        Entry(
            "fit(convex)",
            lambda y=y2: fit(m["two"], y=y, loss=m["loss"]),
            {"y": arg("numbers", y2, Y)},
        ),
        Entry(
            "from_trained",
            trained,
            {
                **data,
                **{name: options[name] for name in shared},
                "trained_params": arg("tree", theta, "params"),
                "model": model,
                "tangent": arg("name", "trained", "tangent"),
                "linearised": arg("flag", False, "linearised"),
            },
        ),
        Entry(
            "kernel_gradient_descent",
            descend,
            {
                **data,
                "rate": arg("positive", 0.1, "rate"),
                "epochs": arg("count", 3, "epochs"),
                "momentum": arg("share", 0.5, "momentum"),
                "x_query": arg("maybe queries", x[:2], "x_query"),
                "initial_outputs": arg("maybe numbers", y, "initial_outputs"),
                "retain": arg("maybe indices", np.array([0, 1]), "retain"),
                "record_every": arg("count", 2, "record_every"),
                **KERNEL,
                "kernel": options["kernel"],
                "loss": options["loss"],
                "ridge": options["ridge"],
                "progress": options["progress"],
            },
        ),
    ]


def _edits(m: dict[str, Any]) -> list[Entry]:
    i = arg("indices", two, "indices|Re|every point")
    edit = m["squared"].edit
    numbers = {"indices": i, "targets": arg("numbers", y[:2], Y)}
    return [
        Entry("Remove", lambda indices=two: edit(dfl.Remove(indices)), {"indices": i}),
        Entry(
            "Reweight",
            lambda indices=two, weights=ones[:2]: edit(dfl.Reweight(indices, weights)),
            {"indices": i, "weights": arg("weights", np.ones(2), "weights")},
        ),
        Entry(
            "Relabel",
            lambda indices=two, targets=y[:2]: edit(dfl.Relabel(indices, targets)),
            numbers,
        ),
        Entry(
            "Relabel(softmax)",
            lambda targets=labels[:2]: m["softmax"].edit(dfl.Relabel(two, targets)),
            {"targets": arg("labels", labels[:2], Y)},
        ),
        Entry(
            "Relabel(convex)",
            lambda targets=y2[:2]: m["convex"].edit(dfl.Relabel(two, targets)),
            {"targets": arg("numbers", y2[:2], Y)},
        ),
        Entry(
            "Replace",
            lambda x=x[:2], targets=y[:2], indices=two: edit(dfl.Replace(indices, x, targets)),
            {
                "indices": i,
                "x": arg("maybe features", x[:2], X),
                "targets": arg("maybe numbers", y[:2], Y),
            },
        ),
        Entry(
            "Add(convex)",
            lambda x=x[:2], targets=y2[:2], weights=ones[:2]: m["convex"].edit(
                dfl.Add(x, targets, weights)
            ),
            {
                "x": arg("features", x[:2], f"{X}|new point"),
                "targets": arg("numbers", y2[:2], Y),
                "weights": arg("weights", np.ones(2), "weights"),
            },
        ),
        Entry(
            "edit",
            lambda edits=removal, **given: m["softmax"].edit(edits, **given),
            {
                "edits": arg("edits", dfl.Remove([1]), "edit"),
                "steps": arg("count", 2, "steps"),
                "until": arg("positive", 0.1, "until"),
                "drift": arg("positive", 0.5, "drift"),
                "solver": arg("option", dfl.CG(), "solver"),
                "rtol": arg("fraction", 0.01, "rtol"),
                "mesh": arg("mesh", device, "mesh"),
                "on_failure": arg("name", "report", "on_failure"),
                "progress": arg("progress", False, "progress"),
            },
        ),
        Entry(
            "retrain",
            lambda edits=removal, **given: m["softmax"].retrain(edits, **given),
            {
                "edits": arg("edits", dfl.Remove([1]), "edit"),
                "solver": arg("option", dfl.Cholesky(), "solver"),
                "tolerance": arg("positive", 0.1, "tolerance"),
                "on_failure": arg("name", "report", "on_failure"),
                "progress": arg("progress", False, "progress"),
            },
        ),
        Entry(
            "on", lambda mesh=device: m["squared"].on(mesh), {"mesh": arg("mesh", device, "mesh")}
        ),
    ]


def _reads(update: Any, m: dict[str, Any], primal: Any) -> list[Entry]:
    q = arg("queries", x[:2], "queries")
    linearised = arg("flag", True, "linearised")
    convex = m["convex"].edit(dfl.Remove([0]))
    reads = []
    for name, read in (("", update), ("primal ", primal)):
        flags = {} if name else {"linearised": linearised}
        reads += [
            Entry(
                f"{name}predict",
                lambda xq=x[:2], r=read, **g: r.predict(xq, **g),
                {"xq": q, **flags},
            ),
            Entry(
                f"{name}delta_outputs",
                lambda xq=x[:2], r=read, **g: r.delta_outputs(xq, **g),
                {"xq": q, **flags},
            ),
            Entry(
                f"{name}delta_loss",
                lambda xq=x[:2], targets=y[:2], r=read, **g: r.delta_loss(xq, targets, **g),
                {
                    "xq": q,
                    "targets": arg("numbers", y[:2], Y),
                    "include_ridge": arg("flag", False, "include_ridge"),
                    "first_order": arg("flag", True, "first_order"),
                    **flags,
                },
            ),
        ]
    return [
        *reads,
        Entry(
            "delta_loss(convex)",
            lambda targets=y2[:2]: convex.delta_loss(x[:2], targets),
            {"targets": arg("numbers", y2[:2], Y)},
        ),
    ]


def _tools(m: dict[str, Any], folder: Path, file: Path) -> list[Entry]:
    eye = np.eye(N)
    names = count()

    def build(x: Any = x, path: Any = Unset, model: Any = rbf, **given: Any) -> Any:
        path = folder / str(next(names)) if path is Unset else path
        return dfl.store.build(model, x, path, **{"progress": False, **given})

    return [
        Entry(
            "kernel_operator",
            lambda x=x, model=m["one"], **g: dfl.kernel_operator(
                model, x, **grouped({"progress": False, **g})
            ),
            {
                "x": arg("queries", x, X),
                "model": arg("thing", m["one"], "model"),
                **KERNEL,
                "mesh": arg("mesh", device, "mesh"),
                "progress": arg("progress", False, "progress"),
            },
        ),
        Entry(
            "low_rank",
            lambda x=x, rank=2, model=m["one"], **g: dfl.low_rank(model, x, rank, **g),
            {
                "x": arg("queries", x, X),
                "rank": arg("count", 2, "rank"),
                "model": arg("thing", m["one"], "model"),
                "method": arg("name", "nystrom", "method"),
                "num_outputs": arg("count", 1, "num_outputs"),
                "key": arg("key", jax.random.key(0), "key"),
            },
        ),
        Entry(
            "PrecomputedKernel",
            lambda matrix=eye: dfl.PrecomputedKernel(matrix),
            {"matrix": arg("matrix", eye, "kernel")},
        ),
        Entry(
            "linearize",
            lambda apply_fn=linear, params=theta, **g: dfl.linearize(apply_fn, params, **g),
            {
                "apply_fn": arg("thing", linear, "apply_fn"),
                "params": arg("fresh tree", theta, "param"),
                "anchor": arg("name", "params", "anchor"),
                "batch_size": arg("count", 4, "batch_size"),
            },
        ),
        Entry(
            "plan",
            lambda n=10, c=2, num_params=5, **g: dfl.plan(
                n, c, num_params, **{"platform": "cpu", "memory": 2**30, **g}
            ),
            {
                name: arg("count", 3, name)
                for name in (
                    "n",
                    "c",
                    "num_params",
                    "devices",
                    "memory",
                    "rank",
                    "tile",
                    "products",
                )
            }
            | {
                "structure": arg("name", "dense", "structure"),
                "dtype": arg("dtype", "float32", "dtype"),
                "platform": arg("name", "cpu", "platform"),
                "bandwidth": arg("positive", 1e9, "bandwidth"),
            },
        ),
        Entry(
            "store.build",
            build,
            {
                "x": arg("store points", x, X),
                "path": arg("path", str(folder / "k"), "path"),
                "model": arg("thing", rbf, "model"),
                "num_outputs": arg("count", 1, "num_outputs"),
                "tile": arg("count", N, "tile"),
                "dtype": arg("name", "float32", "dtype"),
                "verify": arg("flag", True, "verify"),
                "progress": arg("progress", False, "progress"),
            },
        ),
        Entry(
            "load",
            lambda path=file, model=m["one"], **g: dfl.load(path, model, **g),
            {
                "path": arg("path", str(file), "path"),
                "model": arg("thing", m["one"], "model"),
                "loss": arg("option", dfl.SquaredError(), "loss"),
                "kernel": arg("option", m["squared"].kernel_op, "kernel"),
                "progress": arg("progress", False, "progress"),
            },
        ),
        Entry(
            "save",
            lambda path=folder / "again.npz", **g: m["squared"].save(path, **g),
            {
                "path": arg("path", str(folder / "again.npz"), "path"),
                "include_kernel": arg("flag", True, "include_kernel"),
            },
        ),
        Entry(
            "accuracy",
            lambda outputs=y2, labels=labels: dfl.metrics.accuracy(outputs, labels),
            {
                "outputs": arg("scores", y2, "outputs"),
                "labels": arg("labels", labels, "labels"),
            },
        ),
        Entry(
            "random_perturbation",
            lambda key=key, params=theta, norm=0.5: dfl.metrics.random_perturbation(
                key, params, norm
            ),
            {
                "key": arg("key", jax.random.key(0), "key"),
                "norm": arg("norm", 0.5, "norm"),
            },
        ),
        Entry(
            "distance",
            lambda params_a=theta, params_b=theta: dfl.metrics.distance(params_a, params_b),
            {name: arg("tree", theta, "param|tree") for name in ("params_a", "params_b")},
        ),
        Entry(
            "unlearning_report",
            lambda y=labels, forgotten=two, predict=lambda v: v: dfl.metrics.unlearning_report(
                predict, x, y, forgotten, x_test=x, y_test=labels
            ),
            {
                "y": arg("labels", labels, Y),
                "forgotten": arg("indices", np.array([1, 3]), "forgotten|every training point"),
                "predict": arg("thing", lambda v: v, "predict"),
            },
        ),
    ]


def _primal(m: dict[str, Any]) -> list[Entry]:
    def call(**given: Any) -> Any:
        options = {"x": x, "y": y, "loss": dfl.SquaredError(), "ridge": 0.1, "params": theta}
        options |= {"edit": dfl.Remove([1]), "model": m["one"], "on_failure": "report", **given}
        first = [options.pop(name) for name in ("model", "params", "x", "y", "edit")]
        return dfl.primal.influence(*first, **options)

    return [
        Entry(
            "influence",
            call,
            {
                "x": arg("features", x, X),
                "y": arg("numbers", y, Y),
                "params": arg("tree", theta, "params"),
                "model": arg("thing", m["one"], "model"),
                "edit": arg("edits", dfl.Remove([1]), "edit"),
                "loss": arg("thing", dfl.SquaredError(), "loss"),
                "ridge": arg("positive", 0.1, "ridge"),
                "weights": arg("weights", np.ones(N), "weights"),
                "linearised": arg("flag", True, "linearised"),
                "rtol": arg("fraction", 1e-3, "rtol"),
                "max_steps": arg("count", 20, "max_steps"),
                "batch_size": arg("count", 4, "batch_size"),
                "on_failure": arg("name", "report", "on_failure"),
            },
        )
    ]
