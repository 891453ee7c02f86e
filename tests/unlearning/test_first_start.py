"""A desk that was killed at its first start starts again; one that lost its secret says so."""

import os

import numpy as np
import pytest

import dualfluence as dfl
from dualfluence._support.files import FileError

K = np.diag([1.0, 2.0, 3.0, 4.0])


@pytest.fixture(scope="module")
def fitted():
    options = {"loss": dfl.SquaredError(), "ridge": 0.5, "progress": False}
    return dfl.fit(K, None, np.arange(4.0)[:, None], **options)


def test_an_empty_salt_from_a_kill_is_made_again(fitted, tmp_path):
    """The file was made, its content was not: no line of the ledger is there yet."""
    (tmp_path / "salt").touch(mode=0o600)
    (tmp_path / "ledger.jsonl").touch()
    with dfl.unlearning.open(tmp_path, fitted) as desk:
        desk.remove([1])
    assert len(bytes.fromhex((tmp_path / "salt").read_text())) == 32
    with dfl.unlearning.open(tmp_path, fitted) as desk, pytest.raises(KeyError, match="removed"):
        desk.remove([1])


def test_a_kill_while_the_salt_is_written_leaves_none(fitted, tmp_path, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        dfl.unlearning.open(tmp_path, fitted)
    assert [file.name for file in tmp_path.iterdir()] == ["ledger.jsonl"]
    monkeypatch.undo()
    dfl.unlearning.open(tmp_path, fitted).close()


@pytest.mark.parametrize("text", ["", "ab" * 31, None])
def test_a_salt_that_names_were_hashed_with_is_never_replaced(fitted, tmp_path, text):
    dfl.unlearning.open(tmp_path, fitted).close()
    salt = tmp_path / "salt"
    salt.unlink()
    if text is not None:
        salt.write_text(text)
    with pytest.raises(
        FileError, match="not a salt of this desk" if text is not None else "is missing"
    ):
        dfl.unlearning.open(tmp_path, fitted)
    assert salt.exists() == (text is not None)


def test_the_salt_is_never_readable_by_others(fitted, tmp_path, monkeypatch):
    modes, replace = [], os.replace

    def seen(source, target):
        modes.append(os.stat(source).st_mode & 0o777)
        replace(source, target)

    monkeypatch.setattr(os, "replace", seen)
    dfl.unlearning.open(tmp_path, fitted).close()
    assert modes[0] == 0o600
    assert (tmp_path / "salt").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("path", [None, 5, b"desk", ""])
def test_a_path_that_is_none_is_said(fitted, path):
    for opened in (dfl.store.open_store, lambda p: dfl.unlearning.open(p, fitted)):
        with pytest.raises((TypeError, ValueError), match=r"open(_store)?: path must"):
            opened(path)
