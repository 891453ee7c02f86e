"""Solvers count what they do: every product with `K`, every iteration, and when more do not help."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence import operators, solvers
from dualfluence.solvers import LinearSystem, NoPreconditioner
from dualfluence.solvers._gathered import rows_that_count

N, C = 8, 2
RNG = np.random.default_rng(0)
A = RNG.normal(size=(N * C, 5))
K, B = A @ A.T, RNG.normal(size=(N, C))


class Counting(operators.AbstractKernelOperator):
    """A dense `K` that counts its products where they run."""

    matrix: jax.Array
    counts: list = eqx.field(static=True)

    num_outputs = property(lambda self: C)
    num_points = property(lambda self: N)
    num_bytes = property(lambda self: self.matrix.nbytes)
    dtype = property(lambda self: self.matrix.dtype)

    def mv(self, v):
        jax.debug.callback(lambda: self.counts.append(1))
        return (self.matrix @ v.reshape(-1)).reshape(N, C)

    def diagonal(self):
        return jnp.diagonal(self.matrix).reshape(N, C)

    def dense(self):
        return self.matrix


def solved(solver, loss, ridge=0.1, rtol=1e-10, scale=1.0):
    """The solution, and products with `K` that ran besides `K b`, which a step brings along."""
    op = Counting(jnp.asarray(scale * K), [])
    weights = jnp.full(N, 1 / N)
    factor = loss.hess_factor(jnp.zeros((N, C)), jnp.full((N, C), 0.5), weights)
    b = jnp.asarray(B)
    k_b = jnp.asarray((scale * K @ B.reshape(-1)).reshape(N, C))
    system = LinearSystem(
        op, factor, jnp.asarray(ridge), b, k_b, NoPreconditioner(), jnp.asarray(rtol)
    )
    found = jax.block_until_ready(eqx.filter_jit(lambda s: solver.solve(s))(system))
    jax.effects_barrier()
    return found, len(op.counts)


@pytest.mark.parametrize("ridge", [0.1, 1e-9])
@pytest.mark.parametrize(
    "solver",
    [
        solvers.CG(),
        solvers.CG(max_steps=2),
        solvers.Cholesky(refinements=0, max_refinements=0),
        solvers.Cholesky(),
        solvers.Cholesky(refinements=3),
    ],
    ids=repr,
)
def test_every_product_is_counted(solver, ridge):
    found, ran = solved(solver, dfl.SoftmaxCrossEntropy(), ridge)
    assert int(found.products) == ran
    if isinstance(solver, solvers.CG) and solver.max_steps == 2:
        assert (int(found.iterations), bool(found.converged)) == (2, False)
    elif isinstance(solver, solvers.CG):
        # One product more where the sum of those of CG has cancelled.
        assert int(found.products) - int(found.iterations) == (ridge < 0.1)
    else:
        assert int(found.iterations) == 0
        least = 1 + 2 * solver.refinements
        assert least <= ran <= 1 + 2 * max(solver.refinements, solver.max_refinements)


def test_rounds_of_refinement_add_their_products():
    """Beside the products of the inner solves, two for each round: right-hand side and defect."""
    loss = dfl.SquaredError()
    factor = loss.hess_factor(jnp.zeros((N, C)), jnp.zeros((N, C)), jnp.full(N, 1 / N))
    op = operators.MixedOperator(operators.DenseOperator(jnp.asarray(K, jnp.float32), C))
    b = jnp.asarray(B)
    system = LinearSystem(
        op, factor, jnp.asarray(0.1), b, op.mv(b), NoPreconditioner(), jnp.asarray(1e-12)
    )
    one, all_of_them = (
        solvers.Refined(solvers.CG(), max_rounds=rounds).solve(system) for rounds in (1, 10)
    )
    assert int(one.products) == int(one.iterations) + 2
    # A second round at least; CG itself may take a product more than iterations.
    assert int(all_of_them.products) >= int(all_of_them.iterations) + 4
    want = np.linalg.solve(0.1 * np.eye(N * C) + K.astype(np.float32).astype(float) / N, B.ravel())
    np.testing.assert_allclose(all_of_them.value.ravel(), want, rtol=1e-9)


def test_refinements_end_when_they_no_longer_help():
    """Half of the residual, at least, or that was the last one."""
    exact = solved(solvers.Cholesky(refinements=0), dfl.SquaredError(), rtol=1e-10)
    assert exact[1] == 1  # accurate at once
    never = solved(solvers.Cholesky(), dfl.SquaredError(), rtol=0.0)
    assert 3 <= never[1] <= 7
    assert bool(never[0].converged)  # as accurate as the terms of the system allow
    np.testing.assert_array_equal(never[0].reach, np.abs(never[0].value))


def test_cg_says_what_is_left():
    whole = solved(solvers.CG(), dfl.SquaredError())[0]
    assert bool(whole.converged)
    assert 0 < float(whole.residual) <= 1e-10
    W = np.eye(N * C) / N
    left = B.reshape(-1) - (0.1 * np.eye(N * C) + W @ K) @ np.asarray(whole.value).reshape(-1)
    assert np.linalg.norm(left) <= 2e-10 * np.linalg.norm(B)
    # Rank 5 and one curvature: each step takes away one eigenvalue.
    assert int(whole.iterations) <= 6
    negative = solved(solvers.CG(), dfl.SquaredError(), scale=-1e3)[0]
    assert not bool(negative.converged)


def test_a_block_has_one_of_a_few_sizes():
    for n, kept, size in (
        (16, 9, None), (16, 8, 8), (16, 7, 8), (16, 6, 6), (16, 5, 6), (16, 4, 4), (16, 3, 3),
        (16, 2, 2), (16, 1, 1), (10, 5, 5), (10, 3, 3), (11, 5, 5),
    ):  # fmt: skip
        weights = np.zeros(n)
        chosen = np.arange(n)[::-1][:kept]
        weights[chosen] = 2.0
        rows = rows_that_count(weights)
        assert (None if rows is None else rows.size) == size, (n, kept)
        if rows is not None:
            assert set(chosen) <= set(rows.tolist())
            assert (np.diff(rows) > 0).all()
