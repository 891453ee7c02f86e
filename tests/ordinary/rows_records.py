"""Records, errors, measures, data sets and plans."""

import jax
import numpy as np

import dualfluence as dfl
from dualfluence import datasets, metrics

from .table import each, flat, raises, row


@row(*each("", "Certificate", "distance_bound relative_bound at_floor summary"))
def a_certificate(at):
    made = dfl.Certificate(gradient_norm=2.0, rounding=0.5, parameter_norm=10.0, ridge=0.1, gap=1.0)
    np.testing.assert_allclose(made.distance_bound, 2.5 / 0.1 + 1)
    np.testing.assert_allclose(made.relative_bound, made.distance_bound / 9)
    assert not made.at_floor
    assert dfl.Certificate(0.1, 0.5, 10.0, 0.1).at_floor
    assert f"{made.distance_bound:.2g}" in made.summary()
    none = dfl.Certificate(0.1, 0.5, 10.0, 0.1, certified=False)
    np.testing.assert_equal(none.distance_bound, np.inf)
    own = at.fitted.certificate
    np.testing.assert_allclose(own.ridge, at.ridge)
    np.testing.assert_allclose(
        own.parameter_norm, np.linalg.norm(flat(at.fitted.params()) - at.theta), rtol=1e-3
    )


@row(
    "metrics.tree_norm",
    "metrics.distance",
    "metrics.largest_difference",
    "metrics.relative_distance",
    "metrics.accuracy",
)
@row("metrics.random_perturbation", "metrics.unlearning_report", "metrics.UnlearningReport")
def measures_of_models(at):
    a, b = flat(at.params), flat(at.other)
    at.close(metrics.tree_norm(at.params), np.linalg.norm(a))
    at.close(metrics.distance(at.params, at.other), np.linalg.norm(a - b), 5)
    at.close(metrics.largest_difference(at.params, at.other), np.abs(a - b).max(), 5)
    relative = np.linalg.norm(a - b) / np.linalg.norm(b)
    at.close(metrics.relative_distance(at.params, at.other), relative, 5)
    moved = metrics.random_perturbation(jax.random.key(0), at.params, 0.5)
    at.close(np.linalg.norm(flat(moved) - a), 0.5, 5)
    f, y = np.asarray(at.y), at.labels
    want = np.mean((f[:, 0] > 0) == (y > 0)) if at.c == 1 else np.mean(f.argmax(1) == y)
    np.testing.assert_allclose(metrics.accuracy(f, y), want)
    call = lambda gone: metrics.unlearning_report(  # noqa: E731
        at.model.base_outputs, at.x, y, gone, x_test=at.xq, y_test=at.query_labels
    )
    if at.n == 1:
        with raises(ValueError, "none is retained"):
            call([0])
        return
    report = call([0])
    assert isinstance(report, metrics.UnlearningReport)
    np.testing.assert_allclose(report.forgotten, metrics.accuracy(at.f0[:1], y[:1]))
    np.testing.assert_allclose(report.retained, metrics.accuracy(at.f0[1:], y[1:]))
    np.testing.assert_allclose(report.test, metrics.accuracy(at.f0q, at.query_labels))


@row(
    *("datasets.load", "datasets.Dataset", "datasets.Dataset.take"),
    *("datasets.subset", "datasets.plus_minus_one"),
    once=True,
)
def the_embedded_digits(at):
    data = datasets.load("mnist-small")
    assert isinstance(data, datasets.Dataset)
    np.testing.assert_equal((data.x_train.shape, data.y_test.shape), ((2000, 784), (2000,)))
    two = datasets.subset(data, per_class_train=3, per_class_test=2, classes=(4, 7))
    np.testing.assert_array_equal(two.y_train, [4, 7, 4, 7, 4, 7])
    first = np.flatnonzero(data.y_train == 4)[:3]
    np.testing.assert_array_equal(two.x_train[::2], data.x_train[first])
    few = data.take(np.array([7, 3]), data.y_test == 4)
    np.testing.assert_array_equal(few.x_train, data.x_train[[7, 3]])
    np.testing.assert_array_equal(few.y_train, data.y_train[[7, 3]])
    np.testing.assert_array_equal(few.x_test, data.x_test[data.y_test == 4])
    np.testing.assert_array_equal(few.y_test, 4)
    signs = datasets.plus_minus_one(two.y_train, 4, 7)
    np.testing.assert_array_equal(signs[:, 0], [-1, 1, -1, 1, -1, 1])


@row("plan", "PlanError", "Sequences")
def what_a_kernel_costs(at):
    found = dfl.plan(at.n, at.c, at.theta.size, dtype=at.dtype.name, platform="cpu")
    np.testing.assert_equal(found["dense"].num_bytes, (at.n * at.c) ** 2 * at.dtype.itemsize)
    np.testing.assert_equal(found.chosen, "dense")
    wide = dfl.plan(at.n, at.c, structure="kronecker", dtype=at.dtype.name, platform="cpu")
    np.testing.assert_equal(wide["kronecker"].num_bytes, at.n**2 * at.dtype.itemsize)
    text = dfl.plan(at.n, at.c, at.theta.size, sequences=dfl.Sequences(7, probes=2), platform="cpu")
    np.testing.assert_equal(text["outputs"].num_bytes, (2 * at.n) ** 2 * 4)
    with raises(dfl.PlanError, "does|more than there is|fits"):
        dfl.plan(10**6, at.c, memory=10**9, disk=0, platform="cpu").require("dense")
    np.testing.assert_equal(
        dfl.plan(10**6, at.c, memory=10**9, disk=0, platform="cpu").chosen, "none"
    )


@row(
    "NotFinite", "NotConverged", "FileError", "UnsupportedStructure", "FidelityWarning", shared=True
)
def errors_in_their_places(at):
    with raises(dfl.NotFinite, "diverged|too large"):
        dfl.kernel_gradient_descent(
            at.model, at.x, at.y, loss=dfl.SquaredError(), ridge=1.0, rate=1e4, epochs=60
        )
    (at.folder / "a-file").write_text("in the way")
    with raises(dfl.FileError, "a-file"):
        at.fitted.save(at.folder / "a-file" / "model.npz")
    op = dfl.kernel_operator(at.model, at.x, kernel="matrix-free")
    with raises(dfl.UnsupportedStructure, "entries"):
        op.entries()
    assert issubclass(dfl.FidelityWarning, UserWarning)
    if at.n == 1:
        return
    s = np.concatenate([[0.0], np.ones(at.n - 1)])
    with raises(dfl.NotConverged, "on_failure"):
        dfl.fit(
            at.model, at.x, at.y, loss=dfl.SquaredError(), ridge=1e-6, weights=s,
            solver=dfl.CG(max_steps=1), max_steps=1,
        )  # fmt: skip
