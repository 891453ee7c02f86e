"""Gradient descent on the network itself, with the ridge towards its initialisation."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ..._support.options import ProgressFn, Ticker
from ..._support.points import tree_norm
from ...kernels._linearized import ApplyFn, Linearized, linearize
from ..compare._networks import make_network
from ..compare._timing import time_call
from ._common import Context, Points, get_points, num_outputs
from ._config import Fig2, Fig3

BATCH = 10_000
"""Points per batch: all of the paper's training set at once."""

DENSE = 50
"""Epochs that are all recorded; later ones are recorded at this share of themselves. With twice this value,
the figure has twice the points and looks the same."""

CHECK_EPOCHS = 40
"""Epochs of the precision check."""
OnRecord = Callable[[int, PyTree], None]


def make_model(config: Fig2 | Fig3, points: Points, seed: int) -> Linearized:
    """The network at its initialisation."""
    net = make_network(config.network)
    shape = points.x.shape[1:]
    params = net.init(jax.random.key(seed), shape, outputs=num_outputs(config.data))
    return linearize(net.apply, params, batch_size=BATCH)


class NetworkCase:
    """A network of the paper at its initialisation, and its points."""

    def __init__(self, config: Fig2 | Fig3, context: Context) -> None:
        self.config: Any = config
        self.context = context

    @cached_property
    def points(self) -> Any:
        return get_points(self.config.data, self.context)

    @cached_property
    def model(self) -> Any:
        return make_model(self.config, self.points, self.context.seed)


def epochs_to_record(epochs: int, every: int | None) -> list[int]:
    """The epochs of the records, the start and the last one included."""
    marks, epoch = [], 0
    while epoch < epochs:
        marks.append(epoch)
        epoch += max(1, epoch // DENSE) if every is None else every
    return [*marks, epochs]


def train(
    model: Linearized,
    x: Array,
    y: Array,
    *,
    ridge: float,
    rate: float,
    epochs: int,
    marks: Sequence[int],
    on_record: OnRecord | None = None,
    progress: bool | ProgressFn = True,
) -> PyTree:
    """Full-batch gradient descent on the mean squared error; `on_record` is called with `θ` at the epochs
    `marks`, from 0 to the last.

    The matrix products run in the precision of the context.
    """
    theta = model.params
    eta, pull = (jnp.asarray(v, model.dtype) for v in (rate, ridge))
    if on_record is not None:
        on_record(0, theta)
    with Ticker(epochs, "epochs", progress) as ticker:
        for before, done in pairwise(marks):
            size = jnp.asarray(done - before)
            theta = _chunk(model.apply_fn, size, model.params, theta, x, y, pull, eta)
            if on_record is not None:
                on_record(done, theta)
            jax.block_until_ready(theta)
            ticker.tick(done - before)
    if not bool(jnp.isfinite(tree_norm(theta))):
        raise FloatingPointError(f"train: diverged at rate {rate}; lower it.")
    return theta


def risk(
    apply_fn: ApplyFn, theta_0: PyTree, theta: PyTree, x: Array, y: Array, ridge: Array
) -> Float[Array, ""]:
    """Mean of `½(f − y)²` plus `λ/2‖θ − θ₀‖²`."""
    errors = 0.5 * jnp.mean(jnp.sum((apply_fn(theta, x) - y) ** 2, axis=1))
    apart = jax.tree.map(lambda a, b: jnp.sum((a - b) ** 2), theta, theta_0)
    return errors + 0.5 * ridge * sum(jax.tree.leaves(apart), start=jnp.zeros((), errors.dtype))


@partial(jax.jit, static_argnums=0)
def _chunk(
    apply_fn: ApplyFn,
    length: Array,
    theta_0: PyTree,
    theta: PyTree,
    x: Array,
    y: Array,
    ridge: Array,
    rate: Array,
) -> PyTree:
    """`length` epochs; one program serves every length."""

    def epoch(_: Array, theta: PyTree) -> PyTree:
        gradient = jax.grad(risk, argnums=2)(apply_fn, theta_0, theta, x, y, ridge)
        return jax.tree.map(lambda t, g: t - rate * g, theta, gradient)

    return jax.lax.fori_loop(0, length, epoch, theta)


@partial(jax.jit, static_argnums=0)
def gradient_norm(
    apply_fn: ApplyFn, theta_0: PyTree, theta: PyTree, x: Array, y: Array, ridge: Array
) -> Array:
    """`‖∇L‖` of the network's own objective."""
    gradient = jax.grad(risk, argnums=2)(apply_fn, theta_0, theta, x, y, ridge)
    return jnp.sqrt(sum((jnp.sum(g**2) for g in jax.tree.leaves(gradient)), start=0.0 * ridge))


def trained_network(
    config: Fig2 | Fig3,
    context: Context,
    model: Linearized,
    points: Points,
    ridge: float,
    on_record: OnRecord | None = None,
) -> PyTree:
    """The network trained on all points: shared by fig. 2 and fig. 3 through the store.

    `on_record` is called at the epochs to record.
    """
    settings = {
        "data": [config.data.dataset, config.data.classes, config.data.per_class_train],
        "network": [config.network.kind, config.network.depth, config.network.width],
        "training": [ridge, config.rate, config.epochs, config.matmul_precision],
        "seed": context.seed,
    }

    def compute() -> list[Any]:
        theta = train(
            model,
            points.x,
            jnp.asarray(points.y),
            ridge=ridge,
            rate=config.rate,
            epochs=config.epochs,
            marks=epochs_to_record(config.epochs, config.record_every),
            on_record=on_record,
            progress=context.progress,
        )
        return jax.tree.leaves(theta)

    # A trajectory needs the way, not only the end.
    leaves = context.run.store.arrays(settings, compute, anew=on_record is not None)
    return jax.tree.unflatten(
        jax.tree.structure(model.params), [jnp.asarray(leaf) for leaf in leaves]
    )


def precision_check(config: Fig2 | Fig3, context: Context, points: Points) -> dict[str, Any]:
    """Difference between some epochs in the chosen matmul precision and the same epochs in full float32."""
    model = make_model(config, points, context.seed)
    settings = {
        "ridge": min(config.ridges),
        "rate": config.rate,
        "epochs": CHECK_EPOCHS,
        "marks": (0, CHECK_EPOCHS),
        "progress": False,
    }
    ends, seconds = [], []
    for precision in (config.matmul_precision, "highest"):
        with jax.default_matmul_precision(precision):
            args = (model, points.x, jnp.asarray(points.y))
            train(*args, **settings)  # compiles
            done = time_call(lambda args=args: train(*args, **settings))
            ends.append(done.result)
            seconds.append(done.seconds / CHECK_EPOCHS)
    apart = float(tree_norm(jax.tree.map(jnp.subtract, *ends)))
    moved = float(tree_norm(jax.tree.map(jnp.subtract, ends[1], model.params)))
    return {
        "precision": config.matmul_precision,
        "epochs": CHECK_EPOCHS,
        "error_of_change": apart / max(moved, 1e-30),
        "seconds_per_epoch": dict(zip(("chosen", "highest"), seconds, strict=True)),
    }
