"""The commands, at a size for tests."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from dualfluence import datasets
from dualfluence.apps import bench, cli, demo
from dualfluence.apps.cli import _app as cli_app
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
from dualfluence.apps.compare._networks import fully_connected_from_zero
from dualfluence.apps.compare._removals import Removals
from dualfluence.apps.demo import METHODS, run_demo, write_page
from dualfluence.apps.demo._gain import leave_out_each
from dualfluence.apps.demo._story import tell

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


def test_benchmarks_of_the_repository_are_started_with_their_options(tmp_path, monkeypatch):
    started = []

    def run(command, check):
        started.append(command)
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(cli_app.subprocess, "run", run)
    out = str(tmp_path / "x.json")
    for what in ("kernels", "attribution"):
        result = runner.invoke(app, ["bench", what, "--out", out, "--repeats", "2"])
        assert result.exit_code == 3
        script = Path(started[-1][1])
        assert script.is_file()
        assert script.stem == what
        assert started[-1][2:4] == ["--repeats=2", f"--out={out}"]
    monkeypatch.setattr(cli_app, "__file__", str(tmp_path / "a/b/c/d/e.py"))
    assert "checkout" in runner.invoke(app, ["bench", "kernels"]).output


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


def test_reproduce_takes_the_pieces_of_figure_1(monkeypatch, tmp_path):
    from dualfluence.apps import paper

    seen = {}
    monkeypatch.setattr(paper, "reproduce", lambda name, **options: seen.update(options) or True)
    options = ["--no-cold", "--released-repeats", "0", "--seeds", "1,2", "--out", str(tmp_path)]
    assert runner.invoke(app, ["reproduce", "fig1", *options]).exit_code == 0
    overrides = {key: value for key, value in seen["overrides"].items() if value is not None}
    assert overrides == {"cold": False, "released_repeats": 0, "seeds": (1, 2)}


def test_reproduce_refuses_unknown_names(tmp_path):
    result = runner.invoke(app, ["reproduce", "fig9", "--out", str(tmp_path)])
    assert result.exit_code != 0
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def case():
    """The demo's model at a size for tests."""
    model = fully_connected_from_zero((784, 16, 10), 0)
    return Removals(model, datasets.load("mnist-small"), 30, 1e-3)


@pytest.fixture(scope="module")
def story(case):
    return tell(case, 0)


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
def test_demo_tells_which_points_and_which_labels(story):
    wrong_first = (False, True)
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
    for suspect in labels["suspects"]:
        assert suspect["wrong"] == (suspect["given"] != suspect["truth"])
    json.dumps(story)


@pytest.mark.thorough
def test_demo_leaves_out_every_point_as_retraining_does(case, story):
    gain = leave_out_each(case, story["chosen"], story["first_seconds"], 0)
    # One Newton step: its error grows like the share that is left out, here a thirtieth; of 300 points,
    # a tenth of that share, the effects are 1 % off.
    assert gain["error"] < 0.2
    assert (gain["points"], gain["queries"], gain["retrained"]) == (30, 2, 8)
    assert gain["ratio"] == pytest.approx(30 * gain["each"] / gain["repeat"])
    assert min(gain["first"], gain["repeat"], gain["each"]) > 0
    words = demo.gain_in_words(gain)
    assert f"{gain['ratio']:.2g} times as long" in words
    assert "with compilation" in words


def check_page(result, folder):
    write_page(result, folder / "index.html")
    page, story = (folder / "index.html").read_text(), result["story"]
    assert page.count('class="strip"') == len(story["queries"])
    digits = sum(1 + len(q["helpful"]) + len(q["harmful"]) for q in story["queries"])
    assert page.count('class="card') == digits + len(story["labels"]["suspects"])
    assert page.count("data:image/png;base64,") == page.count('class="card') + 4  # the plots
    # Digits and labels come first, the comparison after them.
    parts = (
        "Which digits made these answers",
        "Which labels are wrong?",
        "times as long",
        "<table",
    )
    assert list(parts) == sorted(parts, key=page.index)
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("<tr") == 1 + len(result["outcomes"])
    assert [f.name for f in folder.iterdir()] == ["index.html"]


@pytest.mark.thorough
def test_demo_page_is_self_contained(result, tmp_path):
    check_page(result, tmp_path)


def told():
    """What the demo would tell of one query and two labels."""
    strip = [{"index": i, "label": i % 10, "effect": 0.5 - i / 4} for i in range(3)]
    query = {"test_index": 3, "label": 3, "answer": 6, "helpful": strip, "harmful": strip[:2]}
    suspects = [
        {"index": 4, "given": 7, "truth": 4, "said": 4, "wrong": True},
        {"index": 9, "given": 9, "truth": 9, "said": 4, "wrong": False},
    ]
    labels = {"flipped": 3, "auc": 0.9, "suspects": suspects}
    return {"test_accuracy": 0.4, "queries": [query], "labels": labels}


def test_a_page_is_made_of_a_story_and_numbers(tmp_path):
    timing = {"first": None, "repeat": 0.5, "repeats": 1}
    numbers = {"error": 0.02, "certificate": 0.1, "iterations": 7, "timing": timing, "removed": 3}
    accuracies = {"forget_accuracy": 0.5, "test_accuracy": 0.7}
    outcomes = [
        {"method": name, "percent": share, **numbers, **accuracies}
        for share in (1.0, 10.0)
        for name in METHODS
    ]
    gain = {"points": 30, "first": 9.0, "repeat": 0.25, "retrained": 8, "each": 0.5, "ratio": 60.0}
    config = {"points": 30, "outputs": 10, "network": "784-16-10", "parameters": 12_730}
    result = {
        "story": told(),
        "gain": gain | {"error": 0.01},
        "outcomes": outcomes,
        "config": config | {"ridge": 1e-3, "dtype": "float32"},
        "machine": {"device": "cpu", "jax": "0"},
        "fit": {"steps": 6, "products": 40},
        "seconds": 40.0,
    }
    check_page(result, tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert "<b>60 times as long</b>" in page
    assert "truth 3<br>model: <b>6 ✗</b>" in page
    assert "labelled 7<br>model: 4<br><b>truth 4 ✗</b>" in page
    assert "labelled 9<br>model: 4<br><b>truth 9 ✓</b>" in page
    assert "<b>1 are wrong</b>" in page
    assert "for all 30 that is 15 s" in page


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
