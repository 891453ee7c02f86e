"""Fig. 1: unlearning from linearised networks; runtime, distance, accuracy."""

import tempfile
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ... import metrics
from ...fitted._descent import Descent
from ...fitted._fitted import Fitted
from ...fitted._from_trained import from_trained
from ...fitted._options import KernelOptions
from ...kernels._linearized import linearize
from ...operators import AbstractKernelOperator
from ..compare._methods import Method, Settings, TrainedCase
from ..compare._names import COMPARED, PAPER_RELEASED, RANDOM, RELEASED, RETRAINED, SHARDED
from ..compare._networks import make_network
from ..compare._timing import time_call
from . import _cold
from ._common import (
    LOSSES,
    Context,
    accuracies,
    descend,
    fit_exactly,
    forget_sets,
    get_points,
    moved_by,
    num_outputs,
)
from ._config import Fig1, Row
from ._methods import RELEASED_PRECISION, device_mesh, make_held, make_methods, make_released


def run(config: Fig1, context: Context) -> None:
    """All pieces of both rows; those on disk are skipped when resuming."""
    for row in config.rows:
        case = LinearisedCase(row, config, context)
        context.run.piece(f"{row.name}/training", case.training_facts)
        for percent in config.percentages:
            context.run.piece(f"{row.name}/{percent}", partial(case.compare, percent))
        if config.cold:
            for percent in config.percentages:
                context.run.piece(f"{row.name}/{percent}/cold", partial(case.cold, percent))
        case.close()
    for seed in config.seeds:
        for row in config.rows:
            other = LinearisedCase(row, config, replace(context, seed=seed))
            for percent in config.percentages:
                key = f"seed/{seed}/{row.name}/{percent}"
                context.run.piece(key, partial(other.distances, percent))


