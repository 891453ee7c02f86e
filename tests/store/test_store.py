"""Kernels on disk: resumable, checked, refused when foreign, and the same answers as in memory."""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.store import StoreError
from dualfluence.store._build import IN_FLIGHT

pytestmark = pytest.mark.host

HERE = Path(__file__).parent


def network(params, x):
    return jnp.tanh(x @ params["inner"]) @ params["outer"]


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    params = {"inner": rng.normal(size=(4, 6)), "outer": rng.normal(size=(6, 3))}
    x, y = rng.normal(size=(23, 4)), rng.integers(0, 3, 23)
    return dfl.linearize(network, jax.tree.map(jnp.asarray, params)), x, y


def whole(store):
    return np.asarray(store.operator().dense())


def chunk_files(path):
    return sorted(p for p in (path / "kernel").iterdir() if p.name[0].isdigit())


@pytest.mark.parametrize("tile", [1, 5, 23, 50])
def test_stored_kernel_is_the_kernel(problem, tmp_path, tile):
    model, x, _ = problem
    store = dfl.store.build(model, x, tmp_path / "k", tile=tile, progress=False)
    want = model.kernel(jnp.asarray(x)).reshape(69, 69)
    # Tiles of other shapes round differently: a few units in the last place of the largest entry.
    np.testing.assert_allclose(whole(store), want, atol=1e-13 * np.abs(want).max())
    op = store.operator()
    np.testing.assert_allclose(op.diagonal().ravel(), np.diag(want), rtol=1e-13)
    assert store.complete
    assert store.error == 0
    assert op.num_bytes <= 69 * 69 * 8


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["network", "kronecker"])
def test_fit_and_every_edit_from_disk_equal_those_in_memory(problem, tmp_path, kind):
    model, x, y = problem
    if kind == "kronecker":
        model = lambda a, b: jnp.exp(-jnp.sum((a[:, None] - b[None]) ** 2, -1) / 8)  # noqa: E731
    store = dfl.store.build(model, x, tmp_path / "k", num_outputs=3, tile=6, progress=False)
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 1e-2}
    stored = dfl.fit(model, x, y, kernel=store.operator(), **options)
    memory = dfl.fit(model, x, y, kernel=dfl.KernelOptions(num_outputs=3), **options)
    assert "disk" in stored.stats.reason
    np.testing.assert_allclose(stored.alpha, memory.alpha, atol=1e-9 * np.abs(memory.alpha).max())
    edits = [dfl.Remove([0, 3]), dfl.Relabel([1], [2]), dfl.Reweight([2], [3.0])]
    edits += [dfl.Replace([4], x=x[5:6] + 1), dfl.Add(x[:2] - 1, y[:2])]
    for edit in edits if kind == "network" else edits[::4]:
        got, want = stored.edit(edit, until=1e-8), memory.edit(edit, until=1e-8)
        # Both are within 1e-8 of the retrained parameters.
        np.testing.assert_allclose(got.predict(x[:4]), want.predict(x[:4]), atol=1e-6)
    if kind == "kronecker":
        return
    twice = stored.edit(edits[-1]).commit().edit(dfl.Add(x[2:3] - 2, y[2:3]), until=1e-8)
    want = memory.edit(edits[-1]).commit().edit(dfl.Add(x[2:3] - 2, y[2:3]), until=1e-8)
    np.testing.assert_allclose(twice.predict(x[:4]), want.predict(x[:4]), atol=1e-6)


