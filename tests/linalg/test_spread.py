"""The factor that is spread over devices, here on one and on two; `tests/scale` has it on eight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualfluence.linalg import _spread, spread_cholesky
from dualfluence.operators._base import as_mesh


@pytest.mark.parametrize(("size", "devices"), [(1, 1), (5, 1), (33, 1), (2, 2), (38, 2)])
def test_solves_and_halves_are_those_of_the_matrix(size, devices, monkeypatch):
    if len(jax.devices()) < devices:
        pytest.skip("There is one device.")
    monkeypatch.setattr(_spread, "BLOCK", 4)
    rng = np.random.default_rng(size)
    M, v = rng.normal(size=(size, size)), rng.normal(size=(size, 2))
    A, mesh = M @ M.T, as_mesh(jax.devices()[:devices])
    factor = spread_cholesky(jnp.asarray(A), jnp.asarray(0.1), mesh)
    solved, half = jax.jit(lambda f, v: (f.solve(v), f.half(v)))(factor, jnp.asarray(v))
    want = np.linalg.solve(A + 0.1 * np.eye(size), v)
    # The condition number is below 1e4: twelve digits are left.
    np.testing.assert_allclose(solved, want, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(half.T @ half, v.T @ want, rtol=1e-10, atol=1e-12)


def test_what_is_not_definite_has_no_factor():
    factor = spread_cholesky(-jnp.eye(5), jnp.asarray(0.1), as_mesh(jax.devices()[:1]))
    assert np.isnan(np.asarray(factor.factor)).any()
