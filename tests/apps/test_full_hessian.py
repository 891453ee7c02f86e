"""The benchmark of the Hessian of all points: the exact one is exact, the approximation is not."""

import pytest

import benchmark
from dualfluence.apps.compare._names import FULL_HESSIAN, PAPER

pytestmark = pytest.mark.host

full_hessian = benchmark.load("full_hessian")


@pytest.mark.thorough
def test_one_step_is_exact_for_squared_error_with_the_retained_hessian_alone():
    found = full_hessian.measure(percentages=(10,), seeds=1, per_class=1)
    softmax, squared = found["rows"]
    assert (softmax["removed"], softmax["converged"], squared["converged"]) == (1, True, True)
    # Conjugate gradients to 1e-8 on a system whose condition number is about 1e4.
    assert squared["error"][PAPER][0] < 1e-3
    # One step is not exact for softmax, but the curvature that it uses is that of the retained points.
    assert softmax["error"][PAPER][0] < 0.5 * softmax["error"][FULL_HESSIAN][0]
    for row in (softmax, squared):
        assert 0.1 < row["error"][FULL_HESSIAN][0] < 1
