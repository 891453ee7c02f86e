"""Every structure of `K` answers every question, with the numbers of the dense one or a clear refusal."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from structures import STRUCTURES, C, N, Toeplitz, features, known

import dualfluence as dfl
from dualfluence import operators as ops
from dualfluence.operators._base import every_row, on_mesh

EXACT = 1e-9
"""Relative to the size of `K`: far above the rounding of any order of summation, far below an error."""


@pytest.fixture(scope="module", params=STRUCTURES, ids=str)
def case(request, tmp_path_factory):
    """Made once: a structure is frozen, whatever it is asked."""
    return STRUCTURES[request.param](tmp_path_factory.mktemp("structure"))


def matrix(case, rows=None):
    """`K` between these points as NumPy knows it."""
    K = known(case)
    rows = np.arange(N) if rows is None else rows
    return K[rows][:, :, rows].reshape(len(rows) * C, -1)


def slack(case):
    """A float32 `K` is known to its own rounding."""
    return EXACT if case.op.narrow.dtype == jnp.float64 else 1e-5


def assert_is(op, K, tol):
    """`op` multiplies like this matrix."""
    v = np.random.default_rng(2).normal(size=(len(K) // C, C))
    got = op.layout.points(op.mv(op.layout.place(v.astype(op.dtype))))
    want = (K @ v.reshape(-1)).reshape(v.shape)
    assert np.abs(np.asarray(got) - want).max() <= tol * np.abs(K).max()


def check_mm(case):
    v = np.random.default_rng(3).normal(size=(N, C, 3)).astype(case.op.dtype)
    got = case.op.mm(jnp.asarray(v))
    for k in range(3):
        np.testing.assert_allclose(got[..., k], case.op.mv(jnp.asarray(v[..., k])), atol=1e-9)


def check_diagonal(case):
    want = np.diagonal(matrix(case)).reshape(N, C)
    np.testing.assert_allclose(case.op.diagonal(), want, rtol=0, atol=slack(case) * want.max())


def check_dense(case):
    np.testing.assert_allclose(case.op.dense(), matrix(case), rtol=0, atol=slack(case))


def check_entries(case):
    K = case.op.entries()
    want = matrix(case)[::C, ::C] if case.op.is_kronecker else matrix(case)
    np.testing.assert_allclose(K, want, rtol=0, atol=slack(case))


def check_take(case):
    rows = np.asarray([4, 0, 0, 2])
    assert_is(case.op.take(rows), matrix(case, rows), slack(case))


def check_wide_mv(case):
    v = case.op.layout.place(np.random.default_rng(4).normal(size=(N, C)))
    got = case.op.wide_mv(v)
    assert got.dtype == jnp.float64
    K = matrix(case)
    want = (K @ np.asarray(v).reshape(-1)).reshape(N, C)
    np.testing.assert_allclose(got, want, rtol=0, atol=slack(case) * np.abs(K).max())


def check_with_precision(case):
    lower = case.op.with_precision(jax.lax.Precision.DEFAULT)
    assert lower.product_precision == jax.lax.Precision.DEFAULT
    assert_is(lower, matrix(case), slack(case))  # on a CPU the same products


def check_spread(case):
    layout = on_mesh(N, jax.devices()[:1])
    spread = case.op.spread(layout)
    assert spread.layout.sharding is not None
    assert_is(spread, matrix(case), slack(case))


def check_at_points(case):
    rows = np.asarray([5, 1, 2])
    where = case.op.layout.sharding
    layout = every_row(3) if where is None else on_mesh(3, where.mesh)
    moved = case.op.at_points(jnp.asarray(case.points[rows]), layout)
    assert_is(moved, matrix(case, rows), slack(case))


def columns(case, rows):
    K = known(case)[:rows, :, N : N + 1]
    return jnp.asarray(K[:, 0, :, 0] if case.op.is_kronecker else K, case.op.narrow.dtype)


def check_with_columns(case):
    grown = case.op.with_columns(columns(case, N + 2), N, N + 1)
    K = matrix(case, np.arange(N + 2))
    K[(N + 1) * C :] = K[:, (N + 1) * C :] = 0  # a spare row, with no point in it yet
    assert_is(grown, K, slack(case))


def check_with_features(case):
    phi = jnp.asarray(features()[N : N + 1])
    grown = case.op.with_features(phi, N, N + 1)
    assert_is(grown, matrix(case, np.arange(N + 1)), slack(case))


def check_cut(case):
    assert_is(case.op.cut(N - 1), matrix(case, np.arange(N - 1)), slack(case))


METHODS = {
    "mv": lambda case: assert_is(case.op, matrix(case), slack(case)),
    "mm": check_mm,
    "diagonal": check_diagonal,
    "dense": check_dense,
    "check": lambda case: case.op.check() or pytest.fail("says nothing"),
    "map_narrow": lambda case: assert_is(case.op.map_narrow(lambda op: op), matrix(case), slack(case)),
    "entries": check_entries,
    "take": check_take,
    "wide_mv": check_wide_mv,
    "with_precision": check_with_precision,
    "spread": check_spread,
    "at_points": check_at_points,
    "with_columns": check_with_columns,
    "with_features": check_with_features,
    "cut": check_cut,
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_structure_gives_the_numbers_of_the_dense_one_or_says_what_it_lacks(case, method):
    if method not in case.lacks:
        METHODS[method](case)
        return
    with pytest.raises(dfl.UnsupportedStructure) as caught:
        METHODS[method](case)
    message = str(caught.value)
    assert any(type(op).__name__ in message for op in (case.op, case.op.narrow)), message
    assert method in message, message
    assert message.count(".") >= 2, f"no way out: {message}"


def test_properties_agree_with_what_the_structure_does(case):
    op = case.op
    assert op.has_entries == ("entries" not in case.lacks)
    assert op.follows_points == ("at_points" not in case.lacks)
    assert (op.rank is not None) == ("with_features" not in case.lacks)
    assert (op.product_precision is not None) >= ("with_precision" not in case.lacks)
    assert (op.num_points, op.num_outputs) == (N, C)


def test_the_list_has_every_structure_and_every_method(tmp_path):
    def below(cls):
        return {cls}.union(*[below(sub) for sub in cls.__subclasses__()])

    ours = {
        cls.__name__
        for cls in below(ops.AbstractKernelOperator)
        if not inspect.isabstract(cls) and cls.__module__.startswith("dualfluence")
    }
    made = {type(make(tmp_path).op).__name__ for make in STRUCTURES.values()}
    assert ours <= made, "add the new structure to tests/operators/structures.py"
    public = {
        name
        for name, value in vars(ops.AbstractKernelOperator).items()
        if inspect.isfunction(inspect.unwrap(value)) and not name.startswith("_")
    }
    assert public == set(METHODS), "every method of an operator has a line in METHODS"


def test_an_unknown_type_is_checked_and_not_believed():
    """An indefinite matrix of a structure that says nothing of itself is refused by its products."""
    column = jnp.asarray([1.0, 2.0, 0.0, 0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="positive semidefinite"):
        Toeplitz(column, C).check()
    assert "random directions" in Toeplitz(jnp.asarray(0.5 ** np.arange(N)), C).check()
