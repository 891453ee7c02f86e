"""A fitted network and random removals from it, on which every method is measured in the same way."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ... import metrics
from ...datasets import Dataset
from ...fitted._fit import fit
from ...fitted._options import KernelOptions, Sketch
from ...kernels._linearized import Linearized
from ...losses import SoftmaxCrossEntropy
from ...models._passes import outputs_at
from ._methods import Method, Settings, TrainedCase
from ._names import RANDOM
from ._timing import Timing, time_calls

WARM_UP = Settings(cg_rtol=0.9)
"""A residual so large that one iteration is enough, to compile an iterative method without running it."""


@dataclass(frozen=True)
class Measurement:
    """One method at one share of removed points.

    - `method`: its name.
    - `percent`: share of the training points that were removed.
    - `removed`: their number.
    - `timing`: seconds until the new parameters are ready.
    - `distance`: `‖θ − θ_r‖ / ‖θ_r‖`, with `θ_r` retrained.
    - `error`: `‖θ − θ_r‖` divided by the change `‖θ_before − θ_r‖`; doing nothing has the error 1.
    - `certificate`: the certified bound on `error`; `None` for methods that give none.
    - `iterations`: of conjugate gradients; `None` if there is no solve.
    - `forget_accuracy`, `test_accuracy`: on removed and on test points.
    """

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


class Removals:
    """A linearised network fitted to the first `points` images of a data set."""

    def __init__(
        self, model: Linearized, data: Dataset, points: int, ridge: float, rank: int | None = None
    ) -> None:
        self.model, self.ridge, self.loss = model, ridge, SoftmaxCrossEntropy()
        self.x, self.y = jnp.asarray(data.x_train[:points]), data.y_train[:points]
        self.x_test, self.y_test = jnp.asarray(data.x_test), data.y_test
        # In the dtype of the parameters, as what it is compared with.
        own = KernelOptions(refine=False)
        self.fitted = fit(
            model, self.x, self.y, loss=self.loss, ridge=ridge, sketch=Sketch(rank), kernel=own
        )
        self.params = self.fitted.params()

    def trained(self, settings: Settings) -> TrainedCase:
        """The model for which methods are made."""
        return TrainedCase(self.fitted, self.params, self.y, settings)

    def config(self, widths: Sequence[int], seed: int) -> dict[str, Any]:
        """What a record says about the network and its fit."""
        return {
            "network": "-".join(map(str, widths)),
            "parameters": self.model.num_params,
            "points": len(self.y),
            "outputs": widths[-1],
            "loss": "softmax cross-entropy",
            "ridge": self.ridge,
            "dtype": str(self.fitted.alpha.dtype),
            "seed": seed,
        }

    def indices(self, percent: float) -> np.ndarray:
        """Points to remove, drawn over all classes."""
        count = max(1, round(len(self.y) * percent / 100))
        return np.random.default_rng(0).choice(len(self.y), count, replace=False)

    def measure(
        self,
        name: str,
        method: Method,
        percent: float,
        truth: PyTree,
        *,
        repeats: int = 3,
        warm_up: Method | None = None,
    ) -> Measurement:
        """Times (compiling first through `warm_up`, if given), distance and accuracies."""
        gone = self.indices(percent)
        if warm_up is not None:
            jax.block_until_ready(warm_up(gone)[0])
        (params, facts), seconds = time_calls(lambda: method(gone), repeats + (warm_up is None))
        first = seconds.pop(0) if warm_up is None else None
        timing = Timing(first, float(np.median(seconds)), repeats)
        return self._measurement(name, percent, gone, params, facts, timing, truth)

    def perturbed(self, percent: float, truth: PyTree) -> Measurement:
        """The paper's random perturbation of equal norm."""
        gone = self.indices(percent)
        norm = metrics.distance(self.params, truth)

        def run() -> PyTree:
            return metrics.random_perturbation(jax.random.key(0), self.params, norm)

        params, seconds = time_calls(run, 2)
        timing = Timing(seconds[0], seconds[1], 1)
        return self._measurement(RANDOM, percent, gone, params, {}, timing, truth)

    def _measurement(
        self,
        name: str,
        percent: float,
        gone: np.ndarray,
        params: PyTree,
        facts: dict[str, Any],
        timing: Timing,
        truth: PyTree,
    ) -> Measurement:
        moved = metrics.distance(self.params, truth)
        distance = metrics.distance(params, truth)
        bound = facts.get("bound")
        return Measurement(
            method=name,
            percent=percent,
            removed=len(gone),
            timing=timing,
            distance=distance / metrics.tree_norm(truth),
            error=distance / moved,
            certificate=None if bound is None else bound / moved,
            iterations=facts.get("iterations"),
            forget_accuracy=metrics.accuracy(self.outputs(params, self.x)[gone], self.y[gone]),
            test_accuracy=metrics.accuracy(self.outputs(params, self.x_test), self.y_test),
        )

    def outputs(self, params: PyTree, x: jax.Array) -> np.ndarray:
        """Linearised outputs at `params`."""
        return np.asarray(outputs_at(self.model, params, x, linearised=True))
