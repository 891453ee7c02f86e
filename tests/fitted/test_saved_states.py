"""Saved states come back, and interrupted or refused writes leave nothing behind."""

import errno
import fcntl
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import problems
from dualfluence._support import archive, files
from dualfluence.operators import MatrixFreeOperator, MixedOperator

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def case():
    p = problems.linear_problem(20, 3, 80, "softmax", ridge=0.05)
    return p, cases.fit(p, solver=dfl.CG(), sketch=dfl.Sketch(8))


@pytest.mark.parametrize("include_kernel", [True, False])
def test_round_trip(case, tmp_path, include_kernel):
    p, fitted = case
    fitted.save(tmp_path / "a.npz", include_kernel=include_kernel)
    again = dfl.load(tmp_path / "a.npz", cases.model(p))
    assert again.stats == fitted.stats
    for got, want in (
        (again.edit(dfl.Remove([1, 2])).delta_alpha, fitted.edit(dfl.Remove([1, 2])).delta_alpha),
        (again.predict(p.x_q), fitted.predict(p.x_q)),
        (again.certificate.distance_bound, fitted.certificate.distance_bound),
    ):
        np.testing.assert_array_equal(got, want)
    assert [f.name for f in tmp_path.iterdir()] == ["a.npz"]


@pytest.mark.thorough
def test_round_trip_of_a_trained_network(tmp_path):
    theta_0 = cases.mlp_params(jax.random.key(0), (5, 8, 2))
    theta = jax.tree.map(lambda t: t + 0.1, theta_0)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10, 5)), rng.normal(size=(10, 2))
    model = dfl.linearize(cases.mlp, theta_0)
    fitted = dfl.from_trained(model, theta, x, y, loss=dfl.SquaredError(), ridge=0.1)
    fitted.save(tmp_path / "b.npz")
    again = dfl.load(tmp_path / "b.npz", model)
    np.testing.assert_array_equal(again.predict(x), fitted.predict(x))
    assert again.fidelity == fitted.fidelity


def test_own_loss_must_be_given_again(tmp_path):
    loss = dfl.Convex(lambda f, y: 0.5 * jnp.sum((f - y) ** 2), name="mine")
    fitted = dfl.fit(jnp.eye(4), None, np.ones((4, 1)), loss=loss, ridge=1.0)
    fitted.save(tmp_path / "c.npz")
    with pytest.raises(ValueError, match="named 'mine'"):
        dfl.load(tmp_path / "c.npz", jnp.eye(4))
    again = dfl.load(tmp_path / "c.npz", jnp.eye(4), loss=loss)
    np.testing.assert_array_equal(again.alpha, fitted.alpha)


def test_another_model_is_refused(case, tmp_path):
    p, fitted = case
    fitted.save(tmp_path / "a.npz")
    x = p.x.copy()
    other = dfl.linearize(lambda t, v: 1.01 * problems.apply(t, v), jnp.zeros(x.shape[2] - 1))
    with pytest.raises(ValueError, match="not the one that was saved"):
        dfl.load(tmp_path / "a.npz", other)


