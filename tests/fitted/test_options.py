"""One object says how `K` is held, every call takes it, and what contradicts itself is refused."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import problems
from dualfluence.operators import (
    DenseOperator,
    KroneckerOperator,
    MatrixFreeOperator,
    MixedOperator,
)

N, C, P = 8, 2, 12
P_SQUARED = problems.linear_problem(N, C, P, "squared", ridge=0.1)
LOSS = {"loss": dfl.SquaredError(), "ridge": 0.1, "progress": False}


def trained(dtype=jnp.float64):
    """A model and the parameters at its optimum, by the library's own fit."""
    model = cases.model(P_SQUARED, dtype)
    return model, cases.fit(P_SQUARED, dtype=dtype).params()


CALLS = {
    "fit": lambda kernel: cases.fit(P_SQUARED, kernel=kernel),
    "from_trained": lambda kernel: dfl.from_trained(
        *trained(), jnp.asarray(P_SQUARED.x), P_SQUARED.y, kernel=kernel, **LOSS
    ),
    "kernel_gradient_descent": lambda kernel: dfl.kernel_gradient_descent(
        cases.model(P_SQUARED), jnp.asarray(P_SQUARED.x), P_SQUARED.y,
        rate=0.1, epochs=3, kernel=kernel, **LOSS,
    ),
    "kernel_operator": lambda kernel: dfl.kernel_operator(
        cases.model(P_SQUARED), jnp.asarray(P_SQUARED.x), kernel=kernel, progress=False
    ),
}  # fmt: skip


def answer(result):
    return getattr(result, "alpha", None) if hasattr(result, "alpha") else result.dense()


@pytest.mark.parametrize("name", CALLS)
def test_a_form_by_name_is_short_for_options(name):
    call = CALLS[name]
    for form in ("dense", "matrix-free"):
        short, long = call(form), call(dfl.KernelOptions(form=form))
        np.testing.assert_array_equal(answer(short), answer(long))
    op = call("matrix-free")
    op = getattr(op, "kernel_op", op)
    if name != "kernel_gradient_descent":
        assert isinstance(op, MatrixFreeOperator)


@pytest.mark.parametrize("name", ["fit", "from_trained", "kernel_gradient_descent"])
def test_a_kernel_that_is_there_is_taken_everywhere(name, monkeypatch):
    call, want = CALLS[name], CALLS[name](None)
    op = dfl.kernel_operator(cases.model(P_SQUARED), jnp.asarray(P_SQUARED.x), progress=False)
    model = trained()
    monkeypatch.setitem(globals(), "trained", lambda: model)  # its fit may compute a kernel
    computed = []
    original = dfl.Linearized.kernel
    monkeypatch.setattr(
        dfl.Linearized, "kernel", lambda *a, **k: (computed.append(len(a[1])), original(*a, **k))[1]
    )
    monkeypatch.setattr("dualfluence.fitted._setup.PROBES", 2)
    for kernel in (op, dfl.KernelOptions(operator=op)):
        got = call(kernel)
        np.testing.assert_array_equal(answer(got), answer(want))
        if name != "kernel_gradient_descent":
            assert got.kernel_op is op
    # The comparison with the model's own diagonal looks at two points; K of all is not computed again.
    assert computed == [2, 2]


def test_an_operator_says_the_number_of_outputs():
    def kernel(a, b):
        return a @ b.T + 1

    x = np.random.default_rng(0).normal(size=(N, 3))
    op = dfl.kernel_operator(kernel, x, kernel=dfl.KernelOptions(num_outputs=4), progress=False)
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 0.1, "progress": False}
    # Labels 0 and 1 alone would make two outputs.
    assert dfl.fit(kernel, x, np.arange(N) % 2, kernel=op, **options).num_outputs == 4


@pytest.mark.parametrize("name", ["fit", "from_trained"])
def test_float32_kernels_are_refined_by_every_fit(name):
    """Dual variables in float64 are those of the float64 problem, up to the float32 entries of K."""
    kernel, x = dfl.KernelOptions(refine=True), jnp.asarray(P_SQUARED.x, jnp.float32)
    if name == "fit":
        narrow, wide = cases.fit(P_SQUARED, dtype=jnp.float32, kernel=kernel), cases.fit(P_SQUARED)
    else:
        model, theta = trained(jnp.float32)
        narrow = dfl.from_trained(model, theta, x, P_SQUARED.y, kernel=kernel, **LOSS)
        model, theta = cases.model(P_SQUARED), jnp.asarray(theta, jnp.float64)
        wide = dfl.from_trained(model, theta, jnp.asarray(P_SQUARED.x), P_SQUARED.y, **LOSS)
    assert isinstance(narrow.kernel_op, MixedOperator)
    assert narrow.alpha.dtype == jnp.float64
    assert "residuals and dual variables in float64" in " ".join(narrow.stats.notes)
    for one, other in ((narrow, wide), (narrow.edit(dfl.Remove([1])), wide.edit(dfl.Remove([1])))):
        # Entries of K and outputs of the network round by 6e-8; α = −g/λ carries that over λ = 0.1.
        np.testing.assert_allclose(one.alpha, other.alpha, atol=2e-5)
        np.testing.assert_allclose(one.params(), other.params(), atol=1e-4)


