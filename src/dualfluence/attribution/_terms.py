r"""Which predictions the loss terms of a checkpoint come from: its own, or the average of its run.

A network that has learned its points by heart predicts their labels: their gradients and curvature
vanish there, though training on them took both. Averaged over the run, they say how much each point
pulled on the whole.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._support.compile import filter_jit
from ..kernels._linearized import Linearized
from ..losses import AbstractLoss, SoftmaxCrossEntropy


class Terms(NamedTuple):
    """For each term, whether it is taken at averaged predictions.

    - `train`: gradients `g` of the training points.
    - `queries`: directions `v` of the queries.
    - `curvature`: `R` of the training points.
    """

    train: bool = False
    queries: bool = False
    curvature: bool = False


OWN = Terms()

AVERAGED = {
    "none": OWN,
    "train": Terms(train=True),
    "points": Terms(train=True, queries=True),
    "all": Terms(train=True, queries=True, curvature=True),
}
"""What `averaged=` of `attribute_runs` may be."""


class Outputs(NamedTuple):
    """Predictions at the training points and at the queries."""

    train: Float[Array, "n c"]
    queries: Float[Array, "q c"]

    def where(self, terms: Terms, average: "Outputs | None") -> "tuple[Outputs, Array]":
        """Outputs for the gradients of both kinds of points, and those for the curvature."""
        if average is None:
            return self, self.train
        gradients = Outputs(
            average.train if terms.train else self.train,
            average.queries if terms.queries else self.queries,
        )
        return gradients, average.train if terms.curvature else self.train


def averaged_outputs(
    models: Iterable[Linearized], x: Array, xq: Array, loss: AbstractLoss
) -> Outputs:
    """`log p̄` with `p̄` the mean of probabilities for softmax, else the mean of outputs."""
    softmax = isinstance(loss, SoftmaxCrossEntropy)
    total, count = None, 0
    for model in models:
        seen = Outputs(*(_readable(model, z, softmax) for z in (x, xq)))
        add = jnp.logaddexp if softmax else jnp.add
        total = seen if total is None else Outputs(*map(add, total, seen))
        count += 1
    assert total is not None
    if softmax:
        return Outputs(*(f - jnp.log(jnp.asarray(count, f.dtype)) for f in total))
    return Outputs(*(f / count for f in total))


@filter_jit
def _readable(model: Linearized, x: Array, softmax: bool) -> Float[Array, "n c"]:
    """Outputs in the form in which they are averaged, probabilities as logarithms."""
    f = model.base_outputs(x)
    return jax.nn.log_softmax(f, axis=1) if softmax else f
