"""A stream of removals stays within its certificate of retraining, whatever path each took."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import problems
from dualfluence.unlearning import _anchor, _engine, _programs, _quick
from dualfluence.unlearning._anchor import can_anchor, make_majorant
from dualfluence.unlearning._engine import Engine


def true_distance(p, fitted, gone):
    """`‖θ − θ_retrained‖` against the oracle in parameter space."""
    theta = np.einsum("ia,iap->p", np.asarray(fitted.alpha), p.J)
    return np.linalg.norm(theta - cases.retrain(p, cases.without(p, gone)))


@pytest.fixture(params=["host", "device"])
def either_path(request, monkeypatch):
    """NumPy's algebra and the program for accelerators, which compiles on a CPU too."""
    monkeypatch.setattr(_quick, "on_host", lambda: request.param == "host")
    return request.param


def run(engine, points, **options):
    hows = []
    for point in points:
        work = engine.propose([dfl.Remove(np.atleast_1d(point))], **options)
        engine.accept(work)
        hows.append(work.how)
    return hows


@pytest.mark.parametrize("loss_name", problems.LOSS_NAMES)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_every_answer_of_a_stream_is_within_its_certificate(loss_name, weighted):
    p = problems.linear_problem(24, 2, 30, loss_name, weighted=weighted, ridge=0.05)
    engine, gone = Engine(cases.fit(p)), []
    for point in [3, 17, 4, 5, 20, 0]:
        gone.append(point)
        run(engine, [point])
        bound = engine.fitted.certificate.distance_bound
        assert true_distance(p, engine.fitted, gone) <= bound
        # One per cent of the model is what the engine keeps to without being told.
        assert bound <= 1e-2 * engine.fitted.certificate.parameter_norm
        assert not np.asarray(engine.fitted.alpha)[gone].any()


def test_the_first_removal_is_the_newton_step_up_to_the_change_of_ridge():
    p = problems.linear_problem(40, 2, 60, "squared", ridge=0.1)
    fitted = cases.fit(p)
    got = Engine(fitted, drift=10.0).propose([dfl.Remove([7])])
    assert got.how == "closed form"
    want = fitted.edit(dfl.Remove([7]))
    step = np.asarray(want.alpha - fitted.alpha)
    # The inverse has λ where the exact step has λ(1 − 1/n).
    assert np.linalg.norm(got.fitted.alpha - want.alpha) <= 2 / 40 * np.linalg.norm(step)


def test_every_step_of_a_stream_solves_its_dense_system(either_path):
    n, c, ridge, gone = 24, 3, 0.05, [3, 17, 4, 20]
    p = problems.linear_problem(n, c, 30, "softmax", ridge=ridge)
    engine = Engine(cases.fit(p), drift=100.0)
    first, K = np.asarray(engine.fitted.alpha), np.asarray(engine.fitted.kernel_op.dense())
    f = np.asarray(engine.fitted.outputs)
    prob = np.exp(f) / np.exp(f).sum(axis=1, keepdims=True)
    W = np.zeros((n * c, n * c))
    for i in range(n):
        own = slice(i * c, (i + 1) * c)
        W[own, own] = (np.diag(prob[i]) - np.outer(prob[i], prob[i])) / n
    for k, point in enumerate(gone):
        before = np.asarray(engine.fitted.alpha)
        assert run(engine, [point]) == ["closed form"]
        # `λΔα + WKΔα = λmα₀` where points are left; the point loses all that it has, those before it nothing.
        kept = np.repeat(~np.isin(np.arange(n), gone[: k + 1]), c)
        A, want = ridge * np.eye(n * c) + W @ K, np.zeros((n, c))
        want[point] = -before[point]
        right = (ridge / n * first.ravel() - A @ want.ravel())[kept]
        want.ravel()[kept] = np.linalg.solve(A[np.ix_(kept, kept)], right)
        np.testing.assert_allclose(engine.fitted.alpha - before, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss_name", problems.LOSS_NAMES)
def test_a_named_distance_is_reached(loss_name):
    p = problems.linear_problem(24, 2, 30, loss_name, ridge=0.05)
    engine = Engine(cases.fit(p))
    run(engine, [1, 2, [3, 4], 9], until=1e-9)
    assert engine.fitted.certificate.distance_bound <= 1e-9
    assert true_distance(p, engine.fitted, [1, 2, 3, 4, 9]) <= 1e-9


def test_a_kronecker_kernel_takes_the_closed_form_too():
    p, sigma, _ = problems.kronecker_problem(24, 3, 40, "softmax", ridge=0.05)
    kernel = dfl.PrecomputedKernel(jnp.asarray(sigma))
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 0.05, "progress": False}
    fitted = dfl.fit(kernel, np.arange(24), p.y, **options)
    engine = Engine(fitted)
    hows = run(engine, [3, 8, 9])
    assert all(how.startswith("closed form") for how in hows)
    want = fitted.retrain(dfl.Remove([3, 8, 9]), progress=False)
    change = np.asarray(engine.fitted.alpha - want.alpha)
    distance = np.sqrt(np.einsum("ia,ij,ja->", change, sigma, change))
    assert distance <= engine.fitted.certificate.distance_bound + want.certificate.distance_bound


