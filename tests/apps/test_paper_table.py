"""The table of the results page: complete, and its verdicts those of the tests and the records."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import make_numbers  # noqa: E402

pytestmark = pytest.mark.host

LABELS = [
    line
    for line in (ROOT / "tests" / "data" / "paper_labels.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
ITEMS = {item["label"]: item for item in make_numbers.paper_items()}


def test_every_item_of_the_paper_has_one_row():
    assert [item["label"] for item in make_numbers.paper_items()] == LABELS
    page = (ROOT / "docs" / "results.md").read_text()
    assert [label for label in LABELS if page.count(f"\n| {label} | ") != 1] == []


def test_every_row_has_a_verdict_from_one_source():
    for item in ITEMS.values():
        assert sum(source in item for source in ("tests", "record", "claims")) == 1, item["label"]
        assert make_numbers.verdict_of(item)


def test_the_tests_that_rows_name_exist():
    text = (ROOT / "tests" / "apps" / "test_paper_equations.py").read_text()
    named = {test for item in ITEMS.values() for test in item.get("tests", ())}
    assert [test for test in named if f"def test_{test}(" not in text] == []
    assert len(named) >= 10


def test_every_claim_about_the_paper_is_in_a_row():
    claims = make_numbers.all_claims()
    used = {label for item in ITEMS.values() for label in item.get("claims", ())}
    assert {c.label for c in claims if c.label} <= used
    # A claim is either the paper's, with a label and the place, or ours.
    for claim in claims:
        assert bool(claim.label) == claim.source.startswith("paper, section"), claim


def test_a_setting_that_is_not_the_papers_differs():
    item = ITEMS["setting 4.2 warm start"]
    assert make_numbers.verdict_of(item) == "as published"
    assert make_numbers.verdict_of(item | {"equals": {"config.repeats": 6}}) == "differs"
    found = {"rows": [{"a": 1}, {"a": 2}]}
    assert make_numbers.differing(found, {"rows.1.a": 2, "rows.0.a": 3}) == ["rows.0.a"]


def test_verdicts_of_several_claims_are_counted(monkeypatch):
    from dualfluence.apps.paper._verdicts import FAILS, HOLDS, Claim

    claims = [Claim("", "paper, section 9", v, "", "x") for v in (HOLDS, FAILS, HOLDS)]
    monkeypatch.setattr(make_numbers, "all_claims", lambda: claims)
    assert make_numbers.verdict_of({"claims": ["x"]}) == "holds: 2, does not hold: 1"
    assert make_numbers.verdict_of({"claims": ["y"]}) == "not measured"


def test_ours_over_the_papers_form_are_the_numbers_of_the_text():
    """The ratios that the results page states in its text."""
    found = json.loads((ROOT / "docs" / "results" / "fig1.json").read_text())
    page = " ".join((ROOT / "docs" / "results.md").read_text().split())
    for row in ("fcnn", "cnn"):
        ratios = []
        for percent in found["config"]["percentages"]:
            warm = found["pieces"][f"{row}/{percent}"]["values"]["warm_seconds"]
            middle = {name: sorted(times)[len(times) // 2] for name, times in warm.items()}
            ratios.append(middle["parameter space"] / middle["paper's dual form"])
        assert f"{min(ratios):.2f} to {max(ratios):.2f}" in page
