"""The benchmark of sentences: its rival without a model, its planted facts, and what counts in a query."""

import importlib.util
import math
from pathlib import Path

import jax
import numpy as np
import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.host, pytest.mark.ordinary]

PATH = Path(__file__).parents[2] / "benchmarks" / "attribution_text.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("attribution_text", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bm25_is_its_formula(bench):
    train = ["the red boat", "a boat, a boat", "the gate"]
    scores = bench.bm25(train, ["The boat", "nothing"])
    mean = (3 + 4 + 2) / 3

    def part(count, holding, length):
        rare = math.log(1 + (3 - holding + 0.5) / (holding + 0.5))
        return rare * count * 2.5 / (count + 1.5 * (0.25 + 0.75 * length / mean))

    want = [part(1, 2, 3) + part(1, 2, 3), part(2, 2, 4), part(1, 2, 2)]
    np.testing.assert_allclose(scores[0], want, rtol=1e-12)
    np.testing.assert_array_equal(scores[1], 0)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_recipes_plant_facts_and_ask_for_their_answer_alone(bench, kind):
    scale = bench.SCALES["smoke"]
    lines = [f"line number {i} of many" for i in range(200)]
    recipe = bench.Recipe(scale, kind, lines)
    assert len(recipe.train_lines) == scale["train"]
    assert all("zorvik" in line and "crimson" in line for line in recipe.train_lines[:10])
    assert not set(recipe.train_lines) & set(recipe.query_lines)
    asked = recipe.query_lines[0]
    counted = recipe.yq[0] != bench.IGNORED
    said = bytes(recipe.yq[0][counted].astype(np.uint8)).decode()
    assert asked[: scale["length"]].endswith(said)
    assert "crimson".startswith(said)
    assert said
    # Inputs are the targets one place later.
    np.testing.assert_array_equal(recipe.x[3, 1:5], recipe.y[3, :4])


def test_the_large_network_has_five_million_parameters_and_a_lora_starts_as_its_base(bench):
    recipe = bench.Recipe.__new__(bench.Recipe)
    recipe.scale, recipe.kind = bench.SCALES["h200"], "lora"
    shapes = jax.eval_shape(recipe.initial, jax.random.key(0))
    assert sum(a.size for a in jax.tree.leaves(shapes)) > 5e6
    recipe.scale = bench.SCALES["smoke"]
    base = recipe.initial(jax.random.key(0))
    x = np.arange(20).reshape(2, 10)
    np.testing.assert_array_equal(recipe.apply(base, x), recipe.apply(recipe.with_lora(base), x))
