"""Edits of a training set: each gives new features, targets and sample weights."""

import abc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._support.checks import (
    as_array,
    as_dtype,
    as_weights,
    check_finite,
    check_indices,
    check_range,
    check_rows,
)
from .._support.points import count_points, form_of, is_tree
from .._support.types import Inputs, Numbers
from ..losses import AbstractLoss
from ._objective import TrainingSet


class AbstractEdit(eqx.Module):
    """A change of the training set. Edits apply in the order given; later ones see earlier ones."""

    @abc.abstractmethod
    def apply(self, data: TrainingSet, loss: AbstractLoss, num_outputs: int) -> TrainingSet:
        """The training set after the edit. New points come last."""


class Remove(AbstractEdit):
    """Leave out the points at `indices`; the mean loss is over the rest (paper, section 2.1)."""

    indices: np.ndarray

    def __init__(self, indices: Numbers) -> None:
        self.indices = check_indices("Remove", indices)

    def apply(self, data: TrainingSet, loss: AbstractLoss, num_outputs: int) -> TrainingSet:
        _check_present("Remove", self.indices, data)
        return _reweighted(data, self.indices, 0.0)


class Reweight(AbstractEdit):
    """Give the points at `indices` sample weights (1 is plain training, 0 removes)."""

    indices: np.ndarray
    weights: np.ndarray

    def __init__(self, indices: Numbers, weights: Numbers) -> None:
        self.indices = check_indices("Reweight", indices)
        self.weights = as_weights("Reweight", weights, self.indices.size, "index")

    def apply(self, data: TrainingSet, loss: AbstractLoss, num_outputs: int) -> TrainingSet:
        check_range("Reweight", self.indices, data.num_points)
        return _reweighted(data, self.indices, self.weights)


class Relabel(AbstractEdit):
    """Give the points at `indices` new targets."""

    indices: np.ndarray
    targets: np.ndarray

    def __init__(self, indices: Numbers, targets: Numbers) -> None:
        self.indices = check_indices("Relabel", indices)
        self.targets = _rows("Relabel targets", targets, self.indices.size, "index")

    def apply(self, data: TrainingSet, loss: AbstractLoss, num_outputs: int) -> TrainingSet:
        _check_present("Relabel", self.indices, data)
        # On the host: a scatter on the device would compile anew for every number of indices.
        targets = np.array(data.targets)
        targets[self.indices] = targets_like(
            "Relabel", self.targets, data.targets, loss, num_outputs
        )
        return TrainingSet(data.x, jnp.asarray(targets), data.sample_weights, form=data.form)


class Replace(AbstractEdit):
    """Give the points at `indices` new features and/or targets.

    New features mean a new row: the old one gets weight zero and the new one is appended with the
    old weight, so `delta_alpha` has the new rows last.
    """

    indices: np.ndarray
    x: Inputs | None
    targets: np.ndarray | None

    def __init__(
        self, indices: Numbers, x: Inputs | None = None, targets: Numbers | None = None
    ) -> None:
        self.indices = check_indices("Replace", indices)
        if x is None and targets is None:
            raise ValueError("Replace: give new features x, new targets, or both.")
        size = self.indices.size
        self.x = None if x is None else _points("Replace x", x, size)
        self.targets = None if targets is None else _rows("Replace targets", targets, size, "index")

    def apply(self, data: TrainingSet, loss: AbstractLoss, num_outputs: int) -> TrainingSet:
        _check_present("Replace", self.indices, data)
        if self.x is None:
            assert self.targets is not None  # one of them was given
            return Relabel(self.indices, self.targets).apply(data, loss, num_outputs)
        kept_weights = data.sample_weights[self.indices]
        targets = np.asarray(data.targets)[self.indices]
        if self.targets is not None:
            targets = targets_like("Replace", self.targets, data.targets, loss, num_outputs)
        weights = data.sample_weights.copy()
        weights[self.indices] = 0.0
        gone = TrainingSet(data.x, data.targets, weights, form=data.form)
        return _appended("Replace", gone, self.x, np.asarray(targets), kept_weights)


class Add(AbstractEdit):
    """Add points, by default with weight 1; they start at `α = 0`."""

    x: Inputs
    targets: np.ndarray
    weights: np.ndarray

    def __init__(self, x: Inputs, targets: Numbers, weights: Numbers | None = None) -> None:
        self.x = _points("Add x", x)
        size = count_points(self.x)
        self.targets = _rows("Add targets", targets, size, "new point")
        ones = np.ones(size) if weights is None else weights
        self.weights = as_weights("Add", ones, size, "new point")

    def apply(self, data: TrainingSet, loss: AbstractLoss, num_outputs: int) -> TrainingSet:
        targets = targets_like("Add", self.targets, data.targets, loss, num_outputs)
        return _appended("Add", data, self.x, np.asarray(targets), self.weights)


