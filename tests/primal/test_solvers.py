"""Solvers in parameter space against the dense inverse of the curvature, in NumPy."""

import jax
import numpy as np
import pytest
import rival_cases

import dualfluence as dfl
import gates
from dualfluence.primal import CG, EKFAC, KFAC, Arnoldi, LiSSA, Nystrom

P = 43  # parameters of the dense case


@pytest.fixture(scope="module")
def case():
    return rival_cases.make()


def _inverse(matrix, shift):
    return np.linalg.inv(matrix + shift * np.eye(len(matrix)))


def _relative(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def _remove(case, gone, solver):
    return dfl.primal.influence(
        case.model, case.params, case.x, case.y, dfl.Remove(gone), ridge=case.ridge,
        loss=dfl.SoftmaxCrossEntropy(), linearised=False, solver=solver,
    )  # fmt: skip


def _flat(update):
    return np.concatenate([np.ravel(v) for v in update.delta_params.values()])


# Condition number about 40 here: 1e-8 is three digits above the tolerances of the solves.
EXACT = [CG(rtol=1e-12), Arnoldi(rank=P), Nystrom(rank=P)]


@pytest.mark.parametrize("solver", gates.table(EXACT, EXACT[:1]), ids=lambda s: type(s).__name__)
def test_exact_solvers_meet_the_inverse_of_the_gauss_newton_matrix(case, solver):
    want = case.scores(_inverse(case.gauss_newton(), case.ridge))
    found = case.attribute(solver)
    assert _relative(found.values, want) < 1e-8
    assert found.stats["residual"] < 1e-8
    assert found.stats["converged"]


@pytest.mark.parametrize("solver", [CG, Arnoldi], ids=lambda s: s.__name__)
def test_exact_solvers_meet_the_inverse_of_the_exact_hessian(case, solver):
    options = {"rtol": 1e-12} if solver is CG else {"rank": P}
    found = case.attribute(solver(hessian="exact", damping=0.6, **options))
    hessian = case.hessian()
    assert np.linalg.eigvalsh(hessian)[0] < 0  # a ridge alone would not do
    want = case.scores(_inverse(hessian, case.ridge + 0.6))
    assert _relative(found.values, want) < 1e-8


def test_lissa_tends_to_the_inverse_with_its_depth(case):
    want = case.scores(_inverse(case.gauss_newton(), case.ridge))
    errors = []
    for depth in (30, 100, 400):
        found = case.attribute(LiSSA(depth=depth))
        errors.append(_relative(found.values, want))
        top = np.linalg.eigvalsh(case.gauss_newton())[-1]
        assert found.stats["largest_eigenvalue"] == pytest.approx(top, rel=1e-6)
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-8


def test_the_error_that_lissa_states_bounds_its_solution(case):
    want = _flat(_remove(case, [0], CG(rtol=1e-13)))
    for depth in (10, 60):
        update = _remove(case, [0], LiSSA(depth=depth))
        stated = next(float(n.split()[1]) for n in update.stats.notes if n.startswith("error"))
        error = np.linalg.norm(_flat(update) - want) / np.linalg.norm(_flat(update))
        assert 0 < error <= stated


def test_sampled_lissa_is_right_on_average(case):
    want = case.scores(_inverse(case.gauss_newton(), case.ridge))
    solver = LiSSA(depth=300, sample=20, repeats=20, scale=4.0, seed=1)
    # 300 steps at 0.05/4 leave 2 % of the flattest part; the noise of 20 runs is a few per cent.
    assert _relative(case.attribute(solver).values, want) < 0.1


@pytest.mark.parametrize("complement", [False, True])
def test_arnoldi_is_the_projection_on_the_top_eigenvectors(case, complement):
    values, vectors = np.linalg.eigh(case.gauss_newton())
    top, V = values[-8:], vectors[:, -8:]
    inverse = V @ np.diag(1 / (top + case.ridge)) @ V.T
    if complement:
        inverse = inverse + (np.eye(P) - V @ V.T) / case.ridge
    found = case.attribute(Arnoldi(rank=8, steps=40, complement=complement))
    assert _relative(found.values, case.scores(inverse)) < 1e-6  # eigenvectors after 40 of 43 steps
    assert found.stats["captured_trace"] == pytest.approx(top.sum() / values.sum(), rel=1e-8)
    G = case.grads(case.xq, case.yq)
    inside = ((G @ V) ** 2).sum(1) / (G**2).sum(1)
    assert found.stats["captured"] == pytest.approx(inside.min(), rel=1e-6)


def test_nystrom_is_its_formula(case):
    M = case.gauss_newton()
    found = case.attribute(Nystrom(rank=10, seed=3))
    omega = np.asarray(jax.random.normal(jax.random.key(3), (P, 10)))
    low = M @ omega @ np.linalg.inv(omega.T @ M @ omega) @ omega.T @ M
    # On the range the inverse of low + ridge, off it 1/ridge: that is its inverse.
    assert _relative(found.values, case.scores(_inverse(low, case.ridge))) < 1e-8


SOLVERS = [CG(rtol=1e-12), LiSSA(depth=200), Arnoldi(rank=P), Nystrom(rank=12), KFAC(), EKFAC()]


@pytest.mark.thorough
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
def test_batch_size_changes_rounding_only(case, solver):
    whole, small, single = (case.attribute(solver, batch_size=b).values for b in (None, 7, 1))
    assert _relative(small, whole) < 1e-10
    assert _relative(single, whole) < 1e-10


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
def test_removal_and_scores_are_one_method(case, solver):
    """The step of removing one point, read at the queries to first order, is its score."""
    gone = 4
    update = _remove(case, [gone], solver)
    change = update.delta_loss(case.xq, case.yq, first_order=True)
    # A point of next to no weight is scored on the curvature of the others, as a removed one is.
    weights = np.ones(case.n)
    weights[gone] = 1e-12
    scores = case.attribute(solver, weights=weights).values[:, gone] * 1e12
    assert _relative(np.asarray(change), scores) < 1e-6
    assert update.stats.reason == "removal by eq. 1"


def test_own_effect_is_the_diagonal_of_the_scores(case):
    found = case.attribute(EKFAC(), self_influence=True)
    square = dfl.primal.attribute(
        case.model, case.params, case.x, case.y, case.x, case.y, solver=EKFAC(),
        loss=dfl.SoftmaxCrossEntropy(), ridge=case.ridge, linearised=False,
    )  # fmt: skip
    np.testing.assert_allclose(found.self_influence(), np.diag(square.values), rtol=1e-9)


# What must not be silent.


def test_lissa_names_the_eigenvalue_when_its_scale_is_too_small(case):
    top = np.linalg.eigvalsh(case.gauss_newton())[-1] + case.ridge
    with pytest.raises(dfl.NotConverged, match=f"largest eigenvalue.*{top:.3g}.*scale 0.1"):
        case.attribute(LiSSA(scale=0.1, depth=50))
    with pytest.raises(dfl.NotConverged, match=f"{top:.3g}"):
        case.attribute(LiSSA(scale=0.1, depth=5000))  # past the range of floats


def test_an_indefinite_hessian_is_named_by_its_smallest_eigenvalue(case):
    low = np.linalg.eigvalsh(case.hessian())[0]
    with pytest.raises(dfl.NotConverged, match=f"smallest eigenvalue.*{low:.3g}"):
        case.attribute(CG(hessian="exact"), ridge=1e-4)
    with pytest.raises(dfl.NotConverged, match="smallest eigenvalue"):
        case.attribute(LiSSA(hessian="exact", depth=3000), ridge=1e-4)
    with pytest.raises(ValueError, match="smallest eigenvalue is -"):
        case.attribute(Nystrom(rank=P, hessian="exact"))


def test_conjugate_gradients_that_stop_short_say_how_far_they_are(case):
    with pytest.raises(dfl.NotConverged, match="after 2 iterations at a relative residual of 0"):
        case.attribute(CG(max_steps=2))
    assert not case.attribute(CG(max_steps=2), on_failure="report").stats["converged"]


def test_options_that_cannot_work_are_refused(case):
    for make, words in [
        (lambda: CG(damping=-1.0), "damping must be a finite number, at least 0, got -1"),
        (lambda: CG(rtol=0.0), "rtol must lie between 0 and 1"),
        (lambda: LiSSA(depth=0), "depth must be a whole number"),
        (lambda: LiSSA(scale=-1.0), "scale must be a positive"),
        (lambda: Arnoldi(rank=0), "rank must be a whole number"),
        (lambda: Arnoldi(rank=5, steps=4), "steps must be at least the rank 5, got 4"),
        (lambda: EKFAC(damping=float("nan")), "damping must be a finite number"),
    ]:
        with pytest.raises(ValueError, match=words):
            make()
    with pytest.raises(TypeError, match="solver must be one of"):
        case.attribute(dfl.CG())