@pytest.mark.thorough
def test_killed_at_ten_random_moments_resumes_bit_identical(tmp_path):
    def start(path, log, seconds):
        command = [sys.executable, str(HERE / "build_worker.py"), str(path), str(log), str(seconds)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        return process

    whole_path, path, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log"
    reference = start(whole_path, tmp_path / "other", 0)
    rng = np.random.default_rng()
    cut_short = 0
    for _ in range(10):
        process = start(path, log, 0.02)
        time.sleep(rng.uniform(0.0, 0.35))
        cut_short += process.poll() is None
        process.kill()
        process.wait()
    final = start(path, log, 0.0)
    assert final.wait() == 0
    assert reference.wait() == 0
    tiles = 16 * 17 // 2
    computed = len(log.read_text().splitlines())
    assert cut_short >= 8
    assert tiles <= computed <= tiles + 10 * (IN_FLIGHT + 1)
    for one, other in zip(chunk_files(whole_path), chunk_files(path), strict=True):
        assert one.name == other.name
        assert one.read_bytes() == other.read_bytes()
    assert len(chunk_files(path)) == tiles


def test_a_flipped_byte_is_refused_then_recomputed(problem, tmp_path):
    model, x, _ = problem
    path = tmp_path / "k"
    good = whole(dfl.store.build(model, x, path, tile=8, progress=False))
    victim = chunk_files(path)[2]
    data = bytearray(victim.read_bytes())
    data[100] ^= 1
    victim.write_bytes(data)
    with pytest.raises(Exception, match="does not match its checksum"):
        whole(dfl.store.open_store(path))
    counted = []
    store = dfl.store.build(model, x, path, tile=8, progress=lambda *a: counted.append(a))
    assert len(counted) == 1
    np.testing.assert_array_equal(whole(store), good)


def test_a_byte_flipped_between_two_reads_is_refused(problem, tmp_path):
    """The disk may fail after a tile was verified: later products check what they read, too."""
    model, x, _ = problem
    path = tmp_path / "k"
    store = dfl.store.build(model, x, path, tile=8, progress=False)
    good = whole(store)
    for byte, bit in ((0, 1), (101, 128), (-1, 2)):
        victim = chunk_files(path)[1]
        before = victim.read_bytes()
        data = bytearray(before)
        data[byte] ^= bit
        victim.write_bytes(data)
        with pytest.raises(Exception, match="does not match its checksum"):
            whole(store)
        victim.write_bytes(before)
        np.testing.assert_array_equal(whole(store), good)


def test_a_missing_tile_is_refused(problem, tmp_path):
    model, x, _ = problem
    store = dfl.store.build(model, x, tmp_path / "k", tile=8, progress=False)
    store.record_path((0, 1)).unlink()
    assert not store.complete
    with pytest.raises(StoreError, match="missing"):
        dfl.store.open_store(tmp_path / "k").operator()


def test_another_model_points_or_version_is_refused(problem, tmp_path):
    model, x, _ = problem
    path = tmp_path / "k"
    dfl.store.build(model, x, path, tile=8, progress=False)
    other = dfl.linearize(network, jax.tree.map(lambda p: p + 1e-9, model.params))
    for changed, points in ((other, x), (model, x + 1e-12)):
        with pytest.raises(StoreError, match="fingerprint"):
            dfl.store.build(changed, points, path, tile=8, progress=False)
    with pytest.raises(StoreError, match="tile"):
        dfl.store.build(model, x, path, tile=9, progress=False)
    kernels = [lambda a, b, s=s: jnp.exp(-s * jnp.sum((a[:, None] - b) ** 2, -1)) for s in (1, 2)]
    dfl.store.build(kernels[0], x, tmp_path / "r", progress=False)
    with pytest.raises(StoreError, match="probe"):
        dfl.store.build(kernels[1], x, tmp_path / "r", progress=False)
    fields = json.loads((path / "header.json").read_text())
    (path / "header.json").write_text(json.dumps({**fields, "version": 99}))
    with pytest.raises(StoreError, match="version 99"):
        dfl.store.open_store(path)
    with pytest.raises(StoreError, match="not a kernel store"):
        dfl.store.open_store(tmp_path)


@pytest.mark.parametrize(("dtype", "unit"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_half_precision_reports_its_error(problem, tmp_path, dtype, unit):
    model, x, _ = problem
    store = dfl.store.build(model, x, tmp_path / "k", tile=8, dtype=dtype, progress=False)
    want = np.asarray(model.kernel(jnp.asarray(x)).reshape(69, 69))
    measured = np.linalg.norm(whole(store) - want) / np.linalg.norm(want)
    np.testing.assert_allclose(store.error, measured, rtol=1e-6)
    assert unit / 10 < store.error < unit  # rounding to nearest: at most half a unit each
    assert store.num_bytes < 69 * 69 * 2


def test_interrupt_leaves_a_store_to_resume(problem, tmp_path):
    model, x, _ = problem

    def interrupt(done, total, label):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        dfl.store.build(model, x, tmp_path / "k", tile=8, progress=interrupt)
    assert "resumed" in caught.value.__notes__[0]
    counted = []
    build = dfl.store.build(model, x, tmp_path / "k", tile=8, progress=lambda *a: counted.append(a))
    assert len(counted) <= 6 - 3
    np.testing.assert_allclose(np.diag(whole(build)), whole(build).diagonal())


@pytest.mark.slow
def test_kernel_of_eight_gibibytes_under_a_four_gibibyte_limit(tmp_path):
    if shutil.disk_usage(tmp_path).free < 12 * 2**30:
        pytest.skip("needs 12 GiB of free disk")
    out = tmp_path / "out.json"
    command = [sys.executable, str(HERE / "large_worker.py"), str(tmp_path / "k"), str(out)]

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))

    run = subprocess.run(
        command, preexec_fn=limit, env=dict(os.environ), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    facts = json.loads(out.read_text())
    assert facts["stored_bytes"] >= 8 * 2**30
    assert facts["fit_residual"] <= facts["rtol"]
    assert facts["edit_residual"] <= facts["rtol"]
    assert facts["converged"]
