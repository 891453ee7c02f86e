"""A mesh of devices, in one process or two, gives the numbers that one device gives."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.operators._base import Layout, as_mesh, on_mesh

pytestmark = pytest.mark.host

WORKER = Path(__file__).with_name("worker.py")
SCORES = Path(__file__).with_name("scores_worker.py")
ANSWERS = Path(__file__).with_name("answers_worker.py")
SHAPES = Path(__file__).with_name("shapes_worker.py")
POINTS, DEVICES = 77, 8


def start(out, *options, devices=1, worker=WORKER):
    # The test waits for the compiler, not for the arithmetic: compile fast rather than well.
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    flags += f" --xla_force_host_platform_device_count={devices}"
    environment = dict(os.environ, XLA_FLAGS=flags)
    command = [sys.executable, str(worker), str(out), *options]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def finish(*processes):
    for process in processes:
        _, errors = process.communicate(timeout=900)
        assert process.returncode == 0, errors[-3000:]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "results.npz"
    finish(start(out))
    return np.load(out)


def on_eight_devices(out, worker=WORKER):
    finish(start(out, "--mesh", devices=DEVICES, worker=worker))


def in_two_processes(out, worker=WORKER):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    options = [("--mesh", "--port", port, "--process", str(i)) for i in (0, 1)]
    finish(*[start(out, *each, devices=1, worker=worker) for each in options])


@pytest.mark.thorough
@pytest.mark.parametrize(("run", "devices"), [(on_eight_devices, DEVICES), (in_two_processes, 2)])
def test_same_results_as_one_device_and_no_more_than_its_share(run, devices, one_device, tmp_path):
    """One test for both: the run takes most of a minute, and workers share no fixtures."""
    run(tmp_path / "results.npz")
    got = np.load(tmp_path / "results.npz")
    check_results(got, one_device)
    check_shares(got, devices)


@pytest.fixture(scope="module")
def scores_on_one_device(tmp_path_factory):
    out = tmp_path_factory.mktemp("scores") / "results.npz"
    finish(start(out, worker=SCORES))
    return np.load(out)


@pytest.mark.thorough
@pytest.mark.parametrize("run", [on_eight_devices, in_two_processes])
def test_scores_are_those_of_one_device(run, scores_on_one_device, tmp_path):
    run(tmp_path / "results.npz", SCORES)
    got = np.load(tmp_path / "results.npz")
    for name, want in scores_on_one_device.items():
        # Factors and sums in another order; solves stop at 1e-13 of their right-hand side.
        slack = 1e-10 * np.abs(want).max()
        np.testing.assert_allclose(got[name], want, rtol=1e-9, atol=slack, err_msg=name)


@pytest.fixture(scope="module")
def answers_of_one_device(tmp_path_factory):
    out = tmp_path_factory.mktemp("answers") / "results.npz"
    finish(start(out, worker=ANSWERS))
    return np.load(out)


@pytest.mark.slow
@pytest.mark.parametrize("run", [on_eight_devices, in_two_processes])
def test_answers_are_those_of_one_device(run, answers_of_one_device, tmp_path):
    """Attribution, ridge paths, quick removals, subsets; 33 points in float64 and 101 in float32."""
    run(tmp_path / "results.npz", ANSWERS)
    got = np.load(tmp_path / "results.npz")
    assert len(answers_of_one_device.files) > 40
    for name, want in answers_of_one_device.items():
        # Factors and sums in another order, and solves that stop at 1e-11 of their right-hand side. Bounds
        # measure how near to its optimum a fit has stopped. In two processes a float32 `K` stays in float32.
        within = 1e-9 if "float64" in name else 1e-5
        within = 1e-7 if "bound" in name and "float64" in name else within
        # Runs that were asked for a distance stop anywhere within it.
        within = 1e-3 if "refined" in name else within
        assert np.isfinite(want).all()
        off = np.abs(got[name].astype(float) - want.astype(float)).max()
        assert off <= within * np.abs(want.astype(float)).max(), name


@pytest.mark.thorough
def test_no_answer_gathers_a_matrix_of_the_size_of_the_kernel(tmp_path):
    """In no program for four devices does one of them hold an array larger than its part of `K`."""
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    flags += f" --xla_dump_to={tmp_path} --xla_dump_hlo_as_text --xla_dump_hlo_pass_re=NONE"
    command = [sys.executable, str(SHAPES)]
    done = subprocess.run(
        command, env=dict(os.environ, XLA_FLAGS=flags), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    whole, seen = (36 * 3) ** 2, {}
    for path in tmp_path.glob("*after_optimizations.txt"):
        text = path.read_text()
        if "num_partitions=4" in text:
            shapes = re.findall(r"(?:f64|f32|pred|s32|s64)\[([\d,]+)\]", text)
            sizes = [int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes]
            seen[path.name] = max(sizes, default=0)
    for program in ("less", "polish", "left_out_steps", "smoothed", "columns_of_inverse", "folded"):
        assert any(program in name for name in seen), program
    assert max(seen.values()) <= whole / 4, max(seen, key=seen.__getitem__)


def check_results(got, one_device):
    names = [name for name in one_device.files if not name.startswith("held/")]
    assert len(names) > 80
    for name in names:
        want = one_device[name]
        # The specification's 1e-10. Solves stop at 1e-13 of their right-hand side; gradient norms
        # at a converged fit are rounding themselves, hence the absolute part.
        np.testing.assert_allclose(got[name], want, rtol=1e-10, atol=2e-11, err_msg=name)


def check_shares(got, devices):
    """No device holds more than its share of `K` plus a tenth."""
    exact = {"dense": (POINTS * 3) ** 2 * 8, "kronecker": POINTS**2 * 8}
    for kind, whole in exact.items():
        held, _ = got[f"held/{kind}/kernel"]
        assert 0 < held <= 1.1 * whole / devices, kind
        planned = dfl.plan(POINTS, 3, structure=kind, dtype="float64", devices=devices)
        assert held == planned[kind].bytes_per_device
        held, total = got[f"held/{kind}/alpha"]
        assert held == total // devices, kind


@pytest.mark.slow
def test_whatever_else_takes_a_mesh(tmp_path):
    """Trained networks, refined fits, infinite width, retraining, and models moved to a mesh."""
    outs = tmp_path / "one.npz", tmp_path / "eight.npz"
    finish(start(outs[0], "--others"))
    finish(start(outs[1], "--others", "--mesh", devices=DEVICES))
    want, got = (np.load(out) for out in outs)
    for name in want.files:
        # Tiles of a float32 kernel round as their shapes have it; refinement is exact for K as it is.
        slack = (
            {"rtol": 1e-4, "atol": 2e-5}
            if name.startswith("refined")
            else {"rtol": 1e-10, "atol": 2e-11}
        )
        np.testing.assert_allclose(got[name], want[name], err_msg=name, **slack)
    assert len(want.files) > 40
    for kind, whole in (("infinite", POINTS**2 * 8), ("moved", (POINTS * 3) ** 2 * 8)):
        held, _ = got[f"held/{kind}/kernel"]
        assert 0 < held <= 1.1 * whole / DEVICES, kind


def test_layout_pads_and_restores():
    layout = on_mesh(5, jax.devices()[:1]).extended(3)
    padded = Layout(((5, 8), (3, 4)), layout.sharding)
    values = np.arange(16.0).reshape(8, 2)
    rows = padded.place(values, "last")
    np.testing.assert_array_equal(rows[5:8], np.repeat(values[4:5], 3, axis=0))
    np.testing.assert_array_equal(rows[8:12], values[[5, 6, 7, 7]])
    np.testing.assert_array_equal(padded.points(rows), values)
    np.testing.assert_array_equal(padded.place(values)[5:8], 0)


def test_mesh_of_any_shape_becomes_one_axis():
    devices = np.asarray(jax.devices()[:1]).reshape(1, 1)
    mesh = as_mesh(jax.sharding.Mesh(devices, ("a", "b")))
    assert mesh.shape == {"rows": 1}
    with pytest.raises(ValueError, match="at least one device"):
        as_mesh([])


def fit_on_mesh(kernel=None, **options):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 2))
    kernel = kernel or (lambda a, b: jnp.exp(-jnp.sum((a[:, None] - b[None]) ** 2, -1)))
    return dfl.fit(
        kernel, x, x[:, :1], loss=dfl.SquaredError(), ridge=0.1, mesh=jax.devices()[:1], **options
    )


def test_mesh_takes_conjugate_gradients_and_says_so():
    fitted = fit_on_mesh()
    assert fitted.stats.solver.startswith("CG")
    assert "devices" in fitted.stats.reason
    with pytest.raises(ValueError, match="gather"):
        fitted.edit(dfl.Remove([0]), solver=dfl.Cholesky())
    with pytest.raises(ValueError, match="gather"):
        fit_on_mesh(solver=dfl.Cholesky())


def test_what_is_no_kernel_is_refused_on_a_mesh():
    with pytest.raises(ValueError, match="symmetric"):
        fit_on_mesh(lambda a, b: jnp.exp(a[:, None, 0] - b[None, :, 1]))
    with pytest.raises(ValueError, match="semidefinite"):
        fit_on_mesh(lambda a, b: -jnp.exp(-jnp.sum((a[:, None] - b[None]) ** 2, -1)))
    with pytest.raises(ValueError, match="finite"):
        fit_on_mesh(lambda a, b: jnp.full((len(a), len(b)), jnp.nan))