@pytest.mark.parametrize("loss_name", ["squared", "softmax"])
def test_the_program_for_accelerators_gives_the_same_as_the_hosts(loss_name, monkeypatch):
    p = problems.linear_problem(24, 2, 30, loss_name, ridge=0.05)
    fitted, found = cases.fit(p), []
    for host in (True, False):
        monkeypatch.setattr(_quick, "on_host", lambda host=host: host)
        engine = Engine(fitted)
        hows = run(engine, [3, [5, 6], 9, *range(10, 24)][:6])
        hows += run(engine, [20], until=1e-8)
        found.append((hows, np.asarray(engine.fitted.alpha), engine.fitted.certificate))
        assert isinstance(engine.work.gone.rows, np.ndarray) == host
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-9, atol=1e-12)
    for name in ("gradient_norm", "rounding", "parameter_norm"):
        host, device = (getattr(each[2], name) for each in found)
        # A gradient below 1e-8 is what is left of numbers near one: eight digits of it are the same.
        assert abs(host - device) <= 1e-7 * host + 1e-15, name


def test_on_an_accelerator_a_removal_is_one_program_and_compiles_nothing_again(monkeypatch, caplog):
    monkeypatch.setattr(_quick, "on_host", lambda: False)
    monkeypatch.setattr(_engine, "MAX_GONE", 4)
    _programs._compiled.cache_clear()
    traced, less = [], _programs._less
    monkeypatch.setattr(_programs, "_less", lambda *a: traced.append(1) or less(*a))
    if hasattr(jax, "memory"):
        # As on a GPU: what a program returns is bound to its device then.
        stacked, to_host = _programs._stacked, jax.memory.Space.Host
        monkeypatch.setattr(_programs, "_stacked", lambda a: jax.device_put(stacked(a), to_host))
    p = problems.linear_problem(24, 2, 30, "squared", ridge=0.05)
    engine, calls = Engine(cases.fit(p), drift=100.0), []
    compiled = engine.work.programs._run
    counted = [lambda *a, f=f, name=name: calls.append(name) or f(*a)
               for name, f in zip(compiled._fields, compiled, strict=True)]  # fmt: skip
    monkeypatch.setattr(_programs, "_compiled", lambda *_: type(compiled)(*counted))
    engine = Engine(engine.fitted, drift=100.0)
    with caplog.at_level("WARNING"), jax.log_compiles():
        run(engine, range(10))
    # Two of the ten made a new factorisation.
    assert engine.work.gone.count == 2
    assert calls == ["less"] * 10
    assert len(traced) == 1
    # Once: arrays that are bound to a device and such that are not would make two programs of it.
    assert sum(bool(re.match(r"Compiling (jit\()?less\b", line)) for line in caplog.messages) == 1


