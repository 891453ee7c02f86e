"""What is attributed: a loss, an output, a margin, or a function of one's own, of each query."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.problem._quantity import as_quantity

F3 = np.array([[1.0, -0.5, 2.0], [0.3, 0.1, -1.0]])
F1 = np.array([[1.5], [-0.5]])
LABELS = np.array([2, 0])
ROWS = np.eye(3)[LABELS]


def values(quantity, outputs):
    return np.asarray(jax.vmap(quantity.fn)(jnp.asarray(outputs), quantity.targets))


def made(of, loss, targets, outputs):
    quantity = as_quantity(of, loss, targets, *np.shape(outputs), jnp.float64)
    return quantity, values(quantity, outputs)


def test_quantities_of_several_outputs():
    loss = dfl.SoftmaxCrossEntropy()
    log = np.log(np.exp(F3).sum(1))
    own = F3[[0, 1], LABELS]
    others = np.log(np.exp(F3).sum(1) - np.exp(own))
    for targets in (LABELS, ROWS):
        for of, want, direction in (
            ("loss", log - own, 1),
            ("output", own, -1),
            ("margin", own - others, -1),
        ):
            quantity, got = made(of, loss, targets, F3)
            assert (quantity.name, quantity.direction) == (of, direction)
            np.testing.assert_allclose(got, want, rtol=1e-12)
    # A class is the largest entry of a row of numbers too.
    got = made("margin", dfl.SquaredError(), 2.0 * ROWS - 1, F3)[1]
    np.testing.assert_allclose(got, own - others, rtol=1e-12)


def test_quantities_of_two_outputs():
    """Numbers of classes are taken as given, however few classes there are."""
    labels, both = np.array([1, 0]), F3[:, :2]
    got = made("margin", dfl.SoftmaxCrossEntropy(), labels, both)[1]
    np.testing.assert_allclose(got, both[[0, 1], labels] - both[[0, 1], 1 - labels], rtol=1e-12)


def test_quantities_of_one_output():
    for loss, targets, signs in (
        (dfl.Logistic(), [[0.0], [1.0]], [-1, 1]),
        (dfl.SquaredError(), [[-2.0], [3.0]], [-1, 1]),
    ):
        np.testing.assert_allclose(made("margin", loss, targets, F1)[1], signs * F1[:, 0])
        np.testing.assert_allclose(made("output", loss, targets, F1)[1], F1[:, 0])
    np.testing.assert_allclose(made("output", dfl.SquaredError(), None, F1)[1], F1[:, 0])


def test_a_function_of_ones_own():
    def spread(f, y):
        return jnp.max(f) - y[0]

    quantity, got = made(spread, dfl.SquaredError(), [[1.0], [2.0]], F3)
    assert (quantity.name, quantity.direction) == ("spread", 1)
    np.testing.assert_allclose(got, [1.0, -1.7])
    quantity, got = made(lambda f, y: f[0] + y.size, dfl.SquaredError(), None, F3)
    np.testing.assert_allclose(got, F3[:, 0])


@pytest.mark.parametrize(
    ("of", "targets", "error", "words"),
    [
        ("risk", LABELS, ValueError, "of must be one of"),
        (3, LABELS, TypeError, "of must be a name or a function, got int"),
        ("loss", None, ValueError, "of='loss' needs the targets"),
        ("output", None, ValueError, "of='output' needs the targets"),
        ("loss", LABELS[:1], ValueError, "2 queries but 1 targets"),
        (lambda f, y: f[0], LABELS[:1], ValueError, "2 rows, one per query"),
    ],
)
def test_what_is_no_quantity(of, targets, error, words):
    with pytest.raises(error, match=words):
        as_quantity.__wrapped__(of, dfl.SoftmaxCrossEntropy(), targets, 2, 3, jnp.float64)


def test_two_outputs_have_classes_of_their_own():
    f, labels = F3[:, :2], np.array([1, 0])
    own, other = f[[0, 1], labels], f[[0, 1], 1 - labels]
    for targets in (labels, np.eye(2)[labels]):
        np.testing.assert_allclose(made("output", dfl.SoftmaxCrossEntropy(), targets, f)[1], own)
        got = made("margin", dfl.SoftmaxCrossEntropy(), targets, f)[1]
        np.testing.assert_allclose(got, own - other)
