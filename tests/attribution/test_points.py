"""Effects of single points on one run: the recursion by hand, true retraining, resuming, bad input."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from test_trajectory import C, D, N, _data, _jacobian, _params, _run, _softmax

import cases
from dualfluence.attribution import RandomProbes, Trajectory, _adjoint, attribute_runs, evaluate
from users import ordinary

OPTIONS = {"question": "point", "probes": None, "progress": False}


def thorough(value):
    return pytest.param(value, marks=pytest.mark.thorough)


def by_hand(run, metric=None):
    """The recursion of the adjoint in parameter space, NumPy."""
    x, y, xq, yq = _data()
    rates = np.broadcast_to(np.asarray(run.learning_rate, float), (len(run.steps),))
    times = np.concatenate([[0], rates * np.asarray(run.steps) / (1 - run.momentum)])
    last = run.checkpoint(len(run.steps) - 1)
    v = _softmax(last, xq) - np.eye(C)[yq]
    a = np.einsum("qap,qa->qp", _jacobian(last, xq), v)
    P, d, S = np.eye(a.shape[1]), run.weight_decay, 0.0
    for k in reversed(range(len(run.steps))):
        params, delta = run.checkpoint(k), times[k + 1] - times[k]
        J, s = _jacobian(params, x), _softmax(params, x)
        H = sum(
            J_i.T @ (np.diag(s_i) - np.outer(s_i, s_i)) @ J_i for J_i, s_i in zip(J, s, strict=True)
        )
        if metric is not None:
            P = np.diag(metric[k])
        push = np.einsum("nap,na->pn", J, s - np.eye(C)[y]) / N
        a = a @ np.linalg.inv((1 + delta * d) * np.eye(len(H)) + delta * P @ H / N)
        S = S + delta * a @ P @ push
    return S


def _metric(count):
    flat, unravel = jax.flatten_util.ravel_pytree(_params(0))
    rows = np.random.default_rng(3).uniform(0.1, 2.0, (count, flat.size))
    return rows, [unravel(jnp.asarray(row)) for row in rows]


@pytest.mark.parametrize("kind", [thorough("plain"), thorough("schedule"), "adam"])
def test_scores_of_points_are_the_recursion_in_parameter_space(kind):
    rows, trees = _metric(3)
    more = {
        "plain": {"momentum": 0.5},
        "schedule": {"learning_rate": [0.1, 0.08, 0.06], "weight_decay": 0.2},
        "adam": {"preconditioner": trees, "weight_decay": 0.1},
    }[kind]
    run = _run(checkpoints=3, **more)
    got = run.attribute(*_data(), **OPTIONS)
    want = by_hand(run, rows if kind == "adam" else None)
    np.testing.assert_allclose(got.values, want, rtol=1e-8, atol=1e-12)
    assert got.unit == "change of the quantity"
    assert any("one point out of these runs" in note for note in got.notes)
    all_probes = run.attribute(*_data(), **(OPTIONS | {"probes": C - 1}))
    np.testing.assert_allclose(all_probes.values, want, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("count", [thorough(1), 5, thorough(33)])
def test_scores_of_points_in_float32_and_blocks_of_queries(count, monkeypatch):
    run, (x, y, *_) = _run(), _data()
    rng = np.random.default_rng(1)
    xq, yq = rng.normal(size=(count, D)), rng.integers(0, C, count)
    want = run.attribute(x, y, xq, yq, **OPTIONS).values
    narrow = [jax.tree.map(lambda a: a.astype(jnp.float32), tree) for tree in run.checkpoints]
    small = Trajectory(cases.mlp, narrow, steps=run.steps, learning_rate=0.1)
    got = small.attribute(np.float32(x), y, np.float32(xq), yq, **OPTIONS).values
    assert cases.relative(got, want) < 1e-4  # solves of well-conditioned systems in float32
    monkeypatch.setattr(_adjoint, "queries_at_once", lambda model, num: min(num, 4))
    np.testing.assert_allclose(
        run.attribute(x, y, xq, yq, **OPTIONS).values, want, rtol=1e-10, atol=1e-14
    )


def test_points_of_more_digits_than_the_parameters():
    """Float64 points, as NumPy makes them, and float32 parameters: outputs are in float64."""
    x, y, xq, yq = _data()
    given = [jax.tree.map(lambda a, k=k: jnp.asarray(a, jnp.float32), _params(k)) for k in range(2)]
    runs = [
        Trajectory(ordinary(cases.mlp), params, steps=[1, 10], learning_rate=0.1)
        for params in (given, jax.tree.map(lambda a: a.astype(jnp.float64), given))
    ]
    mixed, wide = (run.attribute(x, y, xq, yq, **OPTIONS).values for run in runs)
    assert x.dtype == np.float64
    np.testing.assert_allclose(mixed, wide, rtol=1e-4, atol=1e-5 * np.abs(wide).max())


def test_several_runs_are_the_mean_and_random_probes_are_near():
    runs = [_run(0), _run(1, 3)]
    got = attribute_runs(runs, *_data(), **OPTIONS).values
    np.testing.assert_allclose(
        got, (by_hand(runs[0]) + by_hand(runs[1])) / 2, rtol=1e-8, atol=1e-12
    )
    draws = [
        runs[0].attribute(*_data(), **(OPTIONS | {"probes": RandomProbes(2, seed)})).values
        for seed in range(3)
    ]
    assert cases.relative(draws[0], draws[1]) > 1e-4
    assert cases.relative(np.mean(draws, axis=0), by_hand(runs[0])) < 0.3


def test_a_killed_run_of_points_goes_on_and_belongs_to_its_question(tmp_path):
    run, asked = _run(checkpoints=3), []

    def killed(k):
        asked.append(k)
        if k == 0 and 1 in asked:
            raise KeyboardInterrupt
        return run.checkpoints[k]

    dying = Trajectory(cases.mlp, killed, steps=run.steps, learning_rate=0.1)
    with pytest.raises(KeyboardInterrupt):
        dying.attribute(*_data(), folder=tmp_path, **OPTIONS)
    done = len(list(tmp_path.iterdir()))
    assert 0 < done < 3
    got = run.attribute(*_data(), folder=tmp_path, **OPTIONS).values
    np.testing.assert_array_equal(got, run.attribute(*_data(), **OPTIONS).values)
    # Another last checkpoint changes the adjoint of every earlier one.
    other = Trajectory(
        cases.mlp, [*run.checkpoints[:2], _params(7)], steps=run.steps, learning_rate=0.1
    )
    (tmp_path / "run-000-checkpoint-002-queries-000000.npz").unlink()
    with pytest.raises(ValueError, match="other data, checkpoints or options"):
        other.attribute(*_data(), folder=tmp_path, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"question": "points"}, "'subset' or 'point'"),
        ({"leverage": True}, "leverage=True"),
        ({"method": "projected"}, "method='projected'"),
        ({"worker": (0, 2)}, "takes no worker"),
    ],
)
def test_options_of_the_other_question_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        _run().attribute(*_data(), **(OPTIONS | options))


def test_time_that_does_not_grow_is_refused():
    run = _run(learning_rate=[0.1, 0.04])
    with pytest.raises(ValueError, match="must grow from checkpoint to checkpoint"):
        run.attribute(*_data(), **OPTIONS)


def test_points_are_nearer_to_true_leave_one_out_than_the_mean_over_checkpoints():
    """A run of full-batch descent with momentum, trained again without each of its points."""
    rng = np.random.default_rng(0)
    n, steps, rate, momentum = 33, 60, 0.05, 0.9
    x, xq = jnp.asarray(rng.normal(size=(n, D))), jnp.asarray(rng.normal(size=(9, D)))
    teacher = jnp.asarray(rng.normal(size=(D, C)))
    y = jnp.argmax(x @ teacher + jnp.asarray(rng.normal(size=(n, C))), axis=1)
    yq = jnp.argmax(xq @ teacher, axis=1)
    saved = (4, 8, 14, 22, 30, 40, 60)

    def losses(params, x, y):
        logs = jax.nn.log_softmax(cases.mlp(params, x))
        return -jnp.take_along_axis(logs, y[:, None], axis=1)[:, 0]

    def train(weights):
        def step(state, _):
            params, speed = state
            slope = jax.grad(lambda p: weights @ losses(p, x, y) / weights.sum())(params)
            speed = jax.tree.map(lambda v, g: momentum * v + g, speed, slope)
            params = jax.tree.map(lambda p, v: p - rate * v, params, speed)
            return (params, speed), params

        start = _params(3)
        zero = jax.tree.map(jnp.zeros_like, start)
        return jax.lax.scan(step, (start, zero), None, length=steps)[1]

    ends = jax.jit(jax.vmap(lambda w: losses(jax.tree.map(lambda a: a[-1], train(w)), xq, yq)))
    whole = jnp.ones((1, n))
    truth = np.asarray(ends(1 - jnp.eye(n)) - ends(whole)).T
    history = jax.jit(train)(whole[0])
    checkpoints = [jax.tree.map(lambda a, s=s: a[s - 1], history) for s in saved]
    run = Trajectory(cases.mlp, checkpoints, steps=saved, learning_rate=rate, momentum=momentum)
    point = run.attribute(x, y, xq, yq, **OPTIONS).values
    subset = run.attribute(x, y, xq, yq, probes=None, progress=False).values
    near, far = (evaluate.loo_correlation(s, truth).value for s in (point, subset))
    print(near, far)
    assert near > 0.8
    assert near > far + 0.03
    # The unit is that of the loss: the regression of truth on scores has a slope near one.
    assert 0.5 < np.sum(point * truth) / np.sum(point**2) < 2.0
