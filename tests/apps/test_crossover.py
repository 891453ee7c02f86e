"""The crossover benchmark: where two costs cross, and the claims on its record."""

import json

import pytest

import benchmark
from dualfluence.apps.compare._names import PAPER, PARAMETER
from dualfluence.apps.paper._claims_crossover import crossover_claims
from dualfluence.apps.paper._verdicts import FAILS, HOLDS, UNKNOWN

pytestmark = pytest.mark.host

crossover = benchmark.load("crossover")
crossing, digits = crossover.crossing, crossover.digits


def made_up(dual=2.0, power=1.0):
    """Parameter space takes `p/(n·c)` seconds, the dual form `dual`; both in ten steps."""
    rows = []
    for ratio in (0.1, 1.0, 10.0, 100.0):
        seconds = {PARAMETER: ratio**power, PAPER: dual}
        methods = {
            name: {"seconds": [2 * t, t], "solve_seconds": t, "iterations": 10}
            for name, t in seconds.items()
        }
        rows.append({"p_over_nc": ratio, "methods": methods})
    cross = crossing(
        rows,
        lambda r: min(r["methods"][PAPER]["seconds"]),
        lambda r: min(r["methods"][PARAMETER]["seconds"]),
    )
    return {"rows": rows, "crossing": {"measured": cross}}


@pytest.mark.parametrize("dual", [0.5, 2.0, 30.0])
def test_costs_that_are_powers_cross_where_they_are_equal(dual):
    assert made_up(dual)["crossing"]["measured"] == pytest.approx(dual)


def test_costs_that_never_cross_have_no_crossing():
    assert made_up(0.01)["crossing"]["measured"] == 0
    assert made_up(1000.0)["crossing"]["measured"] is None


def test_claims_come_from_the_record():
    efficient, independent = crossover_claims(made_up(2.0), "here")
    assert (efficient.verdict, independent.verdict) == (HOLDS, HOLDS)
    assert "they cross at 2 parameters per unknown" in efficient.evidence
    assert crossover_claims(made_up(30.0), "here")[0].verdict == FAILS
    slower = made_up(2.0)
    slower["rows"][-1]["methods"][PAPER]["solve_seconds"] = 5.0
    assert crossover_claims(slower, "here")[1].verdict == FAILS
    small = made_up(2.0)
    small["rows"] = small["rows"][:2]
    assert crossover_claims(small, "here")[0].verdict == UNKNOWN


def test_the_digits_are_means_of_blocks():
    x, y = digits(20)
    assert x.shape == (200, 49)
    assert sorted(set(y.tolist())) == list(range(10))
    assert 0 <= x.min() < x.max() <= 1


@pytest.mark.thorough
def test_the_script_measures_and_draws(tmp_path):
    scale = crossover.Scale(per_class=2, widths=(3, 6))
    found = crossover.measure(1, scale)
    assert [row["num_params"] for row in found["rows"]] == [50 * w + 10 * (w + 1) for w in (3, 6)]
    for row in found["rows"]:
        assert all(m["distance"] < row["change"] for m in row["methods"].values())
    path = tmp_path / "found.json"
    path.write_text(json.dumps(found))
    crossover.draw(json.loads(path.read_text()), path.with_suffix(".svg"))
    assert path.with_suffix(".svg").stat().st_size > 10_000


def test_no_width_starts_after_the_limit():
    found = crossover.measure(1, crossover.Scale(2, (3, 6)), limit=-1)
    assert found["rows"] == []
    assert found["settings"]["widths_left_out"] == [3, 6]


def test_the_results_page_says_where_costs_cross(monkeypatch):
    import make_numbers

    found = made_up(2.0) | {"settings": {"points": 2000}}
    found["crossing"] |= {"per step": 0.0, "plan": None}
    monkeypatch.setattr(make_numbers, "recorded", lambda name: name == "crossover_h200")
    monkeypatch.setattr(make_numbers, "record", lambda name: found)
    assert make_numbers.crossover().splitlines()[-1] == (
        "| H200 | 2,000 | 0.10 to 100 | 2.0 | below 0.10 | nowhere |"
    )
