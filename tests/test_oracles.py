"""The oracles agree among themselves, so that one slip in them cannot pass for a truth.

Tolerances. K has eigenvalues between 0.1 and 4 in these problems and the ridge is 0.1 unless a
test says otherwise, so that parameter systems have condition numbers below 1e2 and the paper's,
which hold K twice, below 1e5 (checked where they are used). Double precision times that leaves
1e-11, and `EXACT` asks for ten times less.
"""

import numpy as np
import pytest

import oracles
import problems

pytestmark = pytest.mark.host

EXACT = {"rtol": 1e-9, "atol": 1e-10}
every_loss = pytest.mark.parametrize("loss_name", problems.LOSS_NAMES)


def make(loss_name, *, n=7, c=3, p=60, seed=0, **kwargs):
    """A problem with full-rank K, its weights, its loss, and its minimiser."""
    problem = problems.linear_problem(n, c, p, loss_name, seed, **kwargs)
    w = oracles.normalise(problem.sample_weights)
    loss = oracles.LOSSES[loss_name]
    args = (problem.J, problem.f0, problem.y, w, problem.ridge, loss)
    return problem, w, loss, args, oracles.retrain(*args)


def keep_all_but(n, gone):
    mask = np.ones(n, bool)
    mask[gone] = False
    return mask


def central_difference(function, at, step):
    """Error of order step²·f''' + eps·|f|/step: with step 1e-5 and values of order one, 1e-10."""
    columns = [
        (function(at + step * unit) - function(at - step * unit)) / (2 * step)
        for unit in np.eye(at.size)
    ]
    return np.stack(columns, axis=-1)


# Losses and objective.


@every_loss
def test_loss_derivatives_match_finite_differences(loss_name):
    rng = np.random.default_rng(1)
    loss = oracles.LOSSES[loss_name]
    y = problems.make_targets(rng, 6, 3, loss_name)
    f = 2 * rng.normal(size=(6, 3))
    _, grad, hess = loss(f, y)
    for i in range(6):
        one = slice(i, i + 1)
        np.testing.assert_allclose(
            central_difference(lambda v: loss(v[None], y[one])[0][0], f[i], 1e-5),  # noqa: B023
            grad[i],
            atol=1e-9,
        )
        np.testing.assert_allclose(
            central_difference(lambda v: loss(v[None], y[one])[1][0], f[i], 1e-5),  # noqa: B023
            hess[i],
            atol=1e-9,
        )


def test_losses_have_known_values():
    f = np.array([[0.0, 0.0], [np.log(3.0), 0.0]])
    y = np.array([[1.0, 0.0], [0.5, 0.5]])
    value, grad, _ = oracles.softmax_ce(f, y)
    np.testing.assert_allclose(value, [np.log(2), 0.5 * np.log(4 / 3) + 0.5 * np.log(4)])
    np.testing.assert_allclose(grad, [[-0.5, 0.5], [0.25, -0.25]])
    value, grad, _ = oracles.logistic(f, y)
    np.testing.assert_allclose(value, [2 * np.log(2), np.log(4) - 0.5 * np.log(3) + np.log(2)])
    np.testing.assert_allclose(grad, [[-0.5, 0.5], [0.25, 0.0]], atol=1e-15)
    value, grad, _ = oracles.squared(f, y)
    np.testing.assert_allclose(value[0], 0.5)
    np.testing.assert_allclose(grad, f - y)


@pytest.mark.parametrize("loss_name", ["softmax", "logistic"])
def test_losses_stay_finite_for_large_outputs(loss_name):
    f, y = np.array([[900.0, -900.0], [-900.0, 900.0]]), np.array([[1.0, 0.0], [1.0, 0.0]])
    value, grad, hess = oracles.LOSSES[loss_name](f, y)
    assert value[0] == 0.0
    np.testing.assert_allclose(value[1], 1800.0)
    assert np.isfinite(grad).all()
    assert np.isfinite(hess).all()


