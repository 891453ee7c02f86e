"""The benchmark of linearisability: its thresholds, and gaps that larger λ close."""

import json

import numpy as np
import pytest

import benchmark

pytestmark = pytest.mark.host

linearisable = benchmark.load("linearisable")


def rows(gaps, seed=0, width=8):
    """Larger gaps of one network by λ; the other gap is half of it."""
    return [
        {"ridge": ridge, "output_gap": gap, "parameter_gap": gap / 2, "seed": seed, "width": width,
         "depth": 1, "num_params": 9}
        for ridge, gap in gaps.items()
    ]  # fmt: skip


def test_a_gap_that_is_a_power_of_lambda_crosses_where_it_equals_the_limit():
    own = rows({ridge: 0.02 / ridge for ridge in (1e-2, 1e-1, 1.0, 10.0)})
    assert linearisable.threshold(own, 0.1) == pytest.approx(0.2)
    assert linearisable.threshold(own[::-1], 0.1) == pytest.approx(0.2)


def test_a_network_below_or_above_the_limit_everywhere_has_no_threshold():
    assert linearisable.threshold(rows({1.0: 0.05, 10.0: 0.01}), 0.1) == 0
    assert linearisable.threshold(rows({1.0: 5.0, 10.0: 1.0}), 0.1) is None


def test_a_gap_above_the_limit_at_a_larger_lambda_counts():
    own = rows({0.01: 0.01, 0.1: 0.4, 1.0: 0.025})
    assert linearisable.threshold(own, 0.1) == pytest.approx(10**-0.5)


def test_the_larger_of_the_two_gaps_decides():
    own = rows({1.0: 0.05, 10.0: 0.01})
    own[0]["parameter_gap"] = 1.0
    assert 1 < linearisable.threshold(own, 0.1) < 10


def test_every_network_has_a_threshold_for_every_seed():
    both = [r for seed in (0, 1) for r in rows({1.0: 0.4 + seed, 10.0: 0.01}, seed)]
    (found,) = linearisable.thresholds(both, 0.1)
    assert (found["depth"], found["width"], len(found["ridges"])) == (1, 8, 2)
    assert found["ridges"][0] < found["ridges"][1]


@pytest.mark.thorough
def test_a_larger_ridge_closes_the_gap_and_the_script_draws(tmp_path):
    found = linearisable.measure(widths=(8,), depths=(1,), seeds=1, ridges=(100.0, 1.0))
    large, small = found["rows"]
    assert large["gradient_left"] <= linearisable.STOP
    assert linearisable.larger_gap(large) < 0.5 * linearisable.larger_gap(small)
    assert large["error_initial"] < 0.1
    assert np.isfinite([row["error_trained"] for row in found["rows"]]).all()
    path = tmp_path / "found.json"
    path.write_text(json.dumps(found))
    linearisable.draw(json.loads(path.read_text()), path.with_suffix(".svg"))
    assert path.with_suffix(".svg").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("ridges", "want"),
    [
        ([0.1, 0.4], "0.2 (0.1 to 0.4)"),
        ([None, 2.0, 4.0], "2 to above 10"),
        ([0.0, 2.0], "below 1 to 2"),
        ([None, None], "above 10"),
        ([0.0, 0.0], "below 1"),
    ],
)
def test_thresholds_in_words(ridges, want, monkeypatch):
    import make_numbers

    found = {"rows": rows({1.0: 0.2, 10.0: 0.1})}
    monkeypatch.setattr(make_numbers, "record", lambda name: found)
    assert make_numbers.ridge_in_words(ridges) == want
