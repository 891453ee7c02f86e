"""The benchmark of many classes: digits side by side, and every method near retraining."""

import numpy as np
import pytest

import benchmark
from dualfluence import datasets
from dualfluence.apps.compare._names import ONE_STEP, PAPER, PARAMETER

pytestmark = pytest.mark.host

classes = benchmark.load("classes")


def test_classes_are_the_numbers_that_the_digits_write():
    x, y = classes.points(3, 40)
    assert x.shape == (40, 3 * 49)
    assert 0 <= y.min() < y.max() < 1000
    whole = datasets.load("mnist-small")
    blocks = np.asarray(whole.x_train).reshape(-1, 7, 4, 7, 4).mean(axis=(2, 4)).reshape(-1, 49)
    for row, number in zip(x[:5] * np.sqrt(3), y[:5], strict=True):
        written = ""
        for part in row.reshape(3, 49):
            written += str(whole.y_train[np.argmin(np.abs(blocks - part).max(axis=1))])
        assert int(written) == number


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["linear read-out", "whole network"])
def test_every_method_comes_near_retraining_with_a_hundred_classes(name):
    found = classes.measure(digits=(2,), counts={name: 30}, repeats=1, width=16)
    (row,) = found["rows"]
    assert (row["classes"], row["unknowns"], row["fit_converged"]) == (100, 3000, True)
    for method in (PARAMETER, PAPER, ONE_STEP):
        assert row["methods"][method]["distance"] < 0.2 * row["change"]
    assert row["relative_bound"] < 0.2
