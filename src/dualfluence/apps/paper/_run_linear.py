"""The linear model of the authors' repository: digits 3 and 8 on random ReLU features, with timings."""

from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ... import metrics
from ..._support.compile import filter_jit
from ..._support.options import Ticker
from ...fitted._fitted import Fitted
from ...fitted._from_trained import from_trained
from ...fitted._options import KernelOptions
from ...kernels._linearized import linearize
from ..compare._methods import Settings, TrainedCase
from ..compare._names import ITERATED, ONE_STEP, PAPER, PARAMETER, RANDOM, RETRAINED
from ..compare._timing import time_call
from ._common import LOSSES, Context, accuracies, fit_exactly, forget_by_class, get_points
from ._config import Linear
from ._features import readout, with_features
from ._methods import make_methods

METHODS = (PARAMETER, PAPER, ONE_STEP, ITERATED)
CHUNK = 100
"""Epochs in one compiled loop; with twice this value, progress is reported half as often."""


def run(config: Linear, context: Context) -> None:
    """One piece for the training, and one per percentage."""
    case = LinearCase(config, context)
    context.run.piece("training", case.training_facts)
    for percent in config.percentages:
        context.run.piece(f"{percent}", lambda p=percent: case.compare(p))


@filter_jit
def _descend(
    K: Float[Array, "n n"],
    f_0: Float[Array, "n 1"],
    y: Float[Array, "n 1"],
    weights: Float[Array, "n t"],
    state: tuple[Float[Array, "n t"], Float[Array, ""]],
    rate: Float[Array, ""],
    ridge: Float[Array, ""],
    epochs: int,
) -> tuple[Float[Array, "n t"], Float[Array, ""]]:
    def epoch(state: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        a, share = state
        f = share * f_0 + K @ a
        a = a - rate * (weights * (f - y) + ridge * a)
        return (a, share * (1 - rate * ridge)), None

    return jax.lax.scan(epoch, state, None, length=epochs)[0]


def descend_from(
    K: Any,
    f_0: Any,
    y: Any,
    weights: Any,
    *,
    rate: float,
    ridge: float,
    epochs: int,
    progress: Any = False,
) -> tuple[Float[Array, "n t"], float]:
    r"""Gradient descent of a linear model $f=\Phi\theta$ with squared error and a ridge on $\|\theta\|^2$,
    from any $\theta_0$, for several sample weights `w` at once.

    In data space, $\theta_k = s_k\theta_0 + \Phi^\top a_k$ with

    $$s_{k+1} = (1-\eta\lambda)s_k,\qquad a_{k+1} = a_k - \eta\,(w(f_k-y)+\lambda a_k),\qquad
    f_k = s_kf_0 + Ka_k .$$

    It is the descent in parameter space, step by step. A column of `weights` is one training; all of them
    share the product with `K` of an epoch.

    **Returns:** `a`, shape `(n, t)`, and `s` after the last epoch.
    """
    K = jnp.asarray(K)
    w = jnp.asarray(weights, K.dtype)
    start, y = jnp.asarray(f_0, w.dtype), jnp.asarray(y, w.dtype)
    state = (jnp.zeros_like(w), jnp.ones((), w.dtype))
    eta, pull = jnp.asarray(rate, w.dtype), jnp.asarray(ridge, w.dtype)
    done = 0
    with Ticker(epochs, "epochs", progress) as ticker:
        while done < epochs:
            size = min(CHUNK, epochs - done)
            state = jax.block_until_ready(_descend(K, start, y, w, state, eta, pull, size))
            done += size
            ticker.tick(size)
    if not bool(jnp.isfinite(jnp.sum(state[0]))):
        raise FloatingPointError(f"descend_from: diverged at rate {rate}; lower it.")
    return state[0], float(state[1])


class LinearCase:
    """The readout trained by gradient descent and to the optimum, and the methods on both."""

    def __init__(self, config: Linear, context: Context) -> None:
        self.config, self.context = config, context
        self.settings = Settings(config.cg_steps, config.cg_rtol, config.until)

    @cached_property
    def points(self) -> Any:
        raw = get_points(self.config.data, self.context)
        key = jax.random.fold_in(jax.random.key(self.context.seed), 0)
        return with_features(raw, self.config.num_features, key, bias=True)

    @cached_property
    def start(self) -> Array:
        """The readout before training, from a standard normal distribution."""
        key = jax.random.fold_in(jax.random.key(self.context.seed), 1)
        return jax.random.normal(key, (self.config.num_features + 1, 1))

    @cached_property
    def model(self) -> Any:
        return linearize(
            readout, jnp.zeros_like(self.start), anchor="zero", batch_size=self.points.x.shape[0]
        )

    def fit_exactly(self, weights: Any = None, held: Fitted | None = None) -> Fitted:
        given = (self.model, self.points, LOSSES["squared"], self.config.training.ridge)
        op = None if held is None else held.kernel_op
        return fit_exactly(*given, self.context, kernel=op, weights=weights)

    @cached_property
    def exact(self) -> Fitted:
        self.context.say("kernel and exact optimum")
        return self.fit_exactly()

    @cached_property
    def forgotten(self) -> dict[int, list[np.ndarray]]:
        """Per percentage the set that is evaluated, and those that are timed."""
        classes, count = self.points.classes, self.config.repeats + 1
        seed, labels = self.context.seed, self.config.data.classes
        return {
            percent: forget_by_class(classes, dict.fromkeys(labels, percent), seed, count)
            for percent in self.config.percentages
        }

    @cached_property
    def descended(self) -> tuple[list[Array], float]:
        """Parameters of the training on all points, then of every retraining, and its seconds."""
        points, training = self.points, self.config.training
        kept = np.ones((points.x.shape[0], 1 + len(self.config.percentages)))
        for column, sets in enumerate(self.forgotten.values(), 1):
            kept[sets[0], column] = 0
        settings = {
            "linear": [self.config.data.dataset, self.config.data.classes, len(kept)],
            "model": [self.config.num_features, self.context.seed, list(self.forgotten)],
            "training": [training.rate, training.ridge, training.epochs],
            "kept": [np.flatnonzero(column == 0).tolist() for column in kept.T],
            "precision": self.config.matmul_precision,
        }

        def compute() -> list[Any]:
            self.context.say(
                f"{training.epochs} epochs of gradient descent, {kept.shape[1]} models"
            )
            done = time_call(
                lambda: descend_from(
                    self.exact.kernel_op.dense(),
                    points.x @ self.start,
                    points.y,
                    kept / kept.sum(axis=0),
                    rate=training.rate,
                    ridge=training.ridge,
                    epochs=training.epochs,
                    progress=self.context.progress,
                )
            )
            return [*done.result, done.seconds]

        a, share, seconds = self.context.run.store.arrays(settings, compute)
        theta = jnp.asarray(share, self.start.dtype) * self.start + points.x.T @ a
        return [theta[:, i : i + 1] for i in range(theta.shape[1])], float(seconds)

    @cached_property
    def published(self) -> Fitted:
        """The model trained by gradient descent, taken over by its parameters alone."""
        return from_trained(
            self.model,
            self.descended[0][0],
            self.points.x,
            self.points.y,
            loss=LOSSES["squared"],
            ridge=self.config.training.ridge,
            tangent="initial",
            linearised=True,
            kernel=KernelOptions(operator=self.exact.kernel_op, refine=False),  # float32 for all
            progress=self.context.progress,
        )

    def training_facts(self) -> dict[str, Any]:
        thetas, seconds = self.descended
        everything = np.arange(self.points.x.shape[0])
        fidelity = self.published.fidelity
        assert fidelity is not None
        return {
            "num_params": self.model.num_params,
            "kernel_size": self.exact.kernel_op.num_points,
            "dtype": str(self.points.x.dtype),
            "descent_seconds": seconds,
            "descent_trainings": len(thetas),
            "fit_seconds": self.exact.stats.seconds,
            "fit_relative_bound": self.exact.certificate.relative_bound,
            "gradient_norm": fidelity.gradient_norm,
            "descent_to_optimum": metrics.relative_distance(thetas[0], self.exact.params()),
            "accuracy": accuracies(self.model, thetas[0], self.points, everything, linearised=True),
        }

    def compare(self, percent: int) -> dict[str, Any]:
        """Every method against both ways of retraining, with its first and its later calls timed."""
        self.context.say(f"{percent} % removed")
        points, sets = self.points, self.forgotten[percent]
        gone, column = sets[0], 1 + self.config.percentages.index(percent)
        weights = (~np.isin(np.arange(points.x.shape[0]), gone)).astype(float)
        retrained = self.fit_exactly(weights, self.exact)
        targets = {"published": self.descended[0][column], "exact": retrained.params()}
        bases = {
            "published": (self.published, self.descended[0][0]),
            "exact": (self.exact, self.exact.params()),
        }
        distance: dict[str, Any] = {}
        accuracy: dict[str, Any] = {}
        details: dict[str, Any] = {}
        first: dict[str, float] = {}
        warm: dict[str, list[float]] = {}
        busy: dict[str, list[float]] = {}
        apart = {}
        for name, (base, params) in bases.items():
            trained = TrainedCase(base, params, points.y, self.settings)
            found: dict[str, Any] = {}
            details[name] = {}
            for label, method in make_methods(trained, METHODS).items():
                if name == "published":
                    jax.clear_caches()
                done = time_call(lambda m=method: m(gone))
                found[label], details[name][label] = done.result
                if name == "published":
                    calls = [time_call(lambda s=s, m=method: m(s)[0]) for s in sets[1:]]
                    first[label] = done.seconds
                    warm[label] = [call.seconds for call in calls]
                    busy[label] = [call.cpu_seconds for call in calls]
            apart[name] = metrics.relative_distance(found[ONE_STEP], found[PARAMETER])
            if name == "published":
                found[RANDOM] = self._perturbed(params, targets[name], percent)
            distance[name] = {
                n: metrics.relative_distance(p, targets[name]) for n, p in found.items()
            }
            accuracy[name] = {
                n: accuracies(self.model, p, points, gone, linearised=True)
                for n, p in (found | {RETRAINED: targets[name]}).items()
            }
        return {
            "removed": len(gone),
            "change": metrics.relative_distance(bases["exact"][1], targets["exact"]),
            "distance": distance,
            "accuracy": accuracy,
            "dual_against_parameter_space": apart,
            "retrained_bound": retrained.certificate.relative_bound,
            "retrained_apart": metrics.relative_distance(targets["published"], targets["exact"]),
            "first_seconds": first,
            "warm_seconds": warm,
            "warm_cpu_seconds": busy,
            "details": details,
        }

    def _perturbed(self, params: Any, target: Any, percent: int) -> Any:
        key = jax.random.fold_in(jax.random.key(self.context.seed), percent)
        return metrics.random_perturbation(key, params, metrics.distance(params, target))
