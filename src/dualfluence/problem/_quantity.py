"""What is measured at a query: its loss, an output, its margin, or a function of your own."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .._support.checks import check_rows
from .._support.types import Numbers
from ..losses import AbstractLoss, Logistic

KINDS = ("loss", "output", "margin")


class Quantity(eqx.Module):
    """A scalar of each query's outputs.

    - `name`: what it is called in reports.
    - `direction`: 1 where a rise is bad (a loss), −1 where a rise is good (a margin, the output of
      the query's own class).
    - `targets`: one row per query, as `fn` wants them.
    """

    fn: Callable[[Array, Array], Array] = eqx.field(static=True)
    name: str = eqx.field(static=True)
    direction: int = eqx.field(static=True)
    targets: Array

    def value(self, outputs: Float[Array, "q c"], targets: Array) -> Float[Array, " q"]:
        """One number per query."""
        return jax.vmap(self.fn)(outputs, targets)

    def grad(self, outputs: Float[Array, "q c"], targets: Array) -> Float[Array, "q c"]:
        """The gradient of the quantity in the query's outputs, `v_q`."""
        return jax.vmap(jax.grad(self.fn))(outputs, targets)


def as_quantity(
    of: str | Callable[[Array, Array], Array],
    loss: AbstractLoss,
    targets: Numbers | None,
    num_queries: int,
    num_outputs: int,
    dtype: DTypeLike,
) -> Quantity:
    """The measured quantity for these queries, checked."""
    if not isinstance(of, str):
        if not callable(of):
            raise TypeError(f"attribute: of must be a name or a function, got {type(of).__name__}.")
        rows = jnp.zeros((num_queries, 0), dtype) if targets is None else jnp.asarray(targets)
        check_rows("attribute: targets", rows, num_queries, "query")
        return Quantity(of, getattr(of, "__name__", "function"), 1, rows)
    if of not in KINDS:
        raise ValueError(
            f"attribute: of must be one of {', '.join(map(repr, KINDS))} or a function of one "
            f"query's outputs and target, got {of!r}."
        )
    if targets is None:
        if of == "output" and num_outputs == 1:
            return Quantity(_only, "output", -1, jnp.zeros((num_queries, 0), dtype))
        raise ValueError(f"attribute: of={of!r} needs the targets of the queries, got None.")
    prepared = loss.prepare_targets(targets, num_outputs, dtype)
    if prepared.shape[0] != num_queries:
        raise ValueError(
            f"attribute: {num_queries} queries but {prepared.shape[0]} targets; one each is needed."
        )
    if of == "loss":
        return Quantity(_OneLoss(loss), "loss", 1, prepared)
    classes = _classes(of, targets, prepared, num_outputs)
    if of == "output":
        return Quantity(_chosen, "output", -1, classes)
    if num_outputs == 1:
        half = 0.5 if isinstance(loss, Logistic) else 0.0
        signs = jnp.sign(prepared.reshape(num_queries, -1)[:, :1] - half)
        return Quantity(_signed, "margin", -1, signs)
    return Quantity(_margin, "margin", -1, classes)


class _OneLoss(eqx.Module):
    """A loss of one query. A module, so that equal losses compare equal and compile once."""

    loss: AbstractLoss = eqx.field(static=True)

    def __call__(self, outputs: Array, target: Array) -> Array:
        return self.loss.value(outputs[None], target[None])[0]


def _only(outputs: Array, target: Array) -> Array:
    return outputs[0]


def _chosen(outputs: Array, target: Array) -> Array:
    return outputs[target]


def _signed(outputs: Array, target: Array) -> Array:
    return outputs[0] * target[0]


def _margin(outputs: Array, target: Array) -> Array:
    own = outputs[target]
    others = jnp.where(jnp.arange(outputs.size) == target, -jnp.inf, outputs)
    return own - jax.nn.logsumexp(others)


def _classes(of: str, targets: Numbers, prepared: Array, num_outputs: int) -> Array:
    """The class of each query: integers as given, else the largest entry of its target."""
    raw = np.asarray(targets)
    if num_outputs == 1:
        return jnp.zeros(prepared.shape[0], int)
    if raw.ndim == 1 and np.issubdtype(raw.dtype, np.integer):
        return jnp.asarray(raw)
    if prepared.ndim != 2 or prepared.shape[1] != num_outputs:
        raise ValueError(
            f"attribute: of={of!r} needs the class of each query: integers (q,) or rows "
            f"(q, {num_outputs}), got targets of shape {tuple(prepared.shape)}."
        )
    return jnp.argmax(prepared, axis=1)
