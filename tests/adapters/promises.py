"""What every adapter promises, checked for any framework's trained model.

`Case` is one such model: how it was adapted, and the framework's own way to do what is checked.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 5))
Y = RNG.integers(0, 3, 12)
Y_SQUARED = np.eye(3)[Y]
RIDGE = 0.1
GONE = [1, 7]


class Case(NamedTuple):
    """A trained model and its framework's own view of it.

    - `adapted`: what the adapter returned.
    - `own`: outputs of the user's model for points, by the framework alone, in evaluation mode.
    - `serve`: outputs of a restored model object for points, by the framework alone, as it is.
    - `seen`: everything in the user's model that must not change: arrays and modes.
    - `model`: what `adapted.read` takes.
    - `x`: points.
    - `widen`: factor on tolerances where the framework rounds to float32 inside whatever it is given,
      so that two orders of the same sums differ by 1e-6 instead of 1e-14.
    """

    adapted: Any
    own: Callable[[Any], np.ndarray]
    serve: Callable[[Any, Any], np.ndarray]
    seen: Callable[[], list[Any]]
    model: Any
    x: np.ndarray = X
    widen: float = 1.0


def learned(adapted):
    """Trained parameters of an adapted model."""
    return adapted.params["params"]


def jacobian(adapted, x):
    """`(n, c, p)` by `jax.jacrev` over the trained collection."""

    def outputs(params):
        return adapted.apply_fn({**adapted.params, "params": params}, x)

    parts = jax.tree.leaves(jax.jit(jax.jacrev(outputs))(learned(adapted)))
    return np.concatenate([np.reshape(j, (*j.shape[:2], -1)) for j in parts], axis=2)


def flat(params):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params["params"])])


def ridge_oracle(case, keep):
    """Trained parameters of the linearised model, refitted to some points by normal equations."""
    x, adapted = jnp.asarray(case.x), case.adapted
    J = jacobian(adapted, x)[keep]
    J = J.reshape(-1, J.shape[2])
    residual = (Y_SQUARED - np.asarray(adapted(x)))[keep].reshape(-1)
    A = J @ J.T + RIDGE * len(keep) * np.eye(len(J))  # mean loss
    return flat(adapted.params) + J.T @ np.linalg.solve(A, residual)


def check_outputs(case):
    """Adapted outputs are the framework's, for any number of points; rounding is all that differs."""
    for count in (1, 5, len(case.x)):
        x = case.x[:count]
        np.testing.assert_allclose(case.adapted(x), case.own(x), rtol=0, atol=1e-12)


def check_kernel(case):
    x = jnp.asarray(case.x)
    J = jacobian(case.adapted, x)
    want = np.einsum("iap,jbp->iajb", J, J)
    got = case.adapted.linearized.kernel(x, progress=False)
    np.testing.assert_allclose(got, want, rtol=0, atol=case.widen * 1e-10 * np.abs(want).max())


def check_removal(case):
    """Fit, remove, restore: parameters are those of a refit, and the framework serves them."""
    fitted = dfl.fit(case.adapted, case.x, Y_SQUARED, loss=dfl.SquaredError(), ridge=RIDGE)
    update = fitted.edit(dfl.Remove(GONE))
    served = case.adapted.restore(update.params())

    keep = np.setdiff1d(np.arange(len(case.x)), GONE)
    want = ridge_oracle(case, keep)
    # The fit reaches its optimum to 1e-10 relative to the way it came; a hundred times that is allowed.
    np.testing.assert_allclose(flat(update.params()), want, rtol=0, atol=case.widen * 1e-8)
    outputs = case.serve(served, case.x)
    want = case.adapted.at(update.params())(case.x)
    np.testing.assert_allclose(outputs, want, rtol=0, atol=case.widen * 1e-12)
    assert np.abs(outputs - case.own(case.x)).max() > 1e-3  # it is another model

    back = case.adapted.read(served)
    for a, b in zip(*map(jax.tree.leaves, (back, update.params())), strict=True):
        np.testing.assert_array_equal(a, b)


def check_statistics(case):
    """Batch-norm statistics are there, are not trained, and do not move."""
    adapted = case.adapted
    held = {name: part for name, part in adapted.params.items() if name != "params"}
    floats = [a for a in jax.tree.leaves(held) if jnp.issubdtype(a.dtype, jnp.floating)]
    assert len(floats) >= 2  # mean and variance
    assert any(np.abs(a).max() > 0.01 for a in floats)  # they have seen data
    assert adapted.linearized.num_params == flat(adapted.params).size
    fitted = dfl.fit(adapted, case.x, Y, loss=dfl.SoftmaxCrossEntropy(), ridge=RIDGE)
    moved = {name: part for name, part in fitted.params().items() if name != "params"}
    for a, b in zip(*map(jax.tree.leaves, (held, moved)), strict=True):
        np.testing.assert_array_equal(a, b)


def check_untouched(case):
    """Nothing that the adapter does changes the user's object, its arrays or its mode."""
    before = [np.copy(a) for a in case.seen()]
    case.adapted(case.x)
    case.adapted.restore(case.adapted.at_zero().params)
    for a, b in zip(before, case.seen(), strict=True):
        np.testing.assert_array_equal(a, b)


def check_taken_over(case):
    """`from_trained` with plain weight decay: the network's own outputs, around zero."""
    with pytest.warns(dfl.FidelityWarning):  # a few steps of training do not reach an optimum
        taken = dfl.from_trained(
            case.adapted.at_zero(),
            case.adapted.params,
            case.x,
            Y,
            loss=dfl.SoftmaxCrossEntropy(),
            ridge=RIDGE,
        )
    np.testing.assert_allclose(taken.outputs, case.own(case.x), rtol=0, atol=1e-12)


def check_trajectory(case):
    """Scores from checkpoints equal those of the plain function and the trained collection alone."""
    adapted = case.adapted
    record = dfl.adapters.sgd_record(lambda step: 0.1 / (1 + step), [2, 5], momentum=0.5)
    run = dfl.attribution.Trajectory(adapted, [adapted.read(case.model)] * 2, **record)
    got = run.attribute(case.x, Y, case.x[:2], Y[:2], progress=False).values

    def plain(params, x):
        return adapted.apply_fn({**adapted.params, "params": params}, x)

    run = dfl.attribution.Trajectory(plain, [learned(adapted)] * 2, **record)
    want = run.attribute(case.x, Y, case.x[:2], Y[:2], progress=False).values
    # Two kernels equal to 1e-10 and a system of condition below 1e2.
    np.testing.assert_allclose(got, want, rtol=0, atol=case.widen * 1e-8)


PROMISES = [
    check_outputs,
    check_kernel,
    check_removal,
    check_statistics,
    check_untouched,
    check_taken_over,
    check_trajectory,
]
