"""An experiment of one's own: its descent, its options, and its record, figure and report."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("matplotlib")

from typer.testing import CliRunner

import dualfluence as dfl
from dualfluence import datasets
from dualfluence.apps import paper
from dualfluence.apps.cli._app import app
from dualfluence.apps.compare._names import FULL_HESSIAN, ITERATED, ONE_STEP, PAPER, PARAMETER
from dualfluence.apps.compare._networks import Architecture
from dualfluence.apps.paper import Data, Minibatches, Own
from dualfluence.apps.paper._config import check_kinds
from dualfluence.apps.paper._results import read_results
from dualfluence.apps.paper._run_own import descend_in_batches

pytestmark = pytest.mark.host


def linear(theta, x):
    return x @ theta


def plain(Phi, y, theta_0, t, seed):
    """The same descent in NumPy, for squared error."""
    theta, v, k = theta_0.copy(), np.zeros_like(theta_0), 0
    rng, n = np.random.default_rng(seed), len(y)
    size = n if t.batch_size is None else t.batch_size
    for _ in range(t.epochs):
        order = rng.permutation(n) if size < n else np.arange(n)
        for rows in order[: n // size * size].reshape(-1, size):
            error = Phi[rows].T @ (Phi[rows] @ theta - y[rows]) / size
            v = t.momentum * v + error + t.ridge * (theta - theta_0)
            theta = theta - t.rate * t.decay_rate ** (k / t.decay_steps) * v
            k += 1
    return theta


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 4, "momentum": 0.8},
        {"batch_size": 33, "decay_steps": 5, "decay_rate": 0.7},
    ],
    ids=["full batch", "minibatches", "decay"],
)
def test_descent_is_that_of_plain_numpy(options):
    rng = np.random.default_rng(0)
    Phi, y = rng.normal(size=(33, 5)), rng.normal(size=(33, 1))
    theta_0 = rng.normal(size=(5, 1))
    training = Minibatches(loss="squared", ridge=0.1, rate=0.05, epochs=7, **options)
    got = descend_in_batches(
        linear,
        jnp.asarray(theta_0),
        jnp.asarray(Phi),
        jnp.asarray(y),
        dfl.SquaredError(),
        training,
        3,
    )
    np.testing.assert_allclose(got, plain(Phi, y, theta_0, training, 3), rtol=1e-10)


def test_a_descent_that_diverges_says_so():
    training = Minibatches(loss="squared", ridge=0.1, rate=1e9, epochs=60)
    x = jnp.ones((3, 2))
    with pytest.raises(FloatingPointError, match="experiment: training diverged"):
        descend_in_batches(
            linear, jnp.ones((2, 1)), x, jnp.zeros((3, 1)), dfl.SquaredError(), training, 0
        )


def own(**changes):
    given = {
        "data": Data("mnist-small", (3, 8), 6, 4),
        "network": Architecture("fcnn", 1, 16),
        "training": Minibatches(loss="squared", ridge=0.1, rate=0.05, epochs=20, batch_size=4),
        "forget": (((3, 50.0),), ((3, 17.0), (8, 50.0))),
        "repeats": 1,
        "cg_steps": 50,
    }
    return Own(**(given | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"forget": ()}, "at least one set to forget"),
        ({"forget": (((5, 10.0),),)}, "cannot forget class 5"),
        ({"forget": (((3, 100.0),),)}, "between 0 and 100, got 100"),
        (
            {"training": Minibatches(loss="softmax", ridge=1.0, rate=1.0, epochs=1)},
            "softmax cannot take",
        ),
        ({"data": Data("mnist-small", (3,), 6, 4)}, "at least two classes"),
    ],
)
def test_settings_that_cannot_run_are_errors(changes, words):
    with pytest.raises(ValueError, match=words):
        own(**changes)


def test_networks_and_losses_that_do_not_exist_are_errors():
    with pytest.raises(ValueError, match=r"network must be one of .* got 'rnn'"):
        check_kinds("rnn", "squared")
    with pytest.raises(ValueError, match=r"loss must be one of .* got 'hinge'"):
        check_kinds("cnn", "hinge")


def load(name, *, classes=None, data_dir=None, progress=True):
    """Nine random pixels per image, in memory."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.asarray(classes), 12).astype(np.int32)
    x = (rng.uniform(size=(len(y), 9)) * (1 + np.arange(9) * y[:, None] / 40)).astype(np.float32)
    return datasets.Dataset(x / 2, y, x / 2, y, name, "made up for tests", 10)


@pytest.mark.thorough
def test_it_leaves_record_figure_and_report(tmp_path):
    assert paper.experiment(own(), out=tmp_path, load=load, progress=False)
    results = read_results(tmp_path, "own")
    assert results["complete"]
    first, second = (results["pieces"][f"removal/{i}"]["values"] for i in range(2))
    assert (first["removed"], second["removed"]) == (3, 4)
    for name in (PARAMETER, PAPER, FULL_HESSIAN, ONE_STEP, ITERATED):
        assert second["largest_difference"][name] > 0
        assert len(second["warm_seconds"][name]) == 1
    assert (tmp_path / "own.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    assert "An experiment of one&#x27;s own" in page or "An experiment of one's own" in page
    assert "Not run" not in page


@pytest.mark.thorough
def test_a_linearised_network_with_several_classes_forgets_exactly(tmp_path):
    """Trained to its optimum, one step for squared error is retraining; all points' Hessian is not."""
    config = own(
        data=Data("mnist-small", (2, 5, 7), 5, 4),
        training=Minibatches(loss="squared", ridge=0.1, rate=0.2, epochs=3000),
        forget=(((2, 40.0), (7, 20.0)),),
        linearised=True,
    )
    with jax.default_matmul_precision("highest"):
        assert paper.experiment(config, out=tmp_path, load=load, progress=False)
    distance = read_results(tmp_path, "own")["pieces"]["removal/0"]["values"]["distance"]
    change = read_results(tmp_path, "own")["pieces"]["removal/0"]["values"]["change"]
    assert distance[ONE_STEP] < 1e-3 * change
    assert distance[PARAMETER] < 1e-3 * change
    assert distance[FULL_HESSIAN] > 1e-2 * change


def test_the_command_passes_its_options_on(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(paper, "experiment", lambda config, **options: asked.append(config) or True)
    command = ["experiment", "--out", str(tmp_path), "--classes", "1,2,5", "--loss", "softmax"]
    command += [
        "--forget",
        "1:10",
        "--forget",
        "2:20,5:30.5",
        "--batch-size",
        "7",
        "--network",
        "cnn",
    ]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    (config,) = asked
    assert config.forget == (((1, 10.0),), ((2, 20.0), (5, 30.5)))
    assert (config.training.batch_size, config.network.kind) == (7, "cnn")
    for wrong in (["--forget", "1"], ["--forget", "9:10"], ["--forget", "1:10", "--loss", "hinge"]):
        assert CliRunner().invoke(app, ["experiment", *wrong]).exit_code == 2
