"""The benchmark of sentences: its rival without a model, its planted facts, and what counts in a query."""

import importlib
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.host, pytest.mark.ordinary]


@pytest.fixture(scope="module", autouse=True)
def bench():
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module("attribution_text")
    sys.path.remove(folder)


@pytest.fixture(scope="module")
def recipes(bench):
    return importlib.import_module("text_recipes")


@pytest.fixture(scope="module")
def rivals(bench):
    return importlib.import_module("text_rivals")


def test_bm25_is_its_formula(rivals):
    train = ["the red boat", "a boat, a boat", "the gate"]
    scores = rivals.bm25(train, ["The boat", "nothing"])
    mean = (3 + 4 + 2) / 3

    def part(count, holding, length):
        rare = math.log(1 + (3 - holding + 0.5) / (holding + 0.5))
        return rare * count * 2.5 / (count + 1.5 * (0.25 + 0.75 * length / mean))

    want = [part(1, 2, 3) + part(1, 2, 3), part(2, 2, 4), part(1, 2, 2)]
    np.testing.assert_allclose(scores[0], want, rtol=1e-12)
    np.testing.assert_array_equal(scores[1], 0)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_recipes_plant_facts_and_ask_for_their_answer_alone(recipes, kind):
    scale = recipes.SCALES["smoke"]
    lines = [f"line number {i} of many" for i in range(200)]
    recipe = recipes.Recipe(scale, kind, lines)
    assert len(recipe.train_lines) == scale["train"]
    assert all("zorvik" in line and "crimson" in line for line in recipe.train_lines[:10])
    assert not set(recipe.train_lines) & set(recipe.query_lines)
    asked = recipe.query_lines[0]
    counted = recipe.yq[0] != recipes.IGNORED
    said = bytes(recipe.yq[0][counted].astype(np.uint8)).decode()
    assert asked[: scale["length"]].endswith(said)
    assert "crimson".startswith(said)
    assert said
    # Inputs are the targets one place later.
    np.testing.assert_array_equal(recipe.x[3, 1:5], recipe.y[3, :4])


def test_the_large_network_has_five_million_parameters_and_a_lora_starts_as_its_base(recipes):
    recipe = recipes.Recipe.__new__(recipes.Recipe)
    recipe.scale, recipe.kind = recipes.SCALES["h200"], "lora"
    shapes = jax.eval_shape(recipe.initial, jax.random.key(0))
    assert sum(a.size for a in jax.tree.leaves(shapes)) > 5e6
    recipe.scale = recipes.SCALES["smoke"]
    base = recipe.initial(jax.random.key(0))
    x = np.arange(20).reshape(2, 10)
    np.testing.assert_array_equal(recipe.apply(base, x), recipe.apply(recipe.with_lora(base), x))


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_ekfac_turns_gradients_and_has_the_second_moments_of_drawn_labels(recipes, rivals, kind):
    lines = [f"line {i} of {i * i}, about {'nothing' * (i % 3)}" for i in range(200)]
    scale = recipes.SCALES["smoke"] | {"train": 20, "queries": 3}
    recipe = recipes.Recipe(scale, kind, lines)
    p = recipe.initial(jax.random.key(0))
    if kind == "lora":
        p = recipe.with_lora(p)
        p["lora"]["up"]["B"] = p["lora"]["up"]["B"] + 0.1  # else the gradient of A is zero
    bases, values, turned = rivals.ekfac_parts(recipe, p, 5)
    weights = {("up", 0): lambda p: p["layers"]["up"], ("out",): lambda p: p["out"]}
    if kind == "lora":
        weights = {("up", 0, side): lambda p, side=side: p["lora"]["up"][side] for side in "AB"}
    assert set(weights) < set(values)
    x, y = jnp.asarray(recipe.x), jnp.asarray(recipe.y)
    own = jax.jacobian(lambda p: recipe.losses(p, x, y))(p)
    drawn = jax.vmap(jax.random.categorical)(
        jax.random.split(jax.random.key(5), len(x)), recipe.apply(p, x)
    )
    other = jax.jacobian(lambda p: recipe.losses(p, x, jnp.where(y >= 0, drawn, y)))(p)
    for name, weight in weights.items():
        left, right = bases[name]
        shape = values[name].shape
        in_basis = [
            np.asarray(jnp.einsum("am,nab,bk->nmk", left, weight(rows).reshape(-1, *shape), right))
            for rows in (own, other)
        ]
        got = turned(p, bases, (x[3], y[3]))[name]
        np.testing.assert_allclose(got, in_basis[0][3], atol=1e-5)
        want = (in_basis[1] ** 2).mean(0)
        np.testing.assert_allclose(values[name], want, atol=1e-5 * want.max(), rtol=1e-3)
    np.testing.assert_allclose(left.T @ left, np.eye(len(left)), atol=1e-5)
    scores = rivals.ekfac(recipe, p)
    assert scores.shape == (len(recipe.xq), len(recipe.x))
    assert np.isfinite(scores).all()