def apply_edits(
    edits: "AbstractEdit | Sequence[AbstractEdit]",
    data: TrainingSet,
    loss: AbstractLoss,
    num_outputs: int,
) -> TrainingSet:
    """All edits in order. It checks that some weight is left and that no purged point comes back."""
    purged = data.purged
    for edit in edits if isinstance(edits, (list, tuple)) else [edits]:
        if not isinstance(edit, AbstractEdit):
            name = f"the class {edit.__name__}" if isinstance(edit, type) else type(edit).__name__
            raise TypeError(
                "edit: expected Remove, Relabel, Reweight, Replace or Add, or a list of them, got "
                f"{name}. Write e.g. Remove([3])."
            )
        # By its class: Equinox makes an object of every method that is asked for by an instance.
        data = type(edit).apply(edit, data, loss, num_outputs)
    if not data.sample_weights.any():
        raise ValueError(
            "edit: every point has been removed or has weight zero; the mean loss over nothing is "
            "not defined. Keep at least one point."
        )
    if purged is None:
        return data
    back = purged[data.sample_weights[purged] > 0]
    if back.size:
        raise ValueError(
            f"edit: point {int(back[0])} was purged: its features and target were deleted. Use "
            "Add to add it again."
        )
    return replace(data, purged=purged)


def targets_like(
    name: str, targets: Numbers, trained: Array, loss: AbstractLoss, num_outputs: int
) -> Array:
    """Targets of some points in the shape and dtype of the training targets."""
    new = loss.prepare_targets(targets, num_outputs, trained.dtype)
    if new.shape[1:] != trained.shape[1:]:
        want = ", ".join(("m", *map(str, trained.shape[1:])))
        raise ValueError(
            f"{name} targets: expected shape ({want}), like the targets of the fit, got "
            f"{tuple(new.shape)}."
        )
    return as_dtype(f"{name} targets", new, trained.dtype)


def _rows(name: str, value: Numbers, size: int, what: str) -> np.ndarray:
    """One row per point, on the host; a bare number is the target of a single one."""
    array = np.atleast_1d(np.asarray(as_array(name, value)))
    check_rows(name, array, size, what)
    return array


def _points(name: str, x: Inputs, size: int | None = None) -> Any:
    """Features of some points on the host, one row each: an array, or a tree of arrays."""
    if form_of(name, x) is not None:
        rows = jax.tree.map(np.asarray, x)
        check_rows(name, jax.tree.leaves(rows)[0], size or max(count_points(rows), 1), "index")
        return rows
    if size is not None:
        return _rows(name, x, size, "index")
    array = np.asarray(as_array(name, x))
    if array.ndim == 0 or array.shape[0] == 0:
        raise ValueError(f"Add: x needs one row per new point, got shape {array.shape}.")
    return array


def _check_present(name: str, indices: np.ndarray, data: TrainingSet) -> None:
    check_range(name, indices, data.num_points)
    gone = indices[data.sample_weights[indices] == 0]
    if gone.size:
        raise ValueError(f"{name}: point {int(gone[0])} is not in the training set (weight zero).")


def _reweighted(data: TrainingSet, indices: np.ndarray, weights: Numbers) -> TrainingSet:
    new = data.sample_weights.copy()
    new[indices] = weights
    return TrainingSet(data.x, data.targets, new, form=data.form)


def _appended(
    name: str, data: TrainingSet, x: Inputs, targets: np.ndarray, weights: np.ndarray
) -> TrainingSet:
    if data.form is not None:
        x = np.asarray(data.form.pack(f"{name} x", x))
    elif is_tree(x):
        x = as_array(f"{name} x", x)  # refuses it, in words
    if x.shape[1:] != data.x.shape[1:]:
        raise ValueError(
            f"{name}: new features must have shape (m, {', '.join(map(str, data.x.shape[1:]))}), "
            f"got {x.shape}."
        )
    check_finite(f"{name} x", x)
    new_x = as_dtype(f"{name} x", x, data.x.dtype)
    # On the host: on the device every number of points would be a program of its own.
    return TrainingSet(
        jax.device_put(np.concatenate([data.x, new_x])),
        jax.device_put(np.concatenate([data.targets, targets])),
        np.concatenate([data.sample_weights, weights.astype(data.sample_weights.dtype)]),
        form=data.form,
    )
