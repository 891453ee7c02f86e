"""Runs that end at the floor of rounding: not before it, and not far above it."""

import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl

FAR, RIDGE = 7e7, 1.5e-7


def apply(theta, x):
    return jnp.matmul(x, theta)


def radial(f, y):
    """`√(1 + |f − y|²)`: its Newton steps go past the minimum by as much as they came from before it."""
    return jnp.sqrt(1 + jnp.sum((f - y) ** 2))


def _model(p, dtype):
    return dfl.linearize(apply, jnp.zeros(p, dtype))


@pytest.mark.parametrize("seed", [6, 7, 17, 29])
def test_steps_do_not_circle_where_the_objective_is_all_rounding(seed):
    """One target is so far away that float32 rounds the objective by more than all there is to gain."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-3, 4, (4, 1, 2)).astype("float32")
    y = np.array([[FAR], [1.0], [-2.0], [3.0]], "float32")
    loss = dfl.Convex(radial, "radial")
    fitted = dfl.fit(
        _model(2, "float32"), x, y, loss=loss, ridge=0.1, solver=dfl.Cholesky(), progress=False
    )
    theta, x, y = np.asarray(fitted.params(), float), x[:, 0].astype(float), y[:, 0].astype(float)
    r = x @ theta - y
    gradient = x.T @ (r / np.sqrt(1 + r**2)) / 4 + 0.1 * theta
    # A thousand units of float32 of the gradient's terms, which are of order one.
    assert np.linalg.norm(gradient) <= 1e-4
    assert fitted.stats.steps <= 20


def test_points_that_pull_against_each_other_are_settled_before_a_run_ends():
    """Two equal points with opposite targets: without them `θ` is the same and `α` far smaller."""
    phi = np.random.default_rng(0).normal(size=8)
    x, y = np.broadcast_to(phi, (5, 1, 8)).copy(), np.array([[41.0], [-39.0], [1], [1], [1]])
    model, solver = _model(8, "float64"), dfl.Cholesky()

    def fit(rows):
        loss = dfl.SquaredError()
        return dfl.fit(
            model, x[rows], y[rows], loss=loss, ridge=1e-6, solver=solver, progress=False
        )

    until = 2 * fit(slice(2, None)).certificate.distance_bound
    fitted = fit(slice(None))
    assert fitted.certificate.distance_bound > 10 * until
    update = fitted.edit(dfl.Remove([0, 1]), until=until, solver=solver, progress=False)
    true = phi / (phi @ phi + 1e-6)
    assert np.linalg.norm(np.asarray(update.params()) - true) <= until


@pytest.mark.parametrize("seed", [38, 56, 59])
def test_points_that_pulled_against_each_other_are_let_go_of_in_few_steps(seed):
    """Nearly equal points: the step that removes them rounds by more than the objective may rise."""
    rng = np.random.default_rng(seed)
    phi = rng.normal(size=8)
    x = np.broadcast_to(phi, (5, 1, 8)) * (1 + 1e-16 * rng.normal(size=(5, 1, 8)))
    y, solver = np.array([[41.0], [-39.0], [1], [1], [1]]), dfl.Cholesky()
    options = {"loss": dfl.SquaredError(), "ridge": 1e-5, "solver": solver, "progress": False}
    model = _model(8, "float64")
    fresh = dfl.fit(model, x[2:], y[2:], **options).certificate
    until = 2 * (fresh.gradient_norm + fresh.noise) / fresh.ridge  # what a gradient there rounds by
    fitted = dfl.fit(model, x, y, **options)
    update = fitted.edit(dfl.Remove([0, 1]), until=until, solver=solver, progress=False)
    assert update.stats.steps <= 5
    assert np.linalg.norm(np.asarray(update.params()) - phi / (phi @ phi + 1e-5)) <= until


def test_a_number_of_steps_is_refused_for_its_last_solve_alone():
    """In float32 at λ = 1e-8 the second of three steps is solved badly, and the third well."""
    phi = np.array([[2, -1, 4], [3, 4, -2], [4, 0, 3]], "float32")
    model = dfl.PrecomputedKernel(jnp.asarray(phi @ phi.T)[:, None, :, None])
    y, solver = np.array([[1], [0]], "float32"), dfl.Cholesky()
    fitted = dfl.fit(
        model, [0, 1], y, loss=dfl.Logistic(), ridge=1.0234e-8, solver=solver, progress=False
    )
    edits = [dfl.Replace([1], x=[2]), dfl.Relabel([2], np.zeros((1, 1), "float32"))]
    update = fitted.edit(edits, steps=3, solver=solver, progress=False)
    assert update.stats.converged
    assert update.stats.steps == 3


@pytest.mark.parametrize("seed", [2, 3, 35, 59])
def test_a_shortened_step_does_not_end_a_run_at_the_floor(seed):
    """Equal points in float32 at a small ridge: steps are halved many times, and `α` rounds by as much
    as it was large, until one is taken as a whole."""
    fitted = _separated(seed)
    off = np.linalg.norm(np.asarray(fitted.params(), float) - _separated_truth(fitted))
    assert off <= fitted.certificate.distance_bound
    assert fitted.certificate.relative_bound <= 0.1


def _separated_truth(fitted):
    """Equal points leave one number: `θ = s·v` with `λs = Σ w_i σ(−d_i − s|v|²)`, by bisection."""
    x, w = np.asarray(fitted.x, float), np.asarray(fitted.data.weights, float)
    v, d = x[0, 0, :-1] - x[0, 1, :-1], x[:, 0, -1] - x[:, 1, -1]
    low, high = 0.0, 1 / RIDGE
    for _ in range(200):
        s = (low + high) / 2
        above = RIDGE * s > w @ (0.5 - 0.5 * np.tanh((d + s * (v @ v)) / 2))
        low, high = (low, s) if above else (s, high)
    return s * v


def test_a_run_that_cannot_move_says_so_soon():
    """No step lowers the objective, however much it is damped: there is nothing to wait for."""
    assert _separated(53, on_failure="report").stats.steps <= 100


def _separated(seed, **options):
    rng = np.random.default_rng(seed)
    phi = np.broadcast_to(rng.integers(-4, 5, (1, 2, 3)) * 4.0, (6, 2, 3))
    x = np.concatenate([phi, 4.0 * rng.integers(-6, 7, (6, 2, 1))], -1).astype("float32")
    weights = 10 ** rng.uniform(-6, 6, 6)
    model = dfl.linearize(
        lambda theta, x: jnp.matmul(x[..., :-1], theta) + x[..., -1], jnp.zeros(3, "float32")
    )
    return dfl.fit(
        model,
        x,
        np.zeros(6, int),
        loss=dfl.SoftmaxCrossEntropy(),
        ridge=RIDGE,
        weights=weights,
        solver=dfl.Cholesky(),
        progress=False,
        **options,
    )
