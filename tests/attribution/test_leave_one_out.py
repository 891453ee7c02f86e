"""Leaving out every point in closed form is one Newton step per point, and certified when refined."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import gates
import oracles
import problems
from dualfluence.attribution._leave_one_out import leave_one_out

N, C, Q = 9, 3, 4
ROUNDING = 1e-10
"""The promise in float64: both sides solve the same system, of condition about 1e3 here."""


def _fit(name, form, weighted):
    """A fit, queries and their targets for a kernel structure and a loss."""
    p = problems.linear_problem(N, C, 40, name, q=Q, weighted=weighted, ridge=0.05)
    if form in ("dense", "matrix-free"):
        return cases.fit(p, kernel=form), p.x_q, jnp.asarray(p.y_q)
    if form == "low rank":
        model = dfl.low_rank(cases.model(p), p.x, rank=11, num_outputs=C)
        fitted = dfl.fit(
            model, p.x, p.y, loss=cases.LOSSES[name], ridge=p.ridge, weights=p.sample_weights
        )
        return fitted, p.x_q, jnp.asarray(p.y_q)
    p, sigma, sigma_qn = problems.kronecker_problem(N, C, 20, name, q=Q, weighted=weighted)
    pool = np.block([[sigma, sigma_qn.T], [sigma_qn, np.zeros((Q, Q))]])
    fitted = dfl.fit(
        dfl.PrecomputedKernel(jnp.asarray(pool)),
        np.arange(N),
        p.y,
        loss=cases.LOSSES[name],
        ridge=0.05,
        weights=p.sample_weights,
    )
    assert isinstance(fitted.kernel_op, dfl.operators.KroneckerOperator)
    return fitted, np.arange(N, N + Q), jnp.asarray(p.y_q)


def _one_by_one(fitted, xq, yq):
    columns = []
    for i in range(N):
        change = fitted.edit(dfl.Remove([i])).delta_outputs(xq)
        f, loss = fitted.predict(xq), fitted.loss
        columns.append(loss.value(f + change, yq) - loss.value(f, yq))
    return np.stack(columns, axis=1)


FORMS = ("dense", "kronecker", "low rank", "matrix-free")
QUICK = {("softmax", form, True) for form in FORMS[:2]}
QUICK |= {("squared", "dense", False), ("logistic", "kronecker", False)}


@pytest.mark.parametrize(
    ("name", "form", "weighted"),
    gates.table(list(itertools.product(problems.LOSS_NAMES, FORMS, (False, True))), QUICK),
)
def test_closed_form_is_one_newton_step_per_point(name, form, weighted):
    fitted, xq, yq = _fit(name, form, weighted)
    got = fitted.attribute(xq, yq, progress=False)
    want = _one_by_one(fitted, xq, yq)
    assert cases.relative(got.values, want) < ROUNDING


WEIGHED = list(itertools.product(problems.LOSS_NAMES, ["dense", "kronecker"]))


@pytest.mark.parametrize(("name", "form"), gates.table(WEIGHED, WEIGHED[::2]))
def test_a_few_distinct_weights_each_get_a_factor(name, form):
    fitted, xq, yq = _fit(name, form, False)
    fitted = fitted.edit(dfl.Reweight([1, 4], [2.0, 0.5]), until=1e-12).commit()
    got = fitted.attribute(xq, yq, progress=False)
    assert cases.relative(got.values, _one_by_one(fitted, xq, yq)) < ROUNDING


def test_squared_error_without_a_point_is_retraining():
    fitted, xq, yq = _fit("squared", "dense", True)
    p = problems.linear_problem(N, C, 40, "squared", q=Q, weighted=True, ridge=0.05)
    got = fitted.attribute(xq, yq, progress=False).values
    loss = lambda theta: oracles.squared(p.f0_q + p.J_q @ theta, p.y_q)[0]  # noqa: E731
    before = loss(cases.retrain(p, p.sample_weights))
    want = np.stack([loss(cases.retrain(p, cases.without(p, [i]))) - before for i in range(N)], 1)
    assert cases.relative(got, want) < 1e-8  # the fit itself is good to 1e-10 of its norm


def test_effect_of_a_point_on_itself_is_the_diagonal():
    fitted, _, _ = _fit("softmax", "dense", True)
    result = fitted.attribute(fitted.x, fitted.data.targets, progress=False)
    np.testing.assert_allclose(np.diag(result.values), result.self_influence(), atol=1e-11)


@pytest.mark.parametrize("form", ["dense", "kronecker", "matrix-free"])
def test_refined_effects_are_retraining_and_their_bounds_hold(form):
    fitted, xq, yq = _fit("softmax", form, True)
    got = fitted.attribute(xq, yq, refine=1e-7, progress=False)
    want, K = [], np.asarray(fitted.kernel_op.dense())
    ((_, solve),) = leave_one_out(fitted, until=1e-3).parts(np.arange(N))
    loose = solve(np.arange(N))
    for i in range(N):
        truth = fitted.edit(dfl.Remove([i]), until=1e-10)
        f = fitted.predict(xq)
        gap = np.asarray(loose.reading[:, :, i] - truth.delta_alpha).ravel()
        distance = np.sqrt(gap @ K @ gap)  # ‖Jᵀδ‖, the distance to exact retraining
        assert distance <= loose.distance_bound[i] + 1e-10
        want.append(fitted.loss.value(truth.predict(xq), yq) - fitted.loss.value(f, yq))
    assert np.all(got.distance_bound <= 1e-7)
    assert np.all(got.distance_bound > 0)
    # Outputs move by at most ‖J‖ times the certified distance; ‖J_q‖ is of order one here.
    np.testing.assert_allclose(got.values, np.stack(want, 1), atol=1e-6)


DESIGNED = list(itertools.product(problems.LOSS_NAMES, ["dense", "kronecker", "low rank"]))


@pytest.mark.parametrize(("name", "form"), gates.table(DESIGNED, DESIGNED[::4]))
def test_first_order_effect_is_the_equation_of_the_design(name, form):
    fitted, xq, yq = _fit(name, form, True)
    got = fitted.attribute(xq, yq, first_order=True, progress=False).values
    K = np.asarray(fitted.kernel_op.dense()).reshape(N, C, N, C)
    problem = jax.tree.map(jnp.asarray, fitted.problem())
    g = np.asarray(problem.loss_grad(fitted.state))
    eye = np.eye(N * C).reshape(N, C, N * C)
    W = np.asarray(problem.factor(fitted.state).hess_mv(jnp.asarray(eye))).reshape(N * C, N * C)
    A = fitted.ridge * np.eye(N * C) + W @ K.reshape(N * C, N * C)
    cross = np.asarray(fitted.source.block(jnp.asarray(xq), fitted.x, False))
    if cross.ndim == 2:
        cross = np.einsum("qn,ab->qanb", cross, np.eye(C))
    f = fitted.predict(xq)
    v = np.asarray(fitted.loss.grad(f, jnp.asarray(yq)))
    thin = np.einsum("qa,qanb->qnb", v, cross).reshape(Q, N * C)
    want = np.einsum("qib,ib->qi", (thin @ np.linalg.inv(A)).reshape(Q, N, C), g)
    assert cases.relative(got, want) < 1e-9


def test_blocks_and_files_change_nothing(tmp_path):
    fitted, xq, yq = _fit("softmax", "dense", False)
    whole = fitted.attribute(xq, yq, progress=False)
    out = tmp_path / "scores.npy"
    parts = fitted.attribute(xq, yq, block_size=2, out=out, progress=False)
    assert isinstance(parts.values, np.memmap)
    assert [f.name for f in tmp_path.iterdir()] == ["scores.npy"]
    np.testing.assert_allclose(parts.values, whole.values, rtol=1e-9, atol=1e-13)


def test_a_failure_leaves_no_file(tmp_path):
    fitted, xq, yq = _fit("softmax", "dense", False)

    def fails(outputs, target):
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fitted.attribute(xq, yq, of=fails, out=tmp_path / "scores.npy", progress=False)
    assert not list(tmp_path.iterdir())


def test_points_of_weight_zero_have_no_effect():
    fitted, xq, yq = _fit("softmax", "dense", False)
    fitted = fitted.edit(dfl.Remove([2]), until=1e-11).commit()
    got = fitted.attribute(xq, yq, progress=False)
    assert np.all(got.values[:, 2] == 0)
    assert any("weight zero" in note for note in got.notes)


def test_output_margin_and_functions_are_measured_alike():
    fitted, xq, yq = _fit("softmax", "dense", False)
    labels = np.argmax(yq, axis=1)
    f = np.asarray(fitted.predict(xq))
    after = np.stack(
        [np.asarray(fitted.edit(dfl.Remove([i])).predict(xq)) for i in range(N)], axis=2
    )
    rows = np.arange(Q)

    def margin(z):
        others = np.array([np.delete(z[r], labels[r], axis=0) for r in rows])
        return z[rows, labels] - np.log(np.exp(others).sum(axis=1))

    got = fitted.attribute(xq, labels, of="output", progress=False)
    np.testing.assert_allclose(
        got.values, after[rows, labels] - f[rows, labels][:, None], atol=1e-10
    )
    assert got.direction == -1
    got = fitted.attribute(xq, labels, of="margin", progress=False)
    np.testing.assert_allclose(got.values, margin(after) - margin(f)[:, None], atol=1e-10)
    got = fitted.attribute(xq, labels, of=lambda z, y: z[0] * z[1], progress=False)
    want = after[:, 0] * after[:, 1] - (f[:, 0] * f[:, 1])[:, None]
    np.testing.assert_allclose(got.values, want, atol=1e-10)


@pytest.mark.parametrize("form", ["dense", "kronecker", "low rank"])
def test_groups_are_left_out_as_groups(form):
    fitted, xq, yq = _fit("softmax", form, True)
    groups = {"a": [0, 3], "b": [1, 2, 5], "c": [7]}
    got = fitted.attribute_groups(groups, xq, yq, interactions=True, progress=False)
    f = fitted.predict(xq)
    single = fitted.attribute(xq, yq, progress=False).values

    def effect(gone):
        delta = fitted.edit(dfl.Remove(gone)).delta_outputs(xq)
        return np.asarray(fitted.loss.value(f + delta, yq) - fitted.loss.value(f, yq))

    for column, gone in enumerate(groups.values()):
        np.testing.assert_allclose(got.values[:, column], effect(gone), atol=1e-9)
        np.testing.assert_allclose(got.sums[:, column], single[:, gone].sum(axis=1), atol=1e-12)
    both = effect([0, 3, 7]) - effect([0, 3]) - effect([7])
    np.testing.assert_allclose(got.interactions[:, 0, 2], both, atol=1e-9)
    assert got.names == ("a", "b", "c")
    assert got.sizes == (2, 3, 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f, x, y: f.attribute(x[:, :1], y), "queries: expected shape"),
        (lambda f, x, y: f.attribute(x, y[:2]), "4 queries but 2 targets"),
        (lambda f, x, y: f.attribute(x, [0, 1, 2, 7]), r"labels must be in \[0, 3\), got 7"),
        (lambda f, x, y: f.attribute(x, y, of="hinge"), "of must be one of"),
        (lambda f, x, y: f.attribute(x, None), "needs the targets"),
        (lambda f, x, y: f.attribute(x, y, refine=-1.0), "positive distance"),
        (lambda f, x, y: f.attribute(x, y, block_size=0), "at least 1"),
        (lambda f, x, y: f.attribute(x * np.nan, y), "finite"),
        (lambda f, x, y: f.attribute_groups({}, x, y), "at least one group"),
        (lambda f, x, y: f.attribute_groups([[0, 99]], x, y), r"in \[0, 9\), got 99"),
        (lambda f, x, y: f.attribute_groups([range(N)], x, y), "whole training set"),
    ],
)
def test_bad_requests_say_what_is_wrong(call, words):
    fitted, xq, yq = _fit("softmax", "dense", False)
    with pytest.raises(ValueError, match=words):
        call(fitted, xq, yq)


def test_a_model_away_from_its_optimum_says_that_effects_include_the_way_there():
    fitted, xq, yq = _fit("softmax", "dense", False)
    rough = fitted.edit(dfl.Remove([0, 1, 2]), progress=False).commit()
    settled = fitted.edit(dfl.Remove([0, 1, 2]), until=1e-9, progress=False).commit()
    said = [
        any("from its optimum" in note for note in model.attribute(xq, yq, progress=False).notes)
        for model in (fitted, rough, settled)
    ]
    assert said == [False, True, False]
