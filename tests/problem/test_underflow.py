"""Numbers whose squares underflow: the certificate is small there, but never below the truth."""

import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
import gates
from dualfluence.problem._certificate import reach

PHI, RIDGE = 255.0, 15.0

# Squares of e^-512 underflow in float64 and those of e^-50 in float32; e^-128 itself does in float32.
CASES = [("float64", -512.0), ("float32", -50.0), ("float32", -60.0), ("float32", -128.0)]


def _fit(dtype, offset, n, loss, y, c=1):
    """`n` equal points; output 0 is `offset + PHI·θ`, all others are zero."""
    first = jnp.asarray(np.eye(c)[0], dtype)

    def apply(theta, x):
        return (jnp.matmul(x, theta) + offset)[:, None] * first[None]

    model = dfl.linearize(apply, jnp.zeros(1, dtype))
    x = np.full((n, 1), PHI, dtype)
    return dfl.fit(model, x, y, loss=loss, ridge=RIDGE, solver=dfl.Cholesky(), progress=False)


def _distance(fitted, offset):
    """To the optimum `−e^offset·PHI/λ`: it moves the output by so little that one term is all of it."""
    alpha = np.asarray(fitted.alpha, np.longdouble)[:, 0]
    return abs(PHI * alpha.sum() + PHI * np.exp(np.longdouble(offset)) / RIDGE)


@pytest.mark.parametrize("n", gates.table([1, 3], [3]))
@pytest.mark.parametrize(("dtype", "offset"), CASES)
def test_a_small_logistic_gradient_is_certified_although_its_square_is_zero(dtype, offset, n):
    fitted = _fit(dtype, offset, n, dfl.Logistic(), np.zeros((n, 1), dtype))
    assert fitted.stats.converged
    assert _distance(fitted, offset) <= fitted.certificate.distance_bound
    # The floor is the root of what underflows: small next to any distance of ordinary size.
    assert fitted.certificate.distance_bound <= 10 * np.sqrt(np.finfo(dtype).tiny)


@pytest.mark.parametrize(("dtype", "offset"), CASES)
def test_a_small_softmax_gradient_is_certified_although_its_square_is_zero(dtype, offset):
    fitted = _fit(dtype, offset, 3, dfl.SoftmaxCrossEntropy(), np.ones(3, int), c=2)
    assert _distance(fitted, offset) <= fitted.certificate.distance_bound


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_gradient_that_is_zero_is_certified_as_zero(dtype):
    zero = np.zeros((3, 1), dtype)
    assert _fit(dtype, 0.0, 3, dfl.SquaredError(), zero).certificate.distance_bound == 0
    one_class = _fit(dtype, 0.0, 3, dfl.SoftmaxCrossEntropy(), np.zeros(3, int))
    assert one_class.certificate.distance_bound == 0


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_kernel_of_zeros_is_certified_as_reached(dtype):
    """Nothing moves the outputs: every dual variable has the same parameters, none."""
    kernel, y = np.zeros((3, 3), dtype), np.ones((3, 1), dtype)
    fitted = dfl.fit(kernel, None, y, loss=dfl.SquaredError(), ridge=RIDGE, progress=False)
    assert fitted.certificate.distance_bound == 0


def test_reach_of_small_numbers_is_not_zero():
    ones, small = jnp.ones((100, 1)), jnp.full((100, 1), 1e-220)
    np.testing.assert_allclose(float(reach(ones, small)), 3 * np.sqrt(100) * 1e-220, rtol=1e-12)
    assert float(reach(ones, 0 * small)) == 0
