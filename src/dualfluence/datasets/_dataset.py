"""Data sets, and balanced parts of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float32, Int32

from .._support.show import Shown


@dataclass(frozen=True, repr=False)
class Dataset(Shown):
    """Images and labels for training and testing, as NumPy arrays.

    **Fields:**

    - `x_train`, `x_test`: pixels in `[0, 1]`, float32; points on axis 0.
    - `y_train`, `y_test`: class indices in `[0, num_classes)`, int32.
    - `name`, `origin`: name and source of the data.
    - `num_classes`: number of classes of the whole set, even if only some are present: labels are never
      renumbered.
    """

    x_train: Float32[np.ndarray, "n ..."]
    y_train: Int32[np.ndarray, " n"]
    x_test: Float32[np.ndarray, "q ..."]
    y_test: Int32[np.ndarray, " q"]
    name: str
    origin: str
    num_classes: int

    def __post_init__(self) -> None:
        for split, x, y in (
            ("training", self.x_train, self.y_train),
            ("test", self.x_test, self.y_test),
        ):
            if y.shape != x.shape[:1]:
                raise ValueError(
                    f"{self.name}: {len(x)} {split} images but labels of shape {y.shape}; "
                    "one label per image is needed."
                )
            check_label_range(y, self.num_classes, f"{self.name}, {split} labels")

    def take(self, train: np.ndarray, test: np.ndarray) -> "Dataset":
        """The points at these positions, or where these flags are true."""
        return replace(
            self,
            x_train=self.x_train[train],
            y_train=self.y_train[train],
            x_test=self.x_test[test],
            y_test=self.y_test[test],
        )


def check_label_range(labels: np.ndarray, num_classes: int, where: str) -> None:
    """Raise unless every label is in `[0, num_classes)`."""
    bad = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if bad.size:
        raise ValueError(
            f"{where}: labels must be in [0, {num_classes}), got {labels[bad[0]]} at record "
            f"{bad[0]}. The file is damaged, or its content does not match its name."
        )


def balanced_order(
    labels: np.ndarray,
    classes: Sequence[int],
    per_class: int,
    where: str,
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """Indices of `per_class` points of each class, interleaved: first class, second, ..., first.

    Every prefix then holds equally many points of each class, to within one. Takes the first points in
    the order given, or with `rng` random ones.
    """
    columns = []
    for label in classes:
        members = np.flatnonzero(labels == label)
        if len(members) < per_class:
            raise ValueError(
                f"{where}: {per_class} points of class {label} requested, but there are only {len(members)}."
            )
        if rng is not None:
            members = rng.permutation(members)
        columns.append(members[:per_class])
    return np.stack(columns, axis=1).ravel()


def subset(
    dataset: Dataset,
    *,
    per_class_train: int,
    per_class_test: int,
    classes: Sequence[int] | None = None,
    seed: int | None = None,
) -> Dataset:
    """Take the same number of points of each class, interleaved so that every prefix is balanced.

    **Arguments:**

    - `dataset`: the data set from which they are taken.
    - `per_class_train`, `per_class_test`: points of each class.
    - `classes`: labels to keep, in the order in which they are interleaved; by default all.
      Labels keep their numbers.
    - `seed`: `None` takes the first points in the order of the data set, an integer takes random
      ones without repetition.

    **Returns:** a new `Dataset`. Asking for more points than a class has is an error.
    """
    chosen = tuple(range(dataset.num_classes)) if classes is None else tuple(classes)
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"subset: classes must be distinct and not empty, got {chosen}.")
    if per_class_train < 1 or per_class_test < 0:
        raise ValueError(
            "subset: per_class_train must be at least 1 and per_class_test at least 0, got "
            f"{per_class_train} and {per_class_test}."
        )
    rng = None if seed is None else np.random.default_rng(seed)
    name = dataset.name
    train = balanced_order(dataset.y_train, chosen, per_class_train, f"{name}, training", rng)
    test = balanced_order(dataset.y_test, chosen, per_class_test, f"{name}, test", rng)
    return dataset.take(train, test)


def plus_minus_one(
    labels: Int32[np.ndarray, " n"], negative: int, positive: int
) -> Float32[np.ndarray, "n 1"]:
    """Targets of a two-class problem with one output: −1 for `negative`, +1 for `positive`.

    Any third label is an error: choose the two classes with `subset` first.
    """
    if negative == positive:
        raise ValueError(f"plus_minus_one: the two classes are the same, {negative}.")
    other = np.setdiff1d(labels, [negative, positive])
    if other.size:
        raise ValueError(
            f"plus_minus_one: labels must be {negative} or {positive}, got {other.tolist()} too. "
            "Choose the two classes with subset(..., classes=...) first."
        )
    return np.where(labels == positive, 1.0, -1.0).astype(np.float32)[:, None]
