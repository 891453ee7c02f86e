"""Small systems are solved as NumPy solves them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualfluence.unlearning._elimination import LARGEST, solve_small


@pytest.mark.parametrize("size", [1, 2, 3, 10, LARGEST, LARGEST + 1])
def test_elimination_agrees_with_numpy(size):
    rng = np.random.default_rng(size)
    A, B = rng.normal(size=(size, size)), rng.normal(size=(size, size + 1))
    got = np.asarray(jax.jit(solve_small)(jnp.asarray(A), jnp.asarray(B)))
    want = np.linalg.solve(A, B)
    # Both are backward stable: they differ by the condition number times rounding, here times 10.
    off = 10 * np.finfo(float).eps * np.linalg.cond(A) * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=off)


@pytest.mark.parametrize("order", [[1, 0, 2], [2, 0, 1], [1, 2, 0]])
def test_rows_in_any_order_are_put_in_place(order):
    """Every pivot of a permutation is zero until its row is found."""
    A = np.eye(3)[order] * np.array([[2.0], [-3.0], [0.5]])
    B = np.arange(6.0).reshape(3, 2)
    got = np.asarray(solve_small(jnp.asarray(A), jnp.asarray(B)))
    np.testing.assert_array_equal(A @ got, B)


def test_a_tiny_pivot_does_no_harm():
    """Without pivoting the answer would lose all its digits."""
    A, B = np.array([[1e-20, 1.0], [1.0, 1.0]]), np.array([[1.0], [2.0]])
    got = np.asarray(solve_small(jnp.asarray(A), jnp.asarray(B)))
    np.testing.assert_allclose(got, [[1.0], [1.0]], rtol=1e-15)


def test_a_singular_system_has_no_finite_answer():
    got = np.asarray(solve_small(jnp.ones((2, 2)), jnp.asarray([[1.0], [2.0]])))
    assert not np.isfinite(got).all()
