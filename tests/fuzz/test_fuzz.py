"""No certificate below the truth, no NaN, no refusal of a well-posed problem: random problems against
retraining in 80-bit arithmetic. `checker` says what is checked, and how well-posed is decided."""

import json

import checker
import numpy as np
import pytest
import random_problems
import relu_fits
import run
import truth

import gates

pytestmark = pytest.mark.host

PROBLEMS, MANY = 200, 5000
FITS, MANY_FITS = 60, 2000


def told(records):
    """Findings, one per line, as an assertion shows them."""
    found = [f for r in records for f in r.findings]
    return "\n".join(
        f"{f['index']} {f['kind']}: {f['call']}: {f['detail']} ({f['problem']})" for f in found
    )


def chunks(count):
    return range(-(-count // random_problems.CHUNK))


QUICK = {2}
"""One kind of kernel; each of the five is among the long tests."""


@pytest.mark.parametrize(
    "chunk",
    gates.table(chunks(PROBLEMS), QUICK),
)
def test_random_problems_are_certified_rightly_and_never_refused(chunk):
    first = chunk * random_problems.CHUNK
    records = [checker.check_problem(i) for i in range(first, first + random_problems.CHUNK)]
    assert not told(records), told(records)
    # Some of the problems in float32 are beyond it, and refused as they should be.
    assert sum(r.certificates for r in records) >= len(records)


@pytest.mark.thorough
@pytest.mark.parametrize("chunk", chunks(FITS))
def test_fits_of_ordinary_networks_are_never_refused(chunk):
    first = chunk * random_problems.CHUNK
    records = [relu_fits.check_fit(i) for i in range(first, first + random_problems.CHUNK)]
    assert not told(records), told(records)
    assert sum(r.well_posed for r in records) >= 0.9 * len(records)


@pytest.mark.thorough
def test_bounds_a_hundred_times_too_small_are_caught():
    first = 5 * random_problems.CHUNK  # softmax, where one step is not yet the optimum
    problems = range(first, first + random_problems.CHUNK)
    records = [checker.check_problem(i, bound_factor=0.01) for i in problems]
    found = [f["kind"] for r in records for f in r.findings]
    assert found.count("below-truth") >= len(records)


def test_every_kernel_loss_solver_and_dtype_meets_every_other():
    names = {(f.kernel, f.loss, f.solver, f.dtype) for f in map(random_problems.family, range(150))}
    assert len(names) == 150
    few = [random_problems.family(k) for k in chunks(PROBLEMS)]
    assert {(f.kernel, f.dtype) for f in few} == {
        (k, d) for k in random_problems.KERNELS for d in random_problems.DTYPES
    }
    assert {f.loss for f in few} == set(random_problems.LOSSES)


@pytest.mark.parametrize("loss", truth.LOSSES)
def test_truth_is_a_zero_of_the_gradient_and_knows_its_error(loss):
    """Finite differences of the value give the gradient; another start gives the same optimum."""
    rng = np.random.default_rng(0)
    phi, y = rng.normal(size=(6, 3, 4)), np.eye(3)[rng.integers(0, 3, 6)]
    phi, y, f0 = (np.asarray(a, truth.LD) for a in (phi, y, rng.normal(size=(6, 3))))
    objective = truth.Objective(phi, f0, y, np.ones(6, truth.LD), 1e-3, truth.LOSSES[loss])
    one = truth.retrain(objective)
    two = truth.retrain(objective, rng.normal(size=4).astype(truth.LD))
    assert one.error < 1e-13
    assert np.sqrt(((one.delta - two.delta) ** 2).sum()) <= one.error + two.error
    system, step = truth._System(objective), truth.LD("1e-6")
    at, along = (rng.normal(size=4).astype(truth.LD) for _ in range(2))
    slope = (system.value(at + step * along) - system.value(at - step * along)) / (2 * step)
    # Central differences err by step² ≈ 1e-12 times a third derivative of order one.
    assert abs(slope - system.grad(at) @ along) < 1e-10


def test_truth_goes_on_while_the_objective_falls():
    """Far out on straight tails a gradient is small next to its terms, and the optimum is far still."""
    rng = np.random.default_rng(0)
    phi = (1e3 * rng.normal(size=(8, 1, 30))).astype(truth.LD)
    zero, far = np.zeros((8, 1), truth.LD), np.full((8, 1), 7e7, truth.LD)
    loss = truth.LOSSES["logcosh"]
    true = truth.retrain(truth.Objective(phi, zero, far, np.ones(8, truth.LD), 4e-4, loss))
    assert true.error <= 1e-4 * true.norm


@pytest.mark.slow
def test_many_random_problems_on_all_cores(tmp_path):
    path = tmp_path / "record.json"
    status = run.main(["--problems", str(MANY), "--out", str(path)])
    record = json.loads(path.read_text())
    assert status == 0, record["findings"]
    assert record["problems"] == MANY
    assert record["certificates"] >= 3 * MANY


@pytest.mark.slow
def test_many_fits_of_ordinary_networks_on_all_cores(tmp_path):
    path = tmp_path / "record.json"
    status = run.main(["--job", "fits", "--problems", str(MANY_FITS), "--out", str(path)])
    record = json.loads(path.read_text())
    assert status == 0, record["findings"]
    assert record["well_posed"] >= 0.9 * MANY_FITS
