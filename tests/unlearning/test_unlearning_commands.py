"""`dualfluence verify` and `serve` on the command line."""

import pytest
from typer.testing import CliRunner

import cases
import dualfluence as dfl
import problems
from dualfluence.apps.cli._app import app
from dualfluence.apps.serve import _model

pytestmark = [pytest.mark.thorough, pytest.mark.host]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("desk")
    p = problems.linear_problem(12, 1, 8, "squared", ridge=0.2)
    with dfl.unlearning.open(folder / "desk", cases.fit(p)) as desk:
        desk.remove([3])
        desk.checkpoint(folder / "model.npz", include_kernel=True)
    return folder


def test_verify_says_what_it_found_and_writes_documents(kept, tmp_path):
    command = ["verify", str(kept / "desk"), "--model", str(kept / "model.npz")]
    done = CliRunner().invoke(app, [*command, "--documents", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "3 lines" in done.output
    assert "11 retained points" in done.output
    assert len(list(tmp_path.glob("certificate-*.html"))) == 3


def test_verify_fails_for_a_changed_ledger(kept, tmp_path):
    raw = (kept / "desk" / "ledger.jsonl").read_bytes().replace(b'"count":1', b'"count":2')
    (tmp_path / "ledger.jsonl").write_bytes(raw)
    done = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert done.exit_code == 1
    assert "line 2" in done.output


def test_serve_starts_with_a_file_and_the_function_it_was_fitted_with(kept, tmp_path, monkeypatch):
    started = {}

    def run(app, listener, ready):
        started.update(state=app, host=listener.getsockname()[0])
        listener.close()
        ready()

    monkeypatch.setattr("dualfluence.apps.serve._run.run", run)
    monkeypatch.setattr(
        _model,
        "load_model",
        lambda name: cases.model(problems.linear_problem(12, 1, 8, "squared", ridge=0.2)),
    )
    command = ["serve", str(kept / "model.npz"), "--ledger", str(tmp_path / "new")]
    done = CliRunner().invoke(app, [*command, "--network", "my:network", "--port", "0"])
    assert done.exit_code == 0, done.output
    assert started["host"] == "127.0.0.1"
    token = (tmp_path / "new" / "token").read_text()
    assert token not in done.output
