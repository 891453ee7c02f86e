"""Every bad input gets an error that says what came and what to try."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import problems

pytestmark = pytest.mark.host

N = 20


@pytest.fixture(scope="module")
def case():
    p = problems.linear_problem(N, 3, 80, "softmax", ridge=0.05)
    return p, cases.fit(p)


@pytest.mark.parametrize(
    ("indices", "error", "words"),
    [
        ([N], ValueError, rf"must be in \[0, {N}\), got {N}. They index the training set"),
        ([-1], ValueError, "got -1"),
        ([1, 1], ValueError, "must not repeat, 1 comes 2 times"),
        ([], ValueError, "empty"),
        ([0.5], TypeError, "integers, got dtype float64"),
        (np.ones(N, bool), TypeError, "np.flatnonzero"),
        ([[1, 2]], ValueError, "one axis"),
        (np.arange(N), ValueError, "every point has been removed"),
    ],
)
def test_indices(case, indices, error, words):
    with pytest.raises(error, match=words):
        case[1].edit(dfl.Remove(indices))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda: dfl.Relabel([1, 2], [0]), "expected 2 rows"),
        (lambda: dfl.Relabel([1], [3]), r"labels must be in \[0, 3\)"),
        (lambda: dfl.Reweight([1], [-1.0]), "non-negative"),
        (lambda: dfl.Reweight([1], [np.nan]), "finite"),
        (lambda: dfl.Replace([1]), "new features"),
        (lambda: dfl.Replace([1], x=np.zeros((1, 3, 4))), "new features must have shape"),
        (lambda: dfl.Replace([1], x=np.full((1, 3, 81), np.inf)), "finite"),
        (lambda: dfl.Add(np.zeros((2, 3, 81)), [0]), "expected 2 rows"),
        (lambda: dfl.Add(np.zeros((0, 3, 81)), []), "one row per new point"),
        (lambda: [dfl.Remove([1]), dfl.Remove([1])], "not in the training set"),
    ],
)
def test_edits(case, edit, words):
    with pytest.raises(ValueError, match=words):
        case[1].edit(edit())


def test_edit_options(case):
    with pytest.raises(TypeError, match="edit"):
        case[1].edit(["remove 3"])
    with pytest.raises(ValueError, match="steps must be"):
        case[1].edit(dfl.Remove([1]), steps=0)
    with pytest.raises(ValueError, match="positive distance"):
        case[1].edit(dfl.Remove([1]), until=0.0)


def _fit(p, **changes):
    options = {
        "loss": dfl.SoftmaxCrossEntropy(),
        "ridge": 0.1,
        "x": jnp.asarray(p.x),
        "y": p.y,
        **changes,
    }
    model = options.pop("model", None)
    x, y = options.pop("x"), options.pop("y")
    return dfl.fit(model if model is not None else cases.model(p), x, y, **options)


def _poked(array, value):
    array = np.array(array, float)
    array.flat[5] = value
    return array


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (lambda p: {"ridge": 0.0}, "positive finite number, got 0.0"),
        (lambda p: {"ridge": -1.0}, "got -1.0"),
        (lambda p: {"ridge": np.inf}, "got inf"),
        (lambda p: {"x": jnp.asarray(_poked(p.x, np.nan))}, "x: every entry must be finite"),
        (lambda p: {"y": _poked(p.y, np.inf)}, "finite"),
        (lambda p: {"y": p.y[:-1]}, "y: expected 20 rows"),
        (lambda p: {"y": p.y[:, :2]}, r"shape \(n, 3\)"),
        (lambda p: {"y": np.full(N, 7)}, r"\[0, 3\), got 7"),
        (lambda p: {"weights": np.ones(3)}, "weights: expected 20 rows"),
        (lambda p: {"weights": -np.ones(N)}, "non-negative"),
        (lambda p: {"kernel": "sparse"}, "kernel must be one of"),
        (lambda p: {"sketch": dfl.Sketch(61)}, "rank must be"),
        (lambda p: {"x": jnp.zeros((0, 3, 81)), "y": np.zeros((0, 3))}, "at least one point"),
    ],
)
def test_fit_arguments(case, changes, words):
    with pytest.raises(ValueError, match=words):
        _fit(case[0], **changes(case[0]))


def test_fit_types(case):
    with pytest.raises(TypeError, match="loss"):
        _fit(case[0], loss=lambda f, y: f)
    with pytest.raises(TypeError, match="model must come from linearize"):
        _fit(case[0], model="resnet")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda K: _poked(K, np.nan), "kernel: every entry must be finite"),
        (lambda K: K + np.triu(np.ones_like(K), 1), "must be symmetric"),
        (lambda K: K - 3 * np.eye(len(K)), "positive semidefinite"),
        (lambda K: K[:-1], "expected shape"),
    ],
)
@pytest.mark.parametrize("size", [10, 700])  # all eigenvalues below 600, Lanczos above
def test_kernels_that_are_none(make, words, size):
    rng = np.random.default_rng(0)
    J = rng.normal(size=(size, size)) / np.sqrt(size)
    with pytest.raises(ValueError, match=words):
        dfl.fit(make(J @ J.T), np.arange(size), np.ones(size), loss=dfl.SquaredError(), ridge=0.1)


def test_rounding_is_not_mistaken_for_asymmetry_or_indefiniteness():
    rng = np.random.default_rng(0)
    J = rng.normal(size=(30, 3)).astype(np.float32)  # rank 3: eigenvalues of ±1e-6 by rounding
    K = (J @ J.T) * (1 + 1e-6 * rng.normal(size=(30, 30)).astype(np.float32))
    fitted = dfl.fit(K, None, np.ones((30, 1), np.float32), loss=dfl.SquaredError(), ridge=0.1)
    assert fitted.stats.converged


@pytest.mark.parametrize(
    "output", [lambda p, x: x[:, 0], lambda p, x: (p * x)[:2], lambda p, x: {"f": x}]
)
def test_apply_fn_with_a_wrong_output(output):
    model = dfl.linearize(output, jnp.ones(3))
    with pytest.raises(ValueError, match=r"must return an array of shape \(n, c\)"):
        dfl.fit(model, jnp.ones((5, 3)), np.ones((5, 3)), loss=dfl.SquaredError(), ridge=1.0)


def test_apply_fn_that_returns_nan():
    model = dfl.linearize(lambda p, x: jnp.log(x - 1) * p, jnp.ones(3))
    with pytest.raises(ValueError, match="outputs of apply_fn"):
        dfl.fit(model, jnp.zeros((5, 3)), np.ones((5, 3)), loss=dfl.SquaredError(), ridge=1.0)


def test_parameters():
    with pytest.raises(ValueError, match="no trainable parameter"):
        dfl.linearize(lambda p, x: x, {"k": 3})
    with pytest.raises(ValueError, match="NaN or inf"):
        dfl.linearize(lambda p, x: x, {"w": jnp.asarray([1.0, jnp.nan])})
    with pytest.raises(ValueError, match="anchor"):
        dfl.linearize(lambda p, x: x, jnp.ones(2), anchor="origin")


def test_a_loss_with_negative_curvature():
    concave = dfl.Convex(lambda f, y: -0.1 * jnp.sum((f - y) ** 2))
    with pytest.raises(ValueError, match="negative curvature"):
        dfl.fit(jnp.eye(5), None, np.ones((5, 1)), loss=concave, ridge=1.0)


def test_queries(case):
    p, fitted = case
    with pytest.raises(ValueError, match=r"queries: expected shape \(q, 3, 81\), got \(3, 81\)"):
        fitted.predict(p.x_q[0])
    with pytest.raises(ValueError, match="queries: every entry must be finite"):
        fitted.predict(_poked(p.x_q, np.nan))
    update = fitted.edit(dfl.Remove([0]))
    with pytest.raises(ValueError, match="3 queries but 2 targets"):
        update.delta_loss(p.x_q, p.y_q[:2])


def _on_integers(y=None, loss=None):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 9, size=(12, 2)).astype(np.uint8)
    y = rng.normal(size=(12, 1)) if y is None else y
    model = dfl.linearize(lambda w, x: (x / 9.0) @ w[:, None], jnp.zeros(2))
    return dfl.fit(model, x, y, loss=loss or dfl.SquaredError(), ridge=0.1, progress=False)


def test_values_that_integers_cannot_hold():
    fitted = _on_integers()
    np.testing.assert_array_equal(  # whole numbers are fine, whatever their dtype
        fitted.predict(np.array([[3.0, 4.0]])), fitted.predict(np.array([[3, 4]], np.uint8))
    )
    for queries in ([[0.5, 1.0]], [[300, 1]], [[-1, 1]]):
        with pytest.raises(ValueError, match=r"queries: .*fitted on uint8.*Fit it on floating"):
            fitted.predict(np.asarray(queries))
    for edit in (dfl.Add([[0.5, 1.0]], [[1.0]]), dfl.Replace([0], x=[[0.5, 1.0]])):
        with pytest.raises(ValueError, match="x: the model was fitted on uint8"):
            fitted.edit(edit)
    counts = dfl.Convex(lambda f, y: jnp.sum((f - y) ** 2))
    fitted = _on_integers(y=np.arange(12).reshape(12, 1), loss=counts)
    for edit in (dfl.Relabel([0], [[1.7]]), dfl.Add([[1, 1]], [[1.7]])):
        with pytest.raises(ValueError, match="targets: the model was fitted on int"):
            fitted.edit(edit)


def test_things_that_are_no_numbers(case):
    p, fitted = case
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 0.1}
    with pytest.raises(TypeError, match="y: expected numbers, got dtype <U"):
        dfl.fit(cases.model(p), p.x, ["cat"] * len(p.x), **options)
    with pytest.raises(TypeError, match="x: expected numbers"):
        dfl.fit(cases.model(p), np.full(p.x.shape, "a"), p.y, **options)
    with pytest.raises(TypeError, match="Relabel targets: expected numbers"):
        dfl.Relabel([0], ["cat"])
    with pytest.raises(TypeError, match="Add x: expected real numbers"):
        fitted.edit(dfl.Add(p.x_q * 1j, p.y_q))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rtol": 2.0}, "rtol must lie between 0 and 1, got 2.0"),
        ({"steps": 0}, "steps must be a whole number, at least 1, got 0"),
    ],
)
def test_options_of_edit(case, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        case[1].edit(dfl.Remove([0]), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 0.0}, "tolerance must be a positive number"),
        ({"tolerance": np.nan}, "tolerance must be a positive number"),
        ({"rtol": -1.0}, "rtol must lie between 0 and 1"),
        (
            {"weights": np.ones((5, 1))},
            r"weights must be a vector, one per point, got shape \(5, 1\)",
        ),
    ],
)
def test_options_of_fit(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        dfl.fit(jnp.eye(5), None, np.ones((5, 1)), loss=dfl.SquaredError(), ridge=1.0, **options)


def test_no_queries(case):
    p, fitted = case
    with pytest.raises(ValueError, match="queries: need at least one row"):
        fitted.predict(p.x_q[:0])


def test_a_weight_beyond_float32_is_a_weight():
    assert dfl.Reweight([1], [1e39]).weights[0] == 1e39


def test_widths_are_named():
    with pytest.raises(TypeError, match="positional"):
        dfl.infinite.Dense(64)  # pyright: ignore[reportCallIssue]


def test_a_kernel_of_the_same_points_in_another_order():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)), rng.normal(size=(40, 1))
    model = dfl.linearize(lambda w, x: x @ w[:, None], jnp.zeros(3))
    other = np.concatenate([x[:4], x[4:][::-1]])
    op = dfl.kernel_operator(model, x, progress=False)
    with pytest.raises(ValueError, match="are the points in another order"):
        dfl.fit(model, other, y, loss=dfl.SquaredError(), ridge=0.1, kernel=op)


def test_shapes_of_trained_parameters(case):
    p, fitted = case
    args = (cases.model(p), fitted.params(), jnp.asarray(p.x), p.y)
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 0.1, "progress": False}
    longer = jax.tree.map(lambda a: jnp.concatenate([a, a]), fitted.params())
    with pytest.raises(ValueError, match=r"must have the shape \(.*\) that linearize was given"):
        dfl.from_trained(args[0], longer, *args[2:], **options)


def test_queries_at_which_the_model_overflows():
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(6, 2))), rng.normal(size=(6, 1))
    model = dfl.linearize(lambda w, x: (x**3) @ w[:, None], jnp.zeros(2))
    update = dfl.fit(model, x, y, loss=dfl.SquaredError(), ridge=0.1).edit(dfl.Remove([0]))
    far = jnp.full((3, 2), 1e200)
    for read in (update.predict, update.delta_outputs, lambda q: update.delta_loss(q, y[:3])):
        with pytest.raises(ValueError, match="overflows at these queries: scale"):
            read(far)


def test_trained_params_of_another_structure(case):
    p, _ = case
    with pytest.raises(ValueError, match="tree structure"):
        dfl.from_trained(
            cases.model(p),
            {"w": jnp.zeros(80)},
            jnp.asarray(p.x),
            p.y,
            loss=dfl.SoftmaxCrossEntropy(),
            ridge=0.1,
        )


def test_cg_that_does_not_converge_is_an_error_unless_asked(case):
    p, fitted = case
    with pytest.raises(dfl.NotConverged, match="relative residual"):
        fitted.edit(dfl.Remove([1, 2]), solver=dfl.CG(max_steps=2))
    update = fitted.edit(dfl.Remove([1, 2]), solver=dfl.CG(max_steps=2), on_failure="report")
    assert not update.stats.converged
    assert update.stats.iterations == 2
    assert update.stats.residual > 1e-11
    # Half-done as it is, its certificate still covers the distance.
    true = cases.retrain(p, cases.without(p, [1, 2]))
    distance = np.linalg.norm(np.asarray(update.params()) - true)
    assert distance <= float(update.certificate.distance_bound)


def test_a_fit_that_stops_early_is_an_error_unless_asked(case):
    p, _ = case
    with pytest.raises(dfl.NotConverged):
        cases.fit(p, max_steps=1)
    assert not cases.fit(p, max_steps=1, on_failure="report").stats.converged


def test_overflow_never_comes_back_silently():
    K = jnp.eye(3, dtype=jnp.float32) * 1e38
    with pytest.raises((FloatingPointError, ValueError, dfl.NotConverged)):
        dfl.fit(K, None, np.full((3, 1), 1e30, np.float32), loss=dfl.SquaredError(), ridge=1e-6)


def test_jax_arrays_of_integers_are_fine_as_indices(case):
    update = case[1].edit(dfl.Remove(jax.numpy.asarray([1, 2])))
    assert update.stats.converged


def test_a_kernel_of_another_model_is_refused(case):
    p, fitted = case
    with pytest.raises(ValueError, match="not the kernel of this model"):
        cases.fit(p, kernel=dfl.operators.DenseOperator(2 * fitted.kernel_op.matrix, 3))
    again = cases.fit(p, kernel=fitted.kernel_op)
    np.testing.assert_allclose(again.alpha, fitted.alpha, rtol=1e-9)


def test_options_out_of_range_and_of_wrong_types_are_refused_by_name():
    """In a process of its own: here, the tests' type checker would speak first."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("refusals_worker.py"))],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["calls"] > 100
    assert found["wrong"] == []
