"""The interface of a loss: its value for each point, and gradient and curvature in the outputs."""

import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._support.checks import as_array, as_dtype, check_finite
from ._factors import AbstractFactor


class AbstractLoss(eqx.Module):
    """A convex function `ℓ(f, y)` of one point's outputs `f`, vectorised over points.

    All methods take `outputs` of shape `(n, c)` and targets as `prepare_targets` returns them.
    """

    @abc.abstractmethod
    def prepare_targets(self, targets: Any, num_outputs: int | None, dtype: Any) -> Array:
        """Check targets and bring them to the shape and dtype that the other methods expect."""

    @abc.abstractmethod
    def value(self, outputs: Float[Array, "n c"], targets: Array) -> Float[Array, " n"]:
        """`ℓ(f_i, y_i)`."""

    @abc.abstractmethod
    def grad(self, outputs: Float[Array, "n c"], targets: Array) -> Float[Array, "n c"]:
        """`∇ℓ(f_i, y_i)`."""

    @abc.abstractmethod
    def grad_noise(
        self, outputs: Float[Array, "n c"], targets: Array, noise: Float[Array, "n c"]
    ) -> Float[Array, "n c"]:
        """An estimate of the error of `grad` if `outputs` are off by `noise`.

        It is of first order: the curvature passes on `noise`, and the terms that `grad` adds up are
        rounded as well. The certificate depends on this estimate, so it must not be too small.
        """

    @abc.abstractmethod
    def hess_factor(
        self, outputs: Float[Array, "n c"], targets: Array, weights: Float[Array, " n"]
    ) -> AbstractFactor:
        """`R` with `RRᵀ = diag(w) ⊗ ∇²ℓ`."""

    def hess_mv(
        self, outputs: Float[Array, "n c"], targets: Array, v: Float[Array, "n c"]
    ) -> Float[Array, "n c"]:
        """`∇²ℓ(f_i, y_i) v_i`."""
        ones = jnp.ones(outputs.shape[0], outputs.dtype)
        return self.hess_factor(outputs, targets, ones).hess_mv(v)


def numeric_targets(name: str, targets: Any, num_outputs: int | None, dtype: Any) -> Array:
    """Real targets as `(n, c)`; a vector of `n` numbers is taken as one output."""
    array = as_array(f"{name} targets", targets)
    if array.ndim == 1 and num_outputs in (None, 1):
        array = array.reshape(-1, 1)
    wrong = num_outputs is not None and array.shape[1:] != (num_outputs,)
    if array.ndim != 2 or wrong or array.shape[1] == 0:
        want = "(n, c)" if num_outputs is None else f"(n, {num_outputs})"
        raise ValueError(f"{name}: targets must have shape {want}, got {tuple(array.shape)}.")
    cast = as_dtype(f"{name} targets", array, dtype)
    check_finite(f"{name} targets", cast)
    return cast
