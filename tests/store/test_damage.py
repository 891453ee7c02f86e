"""Stores that are damaged, full, foreign, busy or half cleaned up: found, said in words, or mended."""

import errno
import os
import resource
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

import dualfluence as dfl
from dualfluence._support.files import locked
from dualfluence._support.options import check_count
from dualfluence.store import StoreError, _build

pytestmark = pytest.mark.host

HERE = Path(__file__).parent
TILES = 16 * 17 // 2
"""Tiles of the worker's kernel."""

x = np.random.default_rng(0).normal(size=(11, 3))


def kernel(x1, x2):
    return np.exp(-np.sum((np.asarray(x1)[:, None] - np.asarray(x2)[None]) ** 2, -1))


def build(path, **options):
    return dfl.store.build(kernel, x, path, **{"tile": 4, "progress": False, **options})


def whole(store):
    """All tiles as stored, each verified."""
    return [store.receive(tile, store.request(tile)) for tile in store.header.tiles]


def all_files(path):
    return sorted(p for p in path.rglob("*") if p.is_file())


@pytest.mark.parametrize("tile", [-1, 0, True])
def test_a_tile_is_a_positive_whole_number(tmp_path, tile):
    kind = TypeError if tile is True else ValueError
    with pytest.raises(kind, match="tile must be a whole number, at least 1"):
        build(tmp_path / "k", tile=tile)
    with pytest.raises(kind, match="num_outputs must be"):
        build(tmp_path / "k", num_outputs=tile)
    assert not (tmp_path / "k").exists()
    for wrong in (2.5, "4", np.float64(3)):  # build's annotations, checked in tests, come first
        with pytest.raises(TypeError, match="tile must be a whole number"):
            check_count("tile", wrong)


@pytest.mark.parametrize("points", [np.zeros((0, 3)), np.full((3, 2), np.nan), np.array(["a"])])
def test_points_are_checked(tmp_path, points):
    with pytest.raises((ValueError, TypeError), match="x"):
        dfl.store.build(kernel, points, tmp_path / "k", progress=False)


def test_every_flipped_byte_of_every_file_is_found_or_changes_nothing(tmp_path):
    path = tmp_path / "k"
    good = whole(build(path))
    rng = np.random.default_rng(0)
    found = {}
    for file in all_files(path):
        before = file.read_bytes()
        for place in rng.choice(len(before), min(12, len(before)), replace=False):
            raw = bytearray(before)
            raw[place] ^= int(rng.integers(1, 256))
            file.write_bytes(raw)
            try:
                store = dfl.store.open_store(path)
                store.operator()
                got = whole(store)
                assert store.error == 0
            except StoreError:
                found[file.suffix] = found.get(file.suffix, 0) + 1
            else:
                for one, other in zip(got, good, strict=True):
                    np.testing.assert_array_equal(one, other)
            file.write_bytes(before)
    # Header and 6 records: every byte counts.
    assert found[".json"] == 12 * 7


def test_what_is_damaged_is_mended_by_building_again(tmp_path):
    path = tmp_path / "k"
    good = whole(build(path))
    victims = [path / "tiles" / "0.1.json", path / "kernel" / "0.2", path / "kernel" / ".zarray"]
    for file in victims:
        for damage in (b"", b"{}", file.read_bytes()[:-3] + b"xyz", None):
            if damage is None:
                file.unlink()
            else:
                file.write_bytes(damage)
            for one, other in zip(whole(build(path)), good, strict=True):
                np.testing.assert_array_equal(one, other)


def test_a_record_of_another_tile_or_store_is_not_believed(tmp_path):
    store, other = build(tmp_path / "k"), build(tmp_path / "other", tile=5)
    for source in (store.record_path((0, 0)), other.record_path((0, 1))):
        shutil.copy(source, store.record_path((0, 1)))
        with pytest.raises(StoreError, match="another store or tile"):
            store.record((0, 1))
        assert not store.complete


