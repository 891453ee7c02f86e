"""A desk answers as if retrained, remembers what it answered, and comes back as it was."""

import dataclasses
import errno
import json
import os
import resource
import signal
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import problems
from dualfluence._support.files import FileError
from dualfluence.unlearning import LedgerError, _engine, _ledger
from dualfluence.unlearning._payload import digest_of_model

N = 16


@pytest.fixture(scope="module")
def p():
    return problems.linear_problem(N, 2, 24, "softmax", ridge=0.1)


@pytest.fixture(scope="module")
def fitted(p):
    return cases.fit(p)


def names():
    return [f"person {i}" for i in range(N)]


def lines(path):
    return (path / "ledger.jsonl").read_bytes().splitlines(keepends=True)


def test_answers_are_cumulative_and_within_their_certificates(p, fitted, tmp_path):
    weights, x, y = p.sample_weights.copy(), p.x, p.y.copy()
    with dfl.unlearning.open(tmp_path, fitted, ids=names()) as desk:
        answers = [desk.remove("person 3", until=1e-6), desk.remove(["person 5", "person 6"])]
        weights[[3, 5, 6]] = 0
        answers.append(desk.relabel("person 0", p.y_q[:1], until=1e-6))
        y[0] = p.y_q[0]
        answers.append(desk.correct("person 1", p.x_q[:1], p.y_q[:1], until=1e-6))
        answers.append(desk.add("new", p.x_q[1:2], p.y_q[1:2], until=1e-6))
        answers.append(desk.remove(["new", "person 1"], until=1e-6))
        weights[1] = 0
        want = cases.retrain(p, weights, x, y)
        got = np.asarray(answers[-1].params())
        assert np.linalg.norm(got - want) <= answers[-1].certificate.distance_bound <= 1e-6
        assert [answer.sequence for answer in answers] == [2, 3, 4, 5, 6, 7]
        np.testing.assert_allclose(
            answers[-1].predict(p.x_q), problems.apply(got, p.x_q), atol=1e-12
        )


def test_a_preview_writes_nothing_and_is_what_the_request_gives(fitted, tmp_path):
    with dfl.unlearning.open(tmp_path, fitted) as desk:
        before, size = desk.model_digest, (tmp_path / "ledger.jsonl").stat().st_size
        seen = desk.preview([4])
        assert seen.sequence is None
        assert desk.model_digest == before
        assert (tmp_path / "ledger.jsonl").stat().st_size == size
        assert desk.remove([4]).model_digest == seen.model_digest


def test_names_never_come_back(p, fitted, tmp_path):
    with dfl.unlearning.open(tmp_path, fitted, ids=names()) as desk:
        desk.remove("person 3")
        with pytest.raises(KeyError, match="was removed"):
            desk.remove("person 3")
        for name in ("person 3", "person 4"):
            with pytest.raises(ValueError, match="a name can be used only once"):
                desk.add(name, p.x_q[:1], p.y_q[:1])
        with pytest.raises(KeyError, match="no point is called"):
            desk.remove("nobody")
        with pytest.raises(ValueError, match="twice"):
            desk.remove(["person 4", "person 4"])
        with pytest.raises(TypeError, match="text or a whole number"):
            desk.remove([4.0])
        assert len(desk.ledger.lines) == 2


@pytest.mark.parametrize("references", ["keep", "pseudonymise", "erase"])
def test_replay_is_bit_identical(p, fitted, tmp_path, references):
    options = {"ids": names(), "references": references}
    with dfl.unlearning.open(tmp_path, fitted, **options) as desk:
        desk.remove("person 3")
        desk.relabel("person 0", p.y_q[:1])
        desk.correct("person 2", p.x_q[:1])
        desk.add(["new"], p.x_q[1:2], p.y_q[1:2])
        desk.remove(["person 7", "person 2", "new"])
        alpha, digest = np.asarray(desk.model.alpha), desk.model_digest
    with dfl.unlearning.open(tmp_path, fitted, **options) as desk:
        np.testing.assert_array_equal(desk.model.alpha, alpha)
        assert desk.model_digest == digest == digest_of_model(desk.model, desk.points.root)
        with pytest.raises(KeyError):
            desk.remove("new")
        with pytest.raises(ValueError, match="a name can be used only once"):
            desk.add("new", p.x_q[:1], p.y_q[:1])


