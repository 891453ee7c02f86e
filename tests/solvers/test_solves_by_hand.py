"""Every solver on every structure against `(λI + WK)⁻¹b` written out: the quick part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence import operators, solvers
from dualfluence.solvers import LinearSystem, NoPreconditioner, Refined, spectral_preconditioner

N, C, RIDGE = 6, 2, 0.2
RNG = np.random.default_rng(0)
A = RNG.normal(size=(N, 4))
PHI = RNG.normal(size=(N, C, 5))
SIGMA = A @ A.T
DENSE = np.einsum("iar,jbr->iajb", PHI, PHI).reshape(N * C, N * C)
WEIGHTS = np.array([1.0, 0, 2, 1, 0.5, 1]) / 5.5
OUTPUTS = RNG.normal(size=(N, C))
B = RNG.normal(size=(N, C))

STRUCTURES = {
    "dense": (lambda: operators.DenseOperator(jnp.asarray(DENSE), C), DENSE),
    "kronecker": (
        lambda: operators.KroneckerOperator(jnp.asarray(SIGMA), C),
        np.kron(SIGMA, np.eye(C)),
    ),
    "low rank": (lambda: operators.LowRankOperator(jnp.asarray(PHI)), DENSE),
}


def hessians(name):
    """Per point `w_i∇²ℓ_i`, by the textbook."""
    if name == "SquaredError":
        return [w * np.eye(C) for w in WEIGHTS]
    if name == "Logistic":
        p = 1 / (1 + np.exp(-OUTPUTS))
        return [w * np.diag(q * (1 - q)) for w, q in zip(WEIGHTS, p, strict=True)]
    p = np.exp(OUTPUTS) / np.exp(OUTPUTS).sum(axis=1, keepdims=True)
    return [w * (np.diag(q) - np.outer(q, q)) for w, q in zip(WEIGHTS, p, strict=True)]


def block_diagonal(blocks):
    W = np.zeros((N * C, N * C))
    for i, block in enumerate(blocks):
        W[i * C : (i + 1) * C, i * C : (i + 1) * C] = block
    return W


def system(op, loss, preconditioner):
    targets = jnp.full((N, C), 1 / C)
    factor = loss.hess_factor(jnp.asarray(OUTPUTS), targets, jnp.asarray(WEIGHTS))
    b = jnp.asarray(B)
    ridge = jnp.asarray(RIDGE)
    return LinearSystem(op, factor, ridge, b, op.mv(b), preconditioner, jnp.asarray(1e-10))


SOLVERS = {
    "cholesky": lambda: solvers.Cholesky(),
    "cholesky without refinement": lambda: solvers.Cholesky(refinements=0, max_refinements=0),
    "cg": lambda: solvers.CG(),
}


CASES = [
    ("dense", "SquaredError", "cholesky without refinement"),
    ("dense", "SoftmaxCrossEntropy", "cholesky"),
    ("dense", "SoftmaxCrossEntropy", "cg"),
    ("kronecker", "SquaredError", "cholesky"),
    ("kronecker", "Logistic", "cholesky"),
    ("kronecker", "SoftmaxCrossEntropy", "cholesky"),
    ("low rank", "SoftmaxCrossEntropy", "cholesky"),
    ("low rank", "Logistic", "cg"),
]
"""Each factorisation and each kind of curvature once; `operators/test_structures.py` has all of them."""


@pytest.mark.parametrize(("structure", "loss", "solver"), CASES)
def test_a_solve_is_the_inverse_written_out(structure, loss, solver):
    make, K = STRUCTURES[structure]
    made = system(make(), getattr(dfl, loss)(), NoPreconditioner())
    want = np.linalg.solve(
        RIDGE * np.eye(N * C) + block_diagonal(hessians(loss)) @ K, B.reshape(-1)
    )
    found = SOLVERS[solver]().solve(made)
    np.testing.assert_allclose(found.value, want.reshape(N, C), rtol=0, atol=1e-8)
    np.testing.assert_allclose(found.k_value, (K @ want).reshape(N, C), rtol=0, atol=1e-7)
    assert bool(found.converged)
    assert float(found.residual) < 1e-8
    assert (int(found.iterations) > 0) == (solver == "cg")


def test_a_sketch_of_full_rank_makes_cg_short_and_changes_nothing():
    make, K = STRUCTURES["dense"]
    op = make()
    sketch = spectral_preconditioner(op, 5, jax.random.key(0))
    np.testing.assert_allclose(
        np.einsum("icr,jdr->icjd", sketch.features, sketch.features).reshape(12, 12), K, atol=1e-9
    )
    loss = dfl.SoftmaxCrossEntropy()
    plain = solvers.CG().solve(system(op, loss, NoPreconditioner()))
    quick = solvers.CG().solve(system(op, loss, sketch))
    np.testing.assert_allclose(quick.value, plain.value, rtol=0, atol=1e-8)
    assert int(quick.iterations) <= 2 < int(plain.iterations)


def test_cg_that_may_not_finish_says_so():
    made = system(STRUCTURES["dense"][0](), dfl.Logistic(), NoPreconditioner())
    short = solvers.CG(max_steps=1).solve(made)
    assert not bool(short.converged)
    assert int(short.iterations) == 1


def test_points_without_weight_leave_the_solve_to_the_others():
    make, K = STRUCTURES["dense"]
    made = system(make(), dfl.SquaredError(), NoPreconditioner())
    rows = np.array([0, 2, 3, 4, 5], np.int32)
    found = solvers.Gathered(solvers.Cholesky(), rows).solve(made)
    W = block_diagonal(hessians("SquaredError"))
    want = np.linalg.solve(RIDGE * np.eye(N * C) + W @ K, B.reshape(-1)).reshape(N, C)
    np.testing.assert_allclose(found.value, want, rtol=0, atol=1e-9)
    np.testing.assert_allclose(found.value[1], B[1] / RIDGE, rtol=1e-12)


def test_refinement_of_float32_solves_reaches_float64():
    narrow = operators.DenseOperator(jnp.asarray(DENSE, jnp.float32), C)
    made = system(operators.widen(narrow), dfl.SoftmaxCrossEntropy(), NoPreconditioner())
    K = np.asarray(narrow.entries(), np.float64)  # as it is stored
    W = block_diagonal(hessians("SoftmaxCrossEntropy"))
    want = np.linalg.solve(RIDGE * np.eye(N * C) + W @ K, B.reshape(-1)).reshape(N, C)
    found = Refined(solvers.Cholesky()).solve(made)
    assert float(np.abs(found.value - want).max()) < 1e-8  # float32 alone is off by 1e-6 or so


def test_auto_takes_what_fits():
    small, large = dfl.Auto(), dfl.Auto(direct_size=N * C - 1)
    dense, kronecker = STRUCTURES["dense"][0](), STRUCTURES["kronecker"][0]()
    assert isinstance(small.choose(dense).solver, solvers.Cholesky)
    assert isinstance(large.choose(dense).solver, solvers.CG)
    # The factor of Σ ⊗ I has the side n, not n·c.
    assert isinstance(large.choose(kronecker).solver, solvers.Cholesky)
    assert isinstance(dfl.Auto(direct_size=N * C).choose(dense).solver, solvers.Cholesky)
    low = dfl.Auto(direct_size=0).choose(STRUCTURES["low rank"][0]())
    assert isinstance(low.solver, solvers.Cholesky)


def test_a_matrix_that_rounding_made_indefinite_is_shifted_by_little():
    """`λ` far below the rounding of `K`: the shift is a few units of rounding of the trace, and is told."""
    K = 1e6 * A @ A.T
    op = operators.DenseOperator(jnp.asarray(K), 1)
    b = jnp.asarray(B[:, :1])
    factor = dfl.SquaredError().hess_factor(b, b, jnp.ones(N))
    ridge = jnp.asarray(1e-16)
    made = LinearSystem(op, factor, ridge, b, op.mv(b), NoPreconditioner(), jnp.asarray(1e-10))
    found = solvers.Cholesky().solve(made)
    assert np.isfinite(np.asarray(found.value)).all()
    # By how much λ was raised: four units of rounding of the trace.
    assert 0 < float(found.jitter) <= 5 * np.finfo(float).eps * np.trace(K)