@pytest.mark.parametrize("gone", [[3], [3, 4, 5]], ids=str)
def test_a_step_that_fails_is_answered_by_edit_and_leaves_nothing_behind(
    either_path, gone, monkeypatch
):
    p = problems.linear_problem(24, 2, 30, "softmax", ridge=0.05)
    engine, whole = Engine(cases.fit(p)), Engine(cases.fit(p))
    with monkeypatch.context() as patch:
        _programs._compiled.cache_clear()
        none = lambda A, B: B * np.nan  # noqa: E731
        patch.setattr(_programs, "solve_small", none)
        patch.setattr(_quick, "_solve", none)
        engine.work = engine.work._replace(programs=_programs.Programs(engine.work.anchor))
        work = engine.propose([dfl.Remove(gone)])
    _programs._compiled.cache_clear()
    assert work.how == "edit, and a new factorisation"
    assert true_distance(p, work.fitted, gone) <= work.fitted.certificate.distance_bound
    # Not accepted: the next request is as if this one had never been.
    engine.work = engine.work._replace(programs=_programs.Programs(engine.work.anchor))
    run(engine, [7, 8])
    run(whole, [7, 8])
    np.testing.assert_array_equal(engine.fitted.alpha, whole.fitted.alpha)


def test_a_matrix_free_kernel_goes_through_edit():
    p = problems.linear_problem(16, 2, 20, "softmax", ridge=0.05)
    engine = Engine(cases.fit(p, kernel="matrix-free"))
    assert run(engine, [3, 4]) == ["edit", "edit"]
    assert true_distance(p, engine.fitted, [3, 4]) <= engine.fitted.certificate.distance_bound


def test_a_new_inverse_keeps_the_bound_of_an_unchanged_kernel(monkeypatch):
    monkeypatch.setattr(_engine, "MAX_GONE", 2)
    monkeypatch.setattr("dualfluence.unlearning._anchor.BOUND_RANK", 8)
    p = problems.linear_problem(24, 2, 30, "softmax", ridge=0.05)
    engine = Engine(cases.fit(p), drift=100.0)
    first = engine.work.anchor
    run(engine, range(5))
    assert engine.work.anchor is not first
    assert engine.work.anchor.majorant is first.majorant


def test_a_new_inverse_is_made_after_many_points_and_after_other_requests(monkeypatch):
    monkeypatch.setattr(_engine, "MAX_GONE", 3)
    monkeypatch.setattr(_engine, "REFRESH_AFTER", 2)
    p = problems.linear_problem(24, 2, 30, "softmax", ridge=0.05)
    engine = Engine(cases.fit(p))
    run(engine, [0, 1, 2, 3])
    assert engine.work.gone.count == 1
    engine.accept(engine.propose([dfl.Relabel([9], p.y[9:10])]))
    assert engine.work.anchor is None
    assert run(engine, [4, 5])[0] == "edit"
    assert engine.work.anchor is not None
    assert true_distance(p, engine.fitted, range(6)) <= engine.fitted.certificate.distance_bound


def test_a_stream_has_room():
    p = problems.linear_problem(40, 1, 50, "logistic", ridge=0.2)
    engine = Engine(cases.fit(p))
    run(engine, range(20))
    assert engine.work.gone.count == 20
    assert true_distance(p, engine.fitted, range(20)) <= engine.fitted.certificate.distance_bound


def test_a_proposal_changes_nothing(either_path):
    p = problems.linear_problem(24, 2, 30, "softmax", ridge=0.05)
    first, second = Engine(cases.fit(p)), Engine(cases.fit(p))
    for point in (7, 8):
        first.propose([dfl.Remove([point])])
    run(first, [3, 9])
    run(second, [3, 9])
    np.testing.assert_array_equal(first.fitted.alpha, second.fitted.alpha)


