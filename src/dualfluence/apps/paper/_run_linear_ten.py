"""Ten classes on random ReLU features: a linear model, our addition to the paper's experiments."""

from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import metrics
from ...fitted._fitted import Fitted
from ...kernels._linearized import linearize
from ..compare._methods import Settings, TrainedCase
from ..compare._names import ONE_STEP, PARAMETER, RETRAINED
from ._common import LOSSES, Context, accuracies, fit_exactly, forget_sets, get_points
from ._config import LinearTen
from ._features import readout, with_features
from ._methods import make_methods

LOSS_NAMES = ("softmax", "squared")


def run(config: LinearTen, context: Context) -> None:
    """One piece per loss and percentage."""
    for name in LOSS_NAMES:
        case = LinearTenCase(config, context, name)
        for percent in config.percentages:
            context.run.piece(f"{name}/{percent}", lambda c=case, p=percent: c.compare(p))


class LinearTenCase:
    """Random features once, then a linear readout with one of the losses."""

    def __init__(self, config: LinearTen, context: Context, loss_name: str) -> None:
        self.config, self.context, self.name = config, context, loss_name
        self.loss = LOSSES[loss_name]
        self.settings = Settings(config.cg_steps, config.cg_rtol, config.until)

    @cached_property
    def points(self) -> Any:
        """The points with their features in place of pixels."""
        raw = get_points(self.config.data, self.context)
        key, size = jax.random.key(self.context.seed), self.config.num_features
        points = with_features(raw, size, key, bias=False)
        y = np.eye(10, dtype=np.float32)[raw.classes] if self.name == "squared" else raw.y
        return points._replace(y=y)

    @cached_property
    def model(self) -> Any:
        zero = jnp.zeros((self.config.num_features, len(self.config.data.classes)))
        return linearize(readout, zero, anchor="zero", batch_size=self.points.x.shape[0])

    def fit_exactly(self, weights: Any = None, held: Fitted | None = None) -> Fitted:
        given = (self.model, self.points, self.loss, self.config.ridge, self.context)
        op = None if held is None else held.kernel_op
        return fit_exactly(*given, kernel=op, weights=weights)

    @cached_property
    def fitted(self) -> Fitted:
        return self.fit_exactly()

    @cached_property
    def params(self) -> Any:
        return self.fitted.params()

    def compare(self, percent: int) -> dict[str, Any]:
        self.context.say(f"{self.name}: {percent} % removed")
        points = self.points
        gone = forget_sets(points.classes, percent, None, self.context.seed, 1)[0]
        weights = (~np.isin(np.arange(points.x.shape[0]), gone)).astype(float)
        retrained = self.fit_exactly(weights, self.fitted)
        target = retrained.params()
        methods = make_methods(TrainedCase(self.fitted, self.params, points.y, self.settings))
        found, details = {}, {}
        for name, method in methods.items():
            found[name], details[name] = method(gone)
        return {
            "removed": len(gone),
            "change": metrics.relative_distance(self.params, target),
            "distance": {n: metrics.relative_distance(p, target) for n, p in found.items()},
            "dual_against_parameter_space": metrics.relative_distance(
                found[ONE_STEP], found[PARAMETER]
            ),
            "retrained_bound": retrained.certificate.relative_bound,
            "accuracy": {
                name: accuracies(self.model, p, points, gone, linearised=True)
                for name, p in (found | {RETRAINED: target}).items()
            },
            "details": details,
        }
