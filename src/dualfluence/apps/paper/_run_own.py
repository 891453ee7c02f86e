"""An experiment of one's own: any network of the kit, data set, loss and descent, and sets to forget."""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ... import metrics
from ..._support.options import ProgressFn, Ticker
from ..._support.points import tree_norm
from ...fitted._fitted import Fitted
from ...fitted._from_trained import from_trained
from ...kernels._linearized import Linearized, linearize
from ...losses import AbstractLoss
from ...models._passes import outputs_at
from ..compare._methods import Settings, TrainedCase
from ..compare._names import FULL_HESSIAN, ITERATED, ONE_STEP, PAPER, PARAMETER, RANDOM, RETRAINED
from ..compare._networks import make_network
from ..compare._timing import time_call
from ._common import LOSSES, Context, Points, accuracies, forget_by_class, get_points, num_outputs
from ._config import Minibatches, Own
from ._methods import make_methods

METHODS = (PARAMETER, PAPER, FULL_HESSIAN, ONE_STEP, ITERATED)


def run(config: Own, context: Context) -> None:
    """One piece for the training, and one per set to forget."""
    case = OwnCase(config, context)
    context.run.piece("training", case.training_facts)
    for number in range(len(config.forget)):
        context.run.piece(f"removal/{number}", partial(case.compare, number))


def descend_in_batches(
    apply: Callable[[PyTree, Array], Array],
    theta_0: PyTree,
    x: Array,
    y: Array,
    loss: AbstractLoss,
    training: Minibatches,
    seed: int,
    progress: bool | ProgressFn = False,
) -> PyTree:
    r"""Descent on the mean loss plus $\frac\lambda2\|\theta-\theta_0\|^2$, with minibatches.

    Every epoch draws a new order and leaves out what does not fill a batch. At step `k` the rate is
    `rate·decay_rate^(k/decay_steps)`; `v ← μv + ∇L`, `θ ← θ − rate·v`.
    """
    n = x.shape[0]
    size = n if training.batch_size is None else min(training.batch_size, n)
    steps = n // size

    def risk(theta: PyTree, rows: Array) -> Float[Array, ""]:
        mean = jnp.mean(loss.value(apply(theta, x[rows]), y[rows]))
        apart = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), theta, theta_0)
        return mean + 0.5 * training.ridge * sum(jax.tree.leaves(apart))

    @jax.jit
    def epoch(theta: PyTree, velocity: PyTree, order: Array, first: Array) -> tuple[PyTree, PyTree]:
        def step(carry: tuple[PyTree, PyTree], given: tuple[Array, Array]) -> Any:
            theta, velocity = carry
            rows, k = given
            decay = training.decay_rate ** (k / training.decay_steps)
            gradient = jax.grad(risk)(theta, rows)
            velocity = jax.tree.map(lambda v, g: training.momentum * v + g, velocity, gradient)
            rate = training.rate * decay
            theta = jax.tree.map(lambda t, v: (t - rate * v).astype(t.dtype), theta, velocity)
            return (theta, velocity), None

        numbers = (first + jnp.arange(steps)).astype(x.dtype)
        return jax.lax.scan(step, (theta, velocity), (order, numbers))[0]

    theta, velocity = theta_0, jax.tree.map(jnp.zeros_like, theta_0)
    rng = np.random.default_rng(seed)
    with Ticker(training.epochs, "epochs", progress) as ticker:
        for number in range(training.epochs):
            order = rng.permutation(n) if size < n else np.arange(n)
            order = jnp.asarray(order[: steps * size].reshape(steps, size))
            theta, velocity = epoch(theta, velocity, order, jnp.asarray(number * steps))
            ticker.tick(1)
    if not bool(jnp.isfinite(tree_norm(theta))):
        raise FloatingPointError(
            f"experiment: training diverged at rate {training.rate}; lower it."
        )
    return theta


