"""What Optax keeps of a run of Adam, as a trajectory asks for it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cases
import dualfluence as dfl
from dualfluence.adapters import adam_record
from dualfluence.attribution import Trajectory

SIZES = (4, 5, 3)


def trained(optimizer, steps, keep):
    """Parameters, gradients and states of a short run, at the steps in `keep`."""
    x = jax.random.normal(jax.random.key(1), (20, 4))
    params = cases.mlp_params(jax.random.key(0), SIZES)
    state, kept = optimizer.init(params), []
    for step in range(1, steps + 1):
        gradient = jax.grad(lambda p: jnp.mean((cases.mlp(p, x) - 1) ** 2))(params)
        update, state = optimizer.update(gradient, state, params)
        if step in keep:
            kept.append((params, gradient, update, state))
        params = optax.apply_updates(params, update)
    return kept


@pytest.mark.parametrize("wrapped", ["plain", "chained", "multi"])
def test_the_diagonal_is_that_of_the_step(wrapped):
    """Without a first moment the step is −η(Pg + decay·θ)."""
    optimizer = optax.adamw(0.01, b1=0.0, b2=0.95, eps=1e-5, weight_decay=0.2)
    if wrapped == "chained":
        optimizer = optax.chain(optax.identity(), optimizer)
    if wrapped == "multi":
        labels = {"W0": "a", "W1": "b"}
        params = cases.mlp_params(jax.random.key(0), SIZES)
        labels = jax.tree.unflatten(
            jax.tree.structure(params), ["a", "b"] * (len(jax.tree.leaves(params)) // 2)
        )
        optimizer = optax.multi_transform({"a": optimizer, "b": optimizer}, labels)
    kept = trained(optimizer, 5, (2, 5))
    options = {"learning_rate": 0.01, "b2": 0.95, "eps": 1e-5, "weight_decay": 0.2}
    record = adam_record([state for *_, state in kept], kept[0][0], **options)
    assert record["steps"] == [2, 5]
    assert record["weight_decay"] == 0.2
    for (params, gradient, update, _), P in zip(kept, record["preconditioner"], strict=True):
        want = jax.tree.map(lambda d, g, p: -0.01 * (d * g + 0.2 * p), P, gradient, params)
        for got, expected in zip(jax.tree.leaves(update), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-12)


def test_moments_of_a_part_find_their_place_and_the_rest_is_not_used():
    whole = {"params": cases.mlp_params(jax.random.key(0), SIZES), "stats": {"mean": jnp.zeros(3)}}
    optimizer = optax.adam(0.1)
    state = optimizer.init(whole["params"])
    _, state = optimizer.update(jax.tree.map(jnp.ones_like, whole["params"]), state)
    (P,) = adam_record([state], whole, learning_rate=0.1)["preconditioner"]
    assert jax.tree.structure(P) == jax.tree.structure(whole)
    for leaf in jax.tree.leaves(P):
        np.testing.assert_allclose(leaf, 1, rtol=1e-6)


def test_a_schedule_gives_its_mean_and_the_record_makes_a_trajectory():
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    kept = trained(optax.adam(schedule), 4, (1, 4))
    record = adam_record([k[-1] for k in kept], kept[0][0], learning_rate=schedule)
    np.testing.assert_allclose(record["learning_rate"], [0.1, 0.085], rtol=1e-6)
    run = Trajectory(cases.mlp, [k[0] for k in kept], **record)
    x = np.asarray(jax.random.normal(jax.random.key(2), (6, 4)))
    scores = run.attribute(x, np.arange(6) % 3, x[:2], [0, 1], probes=1, progress=False)
    assert np.isfinite(scores.values).all()


def test_weight_decay_adds_to_the_ridge_of_stopping():
    params = [cases.mlp_params(jax.random.key(0), SIZES)]
    run = Trajectory(cases.mlp, params, [10], 0.1, weight_decay=0.5)
    assert run.ridge(0) == pytest.approx(0.5 + 1 / (3 * 0.1 * 10))
    for bad in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="weight_decay must be"):
            Trajectory(cases.mlp, params, [10], 0.1, weight_decay=bad)


def test_what_is_no_record_of_adam_is_refused():
    params = cases.mlp_params(jax.random.key(0), SIZES)
    sgd = optax.sgd(0.1).init(params)
    fresh = optax.adam(0.1).init(params)
    (_, _, _, state), *_ = trained(optax.adam(0.1), 1, (1,))
    for states, given, message in [
        ([], {}, "one checkpoint or more"),
        ([sgd], {}, "no state of Adam"),
        ([fresh], {"learning_rate": 0.1}, "at least 1; got \\[0\\]"),
        ([state], {}, "learning_rate is needed"),
        ([state], {"learning_rate": [0.1] * 0}, "each of 1 steps"),
    ]:
        with pytest.raises(ValueError, match=message):
            adam_record(states, params, **given)
    with pytest.raises(ValueError, match="which params does not"):
        adam_record([state], {"other": jnp.zeros(3)}, learning_rate=0.1)
    with pytest.raises(ValueError, match="the optimiser's moment"):
        adam_record([state], jax.tree.map(lambda a: a[:1], params), learning_rate=0.1)
    assert dfl.adapters.adam_record is adam_record
