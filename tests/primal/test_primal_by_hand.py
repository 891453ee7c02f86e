"""Parameter space on a linear model, against the matrices written out: the quick part."""

import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence import primal
from dualfluence.primal import _curvature
from dualfluence.primal._curvature import extreme_eigenvalues, krylov_space, make_curvature
from users import ordinary

RNG = np.random.default_rng(0)
N, P, C, RIDGE = 6, 3, 2, 0.3
X, XQ = RNG.normal(size=(N, P)), RNG.normal(size=(2, P))
Y, YQ = RNG.normal(size=(N, C)), RNG.normal(size=(2, C))
WEIGHTS = np.array([1.0, 2, 1, 3, 1, 1])
LOSS = dfl.SquaredError()


def model():
    return dfl.linearize(lambda params, x: x @ params, jnp.zeros((P, C)))


def optimum(weights, y=Y):
    w = weights / weights.sum()
    return np.linalg.solve(X.T * w @ X + RIDGE * np.eye(P), X.T * w @ y)


EXACT = [
    primal.CG(),
    primal.Arnoldi(rank=P * C),
    primal.Nystrom(rank=P * C),
    primal.KFAC(),
    primal.EKFAC(),
    primal.LiSSA(depth=4000),
]
"""On one dense layer with squared error all of them are the inverse Hessian itself."""


@pytest.mark.parametrize("solver", EXACT, ids=lambda s: type(s).__name__)
def test_scores_are_products_with_the_inverse_hessian(solver):
    damping = 0.2
    solver = type(solver)(**{**vars_of(solver), "damping": damping})
    theta = optimum(WEIGHTS)
    w = WEIGHTS / WEIGHTS.sum()
    H = X.T * w @ X + (RIDGE + damping) * np.eye(P)
    # ∇m_q·H⁻¹∇ℓ_i with gradients x ⊗ residual: the two factors apart.
    inputs = XQ @ np.linalg.solve(H, X.T)
    residuals = (XQ @ theta - YQ) @ (X @ theta - Y).T
    options = {"loss": LOSS, "ridge": RIDGE, "weights": WEIGHTS, "solver": solver}
    found = primal.attribute(model(), theta, X, Y, XQ, YQ, **options)
    np.testing.assert_allclose(found.values, w * inputs * residuals, rtol=1e-6, atol=1e-12)
    assert found.stats["converged"]


def vars_of(solver):
    names = ("rank", "depth")
    return {name: getattr(solver, name) for name in names if hasattr(solver, name)}


def test_the_effect_of_points_on_themselves_is_the_diagonal():
    theta = optimum(WEIGHTS)
    options = {"loss": LOSS, "ridge": RIDGE, "weights": WEIGHTS}
    found = primal.attribute(model(), theta, X, Y, X, Y, self_influence=True, **options)
    np.testing.assert_allclose(found.own, np.diag(found.values), rtol=1e-7)
    assert (found.own > 0).all()


EDITS = {
    "remove": (dfl.Remove([1, 4]), np.array([1.0, 0, 1, 3, 0, 1]), Y),
    "reweight": (dfl.Reweight([0], [5.0]), np.array([5.0, 2, 1, 3, 1, 1]), Y),
    "relabel": (dfl.Relabel([2], [[1.0, -1.0]]), WEIGHTS, np.vstack([Y[:2], [[1, -1]], Y[3:]])),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_squared_error_is_exact(name):
    edit, weights, y = EDITS[name]
    before = optimum(WEIGHTS)
    options = {"loss": LOSS, "ridge": RIDGE, "weights": WEIGHTS}
    update = primal.influence(model(), before, X, Y, edit, **options)
    after = optimum(weights, y)
    np.testing.assert_allclose(update.params(), after, rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(update.delta_params, after - before, rtol=1e-6, atol=1e-10)
    assert update.delta_norm == pytest.approx(np.linalg.norm(after - before), rel=1e-6)
    np.testing.assert_allclose(update.predict(XQ), XQ @ after, rtol=1e-7)
    np.testing.assert_allclose(update.delta_outputs(XQ), XQ @ (after - before), rtol=1e-6)

    def loss(theta):
        return 0.5 * ((XQ @ theta - YQ) ** 2).sum(axis=1)

    def penalty(theta):
        return RIDGE / 2 * (theta**2).sum()

    change = loss(after) - loss(before)
    np.testing.assert_allclose(update.delta_loss(XQ, YQ), change, rtol=1e-6)
    first = ((XQ @ before - YQ) * (XQ @ (after - before))).sum(axis=1)
    np.testing.assert_allclose(update.delta_loss(XQ, YQ, first_order=True), first, rtol=1e-6)
    ridge = penalty(after) - penalty(before)
    found = update.delta_loss(XQ, YQ, include_ridge=True)
    np.testing.assert_allclose(found, change + ridge, rtol=1e-6)
    both = update.delta_loss(XQ, YQ, include_ridge=True, first_order=True)
    want = first + RIDGE * (before * (after - before)).sum()
    np.testing.assert_allclose(both, want, rtol=1e-6)


@pytest.mark.parametrize("solver", EXACT, ids=lambda s: type(s).__name__)
def test_float32_parameters_and_float64_points(solver):
    """Outputs are in float64, so the solve is; answers are those of the same parameters in float64."""
    scores, steps = [], []
    for dtype in (jnp.float32, jnp.float64):
        net = dfl.linearize(ordinary(lambda params, x: x @ params), jnp.zeros((P, C), dtype))
        theta = jnp.asarray(optimum(WEIGHTS), jnp.float32).astype(dtype)
        given = {"loss": LOSS, "ridge": RIDGE, "weights": WEIGHTS, "solver": solver}
        scores.append(primal.attribute(net, theta, X, Y, XQ, YQ, **given).values)
        update = primal.influence(net, theta, X, Y, dfl.Remove([0]), **given, on_failure="report")
        steps.append(np.asarray(update.params(), float) - np.asarray(theta, float))
    np.testing.assert_allclose(scores[0], scores[1], rtol=1e-6)
    np.testing.assert_allclose(steps[0], steps[1], atol=1e-6)


def test_extreme_eigenvalues_are_moved_outwards_by_their_error_bound(monkeypatch):
    """The bound is the residual `‖Cx − μx‖` of each Ritz pair, computed here from the matrix written out."""
    w = WEIGHTS / WEIGHTS.sum()
    C = np.kron(X.T * w @ X, np.eye(2))
    curvature, _ = make_curvature(
        model(), model().params, jnp.asarray(X), jnp.asarray(Y), jnp.asarray(w), LOSS,
        jnp.asarray(RIDGE), True,
    )  # fmt: skip
    values = np.linalg.eigvalsh(C)
    found = extreme_eigenvalues(curvature, "gauss-newton")
    np.testing.assert_allclose(found, (values[0], values[-1]), rtol=1e-6, atol=1e-12)

    monkeypatch.setattr(_curvature, "EIGENVALUE_STEPS", 2)
    krylov = krylov_space(curvature, "gauss-newton", 2, 0)
    ritz, vectors = krylov.ritz()
    full = np.asarray(krylov.basis).T @ vectors
    off = np.linalg.norm(C @ full - full * ritz, axis=0)
    assert off.min() > 1e-3
    found = extreme_eigenvalues(curvature, "gauss-newton")
    np.testing.assert_allclose(found, ((ritz - off).min(), (ritz + off).max()), rtol=1e-6)