class OwnCase:
    """The trained network, and the results of the methods on it."""

    def __init__(self, config: Own, context: Context) -> None:
        self.config, self.context = config, context
        self.settings = Settings(config.cg_steps, config.cg_rtol, config.until)
        self.loss = LOSSES[config.training.loss]

    @cached_property
    def points(self) -> Points:
        """Labels count from zero; several classes with squared error have one-hot targets."""
        raw = get_points(self.config.data, self.context)
        if self.config.data.two_class:
            return raw
        count = np.asarray(self.config.data.classes)
        labels, test = (np.searchsorted(count, v) for v in (raw.classes, raw.y_test))
        y = labels.astype(np.int32)
        if self.config.training.loss == "squared":
            y = np.eye(len(count), dtype=np.float32)[labels]
        return raw._replace(y=y, labels=labels, labels_test=test)

    @cached_property
    def model(self) -> Linearized:
        net = make_network(self.config.network)
        outputs = num_outputs(self.config.data)
        params = net.init(
            jax.random.key(self.context.seed), self.points.x.shape[1:], outputs=outputs
        )
        return linearize(net.apply, params)

    def train(self, kept: np.ndarray) -> PyTree:
        model, points = self.model, self.points
        linear = lambda theta, x: outputs_at(model, theta, x, True)  # noqa: E731
        return descend_in_batches(
            linear if self.config.linearised else model.apply_fn,
            model.params,
            points.x[kept],
            jnp.asarray(points.y[kept]),
            self.loss,
            self.config.training,
            self.context.seed,
            self.context.progress,
        )

    @cached_property
    def trained(self) -> PyTree:
        self.context.say(f"training, {self.config.training.epochs} epochs")
        return self.train(np.arange(self.points.x.shape[0]))

    @cached_property
    def base(self) -> Fitted:
        return from_trained(
            self.model,
            self.trained,
            self.points.x,
            self.points.y,
            loss=self.loss,
            ridge=self.config.training.ridge,
            tangent="initial",
            linearised=self.config.linearised,
            progress=self.context.progress,
        )

    def training_facts(self) -> dict[str, Any]:
        fidelity = self.base.fidelity
        assert fidelity is not None
        everything, linear = np.arange(self.points.x.shape[0]), self.config.linearised
        return {
            "num_params": self.model.num_params,
            "kernel_size": self.base.kernel_op.num_points * self.base.num_outputs,
            "gradient_norm": fidelity.gradient_norm,
            "parameter_gap": fidelity.parameter_gap,
            "output_gap": fidelity.output_gap,
            "accuracy": accuracies(
                self.model, self.trained, self.points, everything, linearised=linear
            ),
        }

    def compare(self, number: int) -> dict[str, Any]:
        """Retrain without the forgotten points, then every method."""
        config, points = self.config, self.points
        percents, count = dict(config.forget[number]), config.repeats + 1
        sets = forget_by_class(points.classes, percents, self.context.seed, count)
        gone = sets[0]
        kept = np.setdiff1d(np.arange(points.x.shape[0]), gone)
        self.context.say(f"removal of {len(gone)} points, retraining")
        retrained = self.train(kept)
        trained = TrainedCase(self.base, self.trained, points.y, self.settings)
        found: dict[str, Any] = {}
        details: dict[str, Any] = {}
        first: dict[str, float] = {}
        warm: dict[str, list[float]] = {}
        for name, method in make_methods(trained, METHODS).items():
            done = time_call(lambda m=method: m(gone))
            found[name], details[name] = done.result
            first[name] = done.seconds
            warm[name] = [time_call(lambda s=s, m=method: m(s)[0]).seconds for s in sets[1:]]
        key = jax.random.fold_in(jax.random.key(self.context.seed), number)
        change = metrics.distance(self.trained, retrained)
        found[RANDOM] = metrics.random_perturbation(key, self.trained, change)
        return {
            "removed": len(gone),
            "change": metrics.relative_distance(self.trained, retrained),
            "distance": {n: metrics.relative_distance(p, retrained) for n, p in found.items()},
            "largest_difference": {
                n: metrics.largest_difference(p, retrained) for n, p in found.items()
            },
            "accuracy": {
                n: accuracies(self.model, p, points, gone, linearised=config.linearised)
                for n, p in (found | {RETRAINED: retrained}).items()
            },
            "first_seconds": first,
            "warm_seconds": warm,
            "details": details,
        }
