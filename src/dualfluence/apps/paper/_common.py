"""Shared parts of the experiments: data, losses and sets to forget."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from ... import datasets, metrics
from ..._support.options import ProgressFn
from ...fitted._descent import Descent, kernel_gradient_descent
from ...fitted._fit import fit
from ...fitted._fitted import Fitted
from ...fitted._options import KernelOptions
from ...kernels._linearized import Linearized
from ...losses import AbstractLoss, SoftmaxCrossEntropy, SquaredError
from ...models._passes import outputs_at
from ...models._sources import pull_back
from ...operators import AbstractKernelOperator
from ._config import Data, Training
from ._results import Run

EXACT_TOLERANCE = 1e-9
"""Below what float32 reaches: exact fits stop at the floor that rounding sets."""

LoadFn = Callable[..., datasets.Dataset]
LOSSES: dict[str, AbstractLoss] = {"softmax": SoftmaxCrossEntropy(), "squared": SquaredError()}


@dataclass(frozen=True)
class Context:
    """The inputs of a run besides its configuration.

    - `run`: the place where its pieces are stored.
    - `seed`: of initialisation, removals and queries.
    - `progress`: `False` for silence, `True` or a function to report.
    - `data_dir`: folder with data sets.
    - `load`: the function that loads data sets.
    """

    run: Run
    seed: int
    progress: bool | ProgressFn
    data_dir: Any = None
    load: LoadFn = datasets.load

    def say(self, text: str) -> None:
        """One line on standard output about the present step."""
        if self.progress is not False:
            print(f"{self.run.name}: {text}", flush=True)


class Points(NamedTuple):
    """Training and test points.

    - `x`, `x_test`: features.
    - `y`, `y_test`: targets.
    - `labels`, `labels_test`: the labels with which accuracy compares.
    - `classes`: class of each training point, for choosing what to forget.
    """

    x: Array
    y: np.ndarray
    labels: np.ndarray
    classes: np.ndarray
    x_test: Array
    labels_test: np.ndarray
    y_test: np.ndarray


def get_points(spec: Data, context: Context) -> Points:
    """Load the balanced part of a data set that `spec` describes."""
    whole = context.load(
        spec.dataset, classes=spec.classes, data_dir=context.data_dir, progress=context.progress
    )
    num_test = spec.per_class_test
    if num_test is None:
        num_test = min(int(np.sum(whole.y_test == label)) for label in spec.classes)
    part = datasets.subset(
        whole, per_class_train=spec.per_class_train, per_class_test=num_test, classes=spec.classes
    )
    y, y_test = part.y_train, part.y_test
    if spec.two_class:
        y, y_test = (datasets.plus_minus_one(v, *spec.classes) for v in (y, y_test))
    x, x_test = (jnp.asarray(v) for v in (part.x_train, part.x_test))
    return Points(x, y, y, part.y_train, x_test, y_test, y_test)


def num_outputs(spec: Data) -> int:
    return 1 if spec.two_class else len(spec.classes)


def forget_sets(
    classes: np.ndarray, percent: int, remove_from: int | None, seed: int, count: int
) -> list[np.ndarray]:
    """`count` random sets of `percent` of all points, or of one class; the first is evaluated."""
    pool = (
        np.arange(len(classes)) if remove_from is None else np.flatnonzero(classes == remove_from)
    )
    size = max(1, round(len(pool) * percent / 100))
    rng = np.random.default_rng([seed, percent])
    return [np.sort(rng.choice(pool, size, replace=False)) for _ in range(count)]


def forget_by_class(
    classes: np.ndarray, percents: Mapping[int, Any], seed: int, count: int
) -> list[np.ndarray]:
    """`count` random sets, each with `percents[label]` percent of every class `label`."""
    rng = np.random.default_rng([seed, *(round(10 * share) for share in percents.values())])
    pools = {label: np.flatnonzero(classes == label) for label in percents}
    sizes = {label: max(1, round(len(pools[label]) * percents[label] / 100)) for label in pools}
    return [
        np.sort(np.concatenate([rng.choice(pools[i], sizes[i], replace=False) for i in pools]))
        for _ in range(count)
    ]


def fit_exactly(
    model: Any,
    points: Points,
    loss: AbstractLoss,
    ridge: float,
    context: Context,
    *,
    kernel: AbstractKernelOperator | None = None,
    num_outputs: int | None = None,
    weights: Any = None,
) -> Fitted:
    """Newton from `α = 0` to the rounding floor; with `kernel`, without computing `K` again."""
    return fit(
        model,
        points.x,
        points.y,
        loss=loss,
        ridge=ridge,
        weights=weights,
        kernel=KernelOptions(operator=kernel, num_outputs=num_outputs, refine=False),
        tolerance=EXACT_TOLERANCE,
        on_failure="report",
        progress=context.progress,
    )


def descend(
    model: Any,
    points: Points,
    training: Training,
    context: Context,
    kernel: AbstractKernelOperator,
    retain: Any = None,
) -> Descent:
    """Training as published, in data space."""
    return kernel_gradient_descent(
        model,
        points.x,
        points.y,
        loss=LOSSES[training.loss],
        ridge=training.ridge,
        rate=training.rate,
        epochs=training.epochs,
        momentum=training.momentum,
        retain=retain,
        kernel=kernel,
        progress=context.progress,
    )


def moved_by(model: Linearized, x: Array, alpha: Array) -> PyTree:
    """`θ₀ + Jᵀα`."""
    return jax.tree.map(jnp.add, model.params, pull_back(model, x, alpha))


def accuracies(
    model: Linearized, params: PyTree, points: Points, gone: np.ndarray, *, linearised: bool
) -> dict[str, float]:
    """Accuracy on forgotten and on test points."""
    at_train = np.asarray(outputs_at(model, params, points.x, linearised))
    at_test = np.asarray(outputs_at(model, params, points.x_test, linearised))
    return {
        "forgotten": metrics.accuracy(at_train[gone], points.labels[gone]),
        "test": metrics.accuracy(at_test, points.labels_test),
    }