def test_kernel_operator_multiplies_as_the_options_say():
    x = jnp.asarray(P_SQUARED.x, jnp.float32)
    model = cases.model(P_SQUARED, jnp.float32)
    refined = dfl.kernel_operator(model, x, kernel=dfl.KernelOptions(refine=True), progress=False)
    assert isinstance(refined, MixedOperator)
    coarse = dfl.KernelOptions(precision=jax.lax.Precision.DEFAULT)
    op = dfl.kernel_operator(model, x, kernel=coarse, progress=False)
    assert op.product_precision == jax.lax.Precision.DEFAULT
    # A refined operator goes on to a fit as it is.
    fitted = cases.fit(P_SQUARED, dtype=jnp.float32, kernel=refined)
    assert fitted.kernel_op is refined
    assert fitted.alpha.dtype == jnp.float64


DENSE = DenseOperator(jnp.eye(N * C), C)
MAKES = {
    "form must be one of": (ValueError, lambda: dfl.KernelOptions(form="sparse")),
    "num_outputs must be a whole number, at least 1": (
        ValueError,
        lambda: dfl.KernelOptions(num_outputs=0),
    ),
    "form='matrix-free' and operator exclude each other": (
        ValueError,
        lambda: dfl.KernelOptions(form="matrix-free", operator=DENSE),
    ),
    "num_outputs=3, but the operator has 2 outputs": (
        ValueError,
        lambda: dfl.KernelOptions(num_outputs=3, operator=DENSE),
    ),
    "Sketch: rank must be a whole number, at least 0": (ValueError, lambda: dfl.Sketch(-1)),
    "sketch: rank must be in": (ValueError, lambda: cases.fit(P_SQUARED, sketch=dfl.Sketch(17))),
    "kernel must be one of": (ValueError, lambda: cases.fit(P_SQUARED, kernel="low-rank")),
    "mesh and kernel contradict each other": (
        ValueError,
        lambda: cases.fit(P_SQUARED, kernel=DENSE, mesh=jax.devices()[:1]),
    ),
    "kernel_operator: kernel is an operator already": (
        ValueError,
        lambda: CALLS["kernel_operator"](DENSE),
    ),
    "kernel is an operator for 8 points with 2": (
        ValueError,
        lambda: dfl.fit(
            lambda a, b: a @ b.T, np.ones((5, 3)), np.ones((5, 2)), kernel=DENSE, **LOSS
        ),
    ),
    "form 'matrix-free' needs a network": (
        ValueError,
        lambda: dfl.fit(np.eye(3), None, np.ones(3), kernel="matrix-free", **LOSS),
    ),
}


@pytest.mark.parametrize("words", MAKES)
def test_what_cannot_be_meant_is_refused(words):
    error, call = MAKES[words]
    with pytest.raises(error, match=words):
        call()


def test_an_operator_on_a_mesh_places_the_fit():
    x = np.random.default_rng(0).normal(size=(6, 2))
    mesh = jax.devices()[:1]
    op = dfl.kernel_operator(lambda a, b: a @ b.T, x, mesh=mesh, progress=False)
    assert not isinstance(op, KroneckerOperator)
    alone = dfl.fit(lambda a, b: a @ b.T, x, x[:, :1], **LOSS)
    for where in ({}, {"mesh": mesh}):
        fitted = dfl.fit(lambda a, b: a @ b.T, x, x[:, :1], kernel=op, **where, **LOSS)
        # Conjugate gradients on the mesh, Cholesky alone.
        np.testing.assert_allclose(fitted.alpha, alone.alpha, atol=1e-8)


def test_fit_has_few_options_and_the_groups_are_shared():
    def named(function):
        parameters = inspect.signature(function).parameters.values()
        return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}

    assert len(named(dfl.fit)) <= 12
    for function in (dfl.from_trained, dfl.kernel_gradient_descent, dfl.kernel_operator, dfl.load):
        assert "kernel" in named(function)
    fields = set(inspect.signature(dfl.KernelOptions).parameters)
    for function in (dfl.fit, dfl.from_trained, dfl.kernel_gradient_descent, dfl.kernel_operator):
        assert not fields & named(function)


@pytest.mark.parametrize("rows", [np.array([0.0, 1.0]), np.array([[0], [1]]), np.array([0, 4])])
def test_points_of_a_matrix_are_whole_positions_in_it(rows):
    kernel = dfl.PrecomputedKernel(np.eye(4))
    with pytest.raises((TypeError, ValueError), match=r"integer positions|in \[0, 4\)"):
        kernel.kernel(rows, np.arange(2))
    with pytest.raises((TypeError, ValueError), match=r"integer positions|in \[0, 4\)"):
        kernel.kernel(np.arange(2), rows)
