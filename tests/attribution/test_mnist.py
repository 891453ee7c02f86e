"""Promises on real images: refined leave-one-out, datamodelling scores, flipped labels."""

import jax
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.apps.attribute._audit import audit
from dualfluence.apps.attribute._data import Data, load_model
from dualfluence.attribution import evaluate

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.fixture(autouse=True)
def optimised():
    jax.config.update("jax_disable_most_optimizations", False)


def _fit(points, ridge):
    data = dfl.datasets.load("mnist-small")
    x, y = data.x_train[:points].astype(float), data.y_train[:points]
    kernel = dfl.KernelOptions(num_outputs=10)
    fitted = dfl.fit(
        load_model(None), x, y, loss=dfl.SoftmaxCrossEntropy(), ridge=ridge, kernel=kernel
    )
    return fitted, data.x_test.astype(float), data.y_test


def test_refined_effects_are_true_leave_one_out_on_500_images():
    fitted, xq, yq = _fit(500, 1e-3)
    xq, yq = xq[:40], yq[:40]
    size = fitted.certificate.parameter_norm
    got = fitted.attribute(xq, yq, refine=1e-4 * size, progress=False)
    points = np.random.default_rng(0).permutation(500)[:20]
    truth = np.zeros((40, 20))
    for column, i in enumerate(points):
        exact = fitted.retrain(dfl.Remove([int(i)]), progress=False)
        truth[:, column] = exact.delta_loss(xq, yq)
    assert np.all(got.distance_bound <= 1e-4 * size)
    flat = np.corrcoef(got.values[:, points].ravel(), truth.ravel())[0, 1]
    assert flat > 0.999


def test_scores_of_a_wide_network_predict_its_own_retraining_on_halves():
    fitted, xq, yq = _fit(500, 1e-2)
    xq, yq = xq[:60], yq[:60]
    masks = evaluate.random_masks(500, 60, seed=0)
    truth = evaluate.retrain_linearised(fitted, masks, xq, yq, progress=False)
    scores = fitted.attribute(xq, yq, progress=False)
    assert evaluate.lds(scores, truth.masks, truth.targets).value >= 0.95


def test_flipped_labels_are_found_in_all_of_mnist_small():
    small = dfl.datasets.load("mnist-small")
    rng = np.random.default_rng(0)
    y, n = small.y_train.copy(), len(small.y_train)
    wrong = np.zeros(n, bool)
    wrong[rng.permutation(n)[: n // 10]] = True
    y[wrong] = (y[wrong] + rng.integers(1, 10, n // 10)) % 10
    data = Data(small.x_train, y, small.x_test[:50], small.y_test[:50], "flipped")
    result = audit(load_model(None), data, ridge=1e-3)
    assert evaluate.mislabel_auc(result["suspicion"], wrong) >= 0.98
