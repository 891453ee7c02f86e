"""Scores from checkpoints: the equation, several runs, other metrics, resuming, bad input."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from dualfluence.attribution import Trajectory, _view, attribute_runs
from dualfluence.attribution._trajectory import shrunk

N, Q, C, D = 12, 3, 3, 5
SIZES = (D, 6, C)


def _data(seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(N, D)),
        rng.integers(0, C, N),
        rng.normal(size=(Q, D)),
        rng.integers(0, C, Q),
    )


def _params(seed):
    return cases.mlp_params(jax.random.key(seed), SIZES)


def _run(seed=0, checkpoints=2, **options):
    trees = [_params(10 * seed + k) for k in range(checkpoints)]
    options = {"steps": [10 * (k + 1) for k in range(checkpoints)], "learning_rate": 0.1} | options
    return Trajectory(cases.mlp, trees, **options)


def _jacobian(params, x):
    """`J` of all outputs, `(n, c, p)`, by automatic differentiation of the flat parameters."""
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    return np.asarray(jax.jacobian(lambda t: cases.mlp(unravel(t), jnp.asarray(x)))(flat))


def _softmax(params, z):
    f = np.asarray(cases.mlp(params, jnp.asarray(z)))
    e = np.exp(f - f.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def _oracle(params, ridge, metric=None):
    """`v_qᵀ J_q P (λI + JᵀWJ P)⁻¹ J_iᵀ g_i` in parameter space, NumPy."""
    x, y, xq, yq = _data()
    J, J_q = _jacobian(params, x), _jacobian(params, xq)
    root = np.ones(J.shape[2]) if metric is None else np.sqrt(metric)
    J, J_q = J * root, J_q * root

    g, v = (_softmax(params, x) - np.eye(C)[y]) / N, _softmax(params, xq) - np.eye(C)[yq]
    H = ridge * np.eye(J.shape[2])
    for J_i, s_i in zip(J, _softmax(params, x), strict=True):
        H += J_i.T @ (np.diag(s_i) - np.outer(s_i, s_i)) @ J_i / N
    push = np.einsum("nap,na->pn", J, g)
    return np.einsum("qap,qa->qp", J_q, v) @ np.linalg.solve(H, push)


def _unit(scores):
    return scores / np.sqrt((scores**2).mean(axis=1, keepdims=True))


def test_scores_are_the_equation_summed_over_checkpoints_and_runs():
    runs = [_run(0), _run(1)]
    got = attribute_runs(runs, *_data(), combine="mean", progress=False)
    parts = [
        _unit(_oracle(run.checkpoint(k), 1 / (3.0 * 0.1 * 10 * (k + 1))))
        for run in runs
        for k in range(2)
    ]
    np.testing.assert_allclose(got.values, np.mean(parts, axis=0), rtol=1e-8, atol=1e-10)
    assert got.unit is None
    assert any("no unit" in note for note in got.notes)


def test_shrinking_multiplies_the_mean_by_the_share_of_it_that_is_not_noise():
    runs = [_run(0, 3), _run(1, 2)]
    parts = np.stack(
        [
            _unit(_oracle(run.checkpoint(k), run.ridge(k)))
            for run in runs
            for k in range(len(run.steps))
        ]
    )
    got = attribute_runs(runs, *_data(), progress=False)
    mean, noise = parts.mean(0), parts.var(0) / (3 * 2)
    np.testing.assert_allclose(got.values, mean**3 / (mean**2 + noise), rtol=1e-7, atol=1e-10)
    assert any("drawn towards zero" in note for note in got.notes)


def test_shrinking_brings_scores_nearer_to_what_all_runs_share():
    """A few large effects below noise as large as most entries: the mean is off by more."""
    rng = np.random.default_rng(0)
    true = 5 * rng.normal(size=(20, 400)) * (rng.random((20, 400)) < 0.05)
    seen = true + 2 * rng.normal(size=(8, 20, 400))
    mean = seen.mean(0)
    nearer = shrunk(mean, seen.var(0), 8.0)
    assert np.mean((nearer - true) ** 2) < 0.6 * np.mean((mean - true) ** 2)


def test_one_checkpoint_has_nothing_to_shrink():
    run = _run(0, 1)
    values = [run.attribute(*_data(), combine=c, progress=False).values for c in ("shrunk", "mean")]
    np.testing.assert_allclose(*values, rtol=1e-12)


def test_an_unknown_way_to_combine_is_refused():
    with pytest.raises(ValueError, match="combine must be one of shrunk, mean"):
        _run().attribute(*_data(), combine="median", progress=False)


def test_momentum_lengthens_the_step():
    assert _run(momentum=0.9).ridge(0) == pytest.approx(1 / (3.0 * (0.1 / 0.1) * 10))


def test_a_schedule_gives_each_checkpoint_its_mean_rate():
    run = _run(learning_rate=[0.1, 0.05])
    assert run.ridge(1) == pytest.approx(1 / (3.0 * 0.05 * 20))


def test_a_diagonal_metric_enters_the_kernel():
    params = _params(0)
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    diagonal = np.random.default_rng(3).uniform(0.1, 2.0, flat.size)
    run = Trajectory(
        cases.mlp,
        [params],
        steps=[10],
        learning_rate=0.1,
        preconditioner=[unravel(jnp.asarray(diagonal))],
    )
    got = run.attribute(*_data(), progress=False).values
    want = _unit(_oracle(params, 1 / 3.0, diagonal))
    np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-10)


def _diagonals(change):
    ones = [jax.tree.map(jnp.ones_like, _params(k)) for k in range(2)]
    return change(ones)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d[:1], "2 checkpoints but 1 preconditioners"),
        (lambda d: [d[0], d[1][:1]], "preconditioner 1 has another tree"),
        (lambda d: [d[0], [d[1][0].T, d[1][1]]], r"preconditioner 1, params\[0\] has shape"),
        (lambda d: [d[0], [-d[1][0], d[1][1]]], "preconditioner 1 must be finite and at least 0"),
        (lambda d: [[d[0][0] * np.nan, d[0][1]], d[1]], "preconditioner 0 must be finite"),
    ],
)
def test_a_preconditioner_that_does_not_fit_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        _run(preconditioner=_diagonals(change)).attribute(*_data(), progress=False)


def test_leverage_is_leave_one_out_in_closed_form():
    run = _run(checkpoints=1)
    x, y, xq, yq = _data()
    got = run.attribute(x, y, xq, yq, leverage=True, progress=False).values
    # The same step by a fit's closed form at a stationary point: shift the outputs' anchor so that
    # α = −g/λ there, as the trajectory assumes, and drop the renormalisation, the same for all i.
    params, ridge = run.checkpoint(0), run.ridge(0)
    J, J_q = _jacobian(params, x), _jacobian(params, xq)
    f = np.asarray(cases.mlp(params, jnp.asarray(x)))
    s = np.exp(f) / np.exp(f).sum(1, keepdims=True)
    f_q = np.asarray(cases.mlp(params, jnp.asarray(xq)))
    s_q = np.exp(f_q) / np.exp(f_q).sum(1, keepdims=True)
    g, v = (s - np.eye(C)[y]) / N, s_q - np.eye(C)[yq]
    W = [(np.diag(r) - np.outer(r, r)) / N for r in s]
    want = np.zeros((Q, N))
    for i in range(N):
        H = ridge * np.eye(J.shape[2]) + sum(J[j].T @ W[j] @ J[j] for j in range(N) if j != i)
        want[:, i] = np.einsum("qap,qa->qp", J_q, v) @ np.linalg.solve(H, J[i].T @ g[i])
    np.testing.assert_allclose(got, _unit(want), rtol=1e-7, atol=1e-9)


@pytest.mark.thorough
def test_projected_gradients_approach_the_full_kernel():
    run = _run(checkpoints=1)
    full = run.attribute(*_data(), progress=False).values
    near = run.attribute(*_data(), method="projected", rank=4000, progress=False)
    # Entries of K are off by about 1/√4000 = 1.6 %; the solve amplifies that a few times.
    assert cases.relative(near.values, full) < 0.15
    assert any("random directions" in note for note in near.notes)


def test_points_with_hardly_any_curvature_have_their_score_too():
    """Labels of tiny probability: float32 finds no `h` with `g = R h`, and takes the sum with kernels."""
    first, last = _params(0)
    params = [first, 15 * last]
    x, y, xq, yq = _data()
    p = _softmax(params, x)
    y = np.where(p.min(axis=1) < 1e-6, p.argmin(axis=1), y)
    assert (p.min(axis=1) < 1e-6).sum() > 1
    yq = _softmax(params, xq).argmin(axis=1)  # the loss of a sure query is rounding in float32
    options = {"probes": None, "progress": False}
    for leverage in (False, True):
        run = Trajectory(cases.mlp, [params], steps=[10], learning_rate=0.1)
        want = run.attribute(x, y, xq, yq, leverage=leverage, **options).values
        narrow = [jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)]
        run = Trajectory(cases.mlp, narrow, steps=[10], learning_rate=0.1)
        small = [np.asarray(a, np.float32) for a in (x, xq)]
        got = run.attribute(small[0], y, small[1], yq, leverage=leverage, **options).values
        # Rounding of outputs near 20 is 2e-6, and the ridge is a tenth of the kernel.
        assert cases.relative(got, want) < 1e-4


def test_checkpoints_may_be_loaded_one_by_one():
    run = _run()
    lazy = Trajectory(cases.mlp, lambda k: run.checkpoints[k], steps=run.steps, learning_rate=0.1)
    want = run.attribute(*_data(), progress=False).values
    np.testing.assert_array_equal(lazy.attribute(*_data(), progress=False).values, want)


@pytest.mark.parametrize("leverage", [False, True])
def test_queries_in_blocks_have_the_same_scores(monkeypatch, leverage):
    x, y, xq, yq = _data()
    many = np.concatenate([np.asarray(xq)] * 3), np.concatenate([np.asarray(yq)] * 3)
    options = {"method": "outputs", "leverage": leverage, "progress": False}
    want = _run().attribute(x, y, *many, **options).values
    sizes, along = [], _view.View.along

    def counted(self, points, u):
        sizes.append(len(points))
        return along(self, points, u)

    monkeypatch.setattr(_view, "QUERIES_AT_ONCE", 2)
    monkeypatch.setattr(_view.View, "along", counted)
    got = _run().attribute(x, y, *many, **options).values
    assert set(sizes) == {2}
    assert sum(sizes) >= len(many[1])
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    run = _run(checkpoints=3)
    want = run.attribute(*_data(), progress=False).values

    def killed(k):
        if k == 2:
            raise KeyboardInterrupt
        return run.checkpoints[k]

    dying = Trajectory(cases.mlp, killed, steps=run.steps, learning_rate=0.1)
    with pytest.raises(KeyboardInterrupt):
        dying.attribute(*_data(), folder=tmp_path, progress=False)
    assert len(list(tmp_path.iterdir())) == 2
    got = run.attribute(*_data(), folder=tmp_path, progress=False).values
    np.testing.assert_array_equal(got, want)
    again = run.attribute(*_data(), folder=tmp_path, progress=False).values
    np.testing.assert_array_equal(again, want)


def test_shares_of_checkpoints_make_the_whole_bit_for_bit(tmp_path):
    runs, options = [_run(0), _run(1, checkpoints=3)], {"folder": tmp_path, "progress": False}
    want = attribute_runs(runs, *_data(), progress=False).values
    for share, held in ((1, 2), (0, 5)):  # every second checkpoint of the five
        part = attribute_runs(runs, *_data(), worker=(share, 2), **options)
        assert f"share {share} of 2" in part.notes[-1]
        assert len(list(tmp_path.glob("*.npz"))) == held
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.npz")}
    np.testing.assert_array_equal(attribute_runs(runs, *_data(), **options).values, want)
    assert before == {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.npz")}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"worker": (0, 2)}, "folder"),
        ({"worker": (0, 9)}, "9 workers"),
        ({"worker": (2, 2)}, "0 to"),
    ],
)
def test_shares_that_cannot_be_are_refused(options, words, tmp_path):
    given = {} if words == "folder" else {"folder": tmp_path}
    with pytest.raises(ValueError, match=words):
        attribute_runs([_run()], *_data(), progress=False, **options, **given)


def test_a_folder_of_other_data_is_refused(tmp_path):
    _run().attribute(*_data(), folder=tmp_path, progress=False)
    with pytest.raises(ValueError, match="other data, checkpoints or options"):
        _run().attribute(*_data(1), folder=tmp_path, progress=False)
    with pytest.raises(ValueError, match="other data, checkpoints or options"):
        _run(kappa=1.0).attribute(*_data(), folder=tmp_path, progress=False)


def _nan():
    params = _params(1)
    return [params[0].at[0, 0].set(jnp.nan), *params[1:]]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: _run(steps=[10, 10]), "positive and increasing"),
        (lambda: _run(steps=[0, 10]), "positive and increasing"),
        (lambda: _run(steps=[10]), "2 checkpoints but 1 steps"),
        (lambda: _run(learning_rate=-0.1), "learning_rate must be"),
        (lambda: _run(momentum=1.0), r"momentum must be in \[0, 1\)"),
        (lambda: _run(kappa=0.0), "kappa must be"),
        (
            lambda: Trajectory(cases.mlp, [_params(0), {"w": 1}], steps=[1, 2], learning_rate=0.1),
            "checkpoint 1 has another tree",
        ),
        (
            lambda: Trajectory(
                cases.mlp,
                [_params(0), cases.mlp_params(jax.random.key(0), (D, 7, C))],
                steps=[1, 2],
                learning_rate=0.1,
            ),
            r"checkpoint 1, params\[0\] has shape \(5, 7\), expected \(5, 6\)",
        ),
        (
            lambda: Trajectory(cases.mlp, [_params(0), _nan()], steps=[1, 2], learning_rate=0.1),
            r"checkpoint 1, params\[0\]: every entry must be finite",
        ),
    ],
)
def test_a_bad_record_of_training_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, y, xq, yq: (x, y, xq[:, :2], yq), "queries: expected shape"),
        (lambda x, y, xq, yq: (x, y + 9, xq, yq), r"labels must be in \[0, 3\)"),
        (lambda x, y, xq, yq: (x, y[:4], xq, yq), "expected 12 rows"),
        (lambda x, y, xq, yq: (x * np.nan, y, xq, yq), "finite"),
    ],
)
def test_bad_data_is_refused_and_nothing_is_written(change, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        _run().attribute(*change(*_data()), folder=tmp_path, progress=False)
    assert not list(tmp_path.iterdir())
