"""Scores by few directions of outputs per point: limits, brute force, means over draws, memory, bad input."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_trajectory import C, D, N, _data, _jacobian, _params, _run, _softmax, _unit

import cases
import dualfluence as dfl
from dualfluence.attribution import LeadingProbes, RandomProbes, Trajectory, _probes

OPTIONS = {"combine": "mean", "progress": False}


def hessians(params, x):
    s = _softmax(params, x)
    return np.stack([(np.diag(r) - np.outer(r, r)) / len(s) for r in s])


def scores_with(params, ridge, H):
    """The equation in parameter space with other curvatures `H` of the outputs, NumPy."""
    x, y, xq, yq = _data()
    J, J_q = _jacobian(params, x), _jacobian(params, xq)
    g = (_softmax(params, x) - np.eye(C)[y]) / N
    v = _softmax(params, xq) - np.eye(C)[yq]
    A = ridge * np.eye(J.shape[2]) + np.einsum("nap,nab,nbr->pr", J, H, J)
    return np.einsum("qap,qa->qp", J_q, v) @ np.linalg.solve(A, np.einsum("nap,na->pn", J, g))


def leading(H, m):
    """The nearest matrices of rank `m`."""
    values, vectors = np.linalg.eigh(H)
    P = vectors[:, :, -m:] * np.sqrt(np.maximum(values[:, None, -m:], 0))
    return P @ np.swapaxes(P, 1, 2)


@pytest.mark.parametrize("leverage", [False, True])
def test_as_many_leading_probes_as_the_rank_are_exact(leverage):
    run = _run()
    exact = run.attribute(*_data(), probes=None, leverage=leverage, **OPTIONS)
    probed = run.attribute(*_data(), probes=C - 1, leverage=leverage, **OPTIONS)
    np.testing.assert_allclose(probed.values, exact.values, rtol=1e-8, atol=1e-10)
    assert probed.stats["left_out"] == pytest.approx(0, abs=1e-12)
    assert exact.stats["probes"] is None


def test_one_leading_probe_is_the_nearest_curvature_of_rank_one():
    run, params = _run(checkpoints=1), _params(0)
    got = run.attribute(*_data(), probes=LeadingProbes(1), **OPTIONS)
    H = hessians(params, _data()[0])
    np.testing.assert_allclose(
        got.values, _unit(scores_with(params, run.ridge(0), leading(H, 1))), rtol=1e-8
    )
    share = 1 - np.trace(leading(H, 1).sum(0)) / np.trace(H.sum(0))
    assert got.stats["left_out"] == pytest.approx(share)
    assert any(f"leave out {share:.2g} of the curvature" in note for note in got.notes)


def test_random_probes_are_signs_through_the_factor_and_right_in_the_mean():
    loss, params, x = dfl.SoftmaxCrossEntropy(), _params(0), _data()[0]
    f = jnp.asarray(np.log(_softmax(params, x)))
    weights = jnp.full(N, 1 / N)
    factor = loss.hess_factor(f, loss.prepare_targets(_data()[1], C, f.dtype), weights)
    draws = jax.vmap(lambda key: RandomProbes(2).directions(factor, f, key))(
        jax.random.split(jax.random.key(0), 4000)
    )
    outer = np.einsum("dncm,dnam->dnca", draws, draws)
    H = hessians(params, x)
    error = np.abs(outer.mean(0) - H) / (outer.std(0) / np.sqrt(4000) + 1e-12)
    assert error.max() < 5
    # Each is R times signs over √m: R⁺P has entries ±1/√2, up to the direction that R maps to zero.
    R = np.asarray(factor.mv(jnp.broadcast_to(jnp.eye(C), (N, C, C))))
    signs = np.array(np.meshgrid(*[[-1, 1]] * C)).reshape(C, -1) / np.sqrt(2)
    possible = R @ signs
    distance = np.abs(draws[0][:, :, 0, None] - possible).max(1).min(1)
    assert distance.max() < 1e-12


def test_scores_by_random_probes_are_the_equation_with_their_curvature():
    run, params = _run(checkpoints=1), _params(0)
    x, y = _data()[:2]
    got = run.attribute(*_data(), probes=RandomProbes(2, seed=3), **OPTIONS)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), 0), 0)
    loss, f = dfl.SoftmaxCrossEntropy(), cases.mlp(params, jnp.asarray(x))
    factor = loss.hess_factor(f, loss.prepare_targets(y, C, f.dtype), jnp.full(N, 1 / N))
    P = np.asarray(RandomProbes(2).directions(factor, f, key))
    want = scores_with(params, run.ridge(0), P @ np.swapaxes(P, 1, 2))
    np.testing.assert_allclose(got.values, _unit(want), rtol=1e-8, atol=1e-10)
    # The halves are the same equation with one probe each, in the size that it would have alone.
    halves = [
        scores_with(params, run.ridge(0), 2 * P[:, :, [h]] @ np.swapaxes(P[:, :, [h]], 1, 2))
        for h in (0, 1)
    ]
    a, b = halves
    each = (a * b).sum(1) / np.sqrt((a**2).sum(1) * (b**2).sum(1))
    assert got.stats["agreement"] == pytest.approx(each.mean(), rel=1e-6)
    assert any("correlate by" in note for note in got.notes)


def test_every_checkpoint_and_seed_draws_its_own_and_a_call_repeats():
    run = Trajectory(
        cases.mlp, [_params(0)] * 2, steps=[10, 11], learning_rate=[0.11, 0.1]
    )  # one ridge
    once = run.attribute(*_data(), probes=RandomProbes(1), **OPTIONS).values
    again = run.attribute(*_data(), probes=RandomProbes(1), **OPTIONS).values
    other = run.attribute(*_data(), probes=RandomProbes(1, seed=1), **OPTIONS).values
    np.testing.assert_array_equal(once, again)
    assert cases.relative(other, once) > 1e-3
    first = Trajectory(cases.mlp, [_params(0)], steps=[10], learning_rate=0.11)
    alone = first.attribute(*_data(), probes=RandomProbes(1), **OPTIONS).values
    assert cases.relative(once, alone) > 1e-3


def test_probes_follow_a_diagonal_metric():
    params = _params(0)
    diagonal = jax.tree.map(lambda a: jnp.abs(a) + 0.1, params)
    run = Trajectory(cases.mlp, [params], [10], 0.1, preconditioner=[diagonal])
    exact = run.attribute(*_data(), probes=None, **OPTIONS).values
    np.testing.assert_allclose(
        run.attribute(*_data(), probes=C - 1, **OPTIONS).values, exact, rtol=1e-8, atol=1e-10
    )


def test_one_output_loses_nothing_by_one_probe():
    rng = np.random.default_rng(0)
    x, xq = rng.normal(size=(N, D)), rng.normal(size=(2, D))
    y, yq = rng.normal(size=(N, 1)), rng.normal(size=(2, 1))
    run = Trajectory(cases.mlp, [cases.mlp_params(jax.random.key(0), (D, 6, 1))], [5], 0.1)
    exact, *probed = (
        run.attribute(x, y, xq, yq, probes=probes, loss=dfl.SquaredError(), **OPTIONS).values
        for probes in (None, LeadingProbes(1), RandomProbes(1))
    )
    for each in probed:
        np.testing.assert_allclose(each, exact, rtol=1e-7, atol=1e-9)


def test_a_killed_run_by_probes_goes_on_and_other_probes_are_other_data(tmp_path):
    run = _run()
    options = {"probes": RandomProbes(2), "folder": tmp_path, **OPTIONS}
    once, again = run.attribute(*_data(), **options), run.attribute(*_data(), **options)
    np.testing.assert_array_equal(once.values, again.values)
    assert again.stats["agreement"] == pytest.approx(once.stats["agreement"])
    with pytest.raises(ValueError, match="other data, checkpoints or options"):
        run.attribute(*_data(), **(options | {"probes": RandomProbes(2, seed=1)}))


def test_auto_is_exact_where_that_is_cheap_and_says_what_it_takes_otherwise(monkeypatch):
    assert _probes.chosen("auto", 100, 10, 9, jnp.float32) == (None, "")
    probes, why = _probes.chosen("auto", 5_000, 10, 9, jnp.float32)
    assert probes == LeadingProbes(3)
    assert "45000 unknowns" in why
    assert _probes.chosen("auto", 5_000, 50_000, 49_999, jnp.float32)[0] == RandomProbes(3)
    monkeypatch.setattr(_probes, "total_memory", lambda: 2 * 4 * 10_000**2 / 0.6)
    assert _probes.chosen("auto", 5_000, 10, 9, jnp.float32)[0] == LeadingProbes(2)
    monkeypatch.setattr(_probes, "EXACT_SECONDS", 0.0)
    monkeypatch.setattr(_probes, "AUTO_PROBES", 1)
    got = _run(checkpoints=1).attribute(*_data(), progress=False)
    assert got.stats["probes"] == "LeadingProbes(m=1)"
    assert any("chosen automatically" in note for note in got.notes)


def test_a_vocabulary_of_outputs_needs_nothing_of_its_square():
    c, n = 50_000, 6
    rng = np.random.default_rng(0)
    params = {"E": jnp.asarray(rng.normal(size=(D, c)) / D, jnp.float32)}
    x, y = rng.normal(size=(n, D)).astype(np.float32), rng.integers(0, c, n)
    run = Trajectory(lambda p, x: x @ p["E"], [params], steps=[10], learning_rate=0.1)
    got = run.attribute(x, y, x[:2], y[:2], probes=8, **OPTIONS)  # c² floats are 10 GB a point
    assert got.stats["probes"] == "RandomProbes(m=8, seed=0)"
    own = np.argmax(got.values, axis=1)
    np.testing.assert_array_equal(own, [0, 1])  # nothing helps a point as itself does


@pytest.mark.thorough
@pytest.mark.host
def test_a_vocabulary_of_outputs_fits_in_memory_for_less_than_its_square():
    command = [sys.executable, str(Path(__file__).with_name("vocabulary_worker.py"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "bounded"


@pytest.mark.parametrize(
    ("probes", "error", "words"),
    [
        (0, ValueError, "at least 1"),
        (C, ValueError, "in at most 2 of the 3 output directions"),
        (RandomProbes(C), ValueError, "probes=None gives the exact scores"),
        ("few", TypeError, "LeadingProbes"),
        (True, TypeError, "LeadingProbes"),
        (1.5, TypeError, "LeadingProbes"),
    ],
)
def test_bad_probes_are_refused(probes, error, words):
    with pytest.raises(error, match=words):
        _run(checkpoints=1).attribute(*_data(), probes=probes, progress=False)
    with pytest.raises(ValueError, match="whole number"):
        LeadingProbes(0)
    with pytest.raises(ValueError, match="whole number"):
        RandomProbes(1, seed=-1)
    with pytest.raises(ValueError, match="instead of probes"):
        _run(checkpoints=1).attribute(*_data(), probes=1, method="projected", progress=False)
