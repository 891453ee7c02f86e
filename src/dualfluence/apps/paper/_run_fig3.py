"""Fig. 3: unlearning from the nonlinear network of fig. 2."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import metrics
from ...fitted._fitted import Fitted
from ...fitted._from_trained import from_trained
from ...losses import SquaredError
from ..compare._methods import Settings, TrainedCase
from ..compare._names import COMPARED, ITERATED, RANDOM, RETRAINED, TANGENT
from ._common import Context, accuracies, forget_sets
from ._config import Fig3
from ._methods import make_methods
from ._nonlinear import (
    NetworkCase,
    epochs_to_record,
    precision_check,
    train,
    trained_network,
)


def run(config: Fig3, context: Context) -> None:
    """One piece per ridge and percentage, each with its own retraining."""
    cases = {ridge: NonlinearCase(config, context, ridge) for ridge in config.ridges}
    first = cases[config.ridges[0]]
    if config.matmul_precision != "highest":
        context.run.piece("precision", lambda: precision_check(config, context, first.points))
    for ridge, case in cases.items():
        context.run.piece(f"ridge/{ridge:g}/training", case.training_facts)
    # Percentage by percentage, so that both ridges use the same compiled retraining.
    for percent in config.percentages:
        for ridge, case in cases.items():
            key = f"ridge/{ridge:g}/{percent}"
            context.run.piece(key, lambda c=case, p=percent: c.compare(p))
    for seed in config.seeds:
        for ridge in config.ridges:
            other = NonlinearCase(config, replace(context, seed=seed), ridge)
            for percent in config.percentages:
                key = f"seed/{seed}/ridge/{ridge:g}/{percent}"
                context.run.piece(key, lambda c=other, p=percent: c.compare(p))


class NonlinearCase(NetworkCase):
    """A trained nonlinear network, and the results of the methods on it."""

    def __init__(self, config: Fig3, context: Context, ridge: float) -> None:
        super().__init__(config, context)
        self.ridge, self.settings = ridge, Settings(config.cg_steps, config.cg_rtol, config.until)

    @cached_property
    def params(self) -> Any:
        self.context.say(f"λ = {self.ridge:g}: the trained network")
        return trained_network(self.config, self.context, self.model, self.points, self.ridge)

    def taken_over(self, tangent: Any) -> Fitted:
        return from_trained(
            self.model,
            self.params,
            self.points.x,
            self.points.y,
            loss=SquaredError(),
            ridge=self.ridge,
            tangent=tangent,
            progress=self.context.progress,
        )

    @cached_property
    def base(self) -> Fitted:
        return self.taken_over("initial")

    @cached_property
    def base_at_trained(self) -> Fitted:
        return self.taken_over("trained")

    def training_facts(self) -> dict[str, Any]:
        fidelity = self.base.fidelity
        assert fidelity is not None
        everything = np.arange(self.points.x.shape[0])
        return {
            "num_params": self.model.num_params,
            "gradient_norm": fidelity.gradient_norm,
            "parameter_gap": fidelity.parameter_gap,
            "output_gap": fidelity.output_gap,
            "accuracy": accuracies(
                self.model, self.params, self.points, everything, linearised=False
            ),
        }

    def compare(self, percent: int) -> dict[str, Any]:
        """Retrain without the forgotten points, then every method."""
        self.context.say(f"λ = {self.ridge:g}: {percent} % removed, retraining")
        config, points = self.config, self.points
        gone = forget_sets(points.classes, percent, None, self.context.seed, 1)[0]
        kept = np.setdiff1d(np.arange(points.x.shape[0]), gone)
        retrained = train(
            self.model,
            points.x[kept],
            jnp.asarray(points.y[kept]),
            ridge=self.ridge,
            rate=config.rate,
            epochs=config.epochs,
            marks=epochs_to_record(config.epochs, config.record_every),
            progress=self.context.progress,
        )
        found: dict[str, Any] = {}
        details: dict[str, Any] = {}
        bases = {None: self.base, TANGENT: self.base_at_trained}
        for label, base in bases.items():
            trained = TrainedCase(base, self.params, points.y, self.settings)
            names = COMPARED if label is None else (ITERATED,)
            for name, method in make_methods(trained, names).items():
                found[label or name], details[label or name] = method(gone)
        key = jax.random.fold_in(jax.random.key(self.context.seed), percent)
        change = metrics.distance(self.params, retrained)
        found[RANDOM] = metrics.random_perturbation(key, self.params, change)
        return {
            "removed": len(gone),
            "change": metrics.relative_distance(self.params, retrained),
            "distance": {n: metrics.relative_distance(p, retrained) for n, p in found.items()},
            "accuracy": {
                name: accuracies(self.model, p, points, gone, linearised=False)
                for name, p in (found | {RETRAINED: retrained}).items()
            },
            "details": details,
        }
