"""The paper's experiments at a size for tests: run, resume, budget, plots, report."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("matplotlib")

from made_up_records import made_up_fig1

from dualfluence import datasets
from dualfluence.apps.compare._names import (
    COMPARED,
    HELD,
    ITERATED,
    ONE_STEP,
    PAPER,
    PAPER_RELEASED,
    PARAMETER,
    RANDOM,
    RELEASED,
)
from dualfluence.apps.compare._networks import Architecture
from dualfluence.apps.paper import NAMES, reproduce
from dualfluence.apps.paper import _published as published
from dualfluence.apps.paper._claims import CLAIMS, COMPARISONS
from dualfluence.apps.paper._common import Context
from dualfluence.apps.paper._config import Data, Row, Training, configure
from dualfluence.apps.paper._nonlinear import epochs_to_record, train
from dualfluence.apps.paper._read import bars, series
from dualfluence.apps.paper._results import ResultsFolder, Run, plain, read_results, write_json
from dualfluence.apps.paper._run_fig1 import LinearisedCase
from dualfluence.apps.paper._verdicts import PublishedValue
from dualfluence.fitted._run import WIDENED
from dualfluence.kernels._linearized import linearize

pytestmark = pytest.mark.host

TINY = Data("mnist-small", (3, 8), 6, 4)
ROW = Row("fcnn", TINY, Architecture("fcnn", 1, 16), Training("squared", 0.1, 0.05, 30))
OVERRIDES = {
    "fig1": {"rows": (ROW,), "percentages": (50,), "repeats": 2, "cg_steps": 20},
    "fig2": {
        "data": TINY,
        "network": Architecture("fcnn", 1, 16),
        "ridges": (1e-1, 1e-2),
        "rate": 0.05,
        "epochs": 20,
        "record_every": 10,
        "seeds": (0, 1),
    },
    "fig3": {
        "data": TINY,
        "network": Architecture("fcnn", 1, 16),
        "ridges": (1e-2, 1e-4),
        "rate": 0.05,
        "epochs": 20,
        "record_every": 10,
        "percentages": (50,),
        "cg_steps": 20,
    },
    "fig4": {"rows": (replace(ROW, network=Architecture("fcnn", 1, None)),), "num_queries": 5},
    "linear": {"data": TINY, "num_features": 30, "percentages": (50,), "cg_steps": 20,
               "training": Training("squared", 1e-3, 0.5, 30), "repeats": 1},
    "linear-ten": {"data": Data("mnist-small", tuple(range(10)), 2, 2), "num_features": 30,
                   "percentages": (50,), "cg_steps": 20},
}  # fmt: skip


def load(name, *, classes=None, data_dir=None, progress=True):
    """Nine random pixels per image, in memory."""
    rng = np.random.default_rng(0)
    classes = np.asarray(classes)
    y = np.repeat(classes, 12).astype(np.int32)
    x = (rng.uniform(size=(len(y), 9)) * (1 + np.arange(9) * y[:, None] / 40)).astype(np.float32)
    return datasets.Dataset(x / 2, y, x / 2, y, name, "made up for tests", 10)


def go(name, out, **options):
    overrides = OVERRIDES[name] | options.pop("overrides", {})
    return reproduce(name, out=out, load=load, progress=False, overrides=overrides, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One experiment; the rest are in `everything`."""
    out = tmp_path_factory.mktemp("results")
    assert go("fig2", out)
    return out


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Every experiment once, the cold runtime of fig. 1 in a process of its own included."""
    out = tmp_path_factory.mktemp("everything")
    for name in NAMES:
        assert go(name, out)
    return out


def check_outcome(out, names):
    for name in names:
        results = read_results(out, name)
        assert results is not None
        assert results["complete"]
        assert results["seed"] == 0
        assert results["config"]
        assert results["environment"]["versions"]["jax"]
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        claims = CLAIMS[name](results)
        assert claims
        assert all(c.text and c.verdict for c in claims)
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(names)
    assert "Smoke scale" in page
    assert not [p for p in out.rglob("*") if p.name.endswith(".tmp")]


@pytest.mark.thorough
def test_experiments_leave_json_figure_and_report(folder):
    check_outcome(folder, ("fig2",))
    assert "Not run: fig1, fig3, fig4, linear, linear-ten" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_every_experiment_leaves_json_figure_and_report(everything):
    check_outcome(everything, NAMES)


@pytest.mark.slow
def test_fig1_measures_every_method_both_ways(everything):
    values = read_results(everything, "fig1")["pieces"]["fcnn/50"]["values"]
    assert set(values["warm_seconds"]) == {*COMPARED, *RELEASED, HELD}
    assert all(len(values["warm_seconds"][name]) == 2 for name in COMPARED)
    exact = values["distance"]["exact"]["exact"]
    assert exact[ONE_STEP] < 1e-7  # squared error: one step is retraining
    assert exact[ITERATED] < 1e-7
    as_released = values["distance"]["published"]["exact"]
    assert as_released[PAPER_RELEASED] == pytest.approx(as_released[PAPER], rel=0.05)
    cold = read_results(everything, "fig1")["pieces"]["fcnn/50/cold"]["values"]["cold_seconds"]
    assert set(cold) == {*COMPARED, *RELEASED}
    assert min(cold.values()) > 0


@pytest.fixture
def types_of_32_bits():
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)


@pytest.mark.thorough
def test_fig1_stays_in_float32_and_marks_solves_that_stop_early(tmp_path, types_of_32_bits):
    """At a ridge where float32 falls short, so that the library would continue in float64 by itself."""
    row = replace(ROW, training=replace(ROW.training, ridge=1e-6))
    config = configure("fig1", "paper", OVERRIDES["fig1"] | {"rows": (row,), "cg_steps": 2})
    run = Run(ResultsFolder(tmp_path), "fig1", "paper", config, 0)
    case = LinearisedCase(row, config, Context(run, 0, False, load=load))
    for base, _ in case.trained.values():
        assert WIDENED not in base.stats.notes
    details = case.compare(50)["details"]
    for base in ("published", "exact"):
        for name in (PARAMETER, PAPER, ONE_STEP, ITERATED):
            assert WIDENED not in details[base][name]["notes"]
        for name in (PARAMETER, PAPER):
            found = details[base][name]
            # Two steps leave far more than 1e-8.
            assert found["iterations"] == 2
            assert found["residual"] > 1e-6
            assert not found["converged"]


@pytest.mark.slow
def test_fig4_estimates_lie_on_the_diagonal(everything):
    values = read_results(everything, "fig4")["pieces"]["fcnn/exact"]["values"]
    for name in (PAPER, ONE_STEP, ITERATED):
        np.testing.assert_allclose(
            values["estimates"][name]["outputs"], values["actual_outputs"], rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize(("epochs", "every"), [(1, None), (4000, None), (4000, 40), (45, 40)])
def test_records_leave_no_gaps(epochs, every):
    marks = epochs_to_record(epochs, every)
    assert (marks[0], marks[-1]) == (0, epochs)
    steps = np.diff(marks)
    assert (steps > 0).all()
    if every is None:
        assert (steps <= np.maximum(1, 0.02 * np.asarray(marks[:-1]))).all()
        assert marks[:51] == list(range(min(epochs, 50) + 1))
    else:
        assert (steps <= every).all()


def test_training_in_pieces_is_training_at_once():
    model = linearize(lambda theta, x: jnp.tanh(x @ theta), jnp.ones((3, 1)))
    x, y = np.random.default_rng(0).normal(size=(2, 5, 3))
    seen, how = {}, {"ridge": 0.1, "rate": 0.2, "epochs": 7, "progress": False}
    args = (model, jnp.asarray(x), jnp.asarray(y[:, :1]))
    got = train(*args, marks=[0, 1, 2, 5, 7], on_record=seen.__setitem__, **how)
    theta = np.ones((3, 1))
    for epoch in range(8):
        if epoch in seen:
            np.testing.assert_allclose(seen[epoch], theta, rtol=1e-12)
        f = np.tanh(x @ theta)
        gradient = x.T @ ((f - y[:, :1]) * (1 - f**2)) / 5 + 0.1 * (theta - 1)
        theta, last = theta - 0.2 * gradient, theta
    assert sorted(seen) == [0, 1, 2, 5, 7]
    np.testing.assert_allclose(got, last, rtol=1e-12)


@pytest.mark.thorough
def test_fig2_trains_both_from_the_same_start(folder):
    values = read_results(folder, "fig2")["pieces"]["ridge/0.01"]["values"]
    assert values["epoch"] == [0, 10, 20]
    assert values["distance"][0] == 0
    assert values["rmse"][0] < 1e-6
    assert values["gradient_network"][0] == pytest.approx(values["gradient_linear"][0], rel=1e-4)


@pytest.mark.thorough
def test_fig2_follows_other_initialisations_at_the_largest_ridge(folder):
    results = read_results(folder, "fig2")
    same, other = (results["pieces"][f"seed/{seed}"]["values"] for seed in (0, 1))
    whole = results["pieces"]["ridge/0.1"]["values"]
    assert same["distance"] == pytest.approx(whole["distance"][-1], rel=1e-3)
    assert other["distance"] != pytest.approx(same["distance"], rel=1e-3)
    why = next(c.why for c in COMPARISONS["fig2"](results) if c.what == "λ = 0.1, final distance")
    low, high = sorted((same["distance"], other["distance"]))
    assert f"2 seeds end at {low:.3g} to {high:.3g}" in why


@pytest.mark.slow
def test_linear_model_is_exact(everything):
    values = read_results(everything, "linear-ten")["pieces"]["squared/50"]["values"]
    assert values["distance"][ONE_STEP] < 1e-6
    assert values["dual_against_parameter_space"] < 1e-4


@pytest.mark.thorough
def test_fig1_has_bars_over_seeds(tmp_path):
    few = {"seeds": (1,), "cold": False, "released_repeats": 0, "repeats": 1}
    assert go("fig1", tmp_path, scale="paper", overrides=few)
    results = read_results(tmp_path, "fig1")
    whole, other = (results["pieces"][f"{p}fcnn/50"]["values"] for p in ("", "seed/1/"))
    apart = other["distance"]["published"]["published"]
    assert set(apart) == {PARAMETER, PAPER, ONE_STEP, ITERATED, RANDOM}
    assert apart[ONE_STEP] != whole["distance"]["published"]["published"][ONE_STEP]
    config = configure("fig1", "paper", OVERRIDES["fig1"] | few)
    run = Run(ResultsFolder(tmp_path), "fig1", "paper", config, 1)
    alone = LinearisedCase(ROW, config, Context(run, 1, False, load=load)).compare(50)
    assert apart == pytest.approx(
        {name: alone["distance"]["published"]["published"][name] for name in apart}, rel=1e-6
    )
    check_bars(results, "fcnn", lambda v: v["distance"]["published"]["published"][ONE_STEP])


def check_bars(results, prefix, pick):
    xs, ys = series(results, prefix, pick)
    below, above = bars(results, prefix, pick)
    for percent, y, low, high in zip(xs, ys, below, above, strict=True):
        found = [
            pick(results["pieces"][f"{seed}{prefix}/{percent}"]["values"])
            for seed in ("", "seed/1/")
        ]
        assert (y - low, y + high) == pytest.approx((min(found), max(found)))
        assert low + high > 0


@pytest.mark.slow
def test_fig3_and_fig4_have_bars_over_seeds(tmp_path):
    assert go("fig3", tmp_path, overrides={"seeds": (1,)})
    found = read_results(tmp_path, "fig3")
    check_bars(found, "ridge/0.01", lambda v: v["distance"][ONE_STEP])
    assert go("fig4", tmp_path, overrides={"seeds": (1,)})
    pieces = read_results(tmp_path, "fig4")["pieces"]
    same, other = (pieces[f"{p}fcnn/exact"]["values"] for p in ("", "seed/1/"))
    assert same["queries"] != other["queries"]


def test_negative_seeds_are_refused():
    with pytest.raises(ValueError, match="seeds must not be negative"):
        configure("fig3", "smoke", {"seeds": (1, -1)})


def test_figure_and_report_need_only_the_json(tmp_path):
    write_json(tmp_path / "fig1.json", made_up_fig1(60.0))
    reproduce("fig1", out=tmp_path, plots_only=True, progress=False)
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 1
    assert "the method itself determines this number" in page
    assert "Smoke scale" not in page


@pytest.mark.thorough
def test_an_interrupted_run_continues_where_it_stopped(tmp_path, monkeypatch):
    from dualfluence.apps.paper import _run_fig2

    calls = []
    follow = _run_fig2.Trajectories.follow

    def counting(self, ridge):
        calls.append(ridge)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return follow(self, ridge)

    monkeypatch.setattr(_run_fig2.Trajectories, "follow", counting)
    with pytest.raises(KeyboardInterrupt):
        go("fig2", tmp_path)
    assert not (tmp_path / "fig2.json").exists()
    assert go("fig2", tmp_path, resume=True)
    assert calls == [1e-1, 1e-2, 1e-2]
    assert go("fig2", tmp_path, resume=True)
    assert len(calls) == 3
    assert go("fig2", tmp_path, resume=True, seed=1)  # other settings: nothing is reused
    assert len(calls) == 5


def test_a_budget_stops_between_pieces_and_says_so(tmp_path):
    assert not go("linear-ten", tmp_path, budget=-1.0)
    results = read_results(tmp_path, "linear-ten")
    assert not results["complete"]
    assert results["pieces"] == {}
    assert "Incomplete" in (tmp_path / "report.html").read_text()


@pytest.mark.thorough
def test_a_damaged_piece_is_computed_again(tmp_path):
    assert go("linear-ten", tmp_path)
    path = tmp_path / "pieces" / "linear-ten" / "squared-50.json"
    whole = json.loads(path.read_text())
    for damage in ("{", "[]", json.dumps({"fingerprint": whole["fingerprint"]})):
        path.write_text(damage)
        assert go("linear-ten", tmp_path, resume=True)
        assert json.loads(path.read_text())["values"] == whole["values"]


def test_plots_only_needs_results(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing to draw in .*expected fig1\.json"):
        reproduce("fig1", out=tmp_path, plots_only=True, progress=False)


@pytest.mark.thorough
def test_a_run_without_results_leaves_earlier_ones(tmp_path):
    assert go("linear-ten", tmp_path)
    before = (tmp_path / "linear-ten.json").read_text()
    assert not go("linear-ten", tmp_path, budget=-1.0)
    assert (tmp_path / "linear-ten.json").read_text() == before


def test_a_folder_that_cannot_be_written_is_an_error_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        go("fig2", tmp_path / "file")


def test_nothing_half_written_is_left(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    with pytest.raises(TypeError):
        write_json(path, {"x": object()})
    assert json.loads(path.read_text()) == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    store = ResultsFolder(tmp_path)
    with pytest.raises(RuntimeError, match="stop"):
        store.arrays({"a": 1}, lambda: (_ for _ in ()).throw(RuntimeError("stop")))
    assert not list(tmp_path.glob("cache/*"))


def test_plain_values_have_no_infinities():
    assert plain({"a": np.float32("nan"), "b": np.arange(2), "c": (1.5, np.inf)}) == {
        "a": None,
        "b": [0, 1],
        "c": [1.5, None],
    }


def test_published_values_are_those_of_the_paper():
    assert published.at_percentages(published.FIG1["fcnn"]["distance dual"])[90] == 5e-4
    assert published.at_percentages(published.FIG1["cnn"]["warm dual"]) == {10: 0.5, 90: 0.5}
    assert published.FIG2["distance"][1e-2] == 2.2e-4
    assert PublishedValue("a", 1.0, 2.1).differs
    assert not PublishedValue("a", 1.0, 0.6).differs
    results = {"config": {"percentages": [10]}, "pieces": {}, "environment": {"device": "x"}}
    found = COMPARISONS["fig1"](results)
    assert len(found) == 10
    assert all(item.measured is None for item in found)


def test_configurations_are_the_published_ones():
    fig1 = configure("fig1", "paper")
    assert fig1.rows[0].training == Training("softmax", 1e-2, 0.1, 4000)
    assert fig1.rows[1].training == Training("squared", 1e-1, 0.1, 500, 0.9)
    assert configure("fig4", "paper", {"epochs": 7}).rows[0].training.epochs == 7
    assert configure("fig3", "paper", {"percentages": (10,)}).percentages == (10,)
    assert configure("fig2", "paper", {"percentages": (10,)}).epochs == 4000
    with pytest.raises(ValueError, match="no experiment 'fig5'"):
        configure("fig5", "paper")
    with pytest.raises(ValueError, match="scale must be"):
        configure("fig1", "large")
    for wrong in ((0,), (10, 100), ()):
        with pytest.raises(ValueError, match="percentages must lie between 1 and 99"):
            configure("fig3", "paper", {"percentages": wrong})


def test_missing_data_says_what_to_put_where(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data_batch_1\.bin"):
        reproduce("fig1", out=tmp_path / "out", data_dir=tmp_path, progress=False)
    assert not (tmp_path / "out").exists()
