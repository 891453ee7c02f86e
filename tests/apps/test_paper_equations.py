"""Every numbered equation and proposition of the paper, against dense algebra and automatic differentiation.

The truth is written from the paper's definitions: means over sets of points, with the ridge term in each.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.apps.paper import FullDataHessian, PaperDirect, PaperFull, remove
from dualfluence.fitted._descent import kernel_gradient_descent

pytestmark = pytest.mark.host

N, C, RIDGE = 5, 2, 0.07
GONE, KEPT = np.array([1, 3]), np.array([0, 2, 4])
CLOSE = {"rtol": 1e-8, "atol": 1e-11}
"""The fit stops at a gradient of 1e-12, and systems here have condition numbers below 1e4."""


class Case:
    """A small network, linearised where it starts, trained with softmax; everything dense."""

    def __init__(self):
        rng = np.random.default_rng(3)
        self.x, self.x_t = rng.normal(size=(N, 3)), rng.normal(size=(4, 3))
        self.y, self.y_t = rng.integers(0, C, N), rng.integers(0, C, 4)
        shapes = {"V": (3, 7), "U": (7, C)}
        params = {k: jnp.asarray(rng.normal(size=v)) for k, v in shapes.items()}
        self.start, self.unravel = jax.flatten_util.ravel_pytree(params)
        apply_fn = lambda p, x: jnp.tanh(x @ p["V"]) @ p["U"]  # noqa: E731
        self.raw = lambda theta, x: apply_fn(self.unravel(theta), x)
        self.model = dfl.linearize(apply_fn, params)
        self.fitted = dfl.fit(
            self.model, self.x, self.y, loss=dfl.SoftmaxCrossEntropy(), ridge=RIDGE,
            tolerance=1e-12, on_failure="report", progress=False,
        )  # fmt: skip
        self.theta = self.flat(self.fitted.params())
        self.alpha = np.asarray(self.fitted.alpha).reshape(-1)
        self.J, self.J_t = (np.asarray(self.jacobian(v)) for v in (self.x, self.x_t))
        self.K = self.J @ self.J.T

    def flat(self, params):
        return jax.flatten_util.ravel_pytree(params)[0]

    def jacobian(self, x):
        return jax.jacobian(self.raw)(self.start, x).reshape(len(x) * C, -1)

    def linear(self, theta, x):
        """`f_lin`."""
        moved = self.jacobian(x) @ (theta - self.start)
        return self.raw(self.start, x) + moved.reshape(len(x), C)

    def risk(self, theta, rows, x=None, y=None):
        """The paper's mean over a set of points, ridge included."""
        x, y = (self.x, self.y) if x is None else (x, y)
        logits = jax.nn.log_softmax(self.linear(theta, x[rows]))
        mean = -jnp.mean(logits[jnp.arange(len(rows)), y[rows]])
        return mean + RIDGE / 2 * jnp.sum((theta - self.start) ** 2)

    def dual_risk(self, delta, rows, x=None, y=None):
        """The paper's objective in `Δα`."""
        return self.risk(self.theta + self.J.T @ delta, rows, x, y)

    @property
    def share(self):
        return len(GONE) / N


@pytest.fixture(scope="module")
def case():
    return Case()


@pytest.fixture(scope="module")
def primal(case):
    return dfl.primal.influence(
        case.model, case.fitted.params(), case.x, case.y, dfl.Remove(GONE),
        loss=dfl.SoftmaxCrossEntropy(), ridge=RIDGE, linearised=True, rtol=1e-13,
    )  # fmt: skip


def step_in_parameters(case):
    hessian = jax.hessian(case.risk)(case.theta, np.arange(N))
    hessian = hessian - case.share * jax.hessian(case.risk)(case.theta, GONE)
    return case.share * np.linalg.solve(hessian, jax.grad(case.risk)(case.theta, GONE))


def step_in_data(case):
    zero, everything = jnp.zeros(N * C), np.arange(N)
    hessian = jax.hessian(case.dual_risk)(zero, everything)
    hessian = hessian - case.share * jax.hessian(case.dual_risk)(zero, GONE)
    return case.share * np.linalg.solve(hessian, jax.grad(case.dual_risk)(zero, GONE))