@every_loss
@pytest.mark.parametrize("weighted", [False, True])
def test_objective_derivatives_match_finite_differences(loss_name, weighted):
    _, _, _, args, delta = make(loss_name, n=5, p=20, weighted=weighted)
    at = delta + np.random.default_rng(2).normal(size=delta.shape)
    np.testing.assert_allclose(
        central_difference(lambda v: oracles.objective(v, *args), at, 1e-5),
        oracles.gradient(at, *args),
        atol=1e-9,
    )
    np.testing.assert_allclose(
        central_difference(lambda v: oracles.gradient(v, *args), at, 1e-5),
        oracles.hessian(at, *args),
        atol=1e-9,
    )


# Retraining.


@every_loss
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("p", "ridge"), [(60, 0.1), (5, 0.1), (60, 1e-3)])
def test_retraining_in_both_spaces_agrees(loss_name, weighted, p, ridge):
    problem, w, loss, args, delta = make(loss_name, p=p, ridge=ridge, weighted=weighted)
    alpha = oracles.retrain_dual(problem.K, problem.f0, problem.y, w, ridge, loss)
    # ‖∇L‖ ≤ 1e-13·(1 + ‖∇L(0)‖) and λ ≥ 1e-3 bound the distance of each by about 1e-9 at most;
    # Newton's last step overshoots that bound by far.
    np.testing.assert_allclose(
        np.einsum("iap,ia->p", problem.J, alpha), delta, rtol=1e-9, atol=1e-11
    )
    assert np.linalg.norm(oracles.gradient(delta, *args)) < 1e-12


def test_retraining_is_ridge_regression_for_squared_error():
    problem, w, _, _, delta = make("squared", weighted=True)
    J = problem.J.reshape(-1, problem.J.shape[-1])
    D = np.repeat(w, 3)
    A = J.T @ (D[:, None] * J) + problem.ridge * np.eye(J.shape[1])
    np.testing.assert_allclose(
        delta, np.linalg.solve(A, J.T @ (D * (problem.y - problem.f0).ravel())), **EXACT
    )


@every_loss
def test_retraining_from_far_away_converges(loss_name):
    # Undamped Newton diverges here for the two classification losses: outputs start at ±50.
    problem = problems.linear_problem(8, 3, 60, loss_name, ridge=1e-4)
    w, loss = oracles.normalise(problem.sample_weights), oracles.LOSSES[loss_name]
    f0 = 50 * problem.f0
    delta = oracles.retrain(problem.J, f0, problem.y, w, 1e-4, loss, tol=1e-12)
    alpha = oracles.retrain_dual(problem.K, f0, problem.y, w, 1e-4, loss, tol=1e-12)
    theta = np.einsum("iap,ia->p", problem.J, alpha)
    assert np.linalg.norm(theta - delta) < 1e-7 * np.linalg.norm(delta)


@every_loss
def test_weight_zero_is_the_same_as_not_being_there(loss_name):
    problem, _, loss, _, _ = make(loss_name)
    keep = keep_all_but(7, [1, 4])
    masked = oracles.normalise(keep.astype(float))
    left = np.full(5, 1 / 5)
    J, f0, y = problem.J, problem.f0, problem.y
    np.testing.assert_allclose(
        oracles.retrain(J, f0, y, masked, 0.1, loss),
        oracles.retrain(J[keep], f0[keep], y[keep], left, 0.1, loss),
        **EXACT,
    )
    alpha = oracles.retrain_dual(problem.K, f0, y, masked, 0.1, loss)
    np.testing.assert_array_equal(alpha[~keep], 0)


@every_loss
def test_kernel_gradient_descent_converges_to_retraining(loss_name):
    problem, w, loss, _, delta = make(loss_name, ridge=0.1)
    K = oracles.as_matrix(problem.K)
    # In outputs the slowest mode shrinks by 1 − ηλ per step: 0.95^700 is 3e-16.
    rate, steps = 0.5, 700
    assert rate * (problem.ridge + np.linalg.norm(K, 2) * w.max()) < 2
    f = oracles.kernel_gradient_descent(
        problem.K, problem.f0, problem.y, w, problem.ridge, loss, rate, steps
    )
    np.testing.assert_allclose(f, oracles.outputs(delta, problem.J, problem.f0), **EXACT)


