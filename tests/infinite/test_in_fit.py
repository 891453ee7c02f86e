"""Infinitely wide networks in `fit` and `edit`: the kernel is Σ ⊗ I and stays so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
from dualfluence import datasets, infinite
from dualfluence.losses import SoftmaxFactor
from dualfluence.operators import KroneckerOperator
from dualfluence.solvers import CG, Cholesky, LinearSystem, NoPreconditioner

NET = infinite.serial(
    infinite.Dense(W_std=2.0, b_std=0.1),
    infinite.Relu(),
    infinite.Dense(W_std=2.0, b_std=0.1),
    infinite.Relu(),
    infinite.Dense(W_std=2.0, b_std=0.1),
)


def digits(n):
    data = datasets.load("mnist-small")
    x = jnp.asarray(data.x_train[:n], jnp.float64)
    return x, data.y_train[:n], jnp.asarray(data.x_test[:5], jnp.float64)


def fit(x, y, solver, **options):
    loss = dfl.SoftmaxCrossEntropy()
    return dfl.fit(NET, x, y, loss=loss, ridge=1e-2, solver=solver, progress=False, **options)


@pytest.mark.thorough
def test_cholesky_and_cg_agree_on_fit_edit_and_queries():
    x, y, queries = digits(40)
    direct, iterative = fit(x, y, Cholesky()), fit(x, y, CG(), rtol=1e-12)
    assert isinstance(direct.kernel_op, KroneckerOperator)
    assert direct.kernel_op.matrix.shape == (40, 40)
    assert cases.relative(direct.alpha, iterative.alpha) < 1e-8
    gone = dfl.Remove([3, 17, 30])
    edits = [direct.edit(gone, solver=s, rtol=1e-12) for s in (Cholesky(), CG())]
    assert cases.relative(edits[0].delta_alpha, edits[1].delta_alpha) < 1e-8
    # Queries: outputs start at 0, so f(x_q) = Σ(x_q, x) α.
    want = NET.kernel(queries, x, progress=False) @ direct.alpha
    np.testing.assert_allclose(direct.predict(queries), want, rtol=1e-10)
    with pytest.raises(TypeError, match="kernel without parameters"):
        direct.params()


@pytest.mark.slow
def test_an_edit_of_many_steps_is_a_retraining():
    x, y, queries = digits(40)
    keep = np.setdiff1d(np.arange(40), [3, 17, 30])
    refit = fit(x[keep], y[keep], Cholesky(), kernel=dfl.KernelOptions(num_outputs=10))
    update = fit(x, y, Cholesky()).edit(dfl.Remove([3, 17, 30]), steps=8, solver=Cholesky())
    np.testing.assert_allclose(update.predict(queries), refit.predict(queries), atol=1e-8)


def solve_bytes(n, c, solver):
    """Working memory of one softmax solve as compiled, in units of the n x n kernel."""
    shape = jax.ShapeDtypeStruct

    def solve(S, roots, probs, b):
        op, factor = KroneckerOperator(S, c), SoftmaxFactor(roots, probs)
        ridge, rtol = jnp.asarray(0.1), jnp.asarray(1e-10)
        system = LinearSystem(op, factor, ridge, b, op.mv(b), NoPreconditioner(), rtol)
        return solver.solve(system).value

    args = [shape(s, jnp.float64) for s in ((n, n), (n, 1), (n, c), (n, c))]
    analysis = jax.jit(solve).lower(*args).compile().memory_analysis()
    return analysis.temp_size_in_bytes / (8 * n * n)


def test_memory_of_the_solves():
    # The factors, c + 1 kernels, and a few of scratch. On a GPU the choice between two ridges copies the
    # factors once, and cuBLAS takes 32 MiB, which a larger kernel makes small.
    on_cpu = jax.default_backend() == "cpu"
    n, copies = (300, 1) if on_cpu else (2000, 2)
    assert solve_bytes(n, 10, Cholesky()) < copies * 11 + 6
    assert solve_bytes(n, 10, CG()) < 2


@pytest.mark.thorough
@pytest.mark.slow
def test_cholesky_and_cg_agree_on_two_thousand_points():
    jax.config.update("jax_disable_most_optimizations", False)
    x, y, _ = digits(2000)
    fitted = fit(x, y, CG())
    assert fitted.kernel_op.matrix.shape == (2000, 2000)
    gone = dfl.Remove(np.arange(0, 2000, 10))
    edits = [fitted.edit(gone, solver=s, rtol=1e-12) for s in (Cholesky(), CG())]
    assert cases.relative(edits[0].delta_alpha, edits[1].delta_alpha) < 1e-8
    assert solve_bytes(2000, 10, Cholesky()) < 11 + 6
