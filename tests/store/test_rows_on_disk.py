"""Inputs on disk: memory-mapped files, TensorStore arrays and batches give the kernel of the array."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dualfluence as dfl
from dualfluence._support import rows
from dualfluence.store import spool

pytestmark = pytest.mark.host

HERE = Path(__file__).parent


def rbf(a, b):
    return np.exp(-np.sum((np.asarray(a)[:, None] - np.asarray(b)[None]) ** 2, -1))


def mapped(x, folder):
    np.save(folder / "x.npy", x)
    return np.load(folder / "x.npy", mmap_mode="r")


def tensorstore(x, folder):
    ts = pytest.importorskip("tensorstore")
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(folder / "x.zarr")}}
    made = ts.open(spec, create=True, dtype=x.dtype.name, shape=x.shape).result()
    made.write(x).result()
    return made


def batches(x, folder):
    return spool((x[i : i + 4] for i in range(0, len(x), 4)), folder / "b.npy")


@pytest.mark.parametrize("kind", [mapped, tensorstore, batches])
def test_rows_on_disk_give_the_same_store(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "PANEL_BYTES", 50)  # several blocks
    x = np.random.default_rng(0).normal(size=(23, 3)).astype(np.float32)
    want = dfl.store.build(rbf, x, tmp_path / "a", tile=5, progress=False)
    on_disk = kind(x, tmp_path)
    assert rows.on_disk(on_disk)
    got = dfl.store.build(rbf, on_disk, tmp_path / "b", tile=5, progress=False)
    assert got.header == want.header  # with the fingerprint of the points
    np.testing.assert_array_equal(got.operator().dense(), want.operator().dense())
    # and a store that one began is continued with the other
    assert dfl.store.build(rbf, on_disk, tmp_path / "a", tile=5, progress=False).complete


def test_a_bad_row_on_disk_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "PANEL_BYTES", 50)
    x = np.zeros((23, 3), np.float32)
    x[20, 1] = np.nan
    with pytest.raises(ValueError, match=r"rows from 20.*finite"):
        dfl.store.build(rbf, mapped(x, tmp_path), tmp_path / "k", progress=False)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "at least one batch"),
        ([np.zeros((2, 3)), np.zeros((2, 4))], "trailing axes"),
        ([np.full((2, 3), np.nan)], "finite"),
    ],
)
def test_bad_batches_leave_no_file(given, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        spool(given, tmp_path / "x.npy")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_a_store_of_rows_larger_than_the_memory_limit(tmp_path):
    """512 MiB of features; the process may take 350 MiB of data more than it has after its imports."""
    code = (HERE / "rows_worker.py").read_text()
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "bounded" in run.stdout
