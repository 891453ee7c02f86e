"""Scores of sequences: brute force, masks, lengths, blocks, tokens, defaults, memory, bad input."""

import os
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
import token_nets as nets
from token_nets import N, Q, T, V

import cases
import dualfluence as dfl
import gates
from dualfluence.attribution import GradDot, RandomProbes, Trajectory, _token_sketch, _tokens

OPTIONS = {"combine": "mean", "progress": False}


def _run(checkpoints=1, **options):
    trees = [nets.params(k) for k in range(checkpoints)]
    steps = [10 * (k + 1) for k in range(checkpoints)]
    return Trajectory(nets.net, trees, steps, 0.1, **options)


def _unit(scores):
    return scores / np.sqrt((scores**2).mean(axis=1, keepdims=True))


def _key(seed=0, run=0, checkpoint=0):
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), run), checkpoint)


@pytest.mark.thorough
def test_the_exact_form_is_brute_force():
    run, p, data = _run(), nets.params(0), nets.data()
    got = run.attribute(*data, probes=None, loss=dfl.TokenCrossEntropy(), **OPTIONS)
    want = nets.scores(p, run.ridge(0), *data, nets.hessians(p, *data[:2])).sum(2)
    np.testing.assert_allclose(got.values, _unit(want), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("adam", gates.table([False, True], [True]))
def test_scores_by_probes_are_brute_force_with_their_curvature_token_by_token(adam):
    p, data = nets.params(0), nets.data()
    diagonal = jax.tree.map(lambda a: jnp.abs(a) + 0.1, p) if adam else None
    run = _run(preconditioner=[diagonal] if adam else None)
    got = run.attribute(*data, probes=RandomProbes(3, seed=5), tokens=True, **OPTIONS)
    P = nets.probes(p, *data[:2], 3, _key(5))
    metric = jax.flatten_util.ravel_pytree(diagonal)[0] if adam else None
    parts = nets.scores(p, run.ridge(0), *data, P @ np.swapaxes(P, 1, 2), metric)
    size = np.sqrt((parts.sum(2) ** 2).mean(axis=1))[:, None, None]
    np.testing.assert_allclose(got.values, parts.sum(2) / size[:, :, 0], rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(got.tokens, parts / size, rtol=1e-7, atol=1e-9)
    assert (got.tokens[:, data[1] == nets.IGNORED] == 0).all()


def test_probes_have_the_curvature_for_their_mean():
    p, (x, y, *_) = nets.params(0), nets.data()
    draws = [nets.probes(p, x[:1], y[:1], 8, _key(s)) for s in range(300)]
    outer = np.stack([P @ np.swapaxes(P, 1, 2) for P in draws])
    H = nets.hessians(p, x[:1], y[:1])
    error = np.abs(outer.mean(0) - H) / (outer.std(0) / np.sqrt(300) + 1e-12)
    assert error.max() < 5


def test_default_arguments_score_sequences_and_the_parts_of_tokens_sum_to_them():
    data = nets.data()
    got = _run(2).attribute(*data, tokens=True, progress=False)
    assert got.values.shape == (Q, N)
    assert got.tokens.shape == (Q, N, T)
    np.testing.assert_allclose(got.tokens.sum(2), got.values, rtol=1e-6, atol=1e-9)
    assert got.stats["probes"] == "RandomProbes(m=8, seed=0)"
    assert 0 < got.stats["agreement"] < 1


@pytest.mark.parametrize("method", gates.table(["outputs", "projected"], ["outputs"]))
def test_padding_to_another_length_changes_nothing(method):
    x, y, xq, yq = nets.data()
    p = [nets.params(0, length=T + 3)]
    run = Trajectory(nets.net, p, [10], 0.1)
    options = {"probes": RandomProbes(2), "method": method, "rank": 30, "tokens": True} | OPTIONS
    pad = lambda a, value: np.pad(a, ((0, 0), (0, 3)), constant_values=value)  # noqa: E731
    once = run.attribute(x, y, xq, yq, **options)
    longer = run.attribute(
        pad(x, 0), pad(y, nets.IGNORED), pad(xq, 1), pad(yq, nets.IGNORED), **options
    )
    np.testing.assert_allclose(longer.values, once.values, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(longer.tokens[:, :, :T], once.tokens, rtol=1e-7, atol=1e-9)


def test_blocks_of_any_size_change_nothing(monkeypatch):
    data = nets.data()
    options = {"probes": RandomProbes(2), "tokens": True} | OPTIONS
    whole = _run().attribute(*data, **options)
    monkeypatch.setattr(_tokens, "panel_size", lambda train: 4)
    monkeypatch.setattr(_tokens, "query_panel", lambda train, queries: 1)
    monkeypatch.setattr(_tokens.Sequences, "at_once", lambda self, rows: 2)
    parts = _run().attribute(*data, **options)
    np.testing.assert_allclose(parts.values, whole.values, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(parts.tokens, whole.tokens, rtol=1e-8, atol=1e-10)
    assert parts.stats["agreement"] == pytest.approx(whole.stats["agreement"])


def test_projections_that_keep_everything_are_the_probes_themselves():
    data, run = nets.data(), _run()
    options = {"probes": RandomProbes(2), "tokens": True} | OPTIONS
    exact = run.attribute(*data, **options)
    kept = run.attribute(*data, method="projected", rank=10_000, **options)
    np.testing.assert_allclose(kept.values, exact.values, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(kept.tokens, exact.tokens, rtol=1e-7, atol=1e-9)
    few = run.attribute(*data, method="projected", rank=40, progress=False, tokens=True)
    assert 0.5 < np.corrcoef(few.values[0], exact.values[0])[0, 1] < 1
    np.testing.assert_allclose(few.tokens.sum(2), few.values, rtol=1e-6, atol=1e-9)


def test_inputs_may_be_a_tree_and_leverage_is_the_closed_form():
    x, y, xq, yq = nets.data()

    def masked(p, batch):
        return nets.net(p, batch["input_ids"]) * batch["scale"][:, None, None]

    tree = lambda a: {"input_ids": a, "scale": np.ones(len(a))}  # noqa: E731
    run = Trajectory(masked, [nets.params(0)], [10], 0.1)
    options = {"probes": RandomProbes(2), "leverage": True} | OPTIONS
    got = run.attribute(tree(x), y, tree(xq), yq, **options)
    np.testing.assert_allclose(
        got.values, _run().attribute(x, y, xq, yq, **options).values, rtol=1e-8, atol=1e-10
    )
    p = nets.params(0)
    P = nets.probes(p, x, y, 2, _key())
    J, J_q = nets.jacobian(p, x), nets.jacobian(p, xq)
    A = run.ridge(0) * np.eye(J.shape[2])
    A = A + np.einsum("nap,nam,nbm,nbr->pr", J, P, P, J)
    z = np.linalg.solve(A, np.einsum("qap,qa->pq", J_q, nets.gradients(p, xq, yq).reshape(Q, -1)))
    want = np.zeros((Q, N))
    for i in range(N):  # without the point's own curvature
        U = J[i].T @ P[i]
        own = J[i].T @ nets.gradients(p, x, y)[i].reshape(-1) / N
        solved = np.linalg.solve(A - U @ U.T, A @ np.linalg.solve(A, own))
        want[:, i] = z.T @ (A @ solved)
    np.testing.assert_allclose(got.values, _unit(want), rtol=1e-7, atol=1e-9)


def test_a_quantity_of_ones_own_and_a_killed_run(tmp_path):
    x, y, xq, _ = nets.data()
    run, options = _run(2), {"probes": RandomProbes(2), **OPTIONS}

    def last(outputs, target):
        return outputs.reshape(T, V)[-1, 0]

    once = run.attribute(x, y, xq, of=last, folder=tmp_path, tokens=True, **options)
    again = run.attribute(x, y, xq, of=last, folder=tmp_path, tokens=True, **options)
    np.testing.assert_array_equal(once.tokens, again.tokens)
    with pytest.raises(ValueError, match="other data, checkpoints or options"):
        run.attribute(x, y, xq, of=last, folder=tmp_path, **options)
    once.save(tmp_path / "scores.npz")
    loaded = dfl.attribution.Attribution.load(tmp_path / "scores.npz")
    np.testing.assert_array_equal(loaded.tokens, once.tokens)


def test_float32_networks_and_half_precision_outputs():
    data = nets.data()
    wide = _run().attribute(*data, probes=RandomProbes(2), **OPTIONS).values
    p = jax.tree.map(lambda a: a.astype(jnp.float32), nets.params(0))
    narrow = Trajectory(nets.net, [p], [10], 0.1)
    got = narrow.attribute(*data, probes=RandomProbes(2), **OPTIONS).values
    assert cases.relative(got, wide) < 1e-4

    # Frozen words in half precision: products of three digits, sums and gradients in float32.
    p = p | {"words": p["words"].astype(jnp.bfloat16)}
    half = Trajectory(
        nets.net, [p], [10], 0.1, trainable=lambda path, leaf: leaf.dtype == "float32"
    )
    full = [p | {"words": p["words"].astype(jnp.float32)}]
    same = Trajectory(
        nets.net, full, [10], 0.1, trainable=lambda path, leaf: path[0].key != "words"
    )
    got, want = (
        run.attribute(*data, probes=RandomProbes(2), **OPTIONS).values for run in (half, same)
    )
    assert cases.relative(got, want) < 0.02


@pytest.mark.parametrize("method", ["outputs", "projected"])
def test_a_large_vocabulary_takes_memory_for_a_few_sequences_only(method):
    n, length, words = 400, 32, 50_000
    x, y = nets.data(n=n, q=1, length=length, vocabulary=words)[:2]
    p = nets.params(0, words, 4, length, jnp.float32)
    model = dfl.linearize(_tokens.Flat(nets.net), p, trainable=lambda path, leaf: leaf.size < 200)
    loss = dfl.TokenCrossEntropy()
    train = _tokens.Sequences.of(
        model, jnp.asarray(x), loss.prepare_targets(y, length * words, jnp.float32), loss, 4, _key()
    )
    size = train.at_once(5)
    here = (train.x, train.targets, train.keys)
    if method == "outputs":
        fn, args = _tokens._train_rows.__wrapped__, (train, here)
    else:
        sketch = _token_sketch.make_sketch(model.split(p)[0], 20, _key())
        A = jnp.zeros((sketch(model.split(p)[0]).size,) * 2, jnp.float32)
        fn, args = _token_sketch._added.__wrapped__, (A, train, sketch, here)
    compiled = eqx.filter_jit(lambda *args: fn(*args, size)).lower(*args).compile()
    temporary = compiled.compiled.memory_analysis().temp_size_in_bytes
    assert (
        temporary < 0.5 * n * length * words * 4
    )  # of one array (n, T, V), of which there is none


@pytest.mark.thorough
@pytest.mark.host
@pytest.mark.parametrize("method", ["outputs", "projected"])
def test_outputs_of_50_000_words_are_never_held_for_all_sequences(method):
    here = Path(__file__).parent
    path = os.pathsep.join([str(Path(dfl.__file__).parents[1]), str(here)])
    done = subprocess.run(
        [sys.executable, str(here / "tokens_worker.py"), method],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "bounded\n", done.stderr[-2000:]


def test_targets_at_padding_are_said():
    x, y, xq, yq = nets.data()
    mask = (y != nets.IGNORED).astype(int)
    tree = lambda a, m: {"input_ids": a, "attention_mask": m}  # noqa: E731
    run = Trajectory(lambda p, batch: nets.net(p, batch["input_ids"]), [nets.params(0)], [10], 0.1)
    counted = np.where(y == nets.IGNORED, 3, y)
    for name, targets in (("y", (counted, yq)), ("yq", (y, np.full_like(yq, 3)))):
        with pytest.raises(
            ValueError, match=rf"{name}: the target of token \d+ of sequence \d+ is 3"
        ):
            run.attribute(
                tree(x, mask), targets[0], tree(xq, np.zeros_like(xq)), targets[1], progress=False
            )


def test_padding_without_a_mask_is_said_where_it_would_count():
    _, _, xq, yq = nets.data()
    x = np.array(
        [[1, 2, 3, 4], [3, 1, 0, 0], [2, 0, 0, 0], [4, 3, 2, 1], [1, 4, 2, 0], [2, 2, 1, 3]]
    )
    run = Trajectory(lambda p, batch: nets.net(p, batch["input_ids"]), [nets.params(0)], [10], 0.1)
    tree = {"input_ids": x}, {"input_ids": xq}
    counted = np.where(x == 0, 3, x)
    with pytest.raises(
        ValueError, match="no attention_mask, but 2 sequences end with token 0 up to"
    ):
        run.attribute(tree[0], counted, tree[1], yq, progress=False)
    ignored = np.where(
        x == 0, nets.IGNORED, x
    )  # behind the last target a causal network sees nothing
    assert run.attribute(tree[0], ignored, tree[1], yq, **OPTIONS).values.shape == (Q, N)
    pooled = Trajectory(
        lambda p, b: nets.net(p, b["input_ids"]).mean(1), [nets.params(0)], [10], 0.1
    )
    for made in (pooled, GradDot(pooled.apply_fn, nets.params(0))):
        with pytest.raises(ValueError, match="x: the inputs have no attention_mask"):
            made.attribute(tree[0], np.zeros(N, int), tree[1], np.zeros(Q, int))


def test_token_numbers_beyond_the_vocabulary_and_texts_are_said():
    x, y, xq, yq = nets.data()
    wrong = x.copy()
    wrong[2, 0] = V

    def taken(p, tokens):  # as an embedding of PyTorch becomes in JAX
        missing = jnp.where(tokens < V, 0.0, jnp.nan)[:, :, None]
        return nets.net(p, tokens) + missing

    filled = Trajectory(taken, [nets.params(0)], [10], 0.1)
    with pytest.raises(
        ValueError, match=r"outputs for point 2 of x are not finite.*beyond the vocab"
    ):
        filled.attribute(wrong, y, xq, yq, **OPTIONS)
    with pytest.raises(TypeError, match=r"x: expected numbers.*texts by a tokenizer"):
        _run().attribute(["a text", "another"], y[:2], xq, yq, **OPTIONS)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"y": lambda y: y[:, :-1]}, ValueError, "targets have 3 tokens per sequence.*outputs 4"),
        ({"y": lambda y: y.astype(float)}, TypeError, "must be integers"),
        ({"y": lambda y: np.where(y < 0, y, V)}, ValueError, r"must be in \[0, 5\) or -100, got 5"),
        ({"y": lambda y: np.where(y < 0, -1, y)}, ValueError, "got -1"),
        ({"y": lambda y: np.full_like(y, -100)}, ValueError, "sequence 0 has no token that counts"),
        ({"y": lambda y: y[0]}, ValueError, r"shape \(n, T\)"),
        ({"probes": dfl.attribution.LeadingProbes(2)}, ValueError, "RandomProbes"),
        ({"probes": None, "tokens": True}, ValueError, "tokens=False"),
        ({"method": "projected", "leverage": True}, ValueError, "leverage=True needs"),
    ],
)
def test_bad_input_is_said(change, error, said):
    x, y, xq, yq = nets.data()
    change = dict(change)
    y = change.pop("y", lambda y: y)(y)
    with pytest.raises(error, match=said):
        _run().attribute(x, y, xq, yq, progress=False, **change)


def test_networks_without_tokens_are_said():
    with pytest.raises(ValueError, match=r"needs outputs of shape \(n, T, V\)"):
        Trajectory(cases.mlp, [cases.mlp_params(jax.random.key(0), (T, V))], [1], 0.1).attribute(
            np.ones((N, T)), *nets.data()[1:], loss=dfl.TokenCrossEntropy(), progress=False
        )
    with pytest.raises(ValueError, match=r"tokens=True needs"):
        Trajectory(cases.mlp, [cases.mlp_params(jax.random.key(0), (T, V))], [1], 0.1).attribute(
            np.ones((N, T)), np.zeros(N, int), np.ones((Q, T)), np.zeros(Q, int), tokens=True
        )
