"""How far a step goes: along a parabola, where every look can be worked out by hand."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.dual import _newton
from dualfluence.problem._objective import Problem, State
from dualfluence.solvers import Solution

N, RIDGE = 4, 0.5
RNG = np.random.default_rng(0)
A = RNG.normal(size=(N, N))
K, Y = A @ A.T, RNG.normal(size=(N, 1))
W = np.full(N, 1 / N)
BEST = np.linalg.solve(RIDGE * np.eye(N) + W[:, None] * K, W[:, None] * Y)
"""The optimum of squared error, which one Newton step from zero reaches."""


def chosen(overshoot, noise=0.0, lighter=False, at_floor=False, alpha=0.0):
    """The step size taken by a step that goes so many times as far as the optimum."""
    start = alpha * BEST
    op = dfl.operators.DenseOperator(jnp.asarray(K), 1)
    problem = Problem(dfl.SquaredError(), jnp.asarray(Y), W, np.asarray(RIDGE), jnp.zeros((N, 1)))
    state = State(jnp.asarray(start), jnp.asarray(K @ start))
    point = _newton.inspect(op, problem, state, op.diagonal())
    floor = point.norms.gradient if at_floor else 0 * point.norms.gradient
    norms = dataclasses.replace(point.norms, noise=floor, rounding=0 * floor)
    point = dataclasses.replace(point, norms=norms)
    delta = overshoot * (BEST - start)

    step = Solution(
        jnp.asarray(delta), jnp.asarray(K @ delta), jnp.abs(jnp.asarray(delta)), jnp.asarray(0),
        jnp.asarray(0.0), jnp.asarray(True), jnp.asarray(1), jnp.asarray(0.0),
    )  # fmt: skip
    root = jnp.sqrt(op.diagonal())
    taken = _newton._line_search(problem, point, step, jnp.asarray(noise), jnp.asarray(lighter))
    return float(taken), bool(_newton._is_lighter(point, step, root))


@pytest.mark.parametrize(
    ("overshoot", "want"),
    [
        (1.0, 1.0),
        (0.2, 1.0),  # short of the minimum, and lower than before
        (1.9, 1.0),  # past it, and still lower
        (2.1, 0.5),  # higher than before: halved, near the minimum
        (5.0, 0.25),  # at a half the slope is 1.5 times what it was, at a quarter a quarter
        (9.0, 0.125),
        (-1.0, 0.0),  # uphill from the start
    ],
)
def test_a_step_is_cut_where_it_does_not_lower_the_objective(overshoot, want):
    assert chosen(overshoot)[0] == pytest.approx(want, abs=1e-11)


def test_where_values_are_rounding_the_slope_decides():
    """A step that has gone past the minimum by half of where it came from is taken, one farther is not."""
    assert chosen(1.4, noise=1e9)[0] == 1
    assert chosen(1.6, noise=1e9)[0] == 0.5
    assert chosen(1.6, noise=1e9, at_floor=True)[0] == 1  # the slope is rounding as well
    assert chosen(5.0, noise=0.0, at_floor=True)[0] == 0.25
    assert chosen(5.0, lighter=True)[0] == 1


def test_a_step_is_lighter_if_it_takes_half_of_alpha_away_from_a_gradient_of_rounding():
    # From twice the optimum to the optimum: exactly half is left. From 1.9 times, more than half.
    for alpha, overshoot, at_floor, lighter in (
        (2.2, 1.0, True, True),
        (1.9, 1.0, True, False),
        (2.2, 1.0, False, False),
        (3.0, 1.4, True, True),
        (3.0, 2.5, True, False),
    ):
        found = chosen(overshoot, alpha=alpha, at_floor=at_floor)[1]
        assert found == lighter, (alpha, overshoot, at_floor)


def test_a_whole_step_is_exact_retraining_of_squared_error_and_reports_itself():
    op = dfl.operators.DenseOperator(jnp.asarray(K), 1)
    problem = Problem(dfl.SquaredError(), jnp.asarray(Y), W, np.asarray(RIDGE), jnp.zeros((N, 1)))
    zero = jnp.zeros((N, 1))
    rtol, pre = jnp.asarray(1e-10), dfl.solvers.NoPreconditioner()
    diagonal = op.diagonal()
    given = (op, problem, State(zero, zero), diagonal, dfl.Cholesky(), pre, rtol)
    point, packed = _newton.influence_step(*given)
    report = _newton.StepReport.unpack(packed)[0]
    np.testing.assert_allclose(point.state.alpha, BEST, rtol=1e-12)
    np.testing.assert_allclose(point.state.k_alpha, K @ BEST, rtol=1e-12)
    assert report.converged
    assert (report.step_size, report.iterations, report.settled, report.lighter) == (
        1,
        0,
        True,
        False,
    )
    # Of the solve, and one for the certificate.
    assert report.products == 4
    np.testing.assert_allclose(report.output_size, np.abs(K @ BEST).max())
    np.testing.assert_allclose(report.kernel_size, np.sqrt(K.diagonal().max()))
    np.testing.assert_allclose(report.parameter_norm, np.sqrt(np.sum(BEST * (K @ BEST))))
    assert report.gradient_norm <= 1e-12
    assert report.jitter == 0
    made = report.certificate(RIDGE)
    assert (made.ridge, made.gradient_norm, made.noise) == (
        RIDGE,
        report.gradient_norm,
        report.noise,
    )
    start = _newton.inspect_jit(op, problem, State(zero, zero), diagonal)
    damped, packed = _newton.newton_step(
        op, problem, start, diagonal, dfl.Cholesky(), pre, rtol, jnp.asarray(1.0), jnp.asarray(True)
    )
    report = _newton.StepReport.unpack(packed)[0]
    np.testing.assert_allclose(damped.state.alpha, BEST, rtol=1e-12)
    assert not report.settled
    assert 0 < report.value_noise < 1e-12
    strong = _newton.newton_step(
        op,
        problem,
        start,
        diagonal,
        dfl.Cholesky(),
        pre,
        rtol,
        jnp.asarray(1e16),
        jnp.asarray(False),
    )
    # A ridge of 4·10¹⁶ rounding units of the trace of WK in the system: a shorter step downhill.
    eps = np.finfo(float).eps
    ridge = 4e16 * eps * np.sum(W * K.diagonal())
    want = np.linalg.solve(ridge * np.eye(N) + W[:, None] * K, W[:, None] * Y)
    np.testing.assert_allclose(strong[0].state.alpha, want, rtol=1e-9)
    report = _newton.StepReport.unpack(strong[1])[0]
    np.testing.assert_allclose(report.jitter, ridge - RIDGE, rtol=1e-9)