def test_an_interrupted_write_leaves_the_old_file(case, tmp_path):
    _, fitted = case
    path = tmp_path / "a.npz"
    fitted.save(path)
    before = path.read_bytes()

    def broken(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write_atomically(path, broken)
    assert path.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["a.npz"]


def test_missing_file(case, tmp_path):
    p, _ = case
    with pytest.raises(FileNotFoundError, match="no file"):
        dfl.load(tmp_path / "none.npz", cases.model(p))


def round_trip(fitted, model, path, **options):
    fitted.save(path, **options)
    again = dfl.load(path, model, progress=False)
    assert cases.same_state(again, fitted)
    edit = dfl.Remove([1, 2])
    want, got = fitted.edit(edit), again.edit(edit)
    assert got.stats.solver == want.stats.solver
    np.testing.assert_array_equal(got.delta_alpha, want.delta_alpha)
    return again


@pytest.mark.thorough
@pytest.mark.parametrize("include_kernel", [True, False])
def test_a_refined_fit_loads_back_refined(tmp_path, include_kernel):
    p = problems.linear_problem(12, 2, 40, "softmax", ridge=0.05)
    fitted = cases.fit(p, dtype=jnp.float32, kernel=dfl.KernelOptions(refine=True))
    model = cases.model(p, jnp.float32)
    again = round_trip(fitted, model, tmp_path / "a.npz", include_kernel=include_kernel)
    assert isinstance(again.kernel_op, MixedOperator)
    assert again.alpha.dtype == jnp.float64


@pytest.mark.thorough
def test_the_form_and_the_precision_of_the_kernel_come_back(tmp_path):
    p, sigma, _ = problems.kronecker_problem(9, 2, 6, "logistic")
    options = {"loss": dfl.Logistic(), "ridge": 0.1, "progress": False}
    coarse = dfl.KernelOptions(precision=jax.lax.Precision.HIGH)
    fitted = dfl.fit(sigma, None, p.y, kernel=coarse, **options)
    for include_kernel in (True, False):
        again = round_trip(fitted, sigma, tmp_path / "a.npz", include_kernel=include_kernel)
        assert again.kernel_op.precision == jax.lax.Precision.HIGH
    fitted = cases.fit(p, kernel="matrix-free")
    again = round_trip(fitted, cases.model(p), tmp_path / "b.npz")
    assert isinstance(again.kernel_op, MatrixFreeOperator)
    with pytest.raises(ValueError, match="no entries"):
        fitted.save(tmp_path / "c.npz", include_kernel=True)


@pytest.mark.thorough
def test_parameters_in_half_precision_and_functions_among_them_come_back(tmp_path):
    theta_0 = {
        "w": jnp.ones((3, 2)),
        "scale": jnp.asarray([2.0], jnp.bfloat16),
        "act": jnp.tanh,
        "steps": 3,
        "key": jax.random.key(0),
    }
    apply = lambda t, x: t["act"](x) @ t["w"] * t["scale"].astype(x.dtype)  # noqa: E731
    model = dfl.linearize(apply, theta_0)
    theta = {**theta_0, "w": theta_0["w"] + 0.1, "scale": jnp.asarray([1.5], jnp.bfloat16)}
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 3)), rng.normal(size=(6, 2))
    fitted = dfl.from_trained(model, theta, x, y, loss=dfl.SquaredError(), ridge=0.1)
    again = round_trip(fitted, model, tmp_path / "a.npz")
    assert again.reference.params["act"] is jnp.tanh
    assert again.reference.params["scale"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(again.predict(x), fitted.predict(x))


def test_a_loss_with_a_class_of_its_own_comes_back(tmp_path):
    class Doubled(dfl.losses.AbstractLoss):
        inner: dfl.SquaredError = dfl.SquaredError()

        def prepare_targets(self, targets, num_outputs, dtype):
            return self.inner.prepare_targets(targets, num_outputs, dtype)

        def value(self, outputs, targets):
            return 2 * self.inner.value(outputs, targets)

        def grad(self, outputs, targets):
            return 2 * self.inner.grad(outputs, targets)

        def grad_noise(self, *args):
            return 2 * self.inner.grad_noise(*args)

        def hess_factor(self, outputs, targets, weights):
            return self.inner.hess_factor(outputs, targets, 2 * weights)

    fitted = dfl.fit(jnp.eye(4), None, np.ones((4, 1)), loss=Doubled(), ridge=1.0)
    fitted.save(tmp_path / "a.npz")
    with pytest.raises(ValueError, match="named 'Doubled'"):
        dfl.load(tmp_path / "a.npz", jnp.eye(4))
    with pytest.raises(ValueError, match="named 'SquaredError'"):
        dfl.load(tmp_path / "a.npz", jnp.eye(4), loss=dfl.SquaredError())
    again = dfl.load(tmp_path / "a.npz", jnp.eye(4), loss=Doubled())
    assert cases.same_state(again, fitted)


def test_a_file_in_float64_stays_in_float64_without_64_bit_types(case, tmp_path):
    p, fitted = case
    fitted.save(tmp_path / "a.npz")
    model = cases.model(p)
    want = fitted.predict(p.x[:3])
    jax.config.update("jax_enable_x64", False)
    try:
        again = dfl.load(tmp_path / "a.npz", model)
        assert again.is_wide
        got = again.predict(p.x[:3])
        assert got.dtype == jnp.float32
        after = again.edit(dfl.Remove([1]), until=1e-6)
        assert after.certificate.distance_bound <= 1e-6
    finally:
        jax.config.update("jax_enable_x64", True)
    assert np.array_equal(again.alpha, fitted.alpha)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "may not write there"),
    ],
)
@pytest.mark.parametrize("where", ["tempfile.mkstemp", "os.fsync", "os.replace"])
def test_what_the_system_refuses_is_said_in_words(case, tmp_path, monkeypatch, code, words, where):
    _, fitted = case
    path = tmp_path / "a.npz"
    path.write_text("old")

    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(where, refuse)
    with pytest.raises(dfl.FileError, match=words):
        fitted.save(path)
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [f.name for f in tmp_path.iterdir()] == ["a.npz"]


def test_a_disk_that_fills_up_leaves_the_old_file(case, tmp_path):
    """The limit on the size of files stands for a full disk: the write fails halfway."""
    _, fitted = case
    path = tmp_path / "a.npz"
    path.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(dfl.FileError, match="larger than"):
            fitted.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "old"
    assert [f.name for f in tmp_path.iterdir()] == ["a.npz"]


def test_a_folder_or_a_file_in_the_way_is_said_in_words(case, tmp_path):
    p, fitted = case
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(dfl.FileError, match="not a folder"):
        fitted.save(tmp_path / "file" / "a.npz")
    with pytest.raises(dfl.FileError, match="folder"):
        fitted.save(tmp_path / "folder")
    with pytest.raises(dfl.FileError):
        dfl.load(tmp_path / "folder", cases.model(p))


def test_temporary_files_of_killed_processes_are_cleaned_and_those_in_use_are_not(case, tmp_path):
    _, fitted = case
    stale, used, other = (tmp_path / f".{n}.tmp" for n in ("a.npz.12", "a.npz.34", "b.npz.56"))
    for file in (stale, used, other):
        file.write_text("half")
    with open(used) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        fitted.save(tmp_path / "a.npz")
    assert {f.name for f in tmp_path.iterdir()} == {"a.npz", used.name, other.name}


def test_killed_while_saving_leaves_the_old_file_or_the_new(tmp_path):
    path = tmp_path / "a.npz"
    worker = [sys.executable, str(Path(__file__).parent / "save_worker.py"), str(path)]
    rng = np.random.default_rng()
    seen = set()
    for _ in range(3):
        process = subprocess.Popen(worker, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(rng.uniform(0.05, 0.4))
        process.kill()
        process.wait()
        header, arrays = archive.read_archive(path, "worker", 1)
        assert (arrays["a"] == header["value"]).all()
        seen.add(header["value"])
    assert seen <= {1, 2}
    files.remove_stale(tmp_path, path.name)
    assert [f.name for f in tmp_path.iterdir()] == ["a.npz"]