def rows(points):
    return (points[:, None] * C + np.arange(C)).reshape(-1)


@pytest.mark.thorough
def test_equations_1_and_4_parameter_space(case, primal):
    got = case.flat(primal.params()) - case.theta
    np.testing.assert_allclose(got, step_in_parameters(case), **CLOSE)


@pytest.mark.thorough
def test_equations_2_and_3_outputs_and_loss_in_parameter_space(case, primal):
    step = step_in_parameters(case)
    np.testing.assert_allclose(
        np.asarray(primal.delta_outputs(case.x_t)).reshape(-1), case.J_t @ step, **CLOSE
    )
    got = primal.delta_loss(case.x_t, case.y_t, first_order=True, include_ridge=True)
    want = [
        jax.grad(case.risk)(case.theta, np.array([t]), case.x_t, case.y_t) @ step for t in range(4)
    ]
    np.testing.assert_allclose(got, want, **CLOSE)


def retrained(case):
    update = case.fitted.edit(dfl.Remove(GONE), until=1e-11, on_failure="report", progress=False)
    gradient = jax.grad(case.risk)(case.flat(update.params()), KEPT)
    assert float(jnp.linalg.norm(gradient)) < 1e-10
    return update


@pytest.mark.thorough
def test_proposition_3_1_retraining_stays_in_the_span(case):
    update = retrained(case)
    delta = np.asarray(update.delta_alpha).reshape(-1)
    moved = case.flat(update.params()) - case.theta
    np.testing.assert_allclose(moved, case.J.T @ delta, **CLOSE)
    per_point = lambda f, y: -jax.nn.log_softmax(f)[y]  # noqa: E731
    f = case.linear(case.theta, case.x)
    known = [jax.grad(per_point)(f[i], case.y[i]) / (N * RIDGE) for i in GONE]
    np.testing.assert_allclose(delta[rows(GONE)], np.concatenate(known), rtol=1e-7, atol=1e-10)


@pytest.mark.thorough
def test_propositions_3_2_and_3_3_the_dual_minimum_is_that_in_parameters(case):
    assert np.linalg.matrix_rank(case.J) == N * C
    moved = case.flat(retrained(case).params()) - case.theta
    delta = np.linalg.solve(case.K, case.J @ moved)  # φ⁻¹
    np.testing.assert_allclose(case.J.T @ delta, moved, rtol=1e-7, atol=1e-10)
    assert float(jnp.linalg.norm(jax.grad(case.dual_risk)(delta, KEPT))) < 1e-9
    eigenvalues = np.linalg.eigvalsh(jax.hessian(case.dual_risk)(delta, KEPT))
    assert eigenvalues.min() > 0  # strictly convex: no other minimum


def test_without_full_rank_every_dual_minimum_gives_the_same_parameters():
    """Four points and two parameters: `Δα` is not determined, `θ` is."""
    rng = np.random.default_rng(0)
    Phi, y = rng.normal(size=(4, 2)), rng.normal(size=(4, 1))
    model = dfl.linearize(lambda theta, x: x @ theta, jnp.zeros((2, 1)))
    fitted = dfl.fit(model, Phi, y, loss=dfl.SquaredError(), ridge=0.2, progress=False)
    update = fitted.edit(dfl.Remove([0]), progress=False)
    null = np.linalg.svd(Phi.T)[2][2:].T
    other = np.asarray(update.delta_alpha) + null @ rng.normal(size=(2, 1))
    A = Phi[1:].T @ Phi[1:] / 3 + 0.2 * np.eye(2)
    want = np.linalg.solve(A, Phi[1:].T @ y[1:] / 3)
    np.testing.assert_allclose(np.asarray(fitted.params()) + Phi.T @ other, want, rtol=1e-9)


@pytest.mark.thorough
def test_equation_5_the_whole_system(case):
    got = remove(case.fitted, dfl.Remove(GONE), form=PaperFull(rtol=1e-12), on_failure="report")
    want = step_in_data(case)
    # Conjugate gradients to 1e-12 on a system of condition 1e5.
    np.testing.assert_allclose(np.asarray(got.delta_alpha).reshape(-1), want, rtol=1e-5, atol=1e-8)
    ours = case.fitted.edit(dfl.Remove(GONE), progress=False)
    np.testing.assert_allclose(np.asarray(ours.delta_alpha).reshape(-1), want, **CLOSE)