@pytest.mark.parametrize("references", ["keep", "pseudonymise", "erase"])
def test_the_ledger_never_holds_names_or_contents(p, fitted, tmp_path, references):
    options = {"ids": names(), "references": references}
    with dfl.unlearning.open(tmp_path, fitted, **options) as desk:
        desk.remove("person 3")
        desk.add("somebody", p.x_q[:1], p.y_q[:1])
        known = desk.ids.reference("person 3").encode()
    raw = (tmp_path / "ledger.jsonl").read_bytes()
    for name in (b"person", b"somebody"):
        assert name not in raw
    assert (known in raw) == (references == "keep")
    assert stat.S_IMODE((tmp_path / "salt").stat().st_mode) == 0o600
    for file in tmp_path.glob("request-*.npz"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_references_erased_later_leave_the_chain_whole(fitted, tmp_path):
    with dfl.unlearning.open(tmp_path, fitted) as desk:
        desk.remove([3])
        desk.remove([4])
    path = tmp_path / "ledger.jsonl"
    _ledger.erase_references(path, [2])
    found, _, torn = _ledger.read_lines(path)
    assert [line["references"] is None for line in found] == [False, True, False]
    assert not torn


def test_a_torn_last_line_is_dropped_and_said(fitted, tmp_path):
    with dfl.unlearning.open(tmp_path, fitted) as desk:
        desk.remove([3])
        digest = desk.model_digest
        desk.remove([4])
    raw = lines(tmp_path)
    (tmp_path / "ledger.jsonl").write_bytes(b"".join(raw[:2]) + raw[2][:-20])
    with dfl.unlearning.open(tmp_path, fitted) as desk:
        assert any("torn" in note for note in desk.notes)
        assert desk.model_digest == digest
        desk.remove([4])
    assert len(lines(tmp_path)) == 3


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_changed_line_is_refused_with_its_number(fitted, tmp_path, number):
    with dfl.unlearning.open(tmp_path, fitted) as desk:
        desk.remove([3])
        desk.remove([4])
    raw = lines(tmp_path)
    raw[number - 1] = raw[number - 1].replace(b'"certified":true', b'"certified":null')
    (tmp_path / "ledger.jsonl").write_bytes(b"".join(raw))
    with pytest.raises(LedgerError, match=f"line {number} was changed"):
        dfl.unlearning.open(tmp_path, fitted)


def test_a_kind_of_request_from_a_later_version_is_refused_by_name(fitted, tmp_path):
    with dfl.unlearning.open(tmp_path, fitted) as desk:
        digest, certificate = desk.model_digest, desk.certificate
        desk._record("swap", [], 0, digest, certificate, "closed form", None, None)
    with pytest.raises(LedgerError, match=r"'swap' is not a request of this version"):
        dfl.unlearning.open(tmp_path, fitted)


def test_a_second_writer_is_refused(fitted, tmp_path):
    with dfl.unlearning.open(tmp_path, fitted), pytest.raises(LedgerError, match="another writer"):
        dfl.unlearning.open(tmp_path, fitted)
    dfl.unlearning.open(tmp_path, fitted).close()


@pytest.mark.parametrize(("noise", "refused"), [(1e-14, False), (1e-3, True)])
def test_a_replay_that_rounds_otherwise_is_told_and_another_model_refused(
    fitted, tmp_path, monkeypatch, noise, refused
):
    with dfl.unlearning.open(tmp_path, fitted) as desk:
        desk.remove([3])
    propose = _engine.Engine.propose

    def off(engine, *args):
        work = propose(engine, *args)
        f = work.fitted
        norm = f.certificate.parameter_norm * (1 + noise)
        certificate = dataclasses.replace(f.certificate, parameter_norm=norm)
        state = type(f.state)(f.state.alpha * (1 + noise), f.state.k_alpha)
        return work._replace(fitted=dataclasses.replace(f, state=state, certificate=certificate))

    monkeypatch.setattr(_engine.Engine, "propose", off)
    if refused:
        with pytest.raises(LedgerError, match="gives another model"):
            dfl.unlearning.open(tmp_path, fitted)
        return
    with dfl.unlearning.open(tmp_path, fitted) as desk:
        assert any("rounding" in note for note in desk.notes)
        assert desk.model_digest == desk.ledger.lines[-1]["model_after"]


def test_another_model_is_refused(p, fitted, tmp_path):
    dfl.unlearning.open(tmp_path, fitted).close()
    other = fitted.edit(dfl.Remove([1])).commit()
    with pytest.raises(LedgerError, match="another model"):
        dfl.unlearning.open(tmp_path, other)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_refuses_leaves_ledger_and_model_as_they_were(
    fitted, tmp_path, monkeypatch, code
):
    with dfl.unlearning.open(tmp_path, fitted) as desk:
        desk.remove([3])
        digest, raw = desk.model_digest, (tmp_path / "ledger.jsonl").read_bytes()
        write = desk.ledger._write

        def half(data):
            desk.ledger._file.write(data[: len(data) // 2])
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(desk.ledger, "_write", half)
        with pytest.raises(LedgerError, match="not recorded and not applied"):
            desk.remove([4])
        assert (tmp_path / "ledger.jsonl").read_bytes() == raw
        assert desk.model_digest == digest
        monkeypatch.setattr(desk.ledger, "_write", write)
        assert desk.remove([4]).sequence == 3


@contextmanager
def not_ours(folder):
    """The folder as a user sees it who may read it and no more; root has to become one."""
    modes = {path: path.stat().st_mode for path in (*folder.iterdir(), folder)}
    for path in modes:
        path.chmod(0o555 if path.is_dir() else 0o444)
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(65534)
        yield
    finally:
        if root:
            os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(mode)


@pytest.fixture
def open_folder():
    """A folder that other users can reach."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_read_only_folder_is_a_clear_error_and_the_ledger_is_intact(fitted, open_folder):
    with not_ours(open_folder), pytest.raises(LedgerError, match="may not write there"):
        dfl.unlearning.open(open_folder, fitted)
    assert not list(open_folder.iterdir())
    with dfl.unlearning.open(open_folder, fitted) as desk:
        desk.remove([3])
        raw = (open_folder / "ledger.jsonl").read_bytes()
    with not_ours(open_folder), pytest.raises(LedgerError, match="may not write there"):
        dfl.unlearning.open(open_folder, fitted)
    assert (open_folder / "ledger.jsonl").read_bytes() == raw


def test_a_folder_that_becomes_read_only_refuses_what_it_cannot_keep(p, fitted, open_folder):
    """The contents of a request go into a file of their own."""
    with dfl.unlearning.open(open_folder, fitted) as desk:
        desk.remove([3])
        digest, raw = desk.model_digest, (open_folder / "ledger.jsonl").read_bytes()
        with not_ours(open_folder), pytest.raises(LedgerError, match="not recorded and not appl"):
            desk.relabel([4], p.y[4:5])
        assert (open_folder / "ledger.jsonl").read_bytes() == raw
        assert desk.model_digest == digest
        assert desk.relabel([4], p.y[4:5]).sequence == 3


@pytest.mark.parametrize("text", ["", "not a salt", "ab" * 31])
def test_a_damaged_salt_is_a_clear_error(fitted, tmp_path, text):
    dfl.unlearning.open(tmp_path, fitted).close()
    (tmp_path / "salt").write_text(text)
    with pytest.raises(FileError, match="not a salt of this desk"):
        dfl.unlearning.open(tmp_path, fitted)


def test_a_file_that_may_not_grow_is_a_clear_error_and_the_ledger_is_intact(fitted, tmp_path):
    """The system's own refusal, in the middle of a line."""
    with dfl.unlearning.open(tmp_path, fitted) as desk:
        desk.remove([3])
        digest, raw = desk.model_digest, (tmp_path / "ledger.jsonl").read_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(raw) + 100, hard))
            with pytest.raises(LedgerError, match="not recorded and not applied"):
                desk.remove([4])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)
        assert (tmp_path / "ledger.jsonl").read_bytes() == raw
        assert desk.model_digest == digest
        assert desk.remove([4]).sequence == 3