def test_of_two_proposals_from_one_state_the_last_can_be_accepted(either_path):
    """They share scratch memory: the first would eliminate the second's point from then on."""
    p = problems.linear_problem(24, 2, 30, "softmax", ridge=0.05)
    engine = Engine(cases.fit(p), drift=100.0)
    run(engine, [2])
    before = engine.work
    first, second = (engine.propose([dfl.Remove([point])]) for point in (5, 9))
    assert engine.work is before
    with pytest.raises(RuntimeError, match="another request was proposed after this one"):
        engine.accept(first)
    engine.accept(second)
    run(engine, [11])
    alone = Engine(cases.fit(p), drift=100.0)
    run(alone, [2, 9, 11])
    np.testing.assert_allclose(engine.fitted.alpha, alone.fitted.alpha, atol=1e-12)


@pytest.mark.parametrize("points", [[3], [5, 3], [24], [-1]])
def test_a_refused_request_changes_nothing(either_path, points):
    # On a device the step is under way before the request is refused.
    p = problems.linear_problem(24, 2, 30, "softmax", ridge=0.05)
    first, second = Engine(cases.fit(p)), Engine(cases.fit(p))
    for engine in (first, second):
        run(engine, [3])
    with pytest.raises(ValueError, match=r"point 3 is not in the training set|in \[0, 24\)"):
        first.propose([dfl.Remove(points)])
    for engine in (first, second):
        run(engine, [5, 9])
    np.testing.assert_array_equal(first.fitted.alpha, second.fitted.alpha)
    assert first.fitted.certificate == second.fitted.certificate


def test_drift_of_the_running_product_is_within_its_estimate():
    p = problems.linear_problem(40, 2, 60, "softmax", ridge=0.01)
    engine = Engine(cases.fit(p), drift=100.0)
    hows = run(engine, range(12))
    assert set(hows) == {"closed form"}
    state = engine.fitted.state
    off = np.abs(engine.fitted.kernel_op.mv(state.alpha) - state.k_alpha)
    root = np.sqrt(np.asarray(engine.fitted.kernel_diagonal))
    eps = np.finfo(float).eps
    reach = np.sum(root * np.abs(np.asarray(state.alpha)))
    assert (off <= 4 * eps * root * (float(state.drift) + reach)).all()
    assert float(state.drift) > 0


def test_the_sketch_bounds_the_kernel(monkeypatch):
    monkeypatch.setattr("dualfluence.unlearning._anchor.BOUND_RANK", 8)
    p = problems.linear_problem(30, 2, 40, "softmax")
    op = cases.fit(p).kernel_op
    majorant = make_majorant(op)
    L = np.asarray(majorant.features, float).T
    bound = L @ L.T + float(majorant.rest) * np.eye(60)
    # Semidefinite but for rounding of the sketch.
    assert np.linalg.eigvalsh(bound - np.asarray(op.dense())).min() >= -1e-9
    rng = np.random.default_rng(0)
    for scale in (1.0, 1e-30):
        v = scale * rng.normal(size=(30, 2))
        low, high = (v.ravel() @ each @ v.ravel() for each in (np.asarray(op.dense()), bound))
        # The slack is 64 units of float32 over the norm of L, at most 1e-4 of the bound here.
        assert low <= float(majorant.square(op, jnp.asarray(v))) <= (1 + 1e-4) * high


def test_a_gap_and_a_missing_certificate_are_carried_on():
    p = problems.linear_problem(24, 2, 30, "softmax", ridge=0.05)
    fitted = cases.fit(p)
    wide = dataclasses.replace(fitted.certificate, gap=0.25)
    engine = Engine(dataclasses.replace(fitted, certificate=wide))
    run(engine, [2])
    assert engine.fitted.certificate.gap == 0.25
    assert engine.fitted.certificate.distance_bound >= 0.25


def test_an_inverse_is_made_up_to_the_last_byte_that_may_be_used(monkeypatch):
    fitted = dfl.fit(
        dfl.linearize(lambda w, x: x @ w, jnp.zeros((3, 2))), np.eye(3), np.ones((3, 2)),
        loss=dfl.SquaredError(), ridge=0.1, progress=False,
    )  # fmt: skip
    needed = _anchor.MATRICES * 6**2 * 8
    for budget, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(_anchor, "memory_budget", lambda budget=budget: budget)
        assert can_anchor(fitted) is fits
