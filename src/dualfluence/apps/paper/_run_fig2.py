"""Fig. 2: a network beside its linearisation over training, for several ridges."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import metrics
from ...fitted._descent import kernel_gradient_descent
from ...losses import SquaredError
from ...models._passes import outputs_at
from ...models._sources import NetworkSource, pull_back
from ...operators import AbstractKernelOperator
from ._common import Context
from ._config import Fig2
from ._nonlinear import (
    NetworkCase,
    epochs_to_record,
    gradient_norm,
    precision_check,
    trained_network,
)


def run(config: Fig2, context: Context) -> None:
    """One piece per ridge."""
    case = Trajectories(config, context)
    if config.matmul_precision != "highest":
        context.run.piece("precision", lambda: precision_check(config, context, case.points))
    for ridge in config.ridges:
        context.run.piece(f"ridge/{ridge:g}", lambda r=ridge: case.follow(r))
    for seed in config.seeds:
        other = Trajectories(config, replace(context, seed=seed))
        context.run.piece(f"seed/{seed}", lambda c=other: c.end(max(config.ridges)))


class Trajectories(NetworkCase):
    """The network and its linearisation, followed together."""

    @cached_property
    def kernel_op(self) -> AbstractKernelOperator:
        source = NetworkSource(self.model)
        return source.operator(self.points.x, 1, form="dense", progress=self.context.progress)

    def follow(self, ridge: float) -> dict[str, Any]:
        """Train both and record the values of fig. 2."""
        marks = epochs_to_record(self.config.epochs, self.config.record_every)
        return self._record(ridge, marks, self.config.record_every or 1)

    def end(self, ridge: float) -> dict[str, Any]:
        """The last epoch."""
        found = self._record(ridge, [self.config.epochs], self.config.epochs)
        return {name: values[-1] for name, values in found.items()}

    def _record(self, ridge: float, marks: list[int], every: int) -> dict[str, Any]:
        """The values at the epochs `marks`; the dual variables are kept after `every` epochs."""
        config, points, model = self.config, self.points, self.model
        self.context.say(f"λ = {ridge:g}: linearisation")
        linear = kernel_gradient_descent(
            model,
            points.x,
            points.y,
            loss=SquaredError(),
            ridge=ridge,
            rate=config.rate,
            epochs=config.epochs,
            kernel=self.kernel_op,
            record_every=every,
            progress=self.context.progress,
        )
        assert linear.recorded is not None
        at_epoch = dict(zip(linear.recorded_epochs.tolist(), linear.recorded, strict=True))
        rows: list[dict[str, float]] = []
        y, pull = jnp.asarray(points.y), jnp.asarray(ridge, jnp.float32)

        def record(epoch: int, theta: Any) -> None:
            step = pull_back(model, points.x, at_epoch[epoch])
            theta_lin = jax.tree.map(jnp.add, model.params, step)
            f = np.asarray(outputs_at(model, theta, points.x_test, False))
            f_lin = np.asarray(outputs_at(model, theta_lin, points.x_test, True))
            norm = gradient_norm(model.apply_fn, model.params, theta, points.x, y, pull)
            rows.append(
                {
                    "epoch": epoch,
                    "distance": metrics.relative_distance(theta, theta_lin),
                    "rmse": float(np.sqrt(np.mean((f - f_lin) ** 2))),
                    "accuracy_network": metrics.accuracy(f, points.labels_test),
                    "accuracy_linear": metrics.accuracy(f_lin, points.labels_test),
                    "gradient_network": float(norm),
                    "gradient_linear": float(linear.gradient_norms[epoch]),
                }
            )

        self.context.say(f"λ = {ridge:g}: network, {config.epochs} epochs")
        if marks == [config.epochs]:
            record(config.epochs, trained_network(config, self.context, model, points, ridge))
        else:
            trained_network(config, self.context, model, points, ridge, record)
        return {name: [row[name] for row in rows] for name in rows[0]}
