"""Where most points are gone, the solve on the others' block is the solve on all of `K`."""

import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import gates
import problems
from dualfluence.dual import _newton
from dualfluence.losses._losses import DiagonalFactor
from dualfluence.operators._dense import DenseOperator
from dualfluence.solvers import _auto
from dualfluence.solvers._base import LinearSystem
from dualfluence.solvers._gathered import Gathered, rows_that_count
from dualfluence.solvers._preconditioner import NoPreconditioner

N, C = 20, 3
REMOVALS = {"50 %": np.arange(0, 20, 2), "90 %": np.arange(2, 20), "all but one": np.arange(19)}


def _fitted(kernel, loss_name, **options):
    p = problems.linear_problem(N, C, 40, loss_name, ridge=0.05, weighted=True)
    if kernel == "dense":
        return cases.fit(p, **options)
    J = np.random.default_rng(3).normal(size=(N, 30))
    settings = {"ridge": p.ridge, "weights": p.sample_weights, "progress": False}
    settings["kernel"] = dfl.KernelOptions(num_outputs=C)
    return dfl.fit(J @ J.T, None, p.y, loss=cases.LOSSES[loss_name], **settings, **options)


def _edit(fitted, monkeypatch, size, gone, **options):
    monkeypatch.setattr(_auto, "GATHER_SIZE", size)  # for the solvers that are not `Auto`
    options.setdefault("solver", dfl.Auto(gather_size=size))
    return fitted.edit(dfl.Remove(gone), **options)


ROWS = [
    (kernel, loss_name, solver, gone)
    for kernel in ("dense", "kronecker")
    for loss_name in problems.LOSS_NAMES
    for solver in (dfl.CG(), dfl.Cholesky())
    for gone in REMOVALS
]
QUICK = [("dense", "softmax", dfl.CG(), "50 %"), ("kronecker", "logistic", dfl.Cholesky(), "90 %")]


@pytest.mark.parametrize(
    ("kernel", "loss_name", "solver", "gone"), gates.table(ROWS, QUICK), ids=str
)
def test_block_gives_the_same_step(monkeypatch, kernel, loss_name, solver, gone):
    fitted = _fitted(kernel, loss_name)
    gone = REMOVALS[gone]
    whole = _edit(fitted, monkeypatch, 10**6, gone, solver=solver)
    block = _edit(fitted, monkeypatch, 0, gone, solver=solver)
    assert "of 20 points" in block.stats.solver
    assert "of 20 points" not in whole.stats.solver
    assert cases.relative(block.delta_alpha, whole.delta_alpha) < 1e-9
    assert cases.relative(block.outputs, whole.outputs) < 1e-9
    # For squared error both are at the optimum, where the bound is rounding alone.
    if loss_name != "squared":
        bounds = block.certificate.distance_bound, whole.certificate.distance_bound
        np.testing.assert_allclose(*bounds, rtol=1e-6)


def test_iterated_steps_reach_retraining_on_the_block(monkeypatch):
    p = problems.linear_problem(N, C, 40, "softmax", ridge=0.05)
    gone = REMOVALS["90 %"]
    update = _edit(cases.fit(p), monkeypatch, 0, gone, until=1e-10)
    want = cases.retrain(p, cases.without(p, gone))
    assert "of 20 points" in update.stats.solver
    assert np.linalg.norm(np.asarray(update.params()) - want) <= 1e-10


def test_a_loose_solve_is_loose_next_to_the_right_hand_side_of_the_whole():
    rng, n, kept, ridge = np.random.default_rng(0), 60, np.arange(0, 60, 3), 1e-2
    J = rng.normal(size=(n, 80)) * np.geomspace(10, 0.1, 80)
    K, w = J @ J.T, np.isin(np.arange(n), kept) / len(kept)
    # As in a removal: next to nothing at the points that are left, and all of `λα` at the others.
    b = ridge * np.where(w > 0, 1e-3, 1) * rng.normal(size=n)
    op = DenseOperator(jnp.asarray(K), 1)
    factor = DiagonalFactor(jnp.sqrt(jnp.asarray(w))[:, None])
    given = (jnp.asarray(ridge), jnp.asarray(b)[:, None], jnp.asarray(K @ b)[:, None])
    system = LinearSystem(op, factor, *given, NoPreconditioner(), jnp.asarray(0.1))
    step = np.asarray(Gathered(dfl.CG(), kept).solve(system).value)[:, 0]
    left = b - ridge * step - w * (K @ step)
    assert np.linalg.norm(left) <= 0.1 * np.linalg.norm(b)


@pytest.mark.thorough
def test_refined_solves_gather_too(monkeypatch):
    p = problems.linear_problem(N, C, 40, "softmax", ridge=0.05)
    fitted = cases.fit(p, dtype=jnp.float32, kernel=dfl.KernelOptions(refine=True))
    gone = REMOVALS["90 %"]
    whole = _edit(fitted, monkeypatch, 10**6, gone, solver=dfl.CG())
    block = _edit(fitted, monkeypatch, 0, gone, solver=dfl.CG())
    assert "of 20 points" in block.stats.solver
    assert "refined" in block.stats.solver
    assert cases.relative(block.delta_alpha, whole.delta_alpha) < 1e-9


@pytest.mark.thorough
def test_later_requests_of_like_size_compile_nothing(monkeypatch):
    p = problems.linear_problem(23, C, 40, "softmax", ridge=0.05)  # a shape of its own
    fitted = cases.fit(p)
    rng = np.random.default_rng(0)
    for count in (12, 18):
        gone = [np.sort(rng.choice(23, size, replace=False)) for size in (count, count, count + 1)]
        _edit(fitted, monkeypatch, 0, gone[0])
        before = _newton.COUNTERS["traces"]
        for again in gone[1:]:
            _edit(fitted, monkeypatch, 0, again)
        assert _newton.COUNTERS["traces"] == before


def test_rows_hold_every_weight_and_come_in_few_sizes():
    weights = np.ones(100)
    assert rows_that_count(weights) is None
    weights[:49] = 0
    assert rows_that_count(weights) is None
    for count, size in ((50, 50), (62, 50), (63, 37), (75, 25), (76, 25), (82, 18), (99, 1)):
        weights[:count] = 0
        rows = rows_that_count(weights)
        assert rows is not None
        assert rows.size == size == np.unique(rows).size
        assert np.isin(np.flatnonzero(weights), rows).all()


def test_small_kernels_are_left_whole():
    fitted = _fitted("dense", "softmax")
    update = fitted.edit(dfl.Remove(REMOVALS["90 %"]))
    assert "points" not in update.stats.solver