@every_loss
def test_kernel_gradient_descent_is_gradient_descent_in_parameters(loss_name):
    problem, w, loss, args, _ = make(loss_name, weighted=True)
    delta = np.zeros(problem.J.shape[-1])
    for _ in range(5):
        delta = delta - 0.3 * oracles.gradient(delta, *args)
    f = oracles.kernel_gradient_descent(
        problem.K, problem.f0, problem.y, w, problem.ridge, loss, 0.3, 5
    )
    np.testing.assert_allclose(f, oracles.outputs(delta, problem.J, problem.f0), rtol=1e-12)


# One step.


def paper_args(problem, loss, f, keep):
    """What eqs. 5 and 12 take, with the paper's α* = −∇_f L_D/λ at outputs f."""
    alpha = -loss(f, problem.y)[1] / len(f) / problem.ridge
    return problem.K, alpha, f, problem.y, keep, problem.ridge, loss


REMOVALS = [[0], [2, 5], [0, 1, 2, 3, 4, 5]]


@every_loss
@pytest.mark.parametrize("gone", REMOVALS)
def test_steps_agree_at_the_minimiser(loss_name, gone):
    problem, _, loss, _, delta = make(loss_name)
    keep = keep_all_but(7, gone)
    f = oracles.outputs(delta, problem.J, problem.f0)
    args = paper_args(problem, loss, f, keep)
    assert np.linalg.cond(oracles._paper_blocks(*args)[0]) < 1e5
    full, reduced = oracles.paper_eq5(*args), oracles.paper_eq12(*args)
    np.testing.assert_allclose(full, reduced, **EXACT)
    np.testing.assert_allclose(full[~keep], -args[1][~keep], **EXACT)

    w_new = oracles.normalise(keep.astype(float))
    star = oracles.one_step_alpha(*args[:4], w_new, problem.ridge, loss)
    np.testing.assert_allclose(star, full, **EXACT)
    at = (problem.J, problem.f0, delta, problem.y)
    newton = oracles.one_step_theta(*at, w_new, problem.ridge, loss)
    np.testing.assert_allclose(oracles.paper_eq1(*at, keep, problem.ridge, loss), newton, **EXACT)
    np.testing.assert_allclose(np.einsum("iap,ia->p", problem.J, full), newton, **EXACT)


@every_loss
@pytest.mark.parametrize("gone", REMOVALS)
def test_steps_differ_away_from_the_minimiser_by_known_amounts(loss_name, gone):
    # The paper's formulas drop ∇L_D, zero only at a minimiser. With v = (∇²L_{D_r})⁻¹∇L_D, eqs. 5
    # and 12 (which see the parameters only through α*) are Newton + v, eq. 1 is
    # Newton + (|D|/|D_r|)v.
    problem, _, loss, args, delta = make(loss_name)
    keep = keep_all_but(7, gone)
    here = delta + 0.3 * np.random.default_rng(3).normal(size=delta.shape)
    f = oracles.outputs(here, problem.J, problem.f0)
    w_new = oracles.normalise(keep.astype(float))
    at = (problem.J, problem.f0, here, problem.y)
    newton = oracles.one_step_theta(*at, w_new, problem.ridge, loss)
    new_args = (problem.J, problem.f0, problem.y, w_new, problem.ridge, loss)
    v = np.linalg.solve(oracles.hessian(here, *new_args), oracles.gradient(here, *args))
    assert np.linalg.norm(v) > 0.01

    dual_args = paper_args(problem, loss, f, keep)
    full, reduced = oracles.paper_eq5(*dual_args), oracles.paper_eq12(*dual_args)
    np.testing.assert_allclose(full, reduced, **EXACT)
    np.testing.assert_allclose(np.einsum("iap,ia->p", problem.J, full), newton + v, **EXACT)
    np.testing.assert_allclose(
        oracles.paper_eq1(*at, keep, problem.ridge, loss), newton + 7 / keep.sum() * v, **EXACT
    )


