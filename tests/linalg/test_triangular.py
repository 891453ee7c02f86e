"""Triangular products, solves and inverses are those of NumPy at sizes that are split unevenly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualfluence.linalg._inverse import LEAF, inverse_transpose, solve_lower, upper_mm

SIZES = (7, LEAF, 2 * LEAF + 3)


def _lower(m):
    A = np.random.default_rng(m).normal(size=(m, m)) / np.sqrt(m)
    return np.linalg.cholesky(A @ A.T + np.eye(m))


@pytest.mark.parametrize("m", SIZES)
def test_the_factor_is_solved_and_inverted_without_a_look_above_its_diagonal(m):
    with jax.enable_x64(True):
        L = _lower(m)
        v = np.random.default_rng(1).normal(size=(m, 3))
        dirty = jnp.asarray(L + np.triu(np.full((m, m), np.nan), 1))
        X = np.linalg.inv(L)
        # Condition numbers of L are below 10, so that 1e-10 is far above rounding.
        np.testing.assert_allclose(inverse_transpose(dirty), X.T, atol=1e-10)
        np.testing.assert_allclose(solve_lower(dirty, jnp.asarray(v)), X @ v, atol=1e-10)
        back = solve_lower(dirty, jnp.asarray(v), transpose=True)
        np.testing.assert_allclose(back, X.T @ v, atol=1e-10)


@pytest.mark.parametrize("m", SIZES)
def test_products_with_a_triangle_are_those_of_the_full_matrix(m):
    with jax.enable_x64(True):
        U = _lower(m).T
        v = np.random.default_rng(2).normal(size=(m, 3))
        np.testing.assert_allclose(upper_mm(jnp.asarray(U), jnp.asarray(v)), U @ v, atol=1e-10)
        back = upper_mm(jnp.asarray(U), jnp.asarray(v), transpose=True)
        np.testing.assert_allclose(back, U.T @ v, atol=1e-10)
