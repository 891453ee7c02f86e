"""The paper's systems: the checks and the certificate of every other removal, also without full rank."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import problems
from dualfluence.apps.paper import PaperCG, PaperDirect, PaperFull, remove
from dualfluence.apps.paper._mesh import retained_rows
from dualfluence.operators import DenseOperator, KroneckerOperator

pytestmark = pytest.mark.host

FORMS = (PaperDirect(), PaperCG(), PaperFull())
SHAPES = ((8, 2, 5), (9, 2, 1), (6, 3, 4))
"""Points, outputs and parameters; fewer parameters than rows of `K`, which lacks full rank."""


def ones_problem():
    """Four equal points: `K` has rank one and the paper's direct system is exactly singular."""
    model = dfl.linearize(lambda theta, x: x @ theta, jnp.zeros((1, 1)))
    y = np.arange(4.0)[:, None]
    return dfl.fit(model, jnp.ones((4, 1)), y, loss=dfl.SquaredError(), ridge=1.0, progress=False)


@pytest.mark.thorough
def test_a_singular_system_is_an_error_with_advice_not_nan():
    for on_failure in ("raise", "report"):
        with pytest.raises(FloatingPointError, match=r"lacks full rank\. Try PaperCG, or Fitted"):
            remove(ones_problem(), dfl.Remove([0]), form=PaperDirect(), on_failure=on_failure)


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS[1:], ids=lambda form: type(form).__name__)
def test_conjugate_gradients_solve_a_consistent_singular_system(form):
    update = remove(ones_problem(), dfl.Remove([0]), form=form)
    # Σ(θ − y)/3 + θ = 0 over the targets 1, 2, 3.
    np.testing.assert_allclose(update.params(), [[1.0]], rtol=1e-8)
    assert update.stats.converged


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS, ids=lambda form: type(form).__name__)
@pytest.mark.parametrize("loss_name", problems.LOSS_NAMES)
def test_the_certificate_holds_where_the_kernel_lacks_full_rank(loss_name, form):
    gone, held = [0, 1], 0
    for seed in (2, 4, 9, 10):
        for n, c, p in SHAPES:
            problem = problems.linear_problem(n, c, p, loss_name, seed=seed, ridge=0.1)
            want = cases.retrain(problem, cases.without(problem, gone))
            try:
                update = remove(
                    cases.fit(problem), dfl.Remove(gone), form=form, on_failure="report"
                )
            except FloatingPointError:
                continue  # the direct system may be singular to the last digit
            distance = np.linalg.norm(np.asarray(update.params()) - want)
            assert distance <= update.certificate.distance_bound, (seed, n, c, p)
            held += 1
    assert held >= len(SHAPES)


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS, ids=lambda form: type(form).__name__)
def test_kernel_products_belong_to_the_dual_variables(form):
    problem = problems.linear_problem(8, 2, 5, "squared", seed=10)
    fitted = cases.fit(problem)
    try:
        update = remove(fitted, dfl.Remove([0, 1]), form=form, on_failure="report")
    except FloatingPointError:
        return
    K = problem.K.reshape(16, 16)
    alpha = np.asarray(update.state.alpha).reshape(-1)
    # One product in float64: eps times the sizes that are summed.
    atol = 16 * np.finfo(float).eps * float(np.max(np.abs(K) @ np.abs(alpha)))
    np.testing.assert_allclose(np.ravel(update.state.k_alpha), K @ alpha, rtol=0, atol=atol)


@pytest.mark.thorough
@pytest.mark.parametrize("form", [PaperCG(max_steps=2), PaperFull(max_steps=2)], ids=repr)
def test_an_unreached_residual_is_not_convergence(form):
    fitted = cases.fit(problems.linear_problem(8, 2, 40, "softmax"))
    with pytest.raises(dfl.NotConverged, match=r"after 2 iterations at a relative residual of"):
        remove(fitted, dfl.Remove([0]), form=form)
    update = remove(fitted, dfl.Remove([0]), form=form, on_failure="report")
    assert not update.stats.converged
    assert update.stats.residual > 1e-8
    assert np.isfinite(update.certificate.distance_bound)


@pytest.mark.thorough
def test_the_papers_residual_is_out_of_reach_in_float32():
    fitted = cases.fit(problems.linear_problem(8, 2, 40, "softmax"), dtype=jnp.float32)
    update = remove(fitted, dfl.Remove([0]), on_failure="report")
    assert not update.stats.converged
    assert update.stats.residual > 2e-8  # whatever the recurrence of conjugate gradients says
    one = fitted.edit(dfl.Remove([0]))
    # Both solve the same step, each to what float32 and the condition number of the printed system leave.
    assert cases.relative(update.params(), one.params()) < 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS, ids=lambda form: type(form).__name__)
