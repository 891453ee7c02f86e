"""Solvers of `(λI + WK)Δα = b`, against a dense solve."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import dualfluence as dfl
from dualfluence import operators as ops
from dualfluence import solvers

from .table import each, row


def system_of(at, op=None, rtol=None):
    """A Newton step's system with softmax's curvature, and `λI + WK` and `b` as arrays."""
    op = (
        ops.DenseOperator(jnp.asarray(at.K.reshape(at.n * at.c, -1), at.dtype), at.c)
        if op is None
        else op
    )
    f, b = at.array(at.n, at.c, seed=31), at.array(at.n, at.c, seed=32)
    w = jnp.asarray(np.linspace(0.5, 2, at.n) / at.n, at.dtype)
    targets = at.loss.prepare_targets(at.classes, at.c, at.dtype)
    factor = at.loss.hess_factor(f, targets, w)
    W = np.asarray(
        factor.hess_mv(jnp.eye(at.n * at.c, dtype=at.dtype).reshape(at.n, at.c, -1)), float
    )
    A = at.ridge * np.eye(at.n * at.c) + W.reshape(at.n * at.c, -1) @ at.K.reshape(at.n * at.c, -1)
    system = solvers.LinearSystem(
        op, factor, jnp.asarray(at.ridge, at.dtype), b, op.mv(b), solvers.NoPreconditioner(),
        jnp.asarray(at.rtol / 50 if rtol is None else rtol, at.dtype),
    )  # fmt: skip
    return system, A, np.asarray(b, float).ravel()


@row(*each("", "CG Cholesky Auto", ""), "CG.solve", "CG.describe", "Cholesky.solve")
@row("Cholesky.describe", "Auto.choose", "solvers.Choice", "solvers.resolve")
@row(*each("solvers", "AbstractDualSolver", "solve describe"), "solvers.Solution")
@row(*each("solvers", "LinearSystem", "defect relative_residual is_stable"))
@row(
    *each("solvers", "NoPreconditioner", "inverse sketch on_rows"),
    *each("solvers", "Gathered", "solve describe"),
)
def solves_in_data_space(at):
    system, A, b = system_of(at)
    want = np.linalg.solve(A, b).reshape(at.n, at.c)
    rows = np.arange(at.n, dtype=np.int32)
    chosen = solvers.resolve(dfl.Auto(), system.op)
    assert isinstance(chosen, solvers.Choice)
    for solver in (dfl.CG(), dfl.Cholesky(), chosen.solver, solvers.Gathered(dfl.Cholesky(), rows)):
        assert isinstance(solver, solvers.AbstractDualSolver)
        found = eqx.filter_jit(solver.solve)(system)
        assert isinstance(found, solvers.Solution)
        at.close(found.value, want, 5, what=repr(solver))
        at.close(
            found.k_value, (at.K.reshape(at.n * at.c, -1) @ want.ravel()).reshape(want.shape), 10
        )
        assert bool(found.converged)
        assert float(system.relative_residual(found.value, found.k_value)) < 5 * at.rtol
        assert bool(system.is_stable(found.value, found.k_value))
        assert type(solver).__name__ in solver.describe(system.op) or "Gathered" in repr(solver)
    at.close(
        system.defect(jnp.zeros_like(system.b), jnp.zeros_like(system.b)), b.reshape(want.shape)
    )
    np.testing.assert_array_equal(
        solvers.NoPreconditioner().inverse(system.factor, system.ridge)(at.y), at.y
    )
    nothing = solvers.NoPreconditioner().on_rows(lambda rows: rows[:1])
    assert nothing.sketch is None
    assert isinstance(dfl.Auto().choose(system.op).reason, str)
    assert isinstance(dfl.Auto(direct_size=0).choose(system.op).solver, dfl.CG)


@row("solvers.conjugate_gradients", "solvers.spectral_preconditioner")
@row(*each("solvers", "AbstractPreconditioner SpectralPreconditioner", "inverse sketch on_rows"))
@row(*each("solvers", "Refined", "solve describe"))
def parts_of_solvers(at):
    A = at.K.reshape(at.n * at.c, -1) + np.eye(at.n * at.c)
    M, b = jnp.asarray(A, at.dtype), at.array(at.n * at.c, seed=33)
    found = solvers.conjugate_gradients(
        lambda p: (M @ p, 2 * p), b, rtol=at.rtol / 20, max_steps=1000
    )
    want = np.linalg.solve(A, np.asarray(b, float))
    at.close(found.x, want, 2)
    at.close(found.extra, 2 * want, 2)
    system, _, _ = system_of(at)
    rank = at.n * at.c
    made = solvers.spectral_preconditioner(system.op, rank, jax.random.key(0))
    assert isinstance(made, solvers.SpectralPreconditioner)
    assert isinstance(made, solvers.AbstractPreconditioner)
    # Of full rank it is the inverse of λI + RᵀKR itself, up to the rounding of the sketch.
    apply = made.inverse(system.factor, system.ridge)
    v = at.array(at.n, at.c, seed=34)
    B_v = at.ridge * v + system.factor.rmv(system.op.mv(system.factor.mv(v)))
    at.close(apply(B_v), v, 20)
    turned = made.on_rows(lambda rows: rows[::-1])
    np.testing.assert_array_equal(turned.sketch, np.asarray(made.sketch)[::-1])
    inner = solvers.Refined(dfl.Cholesky())
    assert "refined" in inner.describe(system.op)
    if at.bits == 64:
        narrow = ops.DenseOperator(jnp.asarray(system.op.dense(), jnp.float32), at.c)
        wide, _, _ = system_of(at, ops.widen(narrow))
        found = eqx.filter_jit(inner.solve)(wide)
        assert bool(found.converged)
        assert float(wide.relative_residual(found.value, found.k_value)) <= at.rtol
