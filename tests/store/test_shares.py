"""A kernel in shares: disjoint, resumable after a kill, and merged with a check."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.store import StoreError

pytestmark = pytest.mark.host

WORKER = Path(__file__).with_name("share_worker.py")
TILES = 16 * 17 // 2


def rbf(a, b):
    return np.exp(-np.sum((np.asarray(a)[:, None] - np.asarray(b)[None]) ** 2, -1))


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(23, 3)).astype(np.float32)


def test_shares_are_disjoint_and_make_the_whole(x, tmp_path):
    counts = []
    for share in (2, 0, 1):  # in any order
        before = written(tmp_path / "k")
        made = dfl.store.build(rbf, x, tmp_path / "k", tile=5, worker=(share, 3), progress=False)
        assert made.complete == (share == 1)
        counts.append(written(tmp_path / "k") - before)
    assert sum(counts) == 15
    assert max(counts) - min(counts) <= 1
    seen = []
    whole = dfl.store.build(rbf, x, tmp_path / "k", tile=5, progress=lambda *a: seen.append(a))
    assert not seen
    np.testing.assert_allclose(whole.operator().dense(), rbf(x, x), rtol=1e-6)


def test_the_merge_recomputes_what_a_share_damaged(x, tmp_path):
    for share in (0, 1):
        made = dfl.store.build(rbf, x, tmp_path / "k", tile=5, worker=(share, 2), progress=False)
    victim = made.chunk_path((1, 3))
    data = bytearray(victim.read_bytes())
    data[7] ^= 1
    victim.write_bytes(data)
    seen = []
    whole = dfl.store.build(rbf, x, tmp_path / "k", tile=5, progress=lambda *a: seen.append(a))
    assert len(seen) == 1
    np.testing.assert_allclose(whole.operator().dense(), rbf(x, x), rtol=1e-6)


@pytest.mark.parametrize(
    ("worker", "words"), [((2, 2), "from 0 to"), (3, "worker"), ((0, 0), "at least 1")]
)
def test_bad_shares_are_refused(worker, words, x, tmp_path):
    with pytest.raises((ValueError, TypeError), match=words):
        dfl.store.build(rbf, x, tmp_path / "k", worker=worker, progress=False)


def start(path, seconds, share, shares):
    command = [sys.executable, str(WORKER), str(path), str(seconds), str(share), str(shares)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def written(path):
    return len(list((path / "tiles").glob("*.json")))


@pytest.mark.thorough
def test_a_killed_share_goes_on_while_the_other_runs(tmp_path):
    """Two shares at once; one is killed in the middle and started again; then they are merged."""
    path = tmp_path / "k"
    first, second = start(path, 0.02, 0, 2), start(path, 0.02, 1, 2)
    end = time.monotonic() + 60
    while written(path) < 20 and time.monotonic() < end:
        time.sleep(0.005)
    first.kill()
    first.wait()
    assert 20 <= written(path) < TILES
    assert second.poll() is None  # the other share runs on
    again = start(path, 0.0, 0, 2)
    assert again.wait() == 0, again.stderr.read()
    assert second.wait() == 0, second.stderr.read()
    assert written(path) == TILES
    x = np.random.default_rng(0).normal(size=(61, 3)).astype(np.float32)
    seen = []
    whole = dfl.store.build(rbf, x, path, tile=4, progress=lambda *a: seen.append(a))
    assert len(seen) == 0
    np.testing.assert_allclose(whole.operator().dense(), rbf(x, x), rtol=1e-6)


def test_sharing_is_refused_while_a_whole_build_runs(x, tmp_path):
    refused = []

    def during(done, total, label):
        if done == 1:
            with pytest.raises(StoreError, match="being built"):
                dfl.store.build(
                    rbf, x, tmp_path / "k", tile=5, worker=(0, 2), wait=False, progress=False
                )
            refused.append(done)

    dfl.store.build(rbf, x, tmp_path / "k", tile=5, progress=during)
    assert refused == [1]


def test_shares_of_another_number_are_refused_while_one_runs(x, tmp_path):
    refused = []

    def during(done, total, label):
        if done == 1:
            with pytest.raises(StoreError, match="its number of shares is not 3"):
                dfl.store.build(rbf, x, tmp_path / "k", tile=5, worker=(0, 3), progress=False)
            dfl.store.build(rbf, x, tmp_path / "k", tile=5, worker=(1, 2), progress=False)
            refused.append(done)

    dfl.store.build(rbf, x, tmp_path / "k", tile=5, worker=(0, 2), progress=during)
    assert refused == [1]
    assert dfl.store.open_store(tmp_path / "k").complete
