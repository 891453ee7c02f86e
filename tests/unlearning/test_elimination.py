"""Small systems, symmetric and positive definite, are solved as NumPy solves them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualfluence.unlearning._elimination import LARGEST, solve_small


def positive(size, condition, seed=0):
    """A symmetric matrix with eigenvalues from `1/condition` to one."""
    basis = np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))[0]
    return basis @ np.diag(np.geomspace(1 / condition, 1, size)) @ basis.T


@pytest.mark.parametrize("condition", [1.0, 1e4, 1e10])
@pytest.mark.parametrize("size", [1, 2, 3, 10, LARGEST, LARGEST + 1])
def test_elimination_agrees_with_numpy(size, condition):
    A, B = positive(size, condition), np.random.default_rng(size).normal(size=(size, size + 1))
    got = np.asarray(jax.jit(solve_small)(jnp.asarray(A), jnp.asarray(B)))
    want = np.linalg.solve(A, B)
    # Both are stable: they differ by the condition number times rounding, here times 10.
    off = 10 * np.finfo(float).eps * np.linalg.cond(A) * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=off)


def test_unknowns_of_very_different_size_do_no_harm():
    """A diagonal from 1e-20 to one, with couplings to match."""
    scale = np.geomspace(1e-10, 1, 7)
    A = scale[:, None] * positive(7, 10.0) * scale
    got = np.asarray(solve_small(jnp.asarray(A), jnp.asarray(scale[:, None])))
    want = np.linalg.solve(positive(7, 10.0), np.ones((7, 1))) / scale[:, None]
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_a_singular_system_has_no_finite_answer():
    got = np.asarray(solve_small(jnp.ones((2, 2)), jnp.asarray([[1.0], [2.0]])))
    assert not np.isfinite(got).all()
