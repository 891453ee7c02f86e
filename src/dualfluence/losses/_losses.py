"""The losses with closed forms: squared error, softmax cross-entropy, logistic."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._support.checks import as_array, check_finite
from .._support.memory import total_memory
from ._base import AbstractLoss, numeric_targets
from ._factors import DiagonalFactor, SoftmaxFactor

PROBABILITY_SLACK = 1e-3
"""Rows of probability targets may sum to one up to this error, because they are often float16 data."""


class SquaredError(AbstractLoss):
    """`½‖f − y‖²`. One dual step is exact retraining."""

    def prepare_targets(self, targets: Any, num_outputs: int | None, dtype: Any) -> Array:
        return numeric_targets("SquaredError", targets, num_outputs, dtype)

    def value(self, outputs: Float[Array, "n c"], targets: Array) -> Float[Array, " n"]:
        return 0.5 * jnp.sum((outputs - targets) ** 2, axis=1)

    def grad(self, outputs: Float[Array, "n c"], targets: Array) -> Float[Array, "n c"]:
        return outputs - targets

    def grad_noise(
        self, outputs: Float[Array, "n c"], targets: Array, noise: Float[Array, "n c"]
    ) -> Float[Array, "n c"]:
        return _eps(outputs) * jnp.abs(outputs - targets) + noise

    def hess_factor(
        self, outputs: Float[Array, "n c"], targets: Array, weights: Float[Array, " n"]
    ) -> DiagonalFactor:
        return DiagonalFactor(jnp.sqrt(weights).reshape(-1, 1))


class SoftmaxCrossEntropy(AbstractLoss):
    """`logsumexp(f) − y·f`, targets as class indices `(n,)` or probabilities `(n, c)`."""

    def prepare_targets(self, targets: Any, num_outputs: int | None, dtype: Any) -> Array:
        array = as_array("SoftmaxCrossEntropy targets", targets)
        if array.ndim == 1:
            # On the host and as wide as they came: 32-bit JAX would wrap 2**32 to class 0.
            return _one_hot(np.asarray(array), num_outputs, dtype)
        probs = numeric_targets("SoftmaxCrossEntropy", array, num_outputs, dtype)
        off = float(jnp.max(jnp.abs(jnp.sum(probs, axis=1) - 1))) if probs.size else 0.0
        if off > PROBABILITY_SLACK or float(jnp.min(probs, initial=0.0)) < 0:
            raise ValueError(
                "SoftmaxCrossEntropy: rows of probability targets must be non-negative and sum to "
                f"one, got a row that is off by {off:.3g}. For class indices give integers (n,)."
            )
        return probs

    def value(self, outputs: Float[Array, "n c"], targets: Array) -> Float[Array, " n"]:
        # Against the largest output every term is non-negative, so that none cancels another and a
        # small loss keeps its digits.
        below = jnp.max(outputs, axis=1, keepdims=True) - outputs
        top = _one_of_the_largest(outputs)
        rest = jnp.sum(jnp.where(top, 0, jnp.exp(-below)), axis=1)
        missing = (1 - jnp.sum(targets, axis=1)) * jnp.max(outputs, axis=1)
        return jnp.sum(targets * below, axis=1) + jnp.log1p(rest) + missing

    def grad(self, outputs: Float[Array, "n c"], targets: Array) -> Float[Array, "n c"]:
        p, others = _probabilities(outputs)
        # p − y without cancellation: a class that is certain and right has 1 − p, not 1 − (1 − ε).
        return p * (1 - targets) - targets * others

    def grad_noise(
        self, outputs: Float[Array, "n c"], targets: Array, noise: Float[Array, "n c"]
    ) -> Float[Array, "n c"]:
        p, others = _probabilities(outputs)
        terms = p * (1 - targets) + targets * others
        # The exponent f − max f rounds once more.
        noise = noise + _eps(outputs) * jnp.max(jnp.abs(outputs), axis=1, keepdims=True)
        mean = jnp.sum(p * noise, axis=1, keepdims=True)
        carried = p * (others * noise + jnp.maximum(mean - p * noise, 0))
        # One class alone has no gradient, all others have one, however small.
        return _eps(outputs) * terms + carried + (_underflow(outputs) if p.shape[1] > 1 else 0)

    def hess_factor(
        self, outputs: Float[Array, "n c"], targets: Array, weights: Float[Array, " n"]
    ) -> SoftmaxFactor:
        root_probs = jnp.exp(0.5 * jax.nn.log_softmax(outputs, axis=1))
        return SoftmaxFactor(jnp.sqrt(weights).reshape(-1, 1), root_probs)


class Logistic(AbstractLoss):
    """`log(1 + eᶠ) − y f`, summed over outputs; targets in [0, 1], one per output."""

    def prepare_targets(self, targets: Any, num_outputs: int | None, dtype: Any) -> Array:
        array = numeric_targets("Logistic", targets, num_outputs, dtype)
        if bool(((array < 0) | (array > 1)).any()):
            raise ValueError(
                "Logistic: targets must lie in [0, 1], got values from "
                f"{float(array.min()):.3g} to {float(array.max()):.3g}. Map labels -1/+1 by (y+1)/2."
            )
        return array

    def value(self, outputs: Float[Array, "n c"], targets: Array) -> Float[Array, " n"]:
        right, wrong = jax.nn.softplus(-outputs), jax.nn.softplus(outputs)
        return jnp.sum(targets * right + (1 - targets) * wrong, axis=1)

    def grad(self, outputs: Float[Array, "n c"], targets: Array) -> Float[Array, "n c"]:
        p, other = jax.nn.sigmoid(outputs), jax.nn.sigmoid(-outputs)
        return p * (1 - targets) - targets * other

    def grad_noise(
        self, outputs: Float[Array, "n c"], targets: Array, noise: Float[Array, "n c"]
    ) -> Float[Array, "n c"]:
        p, other = jax.nn.sigmoid(outputs), jax.nn.sigmoid(-outputs)
        terms = p * (1 - targets) + targets * other
        return _eps(outputs) * terms + p * other * noise + _underflow(outputs)

    def hess_factor(
        self, outputs: Float[Array, "n c"], targets: Array, weights: Float[Array, " n"]
    ) -> DiagonalFactor:
        log_curvature = jax.nn.log_sigmoid(outputs) + jax.nn.log_sigmoid(-outputs)
        return DiagonalFactor(jnp.sqrt(weights).reshape(-1, 1) * jnp.exp(0.5 * log_curvature))


def _one_hot(labels: np.ndarray, num_outputs: int | None, dtype: Any) -> Array:
    check_finite("SoftmaxCrossEntropy targets", labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"SoftmaxCrossEntropy: labels must be integers, got dtype {labels.dtype}. "
            "For probabilities give an array of shape (n, c)."
        )
    low, high = (int(labels.min()), int(labels.max())) if labels.size else (0, 0)
    classes = high + 1 if num_outputs is None else num_outputs
    if low < 0 or high >= classes:
        raise ValueError(
            f"SoftmaxCrossEntropy: labels must be in [0, {classes}), got {low if low < 0 else high}."
        )
    if labels.size * classes * jnp.dtype(dtype).itemsize > total_memory():
        raise ValueError(
            f"SoftmaxCrossEntropy: labels up to {high} mean {classes} classes, whose one-hot rows do "
            "not fit in memory. Number the classes from 0."
        )
    return jax.nn.one_hot(jnp.asarray(labels.astype(np.int32)), classes, dtype=dtype)


def _eps(array: Array) -> float:
    return float(jnp.finfo(array.dtype).eps)


def _underflow(array: Array) -> float:
    """The error of a gradient that rounding made zero although it never is.

    It is the smallest normal number divided by `eps`, so that a small weight does not turn it into zero.
    """
    return float(jnp.finfo(array.dtype).tiny) / _eps(array)


def _one_of_the_largest(outputs: Float[Array, "n c"]) -> Array:
    """One true entry in each row, at a largest output."""
    return jnp.argmax(outputs, axis=1)[:, None] == jnp.arange(outputs.shape[1])[None, :]


def _probabilities(outputs: Float[Array, "n c"]) -> tuple[Array, Array]:
    """Softmax `p` and `1 − p`, both accurate to a few units in the last place.

    Only the largest probability can be near one; for that class `1 − p` is the sum of the others.
    """
    p = jax.nn.softmax(outputs, axis=1)
    top = _one_of_the_largest(outputs)
    rest = jnp.sum(jnp.where(top, 0, p), axis=1, keepdims=True)
    return p, jnp.where(top, rest, 1 - p)