@pytest.mark.thorough
def test_the_hessian_of_all_points_is_the_papers_approximation(case):
    """In parameters, as the paper states it after eq. 1; less exact than the Hessian of the retained."""
    hessian = jax.hessian(case.risk)(case.theta, np.arange(N))
    want = case.share * np.linalg.solve(hessian, jax.grad(case.risk)(case.theta, GONE))
    update = remove(case.fitted, dfl.Remove(GONE), form=FullDataHessian(rtol=1e-12))
    got = case.flat(update.params()) - case.theta
    np.testing.assert_allclose(got, want, **CLOSE)
    true = case.flat(retrained(case).params()) - case.theta
    assert np.linalg.norm(step_in_parameters(case) - true) < np.linalg.norm(want - true)


@pytest.mark.parametrize("n", [2, 5, 33])
def test_the_hessian_of_all_points_for_squared_error(n):
    rng = np.random.default_rng(n)
    Phi, y = rng.normal(size=(n, 4)), rng.normal(size=(n, 1))
    model = dfl.linearize(lambda theta, x: x @ theta, jnp.zeros((4, 1)))
    fitted = dfl.fit(model, Phi, y, loss=dfl.SquaredError(), ridge=0.3, progress=False)
    H = Phi.T @ Phi / n + 0.3 * np.eye(4)
    theta = np.linalg.solve(H, Phi.T @ y / n)
    gradient = Phi[:1].T @ (Phi[:1] @ theta - y[:1]) + 0.3 * theta
    update = remove(fitted, dfl.Remove([0]), form=FullDataHessian())
    want = theta + np.linalg.solve(H, gradient) / n
    np.testing.assert_allclose(update.params(), want, rtol=1e-7)  # conjugate gradients to 1e-8


@pytest.mark.thorough
def test_equations_6_and_7_and_a_1_and_a_2_gradient_and_hessian(case):
    """The closed forms of both, at zero and elsewhere."""

    def parts(delta, points):
        f = case.linear(case.theta + case.J.T @ delta, case.x[points])
        p = jax.nn.softmax(f)
        g = np.asarray(p - np.eye(C)[case.y[points]]).reshape(-1) / len(points)
        W = np.zeros((len(points) * C, len(points) * C))
        for i, q in enumerate(np.asarray(p)):
            W[C * i : C * i + C, C * i : C * i + C] = (np.diag(q) - np.outer(q, q)) / len(points)
        return g, W, case.K[rows(points)]

    some = np.random.default_rng(1).normal(size=N * C) / 5
    for delta in (np.zeros(N * C), some):
        for points in (GONE, KEPT, np.arange(N)):
            g, W, K_i = parts(delta, points)
            gradient = (
                K_i.T @ g + RIDGE * case.J @ (case.theta - case.start) + RIDGE * case.K @ delta
            )
            hessian = K_i.T @ W @ K_i + RIDGE * case.K
            np.testing.assert_allclose(
                jax.grad(case.dual_risk)(jnp.asarray(delta), points), gradient, **CLOSE
            )
            np.testing.assert_allclose(
                jax.hessian(case.dual_risk)(jnp.asarray(delta), points), hessian, **CLOSE
            )
    g, _, K_f = parts(np.zeros(N * C), GONE)
    np.testing.assert_allclose(
        K_f.T @ g + RIDGE * case.K @ case.alpha,
        jax.grad(case.dual_risk)(jnp.zeros(N * C), GONE),
        rtol=1e-7,
        atol=1e-10,
    )