@every_loss
@pytest.mark.parametrize("p", [1, 5, 60])
def test_dual_step_is_the_parameter_step_for_any_rank_and_weights(loss_name, p):
    problem, _, loss, _, _ = make(loss_name, p=p, weighted=True)
    rng = np.random.default_rng(6)
    alpha = rng.normal(size=problem.y.shape)  # no minimiser: the two steps need none
    here = np.einsum("iap,ia->p", problem.J, alpha)
    f = oracles.outputs(here, problem.J, problem.f0)
    w_new = oracles.normalise(rng.uniform(size=7) * (rng.uniform(size=7) > 0.3))
    tail = (problem.y, w_new, problem.ridge, loss)
    step = oracles.one_step_alpha(problem.K, alpha, f, *tail)
    np.testing.assert_allclose(
        np.einsum("iap,ia->p", problem.J, step),
        oracles.one_step_theta(problem.J, problem.f0, here, *tail),
        **EXACT,
    )


@every_loss
def test_paper_systems_are_singular_where_the_kernel_is(loss_name):
    # p < n·c breaks the paper's assumption: H = K(...)K + λK has K's null space, so Δα is not
    # determined. λI + W'K is as well conditioned as ever.
    problem, _, loss, _, delta = make(loss_name, p=5)
    f = oracles.outputs(delta, problem.J, problem.f0)
    keep = keep_all_but(7, [0])
    H, _, kept = oracles._paper_blocks(*paper_args(problem, loss, f, keep))
    assert np.linalg.matrix_rank(H) == 5
    assert np.linalg.matrix_rank(H[np.ix_(kept, kept)]) == 5


@pytest.mark.parametrize("gone", REMOVALS)
def test_one_step_is_retraining_for_squared_error(gone):
    problem, _, loss, _, delta = make("squared")
    w_new = oracles.normalise(keep_all_but(7, gone).astype(float))
    step = oracles.one_step_theta(
        problem.J, problem.f0, delta, problem.y, w_new, problem.ridge, loss
    )
    want = oracles.retrain(problem.J, problem.f0, problem.y, w_new, problem.ridge, loss)
    np.testing.assert_allclose(delta + step, want, **EXACT)


@pytest.mark.parametrize("loss_name", ["softmax", "logistic"])
def test_one_step_error_is_quadratic_in_the_change(loss_name):
    problem, _, loss, _, delta = make(loss_name)
    errors = []
    for size in (0.1, 0.01):
        s = np.ones(7)
        s[0] -= size
        args = (problem.y, oracles.normalise(s), problem.ridge, loss)
        step = oracles.one_step_theta(problem.J, problem.f0, delta, *args)
        want = oracles.retrain(problem.J, problem.f0, *args)
        errors.append(np.linalg.norm(delta + step - want))
    # A tenth of the change, a hundredth of the error, to leading order.
    assert 80 < errors[0] / errors[1] < 120


# Read-out.


@every_loss
def test_loss_changes_are_derivatives_along_the_step(loss_name):
    problem, _, loss, _, delta = make(loss_name)
    alpha = -loss(f := oracles.outputs(delta, problem.J, problem.f0), problem.y)[1] / 7 / 0.1
    delta_alpha = oracles.paper_eq5(
        problem.K, alpha, f, problem.y, keep_all_but(7, [1, 2]), problem.ridge, loss
    )
    step = np.einsum("iap,ia->p", problem.J, delta_alpha)
    f_q = oracles.outputs(delta, problem.J_q, problem.f0_q)

    def query_loss(t, ridge):
        moved = delta + t * step
        value = loss(oracles.outputs(moved, problem.J_q, problem.f0_q), problem.y_q)[0]
        return value + 0.5 * ridge * moved @ moved

    for with_ridge, ridge in ((True, problem.ridge), (False, 0.0)):
        got = oracles.paper_eq13(
            problem.K_qn,
            problem.K,
            alpha,
            f_q,
            problem.y_q,
            delta_alpha,
            problem.ridge,
            loss,
            with_ridge=with_ridge,
        )
        slope = (query_loss(1e-5, ridge) - query_loss(-1e-5, ridge)) / 2e-5
        np.testing.assert_allclose(got, slope, atol=1e-9)
        one_by_one = [
            oracles.paper_eq9_delta_loss(
                problem.K_qn[t],
                problem.K,
                alpha,
                f_q[t],
                problem.y_q[t],
                delta_alpha,
                problem.ridge,
                loss,
                with_ridge=with_ridge,
            )
            for t in range(len(f_q))
        ]
        np.testing.assert_allclose(got, one_by_one, rtol=1e-12, atol=1e-14)

    np.testing.assert_allclose(
        oracles.paper_eq8(problem.K_qn, delta_alpha),
        oracles.outputs(delta + step, problem.J_q, problem.f0_q) - f_q,
        **EXACT,
    )


