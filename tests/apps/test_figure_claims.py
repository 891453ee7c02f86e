"""Verdicts on the claims of figures 1, 3 and 4: they come from the numbers of a record."""

import copy

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from made_up_records import made_up_fig1

from dualfluence.apps.compare._names import (
    COMPARED,
    ITERATED,
    ONE_STEP,
    PAPER,
    PAPER_RELEASED,
    PARAMETER,
    PARAMETER_RELEASED,
    RANDOM,
)
from dualfluence.apps.paper import _published as published
from dualfluence.apps.paper._claims import CLAIMS, COMPARISONS
from dualfluence.apps.paper._methods import RELEASED_PRECISION
from dualfluence.apps.paper._read import bars
from dualfluence.apps.paper._verdicts import PARTLY

pytestmark = pytest.mark.host

FIFTY_TIMES = f"warm: {ONE_STEP} is at least 50 times faster than {PAPER_RELEASED}"


def test_a_figure_without_further_seeds_has_no_bars(everything_fig3):
    assert bars(everything_fig3, "ridge/0.01", lambda v: v["distance"][ONE_STEP]) is None
    piece = copy.deepcopy(everything_fig3["pieces"]["ridge/0.01/10"])
    piece["values"]["distance"][ONE_STEP] = 5e-3
    more = {"config": everything_fig3["config"] | {"seeds": [4]},
            "pieces": everything_fig3["pieces"] | {"seed/4/ridge/0.01/10": piece}}  # fmt: skip
    spread = bars(more, "ridge/0.01", lambda v: v["distance"][ONE_STEP])
    assert np.ravel(spread) == pytest.approx([0, 0, 4e-3, 0])


@pytest.mark.parametrize(
    ("small", "large", "want"),
    [
        ([0, 9e-9, 2e-6, 3e-5], [0, 9.1e-9, 2.01e-6, 1e-5], "holds"),  # rounding, then a tie
        ([0, 9e-9, 2e-6, 3e-5], [0, 9e-9, 3e-6, 1e-5], "does not hold"),  # not at epoch 2
        ([0, 9e-9, 2e-6, 3e-5], [0, 9e-9, 1e-6, 3e-5], "does not hold"),  # a tie at the end
    ],
)
def test_throughout_means_at_every_epoch_that_depends_on_lambda(small, large, want):
    names = ("distance", "rmse", "accuracy_network", "accuracy_linear", "gradient_network")
    pieces = {
        f"ridge/{ridge:g}": {
            "values": {"epoch": [0, 1, 2, 3], "gradient_linear": line} | dict.fromkeys(names, line)
        }
        for ridge, line in ((1e-4, small), (1e-1, large))
    }
    results = {"config": {"ridges": [1e-1, 1e-4], "epochs": 3}, "pieces": pieces}
    found = next(c for c in CLAIMS["fig2"](results) if c.label == "4.3 parameters")
    assert found.verdict == want


@pytest.mark.parametrize(("slowness", "want"), [(60.0, "holds"), (40.0, "does not hold")])
def test_verdicts_come_from_the_numbers(slowness, want):
    found = [c for c in CLAIMS["fig1"](made_up_fig1(slowness)) if FIFTY_TIMES in c.text]
    assert [c.verdict for c in found] == [want, want]


def why_parameter_space(results):
    label = "CNN, distance parameter space, 90 %"
    return next(c.why for c in COMPARISONS["fig1"](results) if c.what == label)


def test_distances_are_explained_by_what_was_measured_at_default_precision():
    results = made_up_fig1(60.0)
    assert "not measured here" in why_parameter_space(results)
    here = results["pieces"]["cnn/90"]["values"]
    here["released_precision"] = RELEASED_PRECISION
    assert "as released it ends at 1e-05" in why_parameter_space(results)


def test_the_larger_part_of_a_distance_is_named():
    results = made_up_fig1(60.0)
    assert "the method itself determines this number" in why_parameter_space(results)
    distance = results["pieces"]["cnn/90"]["values"]["distance"]
    distance["exact"] = {"exact": distance["exact"]["exact"] | {PARAMETER: 1e-7}}
    assert "gradient descent determines this number" in why_parameter_space(results)


