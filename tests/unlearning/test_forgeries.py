"""An operator who rewrites files with every checksum right: what verification and the desk find."""

import hashlib
import json
import shutil
import tracemalloc
import zipfile

import numpy as np
import pytest
from typer.testing import CliRunner

import cases
import dualfluence as dfl
import problems
from dualfluence._support import archive
from dualfluence._support.files import FileError
from dualfluence.apps.cli._app import app
from dualfluence.apps.serve import _model
from dualfluence.unlearning import LedgerError, _verify_model

GONE = (3, 5, 6, 8)


@pytest.fixture(scope="module")
def p():
    return problems.linear_problem(12, 1, 8, "squared", ridge=0.2)


@pytest.fixture(scope="module")
def fitted(p):
    return cases.fit(p)


@pytest.fixture(scope="module")
def honest(fitted, tmp_path_factory):
    """A desk's folder with four removals, the model at its start and the model after them."""
    folder = tmp_path_factory.mktemp("honest")
    with dfl.unlearning.open(folder / "desk", fitted) as desk:
        desk.checkpoint(folder / "first.npz", include_kernel=True)
        for point in GONE:
            desk.remove([point])
        desk.checkpoint(folder / "last.npz", include_kernel=True)
    return folder


@pytest.fixture
def folder(honest, tmp_path):
    """A copy to forge."""
    return shutil.copytree(honest, tmp_path / "copy")


def kernel(x1, x2):
    return np.einsum("iap,jbp->iajb", x1[..., :-1], x2[..., :-1])


def read(folder):
    return [
        json.loads(line) for line in (folder / "desk" / "ledger.jsonl").read_bytes().splitlines()
    ]


