"""Loads a data set by its name."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .._support.options import ProgressFn
from ._cifar10 import load_cifar10
from ._dataset import Dataset
from ._mnist import load_mnist, load_mnist_small

NAMES = ("mnist-small", "mnist", "cifar10")
CIFAR10_PAPER_CLASSES = (0, 1)


def load(
    name: str,
    *,
    classes: Sequence[int] | None = None,
    data_dir: str | Path | None = None,
    progress: bool | ProgressFn = True,
) -> Dataset:
    """Load a data set as NumPy arrays.

    - `"mnist-small"`: embedded, needs no file and no network. The first 200 training and 200 test
      images of each class, pixels `(n, 784)`, classes interleaved so that every prefix is
      balanced.
    - `"mnist"`: all 60000 and 10000 images, pixels `(n, 784)`.
    - `"cifar10"`: pixels `(n, 32, 32, 3)`; by default classes 0 and 1, as in the experiments of Sun and
      Valaee.

    The full sets come from the folder `data_dir`, else from the folder in `DUALFLUENCE_DATA` (files
    directly in it, or in `mnist/` and `cifar-10-batches-bin/`), else from a download into the user's
    cache. Downloads are checked by SHA-256, and an interrupted one is resumed. If a folder is given but
    lacks the files, `load` raises an error and downloads nothing.

    **Arguments:**

    - `name`: one of the above.
    - `classes`: labels to keep; they keep their numbers.
    - `data_dir`: folder with the files of the full sets.
    - `progress`: whether to show the progress of the download: `True`, `False` or a function
      `(done, total, label)`.
    """
    if name == "cifar10":
        chosen = CIFAR10_PAPER_CLASSES if classes is None else classes
        return load_cifar10(chosen, data_dir, progress)
    if name == "mnist":
        return _only(load_mnist(data_dir, progress), classes)
    if name == "mnist-small":
        return _only(load_mnist_small(), classes)
    raise ValueError(f"load: no data set {name!r}; there are {', '.join(NAMES)}.")


def _only(dataset: Dataset, classes: Sequence[int] | None) -> Dataset:
    if classes is None:
        return dataset
    unknown = sorted(set(classes) - set(range(dataset.num_classes)))
    if unknown or not classes:
        raise ValueError(
            f"{dataset.name}: classes must be in [0, {dataset.num_classes}), got {tuple(classes)}."
        )
    train = np.isin(dataset.y_train, tuple(classes))
    test = np.isin(dataset.y_test, tuple(classes))
    return dataset.take(train, test)
