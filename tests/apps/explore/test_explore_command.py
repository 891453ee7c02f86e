"""`dualfluence explore` on the command line: what it takes, and what it writes."""

import re
import signal
import subprocess
import sys

import httpx
import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import dualfluence as dfl
from dualfluence import datasets
from dualfluence.apps.attribute.example import small_network
from dualfluence.apps.cli._app import app
from dualfluence.apps.explore._load import load_scene
from dualfluence.apps.explore._run import serve
from dualfluence.apps.page import _view

pytestmark = [pytest.mark.thorough, pytest.mark.host]

NETWORK = "dualfluence.apps.attribute.example:small_network"


def run(*args):
    return CliRunner().invoke(app, ["explore", *map(str, args)])


@pytest.fixture
def data(tmp_path):
    small = datasets.load("mnist-small")
    path = tmp_path / "data.npz"
    np.savez(
        path, x=small.x_train[:20], y=small.y_train[:20], xq=small.x_test[:4], yq=small.y_test[:4]
    )
    return path


@pytest.mark.thorough
def test_a_model_by_name_is_saved_as_one_page(tmp_path, data):
    page = tmp_path / "page.html"
    out = run(NETWORK, "--data", data, "--save", page)
    assert out.exit_code == 0, out.output
    assert NETWORK in page.read_text()
    assert "data:image/png" in page.read_text()


@pytest.mark.thorough
def test_a_saved_model_is_taken_as_serve_takes_it(tmp_path, data):
    small = datasets.load("mnist-small")
    loss = dfl.SoftmaxCrossEntropy()
    x, y = small.x_train[:12], small.y_train[:12]
    fitted = dfl.fit(dfl.linearize(*small_network()), x, y, loss=loss, ridge=0.1, progress=False)
    fitted.save(tmp_path / "model.npz")
    scene = load_scene(str(tmp_path / "model.npz"), network=NETWORK, data=data, queries=3)
    assert scene.fitted.data.num_points == 12
    np.testing.assert_array_equal(scene.xq, small.x_test[:3])
    without = load_scene(str(tmp_path / "model.npz"), network=NETWORK, queries=3)
    assert "first training points" in without.notes[0]
    np.testing.assert_array_equal(without.xq, x[:3])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "model.npz"}, "needs --network"),
        ({"model": "no.such:thing"}, "--model"),
        ({"model": "a:b", "network": "c:d"}, "--network goes with a saved model"),
        ({"model": "model.npz", "network": "c:d", "points": 3}, "--points"),
    ],
)
def test_what_does_not_fit_together_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        load_scene(**options)


def test_too_many_points_are_refused_before_they_are_fitted(data, monkeypatch):
    monkeypatch.setattr("dualfluence.apps.explore._load.MAX_POINTS", 10)
    with pytest.raises(ValueError, match="up to 10 training points, got 20"):
        load_scene(NETWORK, data=data)
    assert _view.MAX_POINTS == 5000


def test_a_port_in_use_is_told(session):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="--port 0"):
            serve(session, "127.0.0.1", taken.getsockname()[1], browser=False, tell=print)


@pytest.mark.thorough
def test_it_listens_on_this_machine_alone_and_prints_a_link(tmp_path, data):
    command = [sys.executable, "-u", "-m", "dualfluence", "explore", NETWORK]
    process = subprocess.Popen(
        [*command, "--data", str(data), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        found = next(filter(None, (re.match(r"open (\S+)/#(\S+)", s) for s in process.stdout)))
        address, token = found.groups()
        assert address.startswith("http://127.0.0.1:")
        assert len(token) >= 40
        assert httpx.get(f"{address}/api/start").status_code == 401
        headers = {"Authorization": f"Bearer {token}"}
        start = httpx.get(f"{address}/api/start", headers=headers, timeout=60).json()
        assert start["start"]["model"]["points"] == 20
        assert start["start"]["model"]["dtype"] == "float64"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


@pytest.mark.thorough
def test_the_embedded_example_is_the_model_of_the_demo():
    scene = load_scene(None, points=20, queries=5)
    assert scene.title == "A network 784-1024-10"
    assert scene.fitted.ridge == 1e-3
    assert jax.numpy.isfinite(scene.fitted.predict(scene.xq)).all()
