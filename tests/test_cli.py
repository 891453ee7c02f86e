"""The commands, at a size for tests."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dualfluence.apps import bench, cli, demo
from dualfluence.apps.cli._app import app
from dualfluence.apps.compare._look import COLOURS, STYLES
from dualfluence.apps.compare._names import (
    HELD,
    ONE_STEP,
    PAPER,
    PAPER_RELEASED,
    PARAMETER,
    PARAMETER_RELEASED,
    RANDOM,
    TWO_STEPS,
)
from dualfluence.apps.demo import METHODS, run_demo, write_page

pytestmark = pytest.mark.host

runner = CliRunner()


def test_info_says_what_it_would_do():
    result = runner.invoke(app, ["info"])
    assert result.exit_code == 0
    assert "dense K up to" in result.output


def test_bench_refuses_unknown_names(tmp_path):
    result = runner.invoke(app, ["bench", "everything", "--out", str(tmp_path / "x.json")])
    assert result.exit_code != 0
    assert list(tmp_path.iterdir()) == []


def test_plan_says_what_fits_and_fails_where_nothing_does():
    fits = runner.invoke(app, ["plan", "2000", "--outputs", "10", "--parameters", "2900000"])
    assert fits.exit_code == 0, fits.output
    assert "dense" in fits.output
    none = runner.invoke(app, ["plan", "1000000", "--memory-gib", "0.001"])
    assert none.exit_code == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "10", "--parameters", "-4"],
        ["plan", "10", "--memory-gib", "-3"],
        ["demo", "--seed", "-1"],
        ["reproduce", "fig1", "--seed", "99999999999999999999"],
        ["reproduce", "fig1", "--percentages", "10,x"],
    ],
)
def test_numbers_out_of_range_are_refused(arguments):
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert "Invalid value" in result.output


def test_plan_is_for_floating_point_kernels():
    for dtype in ("float99", "int32"):
        result = runner.invoke(app, ["plan", "10", "--dtype", dtype])
        assert "dtype must be a floating-point one" in str(result.exception)


@pytest.mark.parametrize("command", [["demo", "--out", "{}"], ["bench", "--out", "{}/a.json"]])
def test_folders_are_tried_before_the_work(command, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(demo, "run_demo", None)
    monkeypatch.setattr(bench, "bench_core", None)
    arguments = [part.format(tmp_path / "file") for part in command]
    assert isinstance(runner.invoke(app, arguments).exception, OSError)


def test_reproduce_refuses_unknown_names(tmp_path):
    result = runner.invoke(app, ["reproduce", "fig9", "--out", str(tmp_path)])
    assert result.exit_code != 0
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def result():
    return run_demo(points=30, widths=(784, 16, 10), percentages=(10.0, 50.0))


@pytest.mark.thorough
def test_demo_compares_every_method_with_retraining(result):
    outcomes = result["outcomes"]
    assert [o["method"] for o in outcomes] == list(METHODS) * 2
    by_name = {(o["method"], o["percent"]): o for o in outcomes}
    for percent in (10, 50):
        one = by_name[ONE_STEP, percent]
        two = by_name[TWO_STEPS, percent]
        assert two["error"] < 0.3 * one["error"] < 0.3
        for same in (PAPER, PARAMETER):
            assert by_name[same, percent]["error"] == pytest.approx(one["error"], rel=1e-2)
        assert one["certificate"] >= one["error"]
        assert by_name[RANDOM, percent]["error"] > 1
    json.dumps(result)


@pytest.mark.thorough
def test_demo_tells_which_points_and_which_labels(result):
    story, wrong_first = result["story"], (False, True)
    assert 0.2 < story["test_accuracy"] <= 1
    assert [q["answer"] == q["label"] for q in story["queries"]] == list(wrong_first)
    for query in story["queries"]:
        assert [p["effect"] for p in query["helpful"]] == sorted(
            (p["effect"] for p in query["helpful"]), reverse=True
        )
        assert query["helpful"][0]["effect"] > 0 > query["harmful"][0]["effect"]
    labels = story["labels"]
    assert labels["flipped"] == 3
    # Three wrong ones of thirty: by chance the area is a half.
    assert labels["auc"] > 0.6


@pytest.mark.thorough
def test_demo_page_is_self_contained(result, tmp_path):
    write_page(result, tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text()
    assert page.count('class="strip"') == len(result["story"]["queries"])
    assert "data:image/png;base64," in page
    assert "http" not in page
    assert page.count("<tr") == 1 + len(result["outcomes"])
    assert [f.name for f in tmp_path.iterdir()] == ["index.html"]


def test_mistakes_end_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["dualfluence", "plan", "10", "--platform", "abacus"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert "plan: platform must be one of" in str(ended.value.code)
    assert "Traceback" not in capsys.readouterr().err


def test_a_method_has_one_colour_and_no_two_methods_share_one():
    same = {HELD: ONE_STEP, PAPER_RELEASED: PAPER, PARAMETER_RELEASED: PARAMETER}
    for again, method in same.items():
        assert COLOURS[again] == COLOURS[method]
        assert STYLES[again] != STYLES[method]
    alone = [colour for name, colour in COLOURS.items() if name not in same]
    assert len(set(alone)) == len(alone)
    assert set(METHODS) <= set(COLOURS)


def test_help_and_completion_wait_for_no_numerical_library():
    code = "import sys, dualfluence.apps.cli._app; print({'jax', 'numpy', 'equinox'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_public_names_are_there_when_asked_for():
    code = (
        "import dualfluence as d; assert 'fit' not in vars(d); d.fit; from dualfluence import Remove; "
        "assert {'fit', 'attribution', '__version__'} <= set(dir(d)); d.nothing"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "module 'dualfluence' has no attribute 'nothing'" in found.stderr
