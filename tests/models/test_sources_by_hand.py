"""Where a kernel may come from, and gradients of single points, against the matrix written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.models._passes import (
    check_params,
    gradient_norms,
    gradient_products,
    point_gradients,
)
from dualfluence.models._sources import as_kernel, as_source, fold_block, operator_from_array

N, C, Q = 5, 2, 3
RNG = np.random.default_rng(0)
X, XQ = RNG.normal(size=(N, 3)), RNG.normal(size=(Q, 3))
V, VQ = RNG.normal(size=(N, C)), RNG.normal(size=(Q, C))
MIX = np.array([[2.0, 0.5], [0.5, 1.0]])


def plain(a, b):
    """The same for every output."""
    return jnp.exp(-jnp.sum((a[:, None] - b[None]) ** 2, axis=2))


def full(a, b):
    """With outputs that interact."""
    return jnp.asarray(plain(a, b))[:, None, :, None] * jnp.asarray(MIX)[None, :, None, :]


def known(name, a, b):
    K = np.asarray(plain(a, b))
    return np.einsum("ij,ab->iajb", K, np.eye(C) if name == "plain" else MIX)


class Own:
    """An object with a method `kernel`."""

    def __init__(self, fn):
        self.kernel = lambda x1, x2: fn(x1, x2)


@pytest.mark.parametrize("name", ["plain", "full"])
@pytest.mark.parametrize("kind", ["function", "object", "pool"])
def test_a_source_reads_its_kernel(name, kind):
    fn = {"plain": plain, "full": full}[name]
    pool = np.concatenate([X, XQ])
    if kind == "pool":
        source = as_source(dfl.PrecomputedKernel(np.asarray(fn(pool, pool))))
        x, xq = jnp.arange(N), jnp.arange(N, N + Q)
    else:
        source = as_source(fn if kind == "function" else Own(fn))
        x, xq = jnp.asarray(X), jnp.asarray(XQ)
    K, Kq = known(name, X, X), known(name, XQ, X)
    four = name == "full"
    for found, want in (
        (source.block(x, None, False), K),
        (source.block(xq, x, False), Kq),
    ):
        np.testing.assert_allclose(found, want if four else want[:, 0, :, 0], rtol=1e-12)
    move = np.einsum("qanb,nb->qa", Kq, V)
    np.testing.assert_allclose(source.cross_mv(xq, x, jnp.asarray(V), False), move, rtol=1e-12)
    along = np.einsum("qa,qanb->qnb", VQ, Kq)
    np.testing.assert_allclose(source.along(xq, jnp.asarray(VQ), x), along, rtol=1e-12)
    op = source.operator(x, C, form="auto", progress=False)
    np.testing.assert_allclose(op.dense(), K.reshape(N * C, -1), rtol=1e-12)
    assert op.is_kronecker == (not four)
    assert source.base_outputs(x, C) is None
    assert source.num_positions == (N + Q if kind == "pool" else None)
    with pytest.raises(ValueError, match="'matrix-free' needs a network"):
        source.operator(x, C, form="matrix-free", progress=False)


@pytest.mark.parametrize(
    ("shape", "kronecker"),
    [((N, N), True), ((N, C, N, C), False), ((N * C, N * C), False)],
)
def test_an_array_is_an_operator_if_its_shape_says_so(shape, kronecker):
    op = operator_from_array(np.ones(shape), N, C)
    assert op.is_kronecker == kronecker
    assert op.dense().shape == (N * C, N * C)


@pytest.mark.parametrize("shape", [(N, C), (N, N, C, C), (N * C, N), (N, 1, N, 1), (N + 1, N + 1)])
def test_other_shapes_are_no_kernel_of_these_points(shape):
    with pytest.raises(ValueError, match=r"for 5 points and 2 outputs expected shape \(5, 5\)"):
        operator_from_array(np.ones(shape), N, C)


@pytest.mark.parametrize(
    ("shape", "good"),
    [
        ((Q, N), True), ((Q, C, N, C), True), ((N, Q), False), ((Q, C, N, 1), False),
        ((Q * C, N * C), False), ((Q, C, N), False), ((Q, N, 1), False),
    ],
)  # fmt: skip
def test_blocks_of_a_function_are_checked(shape, good):
    source = as_source(lambda a, b: np.ones(shape))
    if good:
        assert source.block(jnp.asarray(XQ), jnp.asarray(X), False).shape == shape
        return
    with pytest.raises(ValueError, match="for 3 and 5 points expected shape"):
        source.block(jnp.asarray(XQ), jnp.asarray(X), False)


def test_a_function_of_one_batch_may_return_a_flat_matrix():
    source = as_source(lambda a, b: np.ones((N * C, N * C)))
    assert source.block(jnp.asarray(X), None, False).shape == (N * C, N * C)
    for side in (N * C + 1, N - 1):
        source = as_source(lambda a, b, side=side: np.ones((side, side)))
        with pytest.raises(ValueError, match="for 5 and 5 points"):
            source.block(jnp.asarray(X), None, False)


def test_a_pool_is_square_not_empty_and_read_by_positions():
    for shape in ((2, 3), (2, 2, 2), (2, 1, 2, 2), (4,)):
        with pytest.raises(ValueError, match=r"expected shape \(n, n\)"):
            dfl.PrecomputedKernel(np.ones(shape))
    with pytest.raises(ValueError, match="at least one point"):
        dfl.PrecomputedKernel(np.ones((0, 0)))
    pool = dfl.PrecomputedKernel(np.arange(9.0).reshape(3, 3))
    np.testing.assert_array_equal(pool.kernel([2, 0], [1]), [[7.0], [1.0]])
    assert pool.kernel(np.arange(3), np.arange(3)) is pool.matrix
    for rows, error in (
        ([3], ValueError),
        ([-1], ValueError),
        ([0.5], TypeError),
        ([[0]], TypeError),
    ):
        with pytest.raises(error, match="kernel"):
            pool.kernel(np.asarray(rows), np.arange(3))
    # Points 1 and 2 of the pool; the second is purged, and reads as the first.
    left = pool.purged(jnp.array([1, 2]), np.array([True, False]), jnp.array([1, 1]))
    np.testing.assert_array_equal(left.matrix, pool.matrix[np.ix_([0, 1, 1], [0, 1, 1])])


def test_entries_are_in_a_dtype_that_solvers_take():
    for given, want in (
        (np.float64, np.float64), (np.float32, np.float32), (np.float16, np.float32),
        (np.int8, np.float64), (bool, np.float64),
    ):  # fmt: skip
        assert as_kernel(np.eye(2, dtype=given)).dtype == want


@pytest.mark.parametrize("model", [3, "cat", dfl.CG, Own])
def test_what_is_no_model_is_named(model):
    with pytest.raises(TypeError, match="model must come from linearize"):
        as_source(model)


def test_a_block_is_folded_with_and_without_outputs():
    K, Kq = known("full", XQ, X), known("plain", XQ, X)[:, 0, :, 0]
    v = jnp.asarray(VQ)
    np.testing.assert_allclose(
        fold_block(jnp.asarray(K), v), np.einsum("qa,qanb->qnb", VQ, K), rtol=1e-12
    )
    np.testing.assert_allclose(
        fold_block(jnp.asarray(Kq), v), Kq[:, :, None] * VQ[:, None], rtol=1e-12
    )


W = {"a": 0.5 * RNG.normal(size=(3, 4)), "b": 0.5 * RNG.normal(size=(4, C))}


def network(w, x):
    return jnp.tanh(x @ w["a"]) @ w["b"]


def jacobian(x):
    hidden = np.tanh(x @ W["a"])
    first = np.einsum("nd,nh,hc->ncdh", x, 1 - hidden**2, W["b"]).reshape(len(x), C, -1)
    second = np.einsum("nh,ce->nche", hidden, np.eye(C)).reshape(len(x), C, -1)
    return np.concatenate([first, second], axis=2)


@pytest.mark.parametrize("limit", [None, 1])
def test_gradients_of_single_points(monkeypatch, limit):
    """All at once, and one at a time where they are large."""
    if limit is not None:
        monkeypatch.setattr("dualfluence.models._passes.gradients_at_once", lambda model: limit)
    model = dfl.linearize(network, jax.tree.map(jnp.asarray, W))
    rows = np.einsum("nc,ncp->np", V, jacobian(X))
    x, v = jnp.asarray(X), jnp.asarray(V)
    np.testing.assert_allclose(point_gradients(model, x, v), rows, rtol=1e-11, atol=1e-13)
    vectors = RNG.normal(size=(4, rows.shape[1]))
    products = jax.jit(gradient_products)(model, x, v, jnp.asarray(vectors))
    np.testing.assert_allclose(products, vectors @ rows.T, rtol=1e-10, atol=1e-13)
    norms = jax.jit(gradient_norms)(model, x, v)
    np.testing.assert_allclose(norms, np.linalg.norm(rows, axis=1), rtol=1e-11)


def test_parameters_have_the_form_that_was_linearised():
    model = dfl.linearize(network, jax.tree.map(jnp.asarray, W))
    same = check_params("given", model, W)
    assert all(np.array_equal(same[k], W[k]) for k in W)
    for wrong, words in (
        ({"a": W["a"]}, "given"),
        ({"a": W["a"].T, "b": W["b"]}, r"\['a'\] must have the shape \(3, 4\)"),
        ({"a": W["a"] * np.nan, "b": W["b"]}, r"\['a'\] has NaN or inf"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            check_params("given", model, wrong)
