"""The sketch of `K`: orthonormal without Householder's QR, and as good a preconditioner as with it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
import gates
from dualfluence.operators import DenseOperator
from dualfluence.solvers import LinearSystem, SpectralPreconditioner, spectral_preconditioner
from dualfluence.solvers._preconditioner import orthonormal

N, C, RANK = 60, 3, 24
SIZE = N * C
SPECTRA = {
    "falling": 1e3 / np.arange(1, SIZE + 1) ** 2.0,
    "slow": 1e2 / np.arange(1, SIZE + 1),
    "ill-conditioned": np.logspace(3, -9, SIZE),
    "fewer than the rank": np.r_[np.logspace(3, 0, 10), np.zeros(SIZE - 10)],
    "flat": np.ones(SIZE),
}


def kernel(spectrum, dtype):
    basis = np.linalg.qr(np.random.default_rng(0).normal(size=(SIZE, SIZE)))[0]
    K = (basis * SPECTRA[spectrum]) @ basis.T
    return (0.5 * (K + K.T)).astype(dtype)


def householder_sketch(K):
    """Nyström after one power step, by NumPy's QR: what the sketch is up to rounding."""
    Q = np.linalg.qr(K @ np.random.default_rng(1).normal(size=(SIZE, RANK)).astype(K.dtype))[0]
    KQ = K @ Q
    KQ = KQ + np.finfo(K.dtype).eps * np.linalg.norm(KQ) * Q
    gram = Q.T @ KQ
    chol = np.linalg.cholesky(0.5 * (gram + gram.T))
    features = np.linalg.solve(chol, KQ.T).T
    return SpectralPreconditioner(jnp.asarray(features.reshape(N, C, RANK), K.dtype))


def iterations(K, preconditioner, ridge):
    rng = np.random.default_rng(2)
    op, dtype = DenseOperator(jnp.asarray(K), C), K.dtype
    weights, labels = jnp.full(N, 1 / N, dtype), jnp.asarray(rng.integers(0, C, N))
    factor = dfl.SoftmaxCrossEntropy().hess_factor(jnp.zeros((N, C), dtype), labels, weights)
    b = jnp.asarray(rng.normal(size=(N, C)), dtype)
    rtol = jnp.asarray(100 * np.sqrt(np.finfo(dtype).eps) ** 1.5, dtype)
    ridge = jnp.asarray(ridge, dtype)
    system = LinearSystem(op, factor, ridge, b, op.mv(b), preconditioner, rtol)
    solution = dfl.CG().solve(system)
    assert bool(solution.converged)
    return int(solution.iterations)


FEW = {
    ("ill-conditioned", np.float32),
    ("fewer than the rank", np.float64),
}


@pytest.mark.parametrize(
    ("spectrum", "dtype"),
    gates.table(list(itertools.product(SPECTRA, (np.float32, np.float64))), FEW),
)
def test_iteration_counts_are_those_of_a_householder_sketch(spectrum, dtype):
    K = kernel(spectrum, dtype)
    op = DenseOperator(jnp.asarray(K), C)
    ours = spectral_preconditioner(op, RANK, jax.random.key(0), 1)
    assert bool(jnp.isfinite(ours.features).all())
    for ridge in (1e-1, 1e-3):
        want = iterations(K, householder_sketch(K), ridge)
        # Another draw of the directions moves the count by a few per cent.
        assert iterations(K, ours, ridge) <= 1.1 * want + 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("spectrum", ["falling", "slow", "ill-conditioned", "flat"])
def test_columns_become_orthonormal_and_keep_their_span(spectrum, dtype):
    A = kernel(spectrum, dtype) @ np.random.default_rng(1).normal(size=(SIZE, RANK)).astype(dtype)
    Q = np.asarray(orthonormal(jnp.asarray(A)), np.float64)
    eps = np.finfo(dtype).eps
    # The last shift is eps times the trace, which is RANK then, and products round a few times more.
    assert np.abs(Q.T @ Q - np.eye(RANK)).max() < 4 * RANK * eps
    basis = np.linalg.qr(A.astype(np.float64))[0][:, :4]
    # Directions of the largest columns: those of the smallest are rounding of the others.
    assert np.linalg.norm(basis - Q @ (Q.T @ basis)) < 100 * RANK * eps


def test_a_kernel_of_zeros_has_a_sketch():
    op = DenseOperator(jnp.zeros((SIZE, SIZE)), C)
    assert bool(jnp.isfinite(spectral_preconditioner(op, 5, jax.random.key(0), 1).features).all())