class LinearisedCase:
    """One row: a linearised network trained as published and to the exact optimum.

    Everything is computed on first use, so a resumed run computes only what is missing.
    """

    def __init__(self, row: Row, config: Fig1, context: Context) -> None:
        self.row, self.config, self.context = row, config, context
        self.settings = Settings(config.cg_steps, config.cg_rtol, config.until)
        self.loss = LOSSES[row.training.loss]
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @cached_property
    def points(self) -> Any:
        return get_points(self.row.data, self.context)

    @cached_property
    def model(self) -> Any:
        net = make_network(self.row.network)
        key = jax.random.key(self.context.seed)
        shape = self.points.x.shape[1:]
        params = net.init(key, shape, outputs=num_outputs(self.row.data))
        return linearize(net.apply, params)

    def fit_exactly(self, op: AbstractKernelOperator | None, weights: Any = None) -> Fitted:
        ridge = self.row.training.ridge
        given = (self.model, self.points, self.loss, ridge, self.context)
        return fit_exactly(*given, kernel=op, weights=weights)

    @cached_property
    def exact(self) -> Fitted:
        self.context.say(f"{self.row.name}: kernel and exact optimum")
        return self.fit_exactly(None)

    def descend(self, retain: Any = None) -> Descent:
        given = (self.model, self.points, self.row.training, self.context)
        return descend(*given, self.exact.kernel_op, retain)

    @cached_property
    def descent(self) -> Descent:
        op = self.exact.kernel_op
        self.context.say(f"{self.row.name}: gradient descent as published, K is {op.num_points}"
                         f"·{op.num_outputs} squared")  # fmt: skip
        return self.descend()

    @cached_property
    def published(self) -> Fitted:
        """The model trained as published, taken over by its parameters alone."""
        return from_trained(
            self.model,
            moved_by(self.model, self.points.x, self.descent.coordinates),
            self.points.x,
            self.points.y,
            loss=self.loss,
            ridge=self.row.training.ridge,
            tangent="initial",
            linearised=True,
            kernel=KernelOptions(operator=self.exact.kernel_op, refine=False),  # float32 for all
            progress=self.context.progress,
        )

    @cached_property
    def held(self) -> dict[str, Method]:
        """The model trained as published with its Jacobian in memory, if that is small enough."""
        return make_held(self.published)

    @cached_property
    def trained(self) -> dict[str, tuple[Fitted, Any]]:
        """Both trained models with their parameters."""
        assert self.published.reference is not None
        return {
            "published": (self.published, self.published.reference.params),
            "exact": (self.exact, self.exact.params()),
        }

    def training_facts(self) -> dict[str, Any]:
        bases = self.trained
        everything = np.arange(self.points.x.shape[0])
        fidelity = self.published.fidelity
        assert fidelity is not None
        return {
            "num_params": self.model.num_params,
            "kernel_size": self.exact.kernel_op.num_points * self.exact.kernel_op.num_outputs,
            "num_devices": device_mesh().size,
            "gradient_norm_first": float(self.descent.gradient_norms[0]),
            "gradient_norm_last": float(self.descent.gradient_norms[-1]),
            "descent_seconds": self.descent.seconds,
            "fit_seconds": self.exact.stats.seconds,
            "fit_steps": self.exact.stats.steps,
            "fit_products": self.exact.stats.products,
            "fit_relative_bound": self.exact.certificate.relative_bound,
            "fit_notes": list(self.exact.stats.notes),
            "parameter_gap": fidelity.parameter_gap,
            "descent_to_optimum": metrics.relative_distance(
                bases["published"][1], bases["exact"][1]
            ),
            "accuracy": {
                name: accuracies(self.model, params, self.points, everything, linearised=True)
                for name, (_, params) in bases.items()
            },
        }

    def compare(self, percent: int) -> dict[str, Any]:
        """One percentage: retraining both ways, every method on both models, warm times."""
        self.context.say(f"{self.row.name}: {percent} % removed")
        points, sets = self.points, self._forget_sets(percent, self.config.repeats + 1)
        gone = sets[0]
        kept = np.setdiff1d(np.arange(points.x.shape[0]), gone)
        targets, seconds = self._retrain(kept)
        distance: dict[str, Any] = {}
        accuracy: dict[str, Any] = {}
        details: dict[str, Any] = {}
        warm: dict[str, list[float]] = {}
        for base_name, (base, params) in self.trained.items():
            methods = make_methods(TrainedCase(base, params, points.y, self.settings))
            if base_name == "published":
                methods |= self.held
            found: dict[str, Any] = {}
            details[base_name] = {}
            for name, method in methods.items():
                if base_name == "exact" and name == SHARDED:
                    continue  # the same solution as unsharded; its time is measured above
                found[name], details[base_name][name] = method(gone)
                if base_name == "published":
                    warm[name] = [
                        time_call(lambda s=s, m=method: m(s)[0]).seconds for s in sets[1:]
                    ]
            if base_name == "published":
                self._released(base, params, sets, found, warm)
            found[RANDOM] = self._perturbed(params, targets[base_name], percent)
            distance[base_name] = _distances(found, targets)
            accuracy[base_name] = {
                name: accuracies(self.model, p, points, gone, linearised=True)
                for name, p in (found | {RETRAINED: targets[base_name]}).items()
            }
        return {
            "removed": len(gone),
            "distance": distance,
            "accuracy": accuracy,
            "warm_seconds": warm,
            "released_precision": RELEASED_PRECISION if self.config.released_repeats else None,
            "retrain_seconds": seconds,
            "retrained_apart": metrics.relative_distance(targets["published"], targets["exact"]),
            "change": metrics.relative_distance(self.trained["exact"][1], targets["exact"]),
            "details": details,
        }

    def distances(self, percent: int) -> dict[str, Any]:
        """Distances and accuracies alone, of the model trained as published."""
        self.context.say(f"{self.row.name}: {percent} % removed, seed {self.context.seed}")
        gone = self._forget_sets(percent, 1)[0]
        kept = np.setdiff1d(np.arange(self.points.x.shape[0]), gone)
        target = moved_by(self.model, self.points.x, self.descend(kept).coordinates)
        base, params = self.trained["published"]
        names = [name for name in COMPARED if name != SHARDED]
        trained = TrainedCase(base, params, self.points.y, self.settings)
        found = {name: m(gone)[0] for name, m in make_methods(trained, names).items()}
        found[RANDOM] = self._perturbed(params, target, percent)
        accuracy = {
            name: accuracies(self.model, p, self.points, gone, linearised=True)
            for name, p in (found | {RETRAINED: target}).items()
        }
        return {
            "removed": len(gone),
            "distance": {"published": _distances(found, {"published": target})},
            "accuracy": {"published": accuracy},
        }

    def _retrain(self, kept: np.ndarray) -> tuple[dict[str, Any], dict[str, float]]:
        descent = self.descend(kept)
        weights = np.isin(np.arange(self.points.x.shape[0]), kept).astype(float)
        exact = self.fit_exactly(self.exact.kernel_op, weights)
        targets = {
            "published": moved_by(self.model, self.points.x, descent.coordinates),
            "exact": exact.params(),
        }
        return targets, {"published": descent.seconds, "exact": exact.stats.seconds}

    def _released(
        self, base: Fitted, params: Any, sets: Any, found: dict[str, Any], warm: dict[str, Any]
    ) -> None:
        """Each call compiles anew; the first is not timed, as the compiler searches only then."""
        count, trained = (
            self.config.released_repeats,
            TrainedCase(base, params, None, self.settings),
        )
        if count == 0:
            return
        for name, method in make_released(trained).items():
            found[name] = jax.block_until_ready(method(sets[0])[0])
            warm[name] = [
                time_call(lambda s=s, m=method: m(s)[0]).seconds for s in sets[1 : count + 1]
            ]

    def _forget_sets(self, percent: int, count: int) -> list[np.ndarray]:
        where, seed = self.row.remove_from, self.context.seed
        return forget_sets(self.points.classes, percent, where, seed, count)

    def _perturbed(self, params: Any, target: Any, percent: int) -> Any:
        key = jax.random.fold_in(jax.random.key(self.context.seed), percent)
        return metrics.random_perturbation(key, params, metrics.distance(params, target))

    def cold(self, percent: int) -> dict[str, Any]:
        """First calls in a new process.

        Parameter space as released only at the smallest percentage: because it compiles for a minute.
        """
        released = RELEASED if percent == min(self.config.percentages) else (PAPER_RELEASED,)
        self.context.say(f"{self.row.name}: {percent} % removed, new process")
        return _cold.measure(
            self._folder(),
            self._forget_sets(percent, 1)[0],
            self.settings,
            self.config.matmul_precision,
            self.row,
            released=released if self.config.released_repeats else (),
        )

    def _folder(self) -> Path:
        """The trained state on disk, written once for all percentages."""
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="dualfluence-cold-")
            folder = Path(self._scratch.name)
            self.published.save(folder / _cold.STATE, include_kernel=True)
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(self.model.params)]
            np.savez(folder / _cold.PARAMS, *leaves)
            np.save(folder / _cold.TARGETS, self.points.y)
        return Path(self._scratch.name)

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()


def _distances(found: dict[str, Any], targets: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of every method's parameters to every way of retraining."""
    return {
        goal: {name: metrics.relative_distance(p, target) for name, p in found.items()}
        for goal, target in targets.items()
    }
