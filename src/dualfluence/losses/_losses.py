"""A loss: its interface, factors of its curvature, and the losses with closed forms (squared error, softmax
cross-entropy, logistic).

A factor `R` with `RRᵀ = W`, the weighted block-diagonal Hessian of the loss in the outputs, multiplies
arrays of shape `(n, c, ...)`. Its class tells solvers its structure.
"""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .._support.checks import as_array, as_dtype, check_finite
from .._support.memory import total_memory
from .._support.types import Numbers

CURVATURE_SLACK = 1e3
"""A Hessian eigenvalue below `-CURVATURE_SLACK·eps` of the largest is not rounding."""


def _per_point(values: Array, like: Array) -> Array:
    """Append axes so that `(n, c)` values multiply `(n, c, ...)` arrays without rank promotion."""
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))


class AbstractFactor(eqx.Module):
    """`R`, a block-diagonal square root of `W = diag(w) ⊗ ∇²ℓ`."""

    @abc.abstractmethod
    def mv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n c ..."]:
        """`R v`."""

    @abc.abstractmethod
    def rmv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n c ..."]:
        """`Rᵀ v`."""

    @abc.abstractmethod
    def hess_diagonal(self) -> Float[Array, "n k"]:
        """Diagonal of `W`; one column if it is the same for all outputs."""

    def hess_mv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n c ..."]:
        """`W v = R Rᵀ v`."""
        return self.mv(self.rmv(v))

    def folded(self, K: Float[Array, "nc nc"], c: int) -> Float[Array, "nr nr"]:
        """`RᵀKR`, with `c` rows of `K` per point."""
        m = K.shape[0]
        half = self.rmv(K.reshape(m // c, c, m)).reshape(-1, m)
        size = half.shape[0]
        return self.rmv(half.T.reshape(m // c, c, size)).reshape(size, size)

    def narrow(self) -> "AbstractFactor":
        """`R` without columns that are always empty: `rmv` then returns fewer rows per point."""
        return self

    @property
    def min_curvature(self) -> Float[Array, ""]:
        """The smallest eigenvalue divided by the largest. A value more negative than rounding explains
        means that the loss is not convex."""
        return jnp.zeros(())


class DiagonalFactor(AbstractFactor):
    """`R = diag(scale)`; one column (`(n, 1)`) if all outputs of a point have the same curvature."""

    scale: Float[Array, "n k"]

    def mv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n c ..."]:
        return _per_point(self.scale, v) * v

    def rmv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n c ..."]:
        return self.mv(v)

    def hess_diagonal(self) -> Float[Array, "n k"]:
        return self.scale**2


class SoftmaxFactor(AbstractFactor):
    r"""`R = √w (diag √p − p √pᵀ)`, so that `RRᵀ = w (diag p − p pᵀ)`: no eigendecomposition."""

    root_weights: Float[Array, "n 1"]
    root_probs: Float[Array, "n c"]

    def mv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n c ..."]:
        q, w = _per_point(self.root_probs, v), _per_point(self.root_weights, v)
        return w * q * (v - q * jnp.sum(q * v, axis=1, keepdims=True))

    def rmv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n c ..."]:
        q, w = _per_point(self.root_probs, v), _per_point(self.root_weights, v)
        return w * q * (v - jnp.sum(q * q * v, axis=1, keepdims=True))

    def hess_diagonal(self) -> Float[Array, "n k"]:
        p = self.root_probs**2
        return self.root_weights**2 * p * (1 - p)

    def narrow(self) -> AbstractFactor:
        c = self.root_probs.shape[1]
        if c == 1:
            return self
        # Householder: I − 2uuᵀ takes √p, which R maps to zero, to the last axis.
        last = jnp.zeros(c, self.root_probs.dtype).at[-1].set(1)
        u = self.root_probs + last[None, :]
        u = u / jnp.linalg.norm(u, axis=1, keepdims=True)
        eye = jnp.eye(c, dtype=u.dtype)
        turn = eye[None] - 2 * u[:, :, None] * u[:, None, :]
        return BlockFactor(self.mv(turn[:, :, :-1]), self.min_curvature)


class BlockFactor(AbstractFactor):
    """Dense blocks `R_i`, `c×c` for any convex loss, with fewer columns if the rank is known."""

    blocks: Float[Array, "n c r"]
    curvature: Float[Array, ""]

    def mv(self, v: Float[Array, "n r ..."]) -> Float[Array, "n c ..."]:
        return jnp.einsum("nij,nj...->ni...", self.blocks, v, precision="highest")

    def rmv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n r ..."]:
        return jnp.einsum("nji,nj...->ni...", self.blocks, v, precision="highest")

    def hess_diagonal(self) -> Float[Array, "n k"]:
        return jnp.sum(self.blocks**2, axis=2)

    @property
    def min_curvature(self) -> Float[Array, ""]:
        return self.curvature


def check_convex(what: str, lowest: float, dtype: DTypeLike) -> None:
    """Raise where the smallest eigenvalue of the loss's Hessian, over the largest, is no rounding."""
    if lowest < -CURVATURE_SLACK * float(jnp.finfo(dtype).eps):
        raise ValueError(
            f"{what}: the loss has negative curvature (smallest Hessian eigenvalue {lowest:.3g} of the "
            "largest). It must be convex in the outputs."
        )


class AbstractLoss(eqx.Module):
    """A convex function `ℓ(f, y)` of one point's outputs `f`, vectorised over points.

    All methods take `outputs` of shape `(n, c)` and targets as `prepare_targets` returns them.
    """

    @abc.abstractmethod
    def prepare_targets(self, targets: Numbers, num_outputs: int | None, dtype: DTypeLike) -> Array:
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


def numeric_targets(
    name: str, targets: Numbers, num_outputs: int | None, dtype: DTypeLike
) -> Array:
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


PROBABILITY_SLACK = 1e-3
"""Rows of probability targets may sum to one up to this error, because they are often float16 data."""


class SquaredError(AbstractLoss):
    """`½‖f − y‖²`. One Newton step in data space is exact retraining."""

    def prepare_targets(self, targets: Numbers, num_outputs: int | None, dtype: DTypeLike) -> Array:
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

    def prepare_targets(self, targets: Numbers, num_outputs: int | None, dtype: DTypeLike) -> Array:
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

    def prepare_targets(self, targets: Numbers, num_outputs: int | None, dtype: DTypeLike) -> Array:
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


def _one_hot(labels: np.ndarray, num_outputs: int | None, dtype: DTypeLike) -> Array:
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
