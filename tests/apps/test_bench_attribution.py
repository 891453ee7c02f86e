"""The benchmark of attribution methods: its truth, its record, its table and its figure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import benchmark

pytestmark = [pytest.mark.thorough, pytest.mark.host, pytest.mark.ordinary]

_attribution, measure = benchmark.load("attribution"), benchmark.load("measure")

SIZES = (16, 4, (3,), 4, 12, 0.05, 6, 5, 0)


def test_first_and_repeated_calls_are_kept_apart():
    record = measure.time_first_and_repeats(lambda: None, 2)
    sizes = {name: np.size(value) for name, value in record.items()}
    assert sizes == {"first": 1, "first_cpu": 1, "repeat": 2, "repeat_cpu": 2}
    assert measure.median_repeat({"repeat": [1.0, 9.0, 2.0]}) == 2.0


@pytest.mark.thorough
def test_the_truth_is_training_without_the_points():
    problem = _attribution._make_problem(*SIZES)
    x, y, xq, yq = problem.data
    start = _attribution._init((16, 3, 10), 0)
    keep = np.flatnonzero(problem.masks[2])
    params, velocity = start, jax.tree.map(jnp.zeros_like, start)

    def loss(p):
        return jnp.mean(_attribution._losses(p, x[keep], y[keep]))

    for _ in range(12):
        grads = jax.grad(loss)(params)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
        params = jax.tree.map(lambda p, v: p - 0.05 * v, params, velocity)
    want = _attribution._losses(params, xq, yq)
    np.testing.assert_allclose(problem.targets[2], want, rtol=1e-5)  # float32 parameters
    assert problem.loo.shape == (4, 5)
    assert sorted(problem.saved)[-1] == 12


@pytest.mark.slow
def test_every_method_is_in_the_record(tmp_path):
    result = _attribution.bench_attribution(
        points=16, queries=4, hidden=(3,), side=4, steps=12, rate=0.05, subsets=6, loo_points=5,
        rank=4, projection=8, repeats=1,
    )  # fmt: skip
    names = {m["method"] for m in result["methods"]}
    known = {"CG", "LiSSA", "Arnoldi", "Nyström", "K-FAC", "EK-FAC", "TracIn", "gradient dot"}
    assert known | {_attribution.OURS, _attribution.OURS_LAST} <= names
    for m in result["methods"]:
        assert m["lds"] is None or {"seconds_first", "seconds_repeat", "peak_bytes"} <= set(m)
        assert m["lds"] is None or m["lds"] == max(m["settings"].values())
    assert _attribution.attribution_table(result).row_count == len(result["methods"])
    _attribution.plot_attribution(result, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 1000
