"""What the LDS benchmark reads and fits before any network is trained: images, and a linear datamodel."""

import numpy as np
import pytest

import benchmark

pytestmark = [pytest.mark.host, pytest.mark.ordinary]

estimators, networks = benchmark.load("lds_estimators"), benchmark.load("lds_networks")


# The linear datamodel


def halves(m, n, seed):
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(n) < n // 2 for _ in range(m)])


@pytest.mark.parametrize(("m", "n"), [(200, 20), (40, 41)])
def test_a_datamodel_finds_a_planted_linear_truth(m, n):
    rng = np.random.default_rng(1)
    effects = rng.normal(size=(3, n))
    masks, blocks = halves(m, n, 0), np.arange(m) % 2
    # Each block has an intercept of its own, which is large and says nothing.
    targets = -(masks @ effects.T) + 50.0 * blocks[:, None]
    found = estimators.datamodel(masks, targets, blocks)
    # Halves all have one size: a common shift of all effects cannot be seen.
    want = effects - effects.mean(axis=1, keepdims=True)
    if m > n:
        np.testing.assert_allclose(found.scores, want, atol=0.01)
        assert found.explained > 0.999
        assert found.ridge == estimators.RIDGES[0]
    else:
        assert np.corrcoef(found.scores.ravel(), want.ravel())[0, 1] > 0.75


def test_a_datamodel_explains_nothing_of_noise():
    targets = np.random.default_rng(0).normal(size=(60, 40))
    found = estimators.datamodel(halves(60, 30, 0), targets, np.zeros(60, int))
    assert found.ridge >= 10
    assert found.explained < 0.02


@pytest.mark.parametrize(("m", "n"), [(14, 5), (9, 12)])
def test_the_ridge_of_a_datamodel_is_the_best_of_refits_without_each_retraining(m, n):
    rng = np.random.default_rng(2)
    masks, blocks = halves(m, n, 3), np.arange(m) % 2
    targets = -(masks @ rng.normal(size=(n, 2))) + rng.normal(size=(m, 2))
    centred = np.array(masks, float)
    for b in (0, 1):
        centred[blocks == b] -= centred[blocks == b].mean(axis=0)
    squares = np.linalg.eigvalsh(centred.T @ centred)
    mean = squares[squares > squares[-1] * 1e-10].mean()
    columns = np.stack([blocks == 0, blocks == 1], axis=1).astype(float)

    def fit(rows, ridge):
        """Intercepts without a penalty, effects with one."""
        A = np.concatenate([columns[rows], masks[rows]], axis=1)
        penalty = np.diag([0.0, 0.0] + [ridge * mean] * n)
        return np.linalg.solve(A.T @ A + penalty, A.T @ targets[rows])

    sizes = 0.0
    for b in (0, 1):
        own = targets[blocks == b]
        sizes = sizes + ((own - own.mean(axis=0)) ** 2).sum(axis=0)

    def error(ridge):
        left = []
        for i in range(m):
            coefficients = fit(np.arange(m) != i, ridge)
            left.append(targets[i] - np.concatenate([columns[i], masks[i]]) @ coefficients)
        return np.mean((np.square(left)).sum(axis=0) / sizes)

    errors = [error(ridge) for ridge in estimators.RIDGES]
    found = estimators.datamodel(masks, targets, blocks)
    assert found.ridge == estimators.RIDGES[np.argmin(errors)]
    np.testing.assert_allclose(found.explained, 1 - min(errors), rtol=1e-6)
    want = fit(np.arange(m) >= 0, found.ridge)[2:]
    np.testing.assert_allclose(found.scores, -want.T, rtol=1e-6, atol=1e-9)


def test_a_datamodel_needs_two_retrainings_in_each_block():
    with pytest.raises(ValueError, match="block 1 has one retraining"):
        estimators.datamodel(halves(3, 4, 0), np.zeros((3, 1)), np.array([0, 0, 1]))


# Data


def write_npz(path, **changed):
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 256, (9, 32, 32, 3)).astype(np.uint8),
        "y_train": np.arange(9) % 3 + 4,
        "x_test": rng.random((6, 32, 32, 3)),
        "y_test": np.arange(6) % 3 + 4,
    }
    arrays = {k: v for k, v in (arrays | changed).items() if v is not None}
    np.savez(path, **arrays)
    return arrays


def test_images_are_read_from_an_npz_file_by_class(tmp_path):
    path = tmp_path / "images.npz"
    arrays = write_npz(path)
    recipe = networks.RECIPES["cnn"]
    (x, y, xq, yq), origin = networks.load(recipe, "full", path, [4, 6])
    assert origin == "images.npz, classes [4, 6]"
    np.testing.assert_array_equal(y, [0, 1, 0, 1, 0, 1])
    np.testing.assert_array_equal(yq, [0, 1, 0, 1])
    mean, std = np.asarray(networks.CIFAR_MEAN), np.asarray(networks.CIFAR_STD)
    np.testing.assert_allclose(x[1] * std + mean, arrays["x_train"][2] / 255, atol=1e-6)
    np.testing.assert_allclose(xq[2] * std + mean, arrays["x_test"][3], atol=1e-6)
    with pytest.raises(SystemExit, match=r"images of \[4, 5, 6\], none of \[7\]"):
        networks.load(recipe, "full", path, [4, 7])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"y_test": None}, "y_test missing"),
        ({"x_train": np.zeros((9, 3, 32, 32))}, r"x_train of shape \(n, 32, 32, 3\)"),
        ({"y_train": np.zeros(8)}, r"got \(9, 32, 32, 3\) and \(8,\)"),
    ],
)
def test_a_wrong_npz_file_is_refused(tmp_path, changed, message):
    write_npz(tmp_path / "images.npz", **changed)
    with pytest.raises(SystemExit, match=message):
        networks.load(networks.RECIPES["cnn"], "full", tmp_path / "images.npz")


def test_images_are_read_from_binary_files_with_the_classes_they_hold(tmp_path):
    rng = np.random.default_rng(0)
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for name in names:
        records = rng.integers(0, 256, (4, 3073)).astype(np.uint8)
        records[:, 0] = [3, 8, 8, 3]
        (tmp_path / name).write_bytes(records.tobytes())
    (x, _, xq, yq), origin = networks.load(networks.RECIPES["cnn"], "full", tmp_path)
    assert x.shape == (20, 32, 32, 3)
    assert xq.shape == (4, 32, 32, 3)
    np.testing.assert_array_equal(yq, [0, 1, 1, 0])
    assert origin.endswith("classes [3, 8]")
    red = records[1, 1:1025].reshape(32, 32) / 255  # the last file is that of tests
    mean, std = networks.CIFAR_MEAN[0], networks.CIFAR_STD[0]
    np.testing.assert_allclose(xq[1, :, :, 0] * std + mean, red, atol=1e-6)
