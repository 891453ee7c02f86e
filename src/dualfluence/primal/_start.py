"""Where every solve in parameter space starts: checked inputs, and the curvature there."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._support.checks import as_array, check_rows, training_weights
from .._support.compile import double
from .._support.options import check_count, check_instance, check_loss, maybe
from .._support.points import enter_points
from .._support.types import Inputs, Numbers
from ..kernels._linearized import Linearized, as_network
from ..losses import AbstractLoss
from ..models._passes import check_network, check_params
from ..models._sources import bound_network
from ..problem._objective import TrainingSet
from ._curvature import Curvature, make_curvature


def entered_network(what: str, model: Any, widen: bool) -> Linearized:
    """The network; with `widen`, a float32 network computes in float64 on a CPU."""
    model = as_network(model)
    check_instance(f"{what}: model", model, Linearized, "made by linearize")
    if not widen or model.dtype != jnp.float32 or jax.default_backend() != "cpu":
        return model
    with double():
        return model.widened()


class Start(NamedTuple):
    """A network at trained parameters, in the form that it takes, and its training set."""

    model: Linearized
    theta: PyTree
    data: TrainingSet
    loss: AbstractLoss

    @property
    def num_outputs(self) -> int:
        return self.model.apply_shape(self.data.x)[1]


def training_start(
    what: str,
    model: Linearized,
    params: PyTree,
    x: Inputs,
    y: Numbers,
    weights: Numbers | None,
    loss: AbstractLoss,
) -> Start:
    """The checked arguments of a user, in the precision of the model."""
    theta = check_params(f"{what}: params", model, params)
    given, model = model, bound_network(model, x)
    check_loss(what, loss, AbstractLoss)
    features, targets = enter_points("x", x, model.form), as_array("y", y)
    check_rows("y", targets, features.shape[0], "point of x")
    samples = training_weights(what, weights, features.shape[0])
    num_outputs = check_network(model, features, None)
    dtype = jax.eval_shape(model.base_outputs, features).dtype
    if dtype == jnp.float64 and model.dtype == jnp.float32:
        # Float64 points or constants: a solve would carry vectors of both types.
        model = bound_network(given.widened(), x)
    theta = model.enter(theta)
    prepared = loss.prepare_targets(targets, num_outputs, dtype)
    return Start(model, theta, TrainingSet(features, prepared, samples, form=model.form), loss)


def curvature_at(
    what: str,
    start: Start,
    data: TrainingSet,
    ridge: float,
    batch_size: int | None,
    linearised: bool,
    devices: int = 1,
) -> tuple[Curvature, Float[Array, "n c"]]:
    """The curvature on `data` at the parameters of `start`, and the outputs there.

    Each of several devices takes a batch of that size, together they take one of their sum.
    """
    batch_size = maybe(check_count, f"{what}: batch_size", batch_size)
    model = start.model
    sized = model if batch_size is None else replace(model, batch_size=batch_size)
    size = sized.batch(data.x)
    if devices > 1:
        size = devices * min(size, -(-data.num_points // devices))
    sized = replace(model, batch_size=size)  # no other size for other edits
    lam, weights = jnp.asarray(ridge, model.dtype), jnp.asarray(data.weights)
    given = (data.x, jnp.asarray(data.targets), weights, start.loss, lam, linearised)
    return make_curvature(sized, start.theta, *given, exactly=devices > 1)
