"""One step is exact retraining for squared error; iterated steps are for every loss."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import gates
import oracles
import problems
from dualfluence.apps import paper

N, C = 20, 3
EXACT_SOLVERS = [dfl.Cholesky(), dfl.CG()]
REMOVALS = {
    "10 %": np.array([3, 11]),
    "50 %": np.arange(0, 20, 2),
    "90 %": np.arange(2, 20),
    "first half": np.arange(10),
}


def _edits(p):
    rng = np.random.default_rng(5)
    new_x, new_y = (
        rng.normal(size=(2, C, p.x.shape[2])),
        problems.make_targets(rng, 2, C, p.loss_name),
    )
    s = p.sample_weights
    both_x, both_y = np.concatenate([p.x, new_x]), np.concatenate([p.y, new_y])
    relabelled = p.y.copy()
    relabelled[[4, 9]] = new_y
    swapped = np.concatenate([s, s[[1, 6]]])
    swapped[[1, 6]] = 0
    several = np.concatenate([s, [1, 1]])
    several[[0, 5]] = [0, 2.5]
    several_y = np.concatenate([relabelled, new_y])
    return {
        "relabel": (dfl.Relabel([4, 9], new_y), (s, p.x, relabelled)),
        "reweight": (dfl.Reweight([0, 7], [0.25, 3.0]), (_with(s, [0, 7], [0.25, 3.0]), p.x, p.y)),
        "replace": (dfl.Replace([1, 6], new_x, new_y), (swapped, both_x, both_y)),
        "replace features": (
            dfl.Replace([1, 6], x=new_x),
            (swapped, both_x, np.concatenate([p.y, p.y[[1, 6]]])),
        ),
        "add": (dfl.Add(new_x, new_y), (np.concatenate([s, [1, 1]]), both_x, both_y)),
        "several": (
            [
                dfl.Add(new_x, new_y),
                dfl.Relabel([4, 9], new_y),
                dfl.Remove([0]),
                dfl.Reweight([5], [2.5]),
            ],
            (several, both_x, several_y),
        ),
    }


def _with(s, where, what):
    s = s.copy()
    s[where] = what
    return s


@pytest.fixture(scope="module")
def squared():
    return problems.linear_problem(N, C, 80, "squared", ridge=0.05, weighted=True)


@pytest.mark.parametrize("form", ["dense", "matrix-free"])
@pytest.mark.parametrize("solver", EXACT_SOLVERS, ids=repr)
@pytest.mark.parametrize("gone", REMOVALS.values(), ids=REMOVALS)
def test_removal_is_exact_for_squared_error(squared, form, solver, gone):
    update = cases.fit(squared, kernel=form).edit(dfl.Remove(gone), solver=solver)
    want = cases.retrain(squared, cases.without(squared, gone))
    assert cases.relative(update.params(), want) < 1e-9  # the promise in float64
    assert update.stats.converged


@pytest.mark.parametrize("solver", EXACT_SOLVERS, ids=repr)
@pytest.mark.parametrize("gone", REMOVALS.values(), ids=REMOVALS)
def test_removal_is_exact_for_kronecker_kernels(solver, gone):
    p, sigma, sigma_qn = problems.kronecker_problem(N, C, 40, "squared", ridge=0.05)
    pool = np.block([[sigma, sigma_qn.T], [sigma_qn, np.zeros((3, 3))]])
    fitted = dfl.fit(
        dfl.PrecomputedKernel(jnp.asarray(pool)),
        np.arange(N),
        p.y - p.f0,  # the kernel's outputs start at zero
        loss=dfl.SquaredError(),
        ridge=p.ridge,
    )
    assert isinstance(fitted.kernel_op, dfl.operators.KroneckerOperator)
    update = fitted.edit(dfl.Remove(gone), solver=solver)
    want = p.J_q @ cases.retrain(p, cases.without(p, gone))
    assert cases.relative(update.predict(np.arange(N, N + 3)), want) < 1e-9


@pytest.mark.parametrize("form", ["dense", "matrix-free"])
@pytest.mark.parametrize("solver", EXACT_SOLVERS, ids=repr)
@pytest.mark.parametrize("name", list(_edits(problems.linear_problem(N, C, 4, "squared"))))
def test_other_edits_are_exact_for_squared_error(squared, form, solver, name):
    edit, (s, x, y) = _edits(squared)[name]
    update = cases.fit(squared, kernel=form).edit(edit, solver=solver)
    want = cases.retrain(squared, s, x, y)
    assert cases.relative(update.params(), want) < 1e-9


@pytest.mark.parametrize("dtype_limit", [(jnp.float32, 1e-5)])
@pytest.mark.parametrize("solver", EXACT_SOLVERS, ids=repr)
@pytest.mark.parametrize("gone", REMOVALS.values(), ids=REMOVALS)
def test_removal_is_exact_in_float32(squared, dtype_limit, solver, gone):
    dtype, limit = dtype_limit
    update = cases.fit(squared, dtype=dtype).edit(dfl.Remove(gone), solver=solver)
    assert update.params().dtype == dtype
    want = cases.retrain(squared, cases.without(squared, gone))
    assert cases.relative(update.params(), want) < limit


ITERATED = list(itertools.product(["remove", "several", "replace"], ["dense", "matrix-free"],
                                  ["softmax", "logistic"]))  # fmt: skip


@pytest.mark.parametrize(("name", "form", "loss_name"), gates.table(ITERATED, ITERATED[::3]))
def test_iterated_steps_reach_retraining(loss_name, form, name):
    p = problems.linear_problem(N, C, 80, loss_name, ridge=0.01, weighted=True)
    fitted = cases.fit(p, kernel=form)
    gone = REMOVALS["50 %"]
    edit, truth = {"remove": (dfl.Remove(gone), (cases.without(p, gone), p.x, p.y)), **_edits(p)}[
        name
    ]
    update = fitted.edit(edit, until=1e-8)
    want = cases.retrain(p, *truth)
    moved = want - np.asarray(fitted.params())
    assert cases.relative(update.params(), want, moved) < 1e-6
    assert float(update.certificate.distance_bound) <= 1e-8


@pytest.mark.parametrize("loss_name", problems.LOSS_NAMES)
@pytest.mark.parametrize("gone", [REMOVALS["10 %"], REMOVALS["50 %"]], ids=["10 %", "50 %"])
def test_one_step_is_the_papers_influence_function(loss_name, gone):
    p = problems.linear_problem(N, C, 120, loss_name, ridge=0.05)
    fitted = cases.fit(p)
    loss = oracles.LOSSES[loss_name]
    keep = np.ones(N, bool)
    keep[gone] = False
    ours = fitted.edit(dfl.Remove(gone))
    alpha, f = np.asarray(fitted.alpha), np.asarray(fitted.outputs)
    # Independent NumPy: reduced eq. 12, unreduced eq. 5, and eq. 1 in parameter space.
    for oracle in (oracles.paper_eq12, oracles.paper_eq5):
        want = oracle(p.K, alpha, f, p.y, keep, p.ridge, loss)
        np.testing.assert_allclose(ours.delta_alpha, want, rtol=1e-7, atol=1e-9)
    theta = np.asarray(fitted.params())
    step = oracles.paper_eq1(p.J, p.f0, theta, p.y, keep, p.ridge, loss)
    np.testing.assert_allclose(ours.params() - theta, step, rtol=1e-7, atol=1e-10)
    # Our implementations of the paper's forms; CG stops at its 1e-8.
    limits = ((paper.PaperDirect(), 1e-9), (paper.PaperCG(), 1e-6), (paper.PaperFull(), 1e-6))
    for form, limit in limits:
        other = paper.remove(fitted, dfl.Remove(gone), form=form)
        assert cases.relative(other.outputs, ours.outputs) < limit, form
    np.testing.assert_allclose(ours.delta_alpha[gone], -alpha[gone], rtol=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("loss_name", ["squared", "softmax", "logistic"])
@pytest.mark.parametrize("gone", [REMOVALS["50 %"], REMOVALS["90 %"]], ids=["50 %", "90 %"])
def test_kronecker_factorisations_agree_with_cg_and_dense(loss_name, gone):
    p, sigma, _ = problems.kronecker_problem(N, C, 40, loss_name, ridge=0.01)
    options = {"loss": cases.LOSSES[loss_name], "ridge": p.ridge}
    fitted = dfl.fit(jnp.asarray(sigma), None, p.y, **options)
    dense = dfl.fit(jnp.asarray(p.K), None, p.y, **options)
    by_cholesky = fitted.edit(dfl.Remove(gone), solver=dfl.Cholesky())
    by_cg = fitted.edit(dfl.Remove(gone), solver=dfl.CG())
    by_dense = dense.edit(dfl.Remove(gone), solver=dfl.Cholesky())
    assert cases.relative(by_cholesky.delta_alpha, by_cg.delta_alpha) < 1e-8
    assert cases.relative(by_cholesky.delta_alpha, by_dense.delta_alpha) < 1e-8


def test_singular_kernels_need_no_full_rank():
    p = problems.linear_problem(N, C, 10, "softmax", ridge=0.01)
    fitted = cases.fit(p)
    update = fitted.edit(dfl.Remove([0, 1, 2]), until=1e-8)
    want = cases.retrain(p, cases.without(p, [0, 1, 2]))
    assert cases.relative(update.params(), want) < 1e-8


def test_low_rank_features_solve_on_the_small_side():
    p = problems.linear_problem(N, C, 10, "logistic", ridge=0.01)
    fitted = cases.fit(p)
    op = dfl.operators.LowRankOperator(jnp.asarray(p.J))
    low = dfl.fit(jnp.asarray(p.K), None, p.y, loss=dfl.Logistic(), ridge=p.ridge)
    from dataclasses import replace

    gone = dfl.Remove([0, 5])
    got = replace(low, kernel_op=op).edit(gone, solver=dfl.Cholesky())
    want = low.edit(gone, solver=dfl.Cholesky())
    assert cases.relative(got.delta_alpha, want.delta_alpha) < 1e-9
    assert fitted.stats.converged


@pytest.mark.parametrize("loss_name", problems.LOSS_NAMES)
def test_fit_reaches_the_optimum(loss_name):
    p = problems.linear_problem(N, C, 80, loss_name, ridge=0.01, weighted=True)
    fitted = cases.fit(p)
    assert cases.relative(fitted.params(), cases.retrain(p, p.sample_weights)) < 1e-9
    np.testing.assert_allclose(fitted.predict(p.x), fitted.outputs, rtol=1e-9)
    w = oracles.normalise(p.sample_weights)[:, None]
    g = w * oracles.LOSSES[loss_name](np.asarray(fitted.outputs), p.y)[1]
    np.testing.assert_allclose(fitted.alpha, -g / p.ridge, atol=1e-9)


def test_fit_is_damped_where_undamped_newton_diverges():
    p = problems.linear_problem(N, C, 80, "softmax", ridge=1e-4, seed=3)
    x = p.x.copy()
    x[..., -1] *= 50  # base outputs of order 50: plain Newton oscillates here
    p = problems.Problem(x, p.y, p.sample_weights, p.x_q, p.y_q, p.ridge, p.loss_name)
    fitted = cases.fit(p)
    assert fitted.stats.converged
    assert cases.relative(fitted.params(), cases.retrain(p, p.sample_weights)) < 1e-7


def test_own_convex_loss_equals_the_closed_form():
    import jax

    p = problems.linear_problem(N, C, 80, "softmax", ridge=0.01)
    own = dfl.Convex(lambda f, y: jax.nn.logsumexp(f) - jnp.sum(y * f))
    model, x = cases.model(p), jnp.asarray(p.x)
    a = dfl.fit(model, x, p.y, loss=own, ridge=0.01).edit(dfl.Remove([1, 2]))
    b = dfl.fit(model, x, p.y, loss=dfl.SoftmaxCrossEntropy(), ridge=0.01).edit(dfl.Remove([1, 2]))
    assert cases.relative(a.delta_alpha, b.delta_alpha) < 1e-8


@pytest.mark.parametrize("solver", EXACT_SOLVERS, ids=repr)
@pytest.mark.parametrize("name", ["relabel", "reweight", "replace", "add"])
def test_other_edits_are_exact_for_kronecker_kernels(solver, name):
    rng = np.random.default_rng(3)
    phi, y = rng.normal(size=(N, 40)) / 6, rng.normal(size=(N, C))
    new_phi, new_y = rng.normal(size=(2, 40)) / 6, rng.normal(size=(2, C))
    both = np.concatenate([phi, new_phi]), np.concatenate([y, new_y])
    relabelled = y.copy()
    relabelled[[4, 9]] = new_y
    edit, s, features, targets = {
        "relabel": (dfl.Relabel([4, 9], new_y), np.ones(N), phi, relabelled),
        "reweight": (
            dfl.Reweight([0, 7], [0.25, 3.0]),
            _with(np.ones(N), [0, 7], [0.25, 3]),
            phi,
            y,
        ),
        "replace": (dfl.Replace([1, 6], new_phi, new_y), _with(np.ones(N + 2), [1, 6], 0), *both),
        "add": (dfl.Add(new_phi, new_y), np.ones(N + 2), *both),
    }[name]
    fitted = dfl.fit(lambda a, b: a @ b.T, phi, y, loss=dfl.SquaredError(), ridge=0.05)
    w = oracles.normalise(s)[:, None]
    theta = np.linalg.solve(
        features.T @ (w * features) + 0.05 * np.eye(40), features.T @ (w * targets)
    )
    query = rng.normal(size=(3, 40))
    got = fitted.edit(edit, solver=solver).predict(query)
    assert cases.relative(got, query @ theta) < 1e-9