def plain(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def chain(folder, lines):
    """Write lines with numbers and hashes as they should be."""
    before, raw = "0" * 64, []
    for number, line in enumerate(lines, start=1):
        line = {**line, "sequence": number, "before": before}
        covered = {k: v for k, v in line.items() if k not in ("hash", "references")}
        line["hash"] = before = hashlib.sha256(plain(covered)).hexdigest()
        raw.append(plain(line) + b"\n")
    (folder / "desk" / "ledger.jsonl").write_bytes(b"".join(raw))


def forge(path, change):
    """Change arrays of a model's file, with checksums made anew."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(arrays.pop("meta").tobytes())
    change(arrays)
    header = {k: v for k, v in header.items() if k not in ("sha256", "dtypes", "checksum")}
    archive.write_archive(path, header, arrays)


def found(folder, model="last.npz", **options):
    return dfl.unlearning.verify(folder / "desk", folder / model, **options)


def test_the_honest_files_agree_and_say_what_was_believed(folder):
    report = found(folder)
    assert report.valid, report.summary()
    assert (report.line, report.lines, report.retained) == (7, 7, 8)
    assert report.head == read(folder)[-1]["hash"]
    assert report.head in report.summary()
    assert "ON TRUST: K" in report.summary()
    own = found(folder, kernel=kernel)
    assert own.valid, own.summary()
    assert own.trusted == []
    np.testing.assert_allclose(own.computed, report.computed, rtol=1e-6, atol=1e-12)


def test_the_model_of_an_earlier_line_is_not_that_of_the_last(folder):
    """A model that removed nothing, after four removals."""
    report = found(folder, "first.npz")
    assert not report.valid
    assert "the model is that of line 2, not of line 7" in report.summary()
    then = found(folder, "first.npz", at=2)
    assert then.valid, then.summary()
    assert "with line 2, not the last of 7" in then.summary()
    assert not found(folder, at=3).valid
    assert not found(folder, at=8).valid
    for wrong in (0, -1, True):
        with pytest.raises(ValueError, match="number of a line"):
            found(folder, at=wrong)


def test_a_ledger_that_was_cut_lacks_the_line_of_a_kept_head(folder, fitted):
    heads = [line["hash"] for line in read(folder)]
    path = folder / "desk" / "ledger.jsonl"
    raw = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(raw[:2]))
    report = dfl.unlearning.verify(folder / "desk", head=heads[-1])
    assert not report.valid
    assert "cut before that line" in report.summary()
    with pytest.raises(LedgerError, match="ends before that line"):
        dfl.unlearning.open(folder / "desk", fitted, head=heads[-1])
    assert path.read_bytes() == b"".join(raw[:2])
    for head in heads[:2]:
        assert dfl.unlearning.verify(folder / "desk", head=head).valid
        with dfl.unlearning.open(folder / "desk", fitted, head=head) as desk:
            assert desk.head == heads[1]
    for wrong in ("", "abc", heads[0].upper()):
        with pytest.raises(ValueError, match="64 hexadecimal"):
            dfl.unlearning.verify(folder / "desk", head=wrong)
        with pytest.raises(ValueError, match="64 hexadecimal"):
            dfl.unlearning.open(folder / "desk", fitted, head=wrong)


def test_an_empty_ledger_is_no_start_for_a_kept_head(fitted, tmp_path):
    with pytest.raises(LedgerError, match="ends before that line"):
        dfl.unlearning.open(tmp_path / "desk", fitted, head="0" * 64)
    assert [file.name for file in (tmp_path / "desk").iterdir()] == ["ledger.jsonl"]


def swap(array):
    array[[0, 1]] = array[[1, 0]]


def swapped_rows(arrays):
    swap(arrays["x"])


def swapped_targets(arrays):
    """With offsets that make up for it: the residual is as it was."""
    before = arrays["targets"].copy()
    swap(arrays["targets"])
    arrays["offset"] += arrays["targets"] - before


def swapped_targets_alone(arrays):
    swap(arrays["targets"])


@pytest.mark.parametrize("change", [swapped_rows, swapped_targets, swapped_targets_alone])
def test_rows_that_were_swapped_are_found(folder, change):
    forge(folder / "last.npz", change)
    assert not found(folder).valid


def test_rows_without_the_commitments_are_not_called_checked(folder):
    forge(folder / "last.npz", lambda arrays: swap(arrays["commitments"]))
    assert "does not have the commitments" in found(folder).summary()
    forge(folder / "last.npz", lambda arrays: arrays.pop("commitments"))
    assert "cannot be checked" in found(folder).summary()


def test_rows_of_the_kernel_a_few_at_a_time_give_the_same(folder, monkeypatch):
    want = found(folder, kernel=kernel).computed
    monkeypatch.setattr(_verify_model, "BLOCK", 3)
    for options in ({}, {"kernel": kernel}):
        report = found(folder, **options)
        assert report.valid, report.summary()
        np.testing.assert_allclose(report.computed, want, rtol=1e-6, atol=1e-12)
    forge(folder / "last.npz", lambda arrays: arrays.pop("kernel"))
    assert found(folder, kernel=kernel).computed == pytest.approx(want, rel=1e-6, abs=1e-12)
    assert "holds no kernel" in found(folder).summary()


@pytest.mark.parametrize("diagonal", [0.0, 1e12])
def test_a_kernel_of_zeros_is_found(folder, diagonal):
    """ρᵀKρ = 0 whatever the model is, and whatever the file says of the size of `K`."""

    def zero(arrays):
        arrays["kernel"][:] = 0
        arrays["kernel_diagonal"][:] = diagonal

    forge(folder / "last.npz", zero)
    assert "K is not that of the model" in found(folder).summary()
    assert "K is not the kernel that was named" in found(folder, kernel=kernel).summary()


def test_entries_of_another_kernel_are_found_by_the_network(folder, p, monkeypatch):
    monkeypatch.setattr(_model, "load_model", lambda name: cases.model(p))
    command = ["verify", str(folder / "desk"), "--model", str(folder / "last.npz")]
    done = CliRunner().invoke(app, [*command, "--network", "my:network"])
    assert done.exit_code == 0, done.output
    assert "ON TRUST" not in done.output
    assert f"head {read(folder)[-1]['hash']}" in done.output

    def other(arrays):
        arrays["kernel"][0, 1] *= 1.01
        arrays["kernel"][1, 0] *= 1.01

    forge(folder / "last.npz", other)
    done = CliRunner().invoke(app, [*command, "--network", "my:network"])
    assert done.exit_code == 1
    assert "PROBLEM" in done.output
    first = ["verify", str(folder / "desk"), "--model", str(folder / "first.npz")]
    assert CliRunner().invoke(app, first).exit_code == 1
    done = CliRunner().invoke(app, [*first, "--at", "2", "--head", "0" * 64])
    assert done.exit_code == 1
    assert "cut before that line" in done.output
    assert CliRunner().invoke(app, [*first, "--at", "2"]).exit_code == 0
    assert CliRunner().invoke(app, [*command[:2], "--network", "my:network"]).exit_code != 0


def test_files_that_are_none_are_refused_with_the_words_and_limits_of_load(folder):
    def bomb(path):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for name in ("meta.npy", "alpha.npy"):
                with file.open(name, "w") as member:
                    shape = {"descr": "|u1", "fortran_order": False, "shape": (2**27,)}
                    np.lib.format.write_array_header_1_0(member, shape)
                    for _ in range(128):
                        member.write(bytes(2**20))

    path = folder / "last.npz"
    whole = path.read_bytes()
    with np.load(path) as arrays:
        at = (
            whole.index(arrays["alpha"].tobytes()) + 5
        )  # of a number; some bytes of an archive mean nothing
    files = {
        "empty": b"",
        "text": b"not an archive",
        "half": whole[: len(whole) // 2],
        "flipped": whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :],
    }
    for raw in files.values():
        path.write_bytes(raw)
        with pytest.raises(FileError, match=r"verify: .* is damaged"):
            found(folder)
    bomb(path)
    tracemalloc.start()
    with pytest.raises(FileError, match="compressed"):
        found(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23
    path.unlink()
    with pytest.raises(FileError, match="no file"):
        found(folder)
    with pytest.raises(FileError, match="no file"):
        dfl.unlearning.verify(folder / "desk" / "none")
    command = ["verify", str(folder / "desk"), "--model", str(path)]
    assert "PROBLEM: verify: there is no file" in CliRunner().invoke(app, command).output


def test_fields_that_make_no_sense_are_refused_in_words(folder):
    whole = (folder / "last.npz").read_bytes()

    def shorter(name):
        return lambda arrays: arrays.update({name: arrays[name][:-1]})

    for change in (
        *(shorter(name) for name in ("x", "targets", "offset", "sample_weights", "kernel")),
        lambda arrays: arrays.pop("targets"),
        lambda arrays: arrays.update(alpha=arrays["alpha"].astype(int)),
        lambda arrays: arrays.update(sample_weights=0 * arrays["sample_weights"]),
    ):
        (folder / "last.npz").write_bytes(whole)
        forge(folder / "last.npz", change)
        with pytest.raises(FileError, match=r"verify: .* is damaged"):
            found(folder)


def lazy(lines):
    """The second removal did nothing."""
    lines[3]["model_after"] = lines[3]["model_before"]
    lines[4]["model_before"] = lines[3]["model_after"]


def moved_only(lines):
    """The first removal changed the model, but left nobody out."""
    for line in lines[2:]:
        line["retained"] += 1


def other_data(lines):
    """Other features and targets come in with a removal."""
    for line in lines[3:]:
        line["points"] = "0" * 64


def jump(lines):
    lines[3]["model_before"] = "0" * 64


def nobody(lines):
    lines[2]["count"] = 0


def twice(lines):
    lines.insert(1, lines[0])


def headless(lines):
    del lines[0]


@pytest.mark.parametrize("change", [lazy, moved_only, other_data, jump, nobody, twice, headless])
def test_lines_that_contradict_each_other_are_refused(folder, fitted, change):
    lines = read(folder)
    change(lines)
    chain(folder, lines)
    assert not dfl.unlearning.verify(folder / "desk").valid
    with pytest.raises(LedgerError, match=r"contradicts the line before it"):
        dfl.unlearning.open(folder / "desk", fitted)


def test_a_removal_that_does_nothing_is_not_written(fitted, tmp_path, monkeypatch):
    with dfl.unlearning.open(tmp_path / "desk", fitted) as desk:
        raw = (tmp_path / "desk" / "ledger.jsonl").read_bytes()
        monkeypatch.setattr(desk.engine, "propose", lambda edits, until: desk.engine.work)
        with pytest.raises(LedgerError, match="does not change the model"):
            desk.remove([3])
        assert (tmp_path / "desk" / "ledger.jsonl").read_bytes() == raw


def test_a_replay_must_give_the_rows_that_the_ledger_is_committed_to(folder, p, fitted):
    """The ledger began with other targets."""
    y = p.y.copy()
    y[0] += 1e-9  # a model of the same norm, to rounding
    other = cases.fit(problems.Problem(**{**p.__dict__, "y": y}))
    with pytest.raises(LedgerError, match="another model or other data"):
        dfl.unlearning.open(folder / "desk", other)


def test_a_checkpoint_forgets_what_tests_a_guess_of_a_removed_row(folder):
    """Without its blind a commitment says nothing, and the file has none for those that are gone."""
    (path,) = (folder / "desk").glob("points-*.npz")
    with np.load(path) as file:
        assert "blinds" not in file.files
    with np.load(folder / "last.npz") as file:
        blinds, commitments = file["blinds"], file["commitments"]
    empty = ~blinds.any(axis=1)
    assert np.flatnonzero(empty).tolist() == sorted(GONE)
    assert commitments.any(axis=1).all()
    assert read(folder)[0]["points"] == read(folder)[-1]["points"]


def test_requests_that_change_rows_are_committed_to_and_verified(p, fitted, tmp_path):
    with dfl.unlearning.open(tmp_path / "desk", fitted) as desk:
        desk.relabel([0], p.y_q[:1])
        desk.correct([1], p.x_q[:1], p.y_q[:1])
        desk.add(["new"], p.x_q[1:2], p.y_q[1:2])
        desk.remove([2])
        digest = desk.model_digest
    with dfl.unlearning.open(tmp_path / "desk", fitted) as desk:
        assert desk.model_digest == digest
        assert desk.notes == []
        desk.checkpoint(tmp_path / "last.npz", include_kernel=True)
        digest, points = desk.model_digest, desk.points.root
    assert len({line["points"] for line in read(tmp_path)}) == 4
    report = found(tmp_path, kernel=kernel)
    assert report.valid, report.summary()
    assert report.retained == 12
    again = dfl.load(tmp_path / "last.npz", cases.model(p), progress=False)
    with dfl.unlearning.open(tmp_path / "desk", again) as desk:
        assert (desk.model_digest, desk.points.root) == (digest, points)
        desk.remove([13])
        assert (desk.model.data.sample_weights > 0).sum() == 11
    for file in (tmp_path / "desk").glob("points-*.npz"):
        file.unlink()
    with pytest.raises(LedgerError, match=r"points-….npz"):
        dfl.unlearning.open(tmp_path / "desk", again)


def test_a_replay_past_a_checkpoint_goes_on_from_it(fitted, tmp_path):
    """The model that the ledger began with replays the checkpoint too."""
    with dfl.unlearning.open(tmp_path / "desk", fitted) as desk:
        desk.remove(3)
        desk.checkpoint(tmp_path / "last.npz", include_kernel=True)
        digest = desk.model_digest
    with dfl.unlearning.open(tmp_path / "desk", fitted) as desk:
        assert desk.model_digest == digest
        desk.remove("10")
        assert not [note for note in desk.notes if "rounding" in note]
    assert dfl.unlearning.verify(tmp_path / "desk").valid


def test_a_ledger_of_an_earlier_format_is_refused_by_name(folder, fitted):
    lines = read(folder)
    for line in lines:
        line["format"] = "dualfluence-ledger-1"
    chain(folder, lines)
    with pytest.raises(LedgerError, match=r"format 'dualfluence-ledger-1', this release reads"):
        dfl.unlearning.open(folder / "desk", fitted)
    assert "dualfluence-ledger-1" in dfl.unlearning.verify(folder / "desk").summary()