def test_a_folder_that_cannot_be_written_is_a_clear_error(fitted, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot open"):
        dfl.unlearning.open(tmp_path / "file" / "desk", fitted)


def test_a_checkpoint_is_a_new_start_without_the_removed_rows(p, fitted, tmp_path):
    saved = tmp_path / "model.npz"
    with dfl.unlearning.open(tmp_path / "desk", fitted) as desk:
        desk.relabel([0], p.y_q[:1], until=1e-8)
        desk.remove([3], until=1e-8)
        desk.checkpoint(saved, include_kernel=True)
        assert not list((tmp_path / "desk").glob("request-*"))
        desk.remove([4])
        digest = desk.model_digest
    again = dfl.load(saved, cases.model(p, jnp.float64))
    with dfl.unlearning.open(tmp_path / "desk", again) as desk:
        assert desk.model_digest == digest
        with pytest.raises(KeyError):
            desk.remove([3])
    with pytest.raises(LedgerError, match="is missing"):
        # The model that the ledger began with no longer has what line 2 brought.
        _replay_from_the_start(tmp_path / "desk", fitted)


def _replay_from_the_start(path, fitted):
    return dfl.unlearning.open(path, fitted)


def test_a_line_says_what_was_asked_and_where(fitted, tmp_path):
    with dfl.unlearning.open(tmp_path, fitted, clock=lambda: 0.0) as desk:
        answer = desk.remove([3, 4], until=1e-3)
    line = json.loads(lines(tmp_path)[1])
    assert line["kind"] == "remove"
    assert line["count"] == 2
    assert line["time"] == "1970-01-01T00:00:00.000+00:00"
    assert line["model_after"] == answer.model_digest
    assert line["certificate"]["distance_bound"] == answer.certificate.distance_bound
    assert set(line["software"]) == {"dualfluence", "jax", "numpy"}
    assert line["device"].startswith(jax.default_backend())