def test_the_residual_is_that_of_the_printed_system(form):
    import oracles

    problem = problems.linear_problem(6, 2, 60, "softmax", seed=1)
    fitted, keep = cases.fit(problem), np.arange(6) != 2
    update = remove(fitted, dfl.Remove([2]), form=form)
    args = (problem.K, np.asarray(fitted.alpha), np.asarray(fitted.outputs), problem.y, keep)
    oracle = oracles.paper_eq5 if isinstance(form, PaperFull) else oracles.paper_eq12
    want = oracle(*args, problem.ridge, oracles.LOSSES["softmax"])
    assert update.stats.residual <= 2e-8
    # A residual of 1e-8 under a condition number below 1e4.
    np.testing.assert_allclose(update.delta_alpha, want, rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS, ids=lambda form: type(form).__name__)
def test_removing_one_after_another_is_removing_both(form):
    fitted = cases.fit(problems.linear_problem(7, 2, 60, "squared"))
    both = remove(fitted, dfl.Remove([1, 3]), form=form)
    twice = remove(remove(fitted, dfl.Remove([1]), form=form).commit(), dfl.Remove([3]), form=form)
    assert cases.relative(twice.params(), both.params()) < 1e-6
    listed = remove(fitted, [dfl.Remove([1]), dfl.Remove([3])], form=form)
    assert cases.relative(listed.params(), both.params()) < 1e-6


@pytest.mark.thorough
def test_each_of_two_and_eight_devices_holds_its_rows_only(tmp_path):
    """Dense and Kronecker `K`, on one device or fitted on the mesh; 11 retained points do not divide."""
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    out = tmp_path / "results.npz"
    command = [sys.executable, str(Path(__file__).with_name("mesh_worker.py")), str(out)]
    subprocess.run(command, env=dict(os.environ, XLA_FLAGS=flags), check=True, timeout=600)
    got = np.load(out)
    for kind, each in (("dense", 3), ("kronecker", 1)):
        for devices, points in ((2, 12), (8, 16)):
            # Both stop at a residual of 1e-8; the condition number is below 1e3 times that of ours.
            want, found = got[f"{kind}/alone"], got[f"{kind}/{devices}"]
            assert cases.relative(found, want) < 1e-5, (kind, devices)
            share = (points * each) ** 2 * 8 // devices
            np.testing.assert_array_equal(got[f"{kind}/{devices}/bytes"], [share] * devices)


@pytest.mark.parametrize("kind", [DenseOperator, KroneckerOperator])
def test_a_product_with_rows_on_a_mesh_is_that_of_the_block(kind):
    rng = np.random.default_rng(0)
    size, keep = (7 * 2 if kind is DenseOperator else 7), np.array([0, 2, 3, 6])
    matrix, v = rng.normal(size=(size, size)), rng.normal(size=(4, 2))
    op = kind(jnp.asarray(matrix), 2)
    block = retained_rows(op, keep, jax.devices()[:1])
    each = size // 7
    rows = (keep[:, None] * each + np.arange(each)).ravel()
    want = (matrix[np.ix_(rows, rows)] @ v.reshape(len(rows), -1)).reshape(4, 2)
    np.testing.assert_allclose(block.mv(jnp.asarray(v)), want, rtol=1e-12)


def test_entries_that_would_not_fit_are_refused_before_they_are_made(monkeypatch):
    fitted = dfl.fit(
        dfl.linearize(lambda w, x: x @ w, jnp.zeros((3, 2))), np.eye(3), np.ones((3, 2)),
        loss=dfl.SquaredError(), ridge=0.1, kernel="matrix-free", progress=False,
    )  # fmt: skip
    monkeypatch.setattr("dualfluence.apps.paper._forms.memory_budget", lambda: 6**2 * 8 - 1)
    with pytest.raises(MemoryError, match=r"6 rows take .* Use fitted\.edit"):
        remove(fitted, dfl.Remove([0]))
    monkeypatch.setattr("dualfluence.apps.paper._forms.memory_budget", lambda: 6**2 * 8)
    assert remove(fitted, dfl.Remove([0])).stats.converged


def test_only_removals_and_only_the_papers_forms_are_taken():
    fitted = cases.fit(problems.linear_problem(6, 2, 30, "squared"))
    for edit in (
        dfl.Relabel([1], np.zeros((1, 2))),
        dfl.Reweight([1], [2.0]),
        dfl.Add(np.zeros((1, 2, 31)), np.zeros((1, 2))),
    ):
        with pytest.raises(ValueError, match="can only remove points"):
            remove(fitted, edit, form=PaperDirect())
    with pytest.raises(TypeError, match="solver"):
        fitted.edit(dfl.Remove([1]), solver=PaperCG())