def test_one_slow_call_does_not_make_a_claim_hold():
    results = made_up_fig1(40.0)
    for percent in published.PERCENTAGES:
        seconds = results["pieces"][f"fcnn/{percent}"]["values"]["warm_seconds"]
        seconds[PAPER_RELEASED] = [4.0, 4.0, 400.0]
    found = [c for c in CLAIMS["fig1"](results) if FIFTY_TIMES in c.text]
    assert [c.verdict for c in found] == ["does not hold", "does not hold"]


def test_claims_measured_at_some_percentages_only_say_so():
    results = made_up_fig1(60.0)
    for percent in published.PERCENTAGES[1:]:
        results["pieces"][f"fcnn/{percent}/cold"]["values"]["cold_seconds"].pop(PARAMETER_RELEASED)
    text = f"FCNN, cold: {ONE_STEP} is at least 3 times faster than {PARAMETER_RELEASED}"
    (claim,) = [c for c in CLAIMS["fig1"](results) if text in c.text]
    assert claim.verdict == PARTLY
    assert "measured at 10 % only" in claim.evidence


def test_failing_at_one_percentage_is_not_failing(everything_fig3):
    text = f"{PAPER} fails at λ = 0.0001"

    def check(distance):
        for percent, factor in zip((10, 90), distance, strict=True):
            values = everything_fig3["pieces"][f"ridge/0.0001/{percent}"]["values"]
            values["distance"][PAPER] = factor * values["change"]
        return next(c.verdict for c in CLAIMS["fig3"](everything_fig3) if text in c.text)

    assert check((2.0, 3.0)) == "holds"
    assert check((0.1, 3.0)) == "does not hold"


def test_only_an_indefinite_hessian_is_said_to_stop_a_solve(everything_fig3):
    notes = {
        PARAMETER: "indefinite Hessian: stopped early",
        ITERATED: "rounding in float32 made a matrix indefinite: shifted by 2.9e-03",
    }
    for piece in everything_fig3["pieces"].values():
        details = {name: {"iterations": 14, "notes": [note]} for name, note in notes.items()}
        piece["values"]["details"] = details
    said = {c.text.split(" fails at")[0]: c.evidence for c in CLAIMS["fig3"](everything_fig3)}
    assert "the Hessian is indefinite there" in said[PARAMETER]
    assert "the Hessian is indefinite there" not in said[ITERATED]


@pytest.fixture
def everything_fig3():
    """Two ridges and two percentages, made up."""
    names = (*COMPARED, RANDOM)
    piece = {"change": 1e-3, "distance": dict.fromkeys(names, 1e-3), "details": {}}
    keys = [f"ridge/{ridge}/{percent}" for ridge in ("0.01", "0.0001") for percent in (10, 90)]
    config = {"ridges": [1e-2, 1e-4], "percentages": [10, 90]}
    return {"config": config, "pieces": {k: {"values": copy.deepcopy(piece)} for k in keys}}


@pytest.mark.parametrize(("missing", "want"), [(0.0, "holds"), (0.1, "does not hold")])
def test_the_ridge_term_is_judged_apart_from_curvature(missing, want):
    actual = np.linspace(-1, 1, 5)
    step = {
        "outputs": actual,
        "loss_evaluated": actual - missing,
        "loss_without_ridge": actual - 0.1,  # first order: off by as much as the ridge adds
        "loss_with_ridge": actual,
        "ridge_term": 0.1,
    }
    found = {"actual_outputs": actual, "actual_loss": actual,
             "estimates": {ONE_STEP: step, ITERATED: step}}  # fmt: skip
    results = {"config": {"rows": [{"name": "cnn"}]}, "pieces": {"cnn/exact": {"values": found}}}
    (claim,) = [c for c in CLAIMS["fig4"](results) if "ridge term" in c.text]
    assert claim.verdict == want
