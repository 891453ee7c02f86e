"""The methods that the demo and the benchmark set side by side, on the same removals, timed alike."""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ... import infinite, metrics, primal
from ..._version import __version__
from ...datasets import Dataset
from ...dual._fit import fit
from ...dual._readout import outputs_at
from ...kernels._linearized import Linearized, linearize
from ...losses import SoftmaxCrossEntropy
from ...problem._edits import Remove
from ..paper import PaperCG, remove

WARM_UP_RTOL = 0.9
"""Compiles an iterative method without running its iterations."""


@dataclass(frozen=True)
class Timing:
    """Seconds until the parameters are ready: a first call, and the median of `repeats` later ones."""

    first: float | None
    repeat: float
    repeats: int


@dataclass(frozen=True)
class Outcome:
    """One method at one percentage. `error` is the distance to retraining over `‖θ_r − θ‖`."""

    method: str
    percent: float
    removed: int
    timing: Timing
    distance: float
    error: float
    certificate: float | None
    iterations: int | None
    forget_accuracy: float
    test_accuracy: float


def describe_machine() -> dict[str, Any]:
    """Where numbers were measured."""
    device = jax.devices()[0]
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "device_count": jax.device_count(),
        "host": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "dualfluence": __version__,
        "matmul_precision": "highest",
    }


def fully_connected(widths: tuple[int, ...], seed: int) -> Linearized:
    """The paper's ReLU network in NTK parameterisation, `W_std = 2.0`, `b_std = 0.1`."""
    layers: list[Any] = []
    for width in widths[1:-1]:
        layers += [infinite.Dense(W_std=2.0, b_std=0.1, width=width), infinite.Relu()]
    net = infinite.serial(*layers, infinite.Dense(W_std=2.0, b_std=0.1))
    params = net.init(jax.random.key(seed), (widths[0],), outputs=widths[-1])
    return linearize(net.apply, params)


def time_calls(call: Callable[[], Any], repeats: int) -> tuple[Any, list[float]]:
    """The last result and the seconds of each call until its result is ready."""
    seconds, result = [], None
    for _ in range(repeats):
        start = time.perf_counter()
        result = jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return result, seconds


class Comparison:
    """A fitted network and every method applied to the same removals."""

    def __init__(
        self, model: Linearized, data: Dataset, points: int, ridge: float, rank: int | None = None
    ) -> None:
        self.model, self.ridge, self.loss = model, ridge, SoftmaxCrossEntropy()
        self.x, self.y = jnp.asarray(data.x_train[:points]), data.y_train[:points]
        self.x_test, self.y_test = jnp.asarray(data.x_test), data.y_test
        self.fitted = fit(model, self.x, self.y, loss=self.loss, ridge=ridge, rank=rank)
        self.params = self.fitted.params()

    def indices(self, percent: float, seed: int = 0) -> np.ndarray:
        """Points to remove, drawn over all classes."""
        count = max(1, round(len(self.y) * percent / 100))
        return np.random.default_rng(seed).choice(len(self.y), count, replace=False)

    def step(self, gone: np.ndarray, steps: int = 1) -> tuple[PyTree, Any]:
        update = self.fitted.edit(Remove(gone), steps=steps, on_failure="report")
        return update.params(), update

    def paper(self, gone: np.ndarray, rtol: float = 1e-8) -> tuple[PyTree, Any]:
        update = remove(self.fitted, Remove(gone), form=PaperCG(rtol=rtol), on_failure="report")
        return update.params(), update

    def parameter_space(self, gone: np.ndarray, rtol: float = 1e-8) -> tuple[PyTree, Any]:
        update = primal.influence(
            self.model,
            self.params,
            self.x,
            self.y,
            Remove(gone),
            loss=self.loss,
            ridge=self.ridge,
            rtol=rtol,
            on_failure="report",
        )
        return update.params(), update

    def retrain(self, gone: np.ndarray) -> tuple[PyTree, Any]:
        update = self.fitted.retrain(Remove(gone))
        return update.params(), update

    def measure(
        self,
        method: str,
        run: Callable[[np.ndarray], tuple[PyTree, Any]],
        percent: float,
        truth: PyTree,
        *,
        repeats: int = 3,
        warm_up: Callable[[np.ndarray], Any] | None = None,
    ) -> Outcome:
        """Times (compiling first through `warm_up`, if given), distance and accuracies."""
        gone = self.indices(percent)
        if warm_up is not None:
            jax.block_until_ready(warm_up(gone)[0])
        (params, update), seconds = time_calls(lambda: run(gone), repeats + (warm_up is None))
        first = seconds.pop(0) if warm_up is None else None
        timing = Timing(first, float(np.median(seconds)), repeats)
        return self._outcome(method, percent, gone, params, update, timing, truth)

    def perturbed(self, percent: float, truth: PyTree) -> Outcome:
        """The paper's random perturbation of equal norm."""
        gone = self.indices(percent)
        norm = metrics.distance(self.params, truth)

        def run() -> PyTree:
            return metrics.random_perturbation(jax.random.key(0), self.params, norm)

        params, seconds = time_calls(run, 2)
        timing = Timing(seconds[0], seconds[1], 1)
        return self._outcome("random perturbation", percent, gone, params, None, timing, truth)

    def _outcome(
        self,
        method: str,
        percent: float,
        gone: np.ndarray,
        params: PyTree,
        update: Any,
        timing: Timing,
        truth: PyTree,
    ) -> Outcome:
        moved = metrics.distance(self.params, truth)
        distance = metrics.distance(params, truth)
        certificate = getattr(update, "certificate", None)
        stats = getattr(update, "stats", None)
        return Outcome(
            method=method,
            percent=percent,
            removed=len(gone),
            timing=timing,
            distance=distance / metrics.tree_norm(truth),
            error=distance / moved,
            certificate=None if certificate is None else certificate.distance_bound / moved,
            iterations=None if stats is None else stats.iterations,
            forget_accuracy=metrics.accuracy(self.outputs(params, self.x)[gone], self.y[gone]),
            test_accuracy=metrics.accuracy(self.outputs(params, self.x_test), self.y_test),
        )

    def outputs(self, params: PyTree, x: jax.Array) -> np.ndarray:
        """Linearised outputs at `params`."""
        return np.asarray(outputs_at(self.model, params, x, linearised=True))
