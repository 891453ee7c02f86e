"""The objective, its rounding and the parts of a certificate, written out in NumPy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.problem._certificate import Certificate, measure_norms
from dualfluence.problem._edits import apply_edits
from dualfluence.problem._objective import Problem, State, TrainingSet

EPS = np.finfo(float).eps
C = 2


def case(n, ridge, scale=1.0):
    """A state of a squared-error problem whose `K` is `ΦΦᵀ`, far from its optimum."""
    rng = np.random.default_rng(n)
    phi = rng.normal(size=(n, C, 3 * n))
    K = np.einsum("iap,jbp->iajb", phi, phi)
    alpha, y, offset = (rng.normal(size=(n, C)) for _ in range(3))
    w = rng.uniform(0.5, 1.5, n)
    w = w / w.sum()
    k_alpha = np.einsum("iajb,jb->ia", K, scale * alpha)
    problem = Problem(dfl.SquaredError(), jnp.asarray(y), w, np.asarray(ridge), jnp.asarray(offset))
    state = State(jnp.asarray(scale * alpha), jnp.asarray(k_alpha), 7.0)
    return problem, state, K, (w, y, offset + k_alpha, scale * alpha, k_alpha)


def norm(v):
    return np.sqrt(np.sum(np.asarray(v) ** 2))


def reach(root, v):
    terms = root * np.abs(v)
    return min(terms.sum(), 3 * norm(terms))


def test_the_objective_its_gradient_and_their_rounding():
    ridge = 0.3
    problem, state, K, (w, y, f, alpha, k_alpha) = case(5, ridge)
    ask = jax.jit(lambda p, s, d: (p.value(s), p.value_noise(s), p.loss_grad(s), p.residual(s),
                                   p.residual_noise(s), p.gradient_noise(s, d)))  # fmt: skip
    off = np.abs(np.random.default_rng(0).normal(size=f.shape))
    value, value_noise, grad, residual, noise, moved = ask(problem, state, jnp.asarray(off))
    losses = 0.5 * np.sum((f - y) ** 2, axis=1)
    want = np.sum(w * losses) + ridge / 2 * np.einsum("ia,iajb,jb->", alpha, K, alpha)
    np.testing.assert_allclose(value, want, rtol=1e-12)
    sizes = np.sum(w * (losses + np.sum(np.abs((f - y) * f), axis=1)))
    np.testing.assert_allclose(
        value_noise, EPS * (sizes + ridge * np.sum(np.abs(alpha * k_alpha))), rtol=1e-12
    )
    g = w[:, None] * (f - y)
    np.testing.assert_allclose(grad, g, rtol=1e-12)
    np.testing.assert_allclose(residual, g + ridge * alpha, rtol=1e-12)
    size = w[:, None] * EPS * np.abs(f - y) + EPS * (np.abs(g) + ridge * np.abs(alpha))
    np.testing.assert_allclose(noise, size, rtol=1e-12)
    np.testing.assert_allclose(moved, w[:, None] * off, rtol=1e-6)  # the difference of two sums
    assert problem.eps == EPS
    assert dataclasses.replace(problem, epsilon=1e-3).eps == 1e-3
    assert dataclasses.replace(problem, epsilon=1e-30).eps == EPS


@pytest.mark.parametrize(("n", "ridge"), [(4, 1e-3), (4, 1e3), (40, 0.1)])
def test_the_parts_of_a_certificate(n, ridge):
    """Few and many points, where a sum is limited by its magnitudes and by random signs; both limits of
    what correlated rounding of the outputs moves."""
    problem, state, K, (w, y, f, alpha, k_alpha) = case(n, ridge, scale=1e-3)
    root = np.sqrt(np.einsum("iaia->ia", K))
    rho = w[:, None] * (f - y) + ridge * alpha
    k_rho = np.einsum("iajb,jb->ia", K, rho)
    found = jax.jit(measure_norms)(
        problem, state, jnp.asarray(rho), jnp.asarray(k_rho), jnp.asarray(root**2)
    )
    square, parameters = np.sum(rho * k_rho), np.sqrt(np.sum(alpha * k_alpha))
    size = reach(root, rho)
    own = 4 * EPS * size**2
    more = own / (np.sqrt(square + own) + np.sqrt(square))
    own_noise = w[:, None] * EPS * np.abs(f - y) + EPS * (
        w[:, None] * np.abs(f - y) + ridge * np.abs(alpha)
    )
    outputs = EPS * (
        np.abs(f) + np.abs(k_alpha) + root * (reach(root, alpha) + 2 * parameters + 7.0)
    )
    moved = w[:, None] * outputs
    limits = 0.5 * np.sqrt(ridge) * norm(np.sqrt(outputs * moved)), np.sum(root * moved)
    assert (limits[0] < limits[1]) == (ridge < 1e3)
    rounding = more + 4 * (norm(root * own_noise) + min(limits))
    noise = more + 4 * norm(root * (own_noise + moved))
    # Differences of numbers that nearly agree: what noise moves is known to some digits.
    np.testing.assert_allclose(found.gradient, np.sqrt(square), rtol=1e-10)
    np.testing.assert_allclose(found.parameters, parameters, rtol=1e-10)
    np.testing.assert_allclose(found.rounding, rounding, rtol=0.02)
    np.testing.assert_allclose(found.noise, noise, rtol=0.02)
    certificate = found.certificate(ridge)
    assert (certificate.ridge, certificate.noise) == (ridge, float(found.noise))
    np.testing.assert_allclose(
        certificate.distance_bound, (np.sqrt(square) + rounding) / ridge, rtol=1e-6
    )


def test_a_bound_is_the_sum_of_its_parts():
    made = Certificate(3.0, 1.0, 10.0, 2.0, gap=0.5, reading=0.25)
    assert made.distance_bound == (3 + 1) / 2 + 0.5 + 0.25
    assert made.relative_bound == made.distance_bound / 9.5
    assert Certificate(0.0, 0.0, 0.0, 1.0).relative_bound == 0
    assert Certificate(0.0, 0.0, 1.0, 1.0, gap=1.0).relative_bound > 1e300
    assert Certificate(1.0, 1.0, 1.0, 1.0, certified=False).distance_bound == math.inf
    floors = [(1.0, 1.0, 0.0), (1.0, 0.0, 1.0), (1.0, 0.5, 0.5)]
    assert [Certificate(g, r, 1.0, 1.0, noise=s).at_floor for g, r, s in floors] == [
        True,
        True,
        False,
    ]


X = np.arange(6.0).reshape(3, 2)
DATA = TrainingSet(jnp.asarray(X), jnp.asarray([[1.0], [2.0], [3.0]]), np.array([1.0, 2.0, 0.0]))


def edited(*edits):
    made = apply_edits(list(edits), DATA, dfl.SquaredError(), 1)
    return np.asarray(made.x), np.asarray(made.targets)[:, 0], made.sample_weights, made


def test_edits_give_features_targets_and_weights():
    same = DATA.sample_weights
    for edit, x, targets, weights in (
        (dfl.Remove([0]), X, [1, 2, 3], [0, 2, 0]),
        (dfl.Reweight([2, 0], [0.5, 3]), X, [1, 2, 3], [3, 2, 0.5]),
        (dfl.Relabel([1], [5.0]), X, [1, 5, 3], same),
        (dfl.Replace([1], targets=[5.0]), X, [1, 5, 3], same),
        (dfl.Replace([1], x=[[9.0, 8.0]]), [*X, [9, 8]], [1, 2, 3, 2], [1, 0, 0, 2]),
        (dfl.Replace([1], [[9.0, 8.0]], [4.0]), [*X, [9, 8]], [1, 2, 3, 4], [1, 0, 0, 2]),
        (dfl.Add([[9.0, 8.0]], [7.0]), [*X, [9, 8]], [1, 2, 3, 7], [1, 2, 0, 1]),
        (dfl.Add([[9.0, 8.0]], [7.0], [0.5]), [*X, [9, 8]], [1, 2, 3, 7], [1, 2, 0, 0.5]),
    ):
        got = edited(edit)
        for value, want in zip(got[:3], (x, targets, weights), strict=True):
            np.testing.assert_array_equal(value, want, err_msg=repr(edit))
    assert edited(dfl.Remove([0]))[3].weights.tolist() == [0, 1, 0]
    for edit in (dfl.Remove([2]), dfl.Relabel([2], [1.0]), dfl.Replace([2], targets=[1.0])):
        with pytest.raises(ValueError, match="point 2 is not in the training set"):
            edited(edit)
    for edit in (dfl.Remove([3]), dfl.Reweight([3], [1.0]), dfl.Relabel([3], [1.0])):
        with pytest.raises(ValueError, match=r"in \[0, 3\), got 3"):
            edited(edit)
    with pytest.raises(ValueError, match="every point has been removed"):
        edited(dfl.Remove([0, 1]))
    with pytest.raises(ValueError, match="finite"):
        edited(dfl.Add([[np.nan, 1.0]], [1.0]))


def test_what_changes_the_objective():
    """Rows of weight zero do not count, whatever they hold."""
    for edit, same in (
        (dfl.Reweight([0], [1.0]), True),
        (dfl.Reweight([0], [2.0]), False),
        (dfl.Relabel([1], [2.0]), True),
        (dfl.Relabel([1], [2.5]), False),
        (dfl.Remove([0]), False),
        (dfl.Add(X[:1], [1.0]), False),
        (dfl.Add(X[:1], [1.0], [0.0]), True),
    ):
        assert edited(edit)[3].same_objective(DATA) == same, repr(edit)
    other = dataclasses.replace(DATA, targets=jnp.asarray([[1.0], [2.0], [9.0]]))
    assert other.same_objective(DATA)
