"""Lanczos' method and explicit inverses against NumPy's decompositions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualfluence.linalg import (
    CholeskyInverse,
    CholeskySolves,
    SpectralInverse,
    inverse_transpose,
    lanczos,
    shifted_cholesky,
    spectrum,
)

SIZE = 40


def symmetric(values):
    Q = np.linalg.qr(np.random.default_rng(0).normal(size=(SIZE, SIZE)))[0]
    return (Q * values) @ Q.T


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("distinct", [1, 5, SIZE])
def test_a_full_run_finds_every_eigenvalue_as_often_as_it_occurs(distinct, dtype):
    values = np.sort(np.resize(np.linspace(-1, 3, distinct), SIZE))
    A = jnp.asarray(symmetric(values), dtype)
    space = jax.jit(lambda: lanczos(lambda v: A @ v, SIZE, A.dtype, SIZE, 0))()
    found, vectors = space.ritz()
    slack = 300 * np.finfo(dtype).eps
    np.testing.assert_allclose(found, values, atol=slack)
    basis = np.asarray(space.basis, float)
    np.testing.assert_allclose(basis @ basis.T, np.eye(SIZE), atol=slack)
    X = basis.T @ vectors
    np.testing.assert_allclose(symmetric(values) @ X, X * found, atol=slack)


def test_few_steps_find_the_ends_of_the_spectrum():
    values = np.concatenate([[-5.0], np.linspace(0, 1, SIZE - 2), [9.0]])
    A = jnp.asarray(symmetric(values))
    found = jax.jit(lambda: lanczos(lambda v: A @ v, SIZE, A.dtype, 12, 3))().ritz()[0]
    np.testing.assert_allclose(found[[0, -1]], [-5, 9], rtol=1e-6)


def test_products_that_overflow_are_not_a_number():
    found = lanczos(lambda v: v * jnp.inf, 4, jnp.zeros(()).dtype, 3, 0).ritz()[0]
    assert np.isnan(found).all()


@pytest.mark.parametrize("form", ["solves", "inverse", "spectral"])
def test_halves_of_an_explicit_inverse(form):
    A, lam = symmetric(np.linspace(0, 2, SIZE)), 0.3
    chol = shifted_cholesky(jnp.asarray(A), jnp.asarray(lam))
    made = {
        "solves": lambda: CholeskySolves(chol),
        "inverse": lambda: CholeskyInverse(inverse_transpose(chol)),
        "spectral": lambda: SpectralInverse(*spectrum(jnp.asarray(A))),
    }[form]()
    want = np.linalg.inv(A + lam * np.eye(SIZE))
    ridge = jnp.full(SIZE, lam)
    whole = made.back(made.half(jnp.eye(SIZE), ridge), ridge)
    np.testing.assert_allclose(whole, want, atol=1e-12)
    X = np.asarray(made.columns(jnp.array([3, 0]), 2, ridge[:2])).reshape(4, SIZE)
    rows = [6, 7, 0, 1]
    np.testing.assert_allclose(X @ X.T, want[np.ix_(rows, rows)], atol=1e-12)
