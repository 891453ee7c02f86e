"""Verdicts at the precision in use, and reproduction where a data set is missing."""

import json

import pytest

pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from dualfluence import __version__, datasets
from dualfluence.apps import paper
from dualfluence.apps.cli._app import app
from dualfluence.apps.compare._names import ITERATED, ONE_STEP
from dualfluence.apps.paper import _reproduce
from dualfluence.apps.paper._claims_linear import linear_ten_claims
from dualfluence.apps.paper._verdicts import FAILS, HOLDS, UNDECIDED, UNKNOWN


def linear_results(apart, distance, bound):
    values = {
        "dual_against_parameter_space": apart,
        "distance": {ONE_STEP: distance, ITERATED: distance},
        "retrained_bound": bound / 2,
        "details": {ITERATED: {"bound": bound / 2}},
    }
    pieces = {
        f"{loss}/{p}": {"values": values} for loss in ("softmax", "squared") for p in (10, 90)
    }
    return {"config": {"percentages": [10, 90]}, "pieces": pieces}


@pytest.mark.parametrize(
    ("apart", "distance", "bound", "want"),
    [
        (3e-5, 9e-6, 1e-3, HOLDS),  # within the claim, however coarse the certificate
        (3.5e-4, 3.4e-5, 1.3e-3, UNDECIDED),  # beyond it, but within what float32 certifies
        (3.5e-4, 3.4e-5, 1e-5, FAILS),  # beyond both
        (0.5, 0.5, 1.3e-3, FAILS),  # no rounding explains this
    ],
)
def test_an_exactness_claim_is_judged_at_the_precision_in_use(apart, distance, bound, want):
    claims = linear_ten_claims(linear_results(apart, distance, bound))
    assert [claim.verdict for claim in claims] == [want] * 4
    if want == UNDECIDED:
        assert all("certifies parameters to 1.3e-03 only" in claim.evidence for claim in claims)


def test_one_distance_beyond_rounding_is_enough_to_fail():
    results = linear_results(3.5e-4, 3.4e-5, 1.3e-3)
    results["pieces"]["squared/90"] = json.loads(json.dumps(results["pieces"]["squared/10"]))
    results["pieces"]["squared/90"]["values"]["distance"][ONE_STEP] = 0.1
    verdicts = {
        claim.text.split(":")[0] + claim.source: claim.verdict
        for claim in linear_ten_claims(results)
    }
    assert verdicts["Ten classes, squaredthis library"] == FAILS
    assert verdicts["Ten classes, softmaxthis library"] == UNDECIDED


def without(missing):
    def load(name, **options):
        if name == missing:
            raise FileNotFoundError(f"{name} could not be downloaded.\nPut these files …")

    return load


def test_all_experiments_run_without_a_data_set_and_say_what_they_leave_out(
    tmp_path, monkeypatch, capsys
):
    seen = {}
    monkeypatch.setattr(datasets, "load", without("cifar10"))
    monkeypatch.setattr(_reproduce, "RUNNERS", {
        name: lambda config, context: seen.setdefault(context.run.name, config)
        for name in paper.NAMES
    })  # fmt: skip
    monkeypatch.setattr(_reproduce, "_draw", lambda *args: None)
    done = paper.reproduce("all", out=tmp_path, progress=False, load=datasets.load)
    assert not done
    assert set(seen) == set(paper.NAMES)
    assert [[row.name for row in seen[name].rows] for name in ("fig1", "fig4")] == [["fcnn"]] * 2
    told = capsys.readouterr().err
    assert "fig1: left out: cnn: cifar10 could not be downloaded." in told
    assert told.count("Put these files") == 1
    for name in paper.NAMES:
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert found["complete"] == (name not in ("fig1", "fig4"))
    # What was asked for stays in the file, so that claims about it are not measured instead of gone.
    kept = json.loads((tmp_path / "fig1.json").read_text())
    assert [row["name"] for row in kept["config"]["rows"]] == ["fcnn", "cnn"]
    assert "Left out: cnn: cifar10 could not" in (tmp_path / "report.html").read_text()
    verdicts = {c.verdict for c in _claims_of("cnn", kept)}
    assert verdicts == {UNKNOWN}


def _claims_of(row, results):
    from dualfluence.apps.paper._claims import CLAIMS

    return [c for c in CLAIMS["fig1"](results) if c.text.lower().startswith(row)]


def test_an_experiment_that_is_named_needs_all_its_data(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "load", without("cifar10"))
    with pytest.raises(FileNotFoundError, match="cifar10 could not be downloaded"):
        paper.reproduce("fig1", out=tmp_path / "out", progress=False, load=datasets.load)
    assert not (tmp_path / "out").exists()


def test_reproduce_without_a_name_is_all_of_them(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(paper, "reproduce", lambda name, **options: asked.append(name) or True)
    found = CliRunner().invoke(app, ["reproduce", "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    assert asked == ["all"]


def test_the_command_says_its_version():
    found = CliRunner().invoke(app, ["--version"])
    assert (found.exit_code, found.output) == (0, f"dualfluence {__version__}\n")