def test_leaving_one_out_matches_the_closed_form_for_squared_error():
    # Kernel ridge regression without point i has residual e_i/(1 − h_i) there, for fixed n·λ:
    # scale the ridge so that removal keeps it.
    problem = problems.linear_problem(6, 1, 20, "squared", seed=4)
    n, y, f0, loss = 6, problem.y[:, 0], problem.f0[:, 0], oracles.squared
    total = 0.1 * (n - 1)
    K = oracles.as_matrix(problem.K)
    hat = K @ np.linalg.inv(K + total * np.eye(n))
    residual = (np.eye(n) - hat) @ (y - f0)
    want = residual / (1 - np.diag(hat))
    left = oracles.leave_one_out(problem.J, problem.f0, problem.y, np.ones(n), 0.1, loss)
    got = [y[i] - oracles.outputs(left[i], problem.J, problem.f0)[i, 0] for i in range(n)]
    np.testing.assert_allclose(got, want, **EXACT)


@every_loss
def test_leaving_one_out_changes_query_losses(loss_name):
    problem, _, loss, _, delta = make(loss_name, weighted=True)
    s = problem.sample_weights
    changes = oracles.leave_one_out_loss(
        problem.J, problem.f0, problem.y, s, problem.ridge, loss, *query(problem)
    )
    assert changes.shape == (3, 7)
    keep = keep_all_but(7, [2])
    J, f0, y = problem.J[keep], problem.f0[keep], problem.y[keep]
    after = oracles.retrain(J, f0, y, s[keep] / s[keep].sum(), problem.ridge, loss)
    J_q, f0_q, y_q = query(problem)
    values = [loss(oracles.outputs(d, J_q, f0_q), y_q)[0] for d in (delta, after)]
    np.testing.assert_allclose(changes[:, 2], values[1] - values[0], **EXACT)


def query(problem):
    return problem.J_q, problem.f0_q, problem.y_q


# Problems.


@every_loss
def test_problems_repeat_and_have_legal_targets(loss_name):
    first, again = (problems.linear_problem(6, 3, 9, loss_name, seed=5) for _ in range(2))
    np.testing.assert_array_equal(first.x, again.x)
    np.testing.assert_array_equal(first.y, again.y)
    if loss_name == "softmax":
        np.testing.assert_allclose(first.y.sum(1), 1)
    if loss_name != "squared":
        assert first.y.min() >= 0
        assert first.y.max() <= 1
    theta = np.random.default_rng(0).normal(size=9)
    np.testing.assert_allclose(
        problems.apply(theta, first.x), oracles.outputs(theta, first.J, first.f0)
    )


def test_kronecker_problem_has_a_kronecker_kernel():
    problem, Sigma, Sigma_qn = problems.kronecker_problem(5, 3, 4, "softmax")
    np.testing.assert_allclose(oracles.as_matrix(problem.K), np.kron(Sigma, np.eye(3)), atol=1e-14)
    np.testing.assert_allclose(
        oracles.as_matrix(problem.K_qn), np.kron(Sigma_qn, np.eye(3)), atol=1e-14
    )