def test_a_damaged_header_is_refused_and_nothing_is_overwritten(tmp_path):
    path = tmp_path / "k"
    build(path)
    header = path / "header.json"
    header.write_bytes(header.read_bytes().replace(b'"num_points": 11', b'"num_points": 12'))
    before = {file: file.read_bytes() for file in all_files(path)}
    with pytest.raises(StoreError, match="damaged"):
        build(path)
    assert {file: file.read_bytes() for file in all_files(path)} == before


def test_a_folder_that_is_not_a_store_is_not_filled(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(StoreError, match=r"holds other files \(thesis.tex\)"):
        build(tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(StoreError, match="is a file"):
        build(tmp_path / "thesis.tex")
    (tmp_path / "empty").mkdir()
    assert build(tmp_path / "empty").complete


def test_what_a_killed_build_left_is_cleaned_up(tmp_path):
    path = tmp_path / "k"
    store = build(path)
    store.record_path((0, 1)).unlink()
    left = [path / ".header.json.ab12.tmp", path / "tiles" / ".0.1.json.cd34.tmp"]
    left += [path / "kernel" / "0.1.__lock"]
    for file in left:
        file.write_text("half")
    assert build(path).complete
    assert not any(file.exists() for file in left)


def test_a_busy_store_says_who_builds_it(tmp_path):
    path = tmp_path / "k"
    path.mkdir()
    with (
        locked(path / "build.lock", lambda process: None),
        pytest.raises(StoreError, match=f"being built by process {os.getpid()}"),
    ):
        build(path, wait=False)
    assert build(path, wait=False).complete


def test_a_complete_store_is_read_without_writing(tmp_path, monkeypatch):
    """As on a read-only file system, where even the lock cannot be opened."""

    def refuse(*args):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    path = tmp_path / "k"
    build(path)
    monkeypatch.setattr(_build, "locked", refuse)
    assert build(path).complete
    with pytest.raises(StoreError, match="file system is read-only"):
        build(tmp_path / "new")


def test_too_little_space_is_said_before_any_work(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 990, 10))
    sizes = []

    def watched(x1, x2):
        sizes.append(len(x1))
        return kernel(x1, x2)

    with pytest.raises(StoreError, match=r"disk of .* is full"):
        dfl.store.build(watched, x, tmp_path / "k", tile=4, progress=False)
    assert max(sizes) <= 2  # the header's probe
    monkeypatch.undo()
    assert build(tmp_path / "k").complete


def test_a_disk_that_fills_up_is_said_in_words_and_resumed(tmp_path):
    """The limit on the size of files stands for a full disk: TensorStore's write fails."""
    path = tmp_path / "k"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    build(path, tile=1)
    shutil.rmtree(path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (800, before[1]))
    try:
        with pytest.raises(StoreError, match=r"larger than this process .* resumes the build"):
            dfl.store.build(kernel, np.tile(x, (4, 1)), path, tile=11, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    store = dfl.store.build(kernel, np.tile(x, (4, 1)), path, tile=11, progress=False)
    assert store.complete
    assert len(whole(store)) == 10


def start(path, log, seconds):
    command = [sys.executable, str(HERE / "build_worker.py"), str(path), str(log), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process


@pytest.mark.thorough
def test_three_processes_that_build_one_store_share_the_work(tmp_path):
    """One builds, two wait; the builder is killed, and each tile is still computed once."""
    path, log = tmp_path / "k", tmp_path / "log"
    processes = [start(path, log, 0.02) for _ in range(3)]
    lock, deadline = path / "build.lock", time.monotonic() + 120
    while not (lock.exists() and lock.read_text().strip() and log.exists()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    builder = int(lock.read_text())
    (victim,) = (p for p in processes if p.pid == builder)
    time.sleep(0.3)
    victim.kill()
    victim.wait()
    for process in processes:
        assert process.wait() == (0 if process is not victim else -9)
    computed = len(log.read_text().splitlines())
    assert TILES <= computed <= TILES + _build.IN_FLIGHT + 1
    store = dfl.store.open_store(path)
    assert store.complete
    assert len(whole(store)) == TILES
