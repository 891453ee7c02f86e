"""The truth, the estimators and the tables of `attribution_lds.py` for AdamW and for convolutions."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.linalg
from test_lds_data import halves

import benchmark
import dualfluence as dfl
from dualfluence import primal
from dualfluence.kernels._linearized import linearize

pytestmark = [pytest.mark.host, pytest.mark.ordinary]


estimators, networks = benchmark.load("lds_estimators"), benchmark.load("lds_networks")
estimands, script = benchmark.load("lds_estimands"), benchmark.load("attribution_lds")


# Training


def tiny(kind, n=11, dtype=np.float64):
    """A training of few steps whose last batch is short; targets have three classes."""
    rng = np.random.default_rng(0)
    y = jnp.asarray(np.arange(n) % 3)
    if kind == "adamw":
        recipe = networks.RECIPES["adamw"] | {
            "widths": (5, 4, 3), "batch": 4, "epochs": 3, "rate": 0.02, "decay": 0.3,
        }  # fmt: skip
        x = rng.normal(size=(n, 5))
    else:
        recipe = networks.RECIPES["cnn"] | {"channels": (2, 3), "batch": 4, "epochs": 2}
        x = rng.normal(size=(n, 8, 8, 3))
    return networks.Training(recipe, jnp.asarray(x, dtype), y, 3)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["adamw", "cnn"])
def test_training_without_points_is_a_loop_over_the_other_rows_of_the_same_batches(kind):
    t = tiny(kind)
    key = jax.random.key(5)
    kept = np.array([0, 1, 3, 4, 7, 8, 10])
    (params, _), (rows, counts, keys) = t._begin(key)
    assert sorted(rows[:3][counts[:3] > 0].tolist()) == list(range(11))  # each once in an epoch
    assert t.total == len(rows) == t.recipe["epochs"] * 3
    moments = jax.tree.map(jnp.zeros_like, params)
    squares = moments

    def loss(params, own, mask, key):
        f = t._noisy(params, t.x, key) if kind == "cnn" else None
        if f is None:  # dropout is drawn for the whole batch
            f = networks.dropped(params, t.x[own], key, t.recipe["dropout"])[mask]
            own = own[mask]
        else:
            own = own[mask]
            f = f[own]
        return -jnp.mean(jax.nn.log_softmax(f)[jnp.arange(len(own)), t.y[own]])

    for step in range(t.total):
        mask = (counts[step] > 0) & np.isin(rows[step], kept)
        rate = t.recipe["rate"] * 0.5 * (1 + np.cos(np.pi * step / t.total))
        grads = jax.tree.map(jnp.zeros_like, params)
        if mask.any():
            grads = jax.grad(loss)(params, np.asarray(rows[step]), np.asarray(mask), keys[step])
        if kind == "cnn":
            moments = jax.tree.map(lambda v, g: 0.9 * v + g, moments, grads)
            params = jax.tree.map(lambda p, v, r=rate: p - r * v, params, moments)
            continue
        moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, grads)
        squares = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, squares, grads)
        a, b = 1 - 0.9 ** (step + 1), 1 - 0.999 ** (step + 1)
        params = jax.tree.map(
            lambda p, m, v, a=a, b=b, r=rate: (
                p - r * (m / a / (jnp.sqrt(v / b + 1e-16) + 1e-8) + 0.3 * p)
            ),
            params,
            moments,
            squares,
        )
    got = t.on_rows(key, jnp.asarray(kept))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["adamw", "cnn"])
def test_checkpoints_are_of_the_same_training_and_carry_the_optimisers_moments(kind):
    t = tiny(kind)
    key, ones = jax.random.key(2), jnp.ones(11)
    stops = [1, 2, t.total]
    found = t.checkpoints(key, stops)
    end, again = t.learn(key, ones), t.learn(key, ones, again=True)
    for a, b, c in zip(*map(jax.tree.leaves, (end, again, found[t.total][0])), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-12)
        np.testing.assert_allclose(c, a, rtol=1e-9)
    record = t.record([found[s] for s in stops], stops)
    assert list(record["steps"]) == stops
    rates = [t.recipe["rate"] * 0.5 * (1 + np.cos(np.pi * k / t.total)) for k in range(t.total)]
    np.testing.assert_allclose(record["learning_rate"][1], np.mean(rates[:2]), rtol=1e-6)
    momentum = t.recipe.get("momentum", 0.0)
    np.testing.assert_allclose(t.time(1, 3), sum(rates[1:3]) / (1 - momentum), rtol=1e-6)
    if kind == "adamw":
        nu = optax.tree_utils.tree_get(found[2][1], "nu")[0]["w"]
        want = 1 / (np.sqrt(np.asarray(nu) / (1 - 0.999**2)) + 1e-8)
        np.testing.assert_allclose(record["preconditioner"][1][0]["w"], want, rtol=1e-9)
        assert record["weight_decay"] == 0.3
    else:
        assert record["momentum"] == 0.9


@pytest.mark.thorough
def test_products_with_patches_are_convolutions_with_stride_two():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 8, 6, 3)), rng.normal(size=(27, 4))
    want = jax.lax.conv_general_dilated(
        jnp.asarray(x), jnp.asarray(w.reshape(3, 3, 3, 4)), (2, 2), ((1, 1), (1, 1)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    np.testing.assert_allclose(networks.patches(jnp.asarray(x)) @ w, want, rtol=1e-9, atol=1e-12)


def test_segments_cover_training_and_end_where_it_ends():
    for total in (7, 90, 800):
        parts = networks.segment_stops(total)
        assert [a for a, _, _ in parts] == [0, *(b for _, b, _ in parts[:-1])]
        assert parts[-1][1] == parts[-1][2][-1] == total
        assert all(a < stop <= b for a, b, stops in parts for stop in stops)


# Estimators


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["adamw", "cnn"])
def test_replay_is_the_derivative_of_training_by_differences(kind):
    t = tiny(kind)
    rng = np.random.default_rng(3)
    xq = jnp.asarray(rng.normal(size=(3, *t.x.shape[1:])))
    yq = jnp.asarray([0, 2, 1])

    def outcome(weights, key, again=False):
        return networks.exact_losses(t.apply(t.learn(key, weights, again), xq), yq)

    key, ones = jax.random.key(1), jnp.ones(11)
    scores = estimators.make_replay(lambda w, k: outcome(w, k, True), at_once=2)(ones, key)
    assert scores.shape == (3, 11)
    measure, step = jax.jit(outcome), 1e-6
    for i in range(11):
        shift = step * jnp.eye(11)[i]
        want = (measure(ones + shift, key) - measure(ones - shift, key)) / (2 * step)
        np.testing.assert_allclose(scores[:, i], -np.asarray(want), rtol=1e-4, atol=1e-7)


@pytest.mark.thorough
def test_replay_ranks_small_removals_of_the_run_itself():
    """A sign test: leaving one point out moves the loss the way replay says."""
    t = tiny("adamw", n=24)
    xq, yq = t.x[:5] + 0.3, t.y[:5]
    key, ones = jax.random.key(1), jnp.ones(24)
    outcome = jax.jit(lambda w: networks.exact_losses(t.apply(t.learn(key, w), xq), yq))
    scores = estimators.make_replay(outcome)(ones)
    moved = np.stack([outcome(ones.at[i].set(0)) - outcome(ones) for i in range(24)], axis=1)
    assert np.corrcoef(scores.ravel(), moved.ravel())[0, 1] > 0.8


def mlp(params, x):
    return jnp.tanh(x @ params[0]["w"] + params[0]["b"]) @ params[1]["w"] + params[1]["b"]


def mlp_params(seed, dtype=np.float64):
    rng = np.random.default_rng(seed)
    shapes = ({"w": (4, 3), "b": (3,)}, {"w": (3, 3), "b": (3,)})
    make = lambda shape: jnp.asarray(0.7 * rng.normal(size=shape), dtype)  # noqa: E731
    return [{k: make(s) for k, s in layer.items()} for layer in shapes]


def mlp_data(n=9, q=2):
    rng = np.random.default_rng(7)
    x, xq = rng.normal(size=(n, 4)), rng.normal(size=(q, 4))
    return x, np.arange(n) % 3, xq, np.arange(q) % 3


def by_hand(params, x):
    """For both layers: inputs with a one for the bias, and `Σ_r g_r g_rᵀ` of every point."""
    W, b, V, c = (np.asarray(a) for layer in params for a in (layer["w"], layer["b"]))
    h = np.tanh(x @ W + b)
    f = h @ V + c
    p = np.exp(f - f.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    G2 = p[:, :, None] * np.eye(3) - p[:, :, None] * p[:, None, :]
    B = (1 - h**2)[:, :, None] * V
    G1 = np.einsum("iab,ibc,idc->iad", B, G2, B)
    ones = np.ones((len(x), 1))
    return [(np.hstack([x, ones]), G1), (np.hstack([h, ones]), G2)]


def stacked(tree):
    """`[w; b]` of every layer, leading axes first."""
    return [
        np.concatenate([np.asarray(a["w"]), np.asarray(a["b"])[..., None, :]], axis=-2)
        for a in tree
    ]


def gradients(params, x, y):
    one = lambda p, x, y: -jax.nn.log_softmax(mlp(p, x[None])[0])[y]  # noqa: E731
    return stacked(jax.vmap(jax.grad(one), (None, 0, 0))(params, jnp.asarray(x), jnp.asarray(y)))


@pytest.mark.thorough
def test_source_is_its_matrices_written_out():
    x, y, xq, yq = mlp_data()
    n, times, decays = len(x), (0.8, 2.5), (0.1, 0.3)
    runs = [[mlp_params(0), mlp_params(1)], [mlp_params(2), mlp_params(3)]]
    rng = np.random.default_rng(9)
    diagonals = [
        [jax.tree.map(lambda a: jnp.asarray(rng.uniform(0.2, 3, a.shape)), p) for p in part]
        for part in runs
    ]
    a = gradients(runs[-1][-1], xq, yq)
    want = 0.0
    for part, diagonal, time, decay in reversed(
        list(zip(runs, diagonals, times, decays, strict=True))
    ):
        P = [(u + v) / 2 for u, v in zip(*map(stacked, diagonal), strict=True)]
        moved = []
        for layer in (0, 1):
            terms = [by_hand(params, x)[layer] for params in part]
            A = np.mean([np.einsum("ia,ib->ab", i, i) / n for i, _ in terms], axis=0)
            S = np.mean([G.mean(axis=0) for _, G in terms], axis=0)
            left, right = np.linalg.eigh(A)[1], np.linalg.eigh(S)[1]
            values = np.mean([
                np.einsum("ia,ib->ab", (i @ left) ** 2,
                          np.einsum("jb,ijk,kb->ib", right, G, right)) / n
                for i, G in terms
            ], axis=0)  # fmt: skip
            Q = np.kron(left, right)
            p = np.diag(Q.T @ np.diag(P[layer].reshape(-1)) @ Q)
            M = Q @ np.diag(p * values.reshape(-1) + decay) @ Q.T
            keep = scipy.linalg.expm(-time * M)
            gain = Q @ np.diag(p) @ Q.T @ np.linalg.solve(M, np.eye(len(M)) - keep)
            flat = a[layer].reshape(len(xq), -1)
            moved.append(flat @ gain.T)
            a[layer] = (flat @ keep.T).reshape(a[layer].shape)
        for params in part:
            for layer, g in enumerate(gradients(params, x, y)):
                want = want + moved[layer] @ g.reshape(n, -1).T / n / len(part)
    segments = [
        estimators.Segment(part, time, decay, diagonal)
        for part, diagonal, time, decay in zip(runs, diagonals, times, decays, strict=True)
    ]
    got = estimators.source(mlp, segments, *map(jnp.asarray, (x, y, xq, yq)))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-9)


@pytest.mark.thorough
def test_source_of_a_quadratic_is_the_derivative_of_its_training():
    """Where curvature is constant and diagonal nothing is approximated but the size of a step."""
    rng = np.random.default_rng(0)
    n, d, steps, rate, decay = 8, 3, 40, 0.02, 0.4
    x = np.zeros((n, d))
    x[np.arange(n), np.arange(n) % d] = rng.uniform(0.5, 2, n)
    y, xq, yq = rng.normal(size=(n, 1)), rng.normal(size=(2, d)), rng.normal(size=(2, 1))
    P = rng.uniform(0.5, 2, (d, 1))
    loss = dfl.SquaredError()
    scale = float(loss.grad(jnp.ones((1, 1)), jnp.zeros((1, 1)))[0, 0])  # 1 for ½(f − y)²

    def train(weights):
        theta, path = np.zeros((d, 1)), []
        for _ in range(steps):
            path.append(theta)
            grad = scale * x.T @ (weights[:, None] * (x @ theta - y)) / n
            theta = theta - rate * (P * grad + decay * theta)
        return theta, path

    ones, eps = np.ones(n), 1e-5
    end, path = train(ones)
    v = scale * (xq @ end - yq)
    want = np.stack([
        -((xq @ (train(ones + eps * e)[0] - train(ones - eps * e)[0])) * v)[:, 0] / (2 * eps)
        for e in np.eye(n)
    ], axis=1)  # fmt: skip
    apply = lambda w, x: x @ w  # noqa: E731
    segments = [
        estimators.Segment([jnp.asarray(w)], rate, decay, [jnp.asarray(P)])
        for w in [*path[1:], end]
    ]
    got = estimators.source(apply, segments, *map(jnp.asarray, (x, y, xq, yq)), loss=loss)
    # Steps of 0.02 on a curvature below 2: each is off by at most two per cent of itself.
    assert np.abs(got - want).max() < 0.02 * np.abs(want).max()


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ekfac_of_many_dampings_is_the_librarys_one_by_one(dtype):
    x, y, xq, yq = mlp_data(n=33, q=5)
    params = mlp_params(4, dtype)
    data = [jnp.asarray(a, dtype if a.dtype == float else int) for a in (x, y, xq, yq)]
    ridges = (1e-3, 0.1, 10.0)
    found = estimators.ekfac(mlp, params, ridges, *data)
    for ridge, got in zip(ridges, found, strict=True):
        want = primal.attribute(
            linearize(mlp, params), params, *data, loss=dfl.SoftmaxCrossEntropy(), ridge=ridge,
            solver=primal.EKFAC(), linearised=False,
        ).values  # fmt: skip
        scale = np.abs(want).max()
        np.testing.assert_allclose(got, want, atol=scale * (1e-4 if dtype == np.float32 else 1e-9))


# Tables


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["adamw", "cnn"])
def test_a_smoke_run_fills_its_table_and_goes_on_where_it_was_killed(monkeypatch, tmp_path, name):
    out = tmp_path / "found.json"
    command = ["attribution_lds.py", "--recipes", name, "--smoke"]
    command += ["--work", str(tmp_path / "work"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    honest, calls = estimands.Estimands.models, []

    def killed(self, rows, seeds):
        calls.append(list(seeds))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return honest(self, rows, seeds)

    monkeypatch.setattr(estimands.Estimands, "models", killed)
    with pytest.raises(KeyboardInterrupt):
        script.main()
    assert json.loads(out.read_text())["missing"][0] == f"{name}: truth"
    script.main()
    record = json.loads(out.read_text())
    assert record["missing"] == []
    assert record["errors"] == {}
    assert record["command"].endswith("--work … --out …")
    assert {"versions", "device", "cpu_count", "commit"} <= set(record["machine"])
    result = record["recipes"][name]
    assert set(result["ceiling"]) == {"mean", "run"}
    assert result["ceiling"]["run"]["value"] > 0.95  # nothing is random but rounding
    table = result["table"]
    both = {
        "Trajectory", 'Trajectory, question="point"', "Trajectory, last checkpoint alone",
        "gradient dot", "gradient cosine", "TracIn", "EK-FAC", "SOURCE", "TRAK", "TRAK, 2 halves",
        "replay", "datamodel, 20 retrainings", "datamodel, 40 retrainings",
    }  # fmt: skip
    for label in both:
        for question in ("mean", "run"):
            low, high = table[label][question]["interval"]
            assert -1 <= low <= table[label][question]["lds"] <= high <= 1
    assert table["EK-FAC"]["run"]["setting"].startswith("damping")
    assert table["datamodel, 40 retrainings"]["models"] == 40
    assert "run" not in table["SOURCE, 2 runs"]
    text = estimands.markdown(result)
    assert text.count("\n") == len(table) + 2
    # What was trained before is not trained again, and the table stays.
    trained = len(calls)
    script.main()
    assert len(calls) == trained
    again = json.loads(out.read_text())["recipes"][name]
    assert again["table"] == table


def made_up(tmp_path):
    """A bench whose truths are linear in the points, with effects of their own for each part and question."""
    bench, effects = estimands.Estimands("adamw", "smoke", None, None, tmp_path), {}
    rng = np.random.default_rng(0)
    n, q = bench.scale["points"], bench.scale["queries"]
    for part in bench.parts.values():
        part.masks = halves(part.subsets, n, part.subset_seed)
        for question in estimands.QUESTIONS:
            own = effects[part.name, question] = rng.normal(size=(q, n))
            part.targets[question] = -(part.masks @ own.T)
    return bench, effects


def test_a_constant_is_chosen_for_each_question_on_the_other_part(tmp_path):
    bench, effects = made_up(tmp_path)
    seen = []

    def scores(seeds, part):
        """On the part to choose on, `a` is right for the mean and `b` for the run; else `c` would be best."""
        seen.append((part.name, list(seeds)))
        if part.name == "choice":
            a, b = (effects["choice", question] for question in estimands.QUESTIONS)
            return {"a": a, "b": b, "c": -a - b}
        right = effects["report", "mean"]
        return {"a": 0.5 * right, "b": -right, "c": right}

    assert bench.compare("made up", scores, 1) == {"mean": "a", "run": "b"}
    row = bench.table["made up"]
    assert row["mean"]["setting"] == "a"
    assert row["run"]["setting"] == "b"
    np.testing.assert_allclose(row["mean"]["lds"], 1)  # `a` ranks as `c` does
    report = bench.parts["report"]
    want = bench.measured(-effects["report", "mean"], report, "run").value
    np.testing.assert_allclose(row["run"]["lds"], want)
    assert seen == [("report", [1000]), ("choice", [1900])]
    # A second command reads the scores of the first.
    again, _ = made_up(tmp_path)
    again.compare("made up", lambda seeds, part: 1 / 0, 1)
    assert again.table["made up"] == row


@pytest.mark.thorough
def test_trak_of_the_table_is_the_librarys(tmp_path):
    bench = estimands.Estimands("adamw", "smoke", None, None, tmp_path)
    models = [bench.training.first(jax.random.key(k)) for k in range(2)]
    part = bench.parts["report"]
    found = bench.trak(models, part)
    assert list(found) == ["ρ = 0.01", "ρ = 0.1", "ρ = 1", "ρ = 10"]
    want = dfl.attribution.TRAK(bench.training.apply, models, damping=0.1)
    want = 4 * want.attribute(*bench.data(part)).values  # means of two models in both factors
    np.testing.assert_allclose(found["ρ = 0.1"], want, rtol=1e-4, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("name", ["adamw", "cnn"])
@pytest.mark.parametrize("scale", ["full", "small", "smoke"])
def test_sizes_of_every_scale_fit_together(name, scale):
    recipe, sizes = networks.recipe_at(name, scale)
    assert set(sizes) == set(networks.SMOKE)
    assert max(sizes["datamodel"]) % estimands.BLOCKS == 0
    assert sizes["choosing"] >= 3
    t = networks.Training(recipe, jnp.zeros((sizes["points"], 1)), jnp.zeros(sizes["points"], int))
    stops = t.stops(networks.SHARES)
    assert stops[-1] == t.total
    assert len(stops) > (5 if scale == "smoke" else 14)
    if scale == "full":  # thousands of retrainings
        assert max(sizes["datamodel"]) >= 4000


@pytest.mark.thorough
def test_no_retraining_of_the_datamodel_and_nothing_chosen_on_is_reported(monkeypatch, tmp_path):
    """Subsets, seeds and queries of the parts are apart."""
    bench = estimands.Estimands("adamw", "smoke", None, None, tmp_path)
    used = {}

    def noted(label, part, masks, seeds, at_once=None):
        rows = {(int(s), m.tobytes()) for s, m in zip(seeds, masks, strict=True)}
        used[label] = rows, {m for _, m in rows}, {s for s, _ in rows}
        return np.random.default_rng(len(used)).random((len(masks), 4))

    monkeypatch.setattr(bench, "retrained", noted)
    bench.truth()
    bench.datamodels("mean")
    bench.datamodels("run")
    reported = used["truth, mean, report"][1]
    assert used["truth, run, report"][1] == reported
    for label in ("truth, mean, choice", "truth, run, choice", "datamodel, mean", "datamodel, run"):
        assert not used[label][1] & reported, label
    scored = set(range(1000, 1000 + bench.scale["runs"]))
    assert not used["truth, mean, report"][2] & scored
    assert used["truth, run, report"][2] == {1000} == used["datamodel, run"][2]
    assert not used["datamodel, mean"][2] & (scored | used["truth, mean, report"][2])
    assert used["truth, run, choice"][2].isdisjoint(scored)
    first, other = (part.queries[0] for part in bench.parts.values())
    assert not {a.tobytes() for a in np.asarray(first)} & {a.tobytes() for a in np.asarray(other)}


def test_recipes_of_two_kinds_are_refused_together(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["attribution_lds.py", "--recipes", "mlp", "cnn"])
    with pytest.raises(SystemExit):
        script.main()
    assert "cannot be run together" in capsys.readouterr().err