@pytest.mark.thorough
def test_equations_8_and_9_and_13_outputs_and_loss_in_data_space(case):
    update = case.fitted.edit(dfl.Remove(GONE), progress=False)
    delta = np.asarray(update.delta_alpha).reshape(-1)
    outputs = case.J_t @ case.J.T @ delta
    np.testing.assert_allclose(
        np.asarray(update.delta_outputs(case.x_t)).reshape(-1), outputs, **CLOSE
    )
    got = update.delta_loss(case.x_t, case.y_t, first_order=True, include_ridge=True)
    zero = jnp.zeros(N * C)
    one = [
        jax.grad(case.dual_risk)(zero, np.array([t]), case.x_t, case.y_t) @ delta for t in range(4)
    ]
    np.testing.assert_allclose(got, one, rtol=1e-7, atol=1e-10)
    f = case.linear(case.theta, case.x_t)
    g = np.asarray(jax.nn.softmax(f) - np.eye(C)[case.y_t])
    stacked = (g * outputs.reshape(4, C)).sum(axis=1) + RIDGE * case.alpha @ case.K @ delta
    np.testing.assert_allclose(got, stacked, rtol=1e-7, atol=1e-10)


@pytest.mark.thorough
def test_equations_10_to_12_the_reduced_system(case):
    """The blocks of the whole system, with the forgotten entries known."""
    zero = jnp.zeros(N * C)
    H = np.asarray(jax.hessian(case.dual_risk)(zero, KEPT)) * len(KEPT) / N
    b = case.share * np.asarray(jax.grad(case.dual_risk)(zero, GONE))
    r, f = rows(KEPT), rows(GONE)
    known = -case.alpha[f]
    want = np.linalg.solve(H[np.ix_(r, r)], b[r] - H[np.ix_(r, f)] @ known)
    update = remove(case.fitted, dfl.Remove(GONE), form=PaperDirect())
    delta = np.asarray(update.delta_alpha).reshape(-1)
    np.testing.assert_allclose(delta[r], want, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(delta[f], known, **CLOSE)


@pytest.mark.thorough
def test_equation_14_and_a_3_and_a_4_descent_in_function_space(case):
    descent = kernel_gradient_descent(
        case.model, case.x, case.y, loss=dfl.SoftmaxCrossEntropy(), ridge=RIDGE, rate=0.05,
        epochs=40, x_query=case.x_t, progress=False,
    )  # fmt: skip
    theta, gradient = case.start, jax.jit(jax.grad(lambda t: case.risk(t, np.arange(N))))
    for _ in range(40):
        theta = theta - 0.05 * gradient(theta)
    np.testing.assert_allclose(descent.outputs, case.linear(theta, case.x), **CLOSE)
    np.testing.assert_allclose(descent.query_outputs, case.linear(theta, case.x_t), **CLOSE)


@pytest.mark.thorough
def test_equation_a_5_the_gradient_in_function_space(case):
    """Its inner product with a direction is the derivative along that direction."""
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=N * C) / 9, rng.normal(size=N * C)

    def risk(coordinates):
        """`L[Δf]` for `Δf = K(·, X)·coordinates`, whose squared norm is a quadratic form of `K`."""
        f = case.raw(case.start, case.x) + (case.K @ coordinates).reshape(N, C)
        mean = -jnp.mean(jax.nn.log_softmax(f)[jnp.arange(N), case.y])
        return mean + RIDGE / 2 * coordinates @ case.K @ coordinates

    f = case.raw(case.start, case.x) + (case.K @ a).reshape(N, C)
    g = np.asarray(jax.nn.softmax(f) - np.eye(C)[case.y]).reshape(-1) / N
    inner = (g + RIDGE * a) @ case.K @ b  # ⟨K(·,X)(g + λa), K(·,X)b⟩
    np.testing.assert_allclose(jax.jvp(risk, (a,), (b,))[1], inner, **CLOSE)


def test_the_condition_numbers_of_the_theory_page():
    text = (Path(__file__).parents[2] / "docs" / "theory.md").read_text()
    found = re.findall(r"^\| ([\d.]+) \| ([\d.e]+) \| ([\d.e]+) \|$", text, re.MULTILINE)
    assert [float(row[0]) for row in found] == [10, 1, 0.001, 0]
    K = np.diag(np.geomspace(0.0036, 3.6, 8))
    for ridge, ours, theirs in found:
        A = float(ridge) * np.eye(8) + K
        np.testing.assert_allclose(np.linalg.cond(A), float(ours), rtol=0.04)
        np.testing.assert_allclose(np.linalg.cond(K @ A), float(theirs), rtol=0.04)
