"""Identity, LayerNorm and Dropout."""

from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ._gap import joint_from_minus, safe_sqrt
from ._spec import AbstractLayer, Band, Records, Spec
from ._states import ImagePairs, Pairs, VectorPairs, settle
from ._windows import at_first, at_second, same_pixel


def variances(state: VectorPairs | ImagePairs) -> Array:
    return state.q1 if isinstance(state, ImagePairs) else state.joint.q1


@dataclass(frozen=True)
class Identity(AbstractLayer):
    """Passes its input on: the skip of a residual block."""

    def out_spec(self, spec: Spec) -> Spec:
        return spec

    def record(self, state: Pairs, band: Band) -> tuple[Array, ...]:
        return (variances(state),)

    def pairs(self, state: Pairs, rec1: Records, rec2: Records, band: Band) -> Pairs:
        return state

    def apply(self, params: PyTree, x: Array) -> Array:
        return x


@dataclass(frozen=True)
class LayerNorm(AbstractLayer):
    r"""Normalise over channels, and over the spatial axes in `axis`.

    $K' = K/\sqrt{(\epsilon+\bar q_1)(\epsilon+\bar q_2)}$, with the variances averaged over the
    normalised spatial axes.

    **Arguments:**

    - `axis`: NHWC axes; must contain the channels (-1 or the last).
    - `eps`: added to the variance.
    """

    axis: int | tuple[int, ...] = -1
    eps: float = 1e-12

    def _axes(self, ndim: int) -> tuple[int, ...]:
        axes = (self.axis,) if isinstance(self.axis, int) else tuple(self.axis)
        axes = tuple(sorted({a + ndim if a < 0 else a for a in axes}))
        if ndim - 1 not in axes or axes[0] < 1 or axes[-1] >= ndim:
            raise ValueError(
                f"LayerNorm: axis must contain the channels (-1) and otherwise only spatial axes "
                f"of an input with {ndim} axes, got {self.axis}."
            )
        return axes

    def _spread(self, q: Array) -> Array:
        spatial = tuple(a - 1 for a in self._axes(q.ndim) if a < q.ndim - 1)
        return jnp.broadcast_to(self.eps + jnp.mean(q, axis=spatial, keepdims=True), q.shape)

    def out_spec(self, spec: Spec) -> Spec:
        self._axes(len(spec.shape) + 2)
        return spec

    def record(self, state: Pairs, band: Band) -> tuple[Array, ...]:
        q = variances(state)
        return (q / self._spread(q),)

    def pairs(self, state: Pairs, rec1: Records, rec2: Records, band: Band) -> Pairs:
        if isinstance(state, VectorPairs):
            old = state.joint
            scale = 1 / (jnp.sqrt(self._spread(old.q1)) * jnp.sqrt(self._spread(old.q2)))
            q1, q2 = rec1[0], rec2[0]
            joint = joint_from_minus(q1, q2, old.minus * scale)
            joint = joint._replace(cov=old.cov * scale, gap=old.gap * scale)
            ntk = None if state.ntk is None else state.ntk * scale
            return replace(state, joint=joint, ntk=ntk)
        inv1 = at_first(1 / jnp.sqrt(self._spread(state.q1)))
        inv2 = at_second(1 / jnp.sqrt(self._spread(state.q2)), state.band)
        # q1 inv1^2 + q2 inv2^2 - 2 K inv1 inv2, without subtracting what is equal.
        shift = (state.first * inv1 - state.second * inv2) * (inv1 - inv2)
        distance = jnp.maximum(state.distance * inv1 * inv2 + shift, 0)
        ntk = None if state.ntk is None else state.ntk * inv1 * inv2
        return settle(
            replace(state, q1=rec1[0], q2=rec2[0], distance=distance, ntk=ntk, pixels=None)
        )

    def apply(self, params: PyTree, x: Array) -> Array:
        axes = self._axes(x.ndim)
        mean = jnp.mean(x, axis=axes, keepdims=True)
        return (x - mean) / jnp.sqrt(jnp.var(x, axis=axes, keepdims=True) + self.eps)


@dataclass(frozen=True)
class Dropout(AbstractLayer):
    r"""Dropout; `rate` is the probability of KEEPING an entry.

    `mode="test"` is the identity. `mode="train"` divides the variance of every point by `rate`.
    Covariances of different points do not change, because their masks are independent. Equal
    points count as different, except a point with itself on the diagonal of `kernel(x)` and in
    `diagonal(x)`.
    """

    rate: float
    mode: Literal["test", "train"] = "test"

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(
                f"Dropout: rate is the probability of keeping, in (0, 1], got {self.rate}."
            )
        if self.mode not in ("test", "train"):
            raise ValueError(f"Dropout: mode must be 'test' or 'train', got {self.mode!r}.")

    @property
    def _gain(self) -> float:
        return 1 / self.rate if self.mode == "train" else 1.0

    def out_spec(self, spec: Spec) -> Spec:
        return spec

    def record(self, state: Pairs, band: Band) -> tuple[Array, ...]:
        return (self._gain * variances(state),)

    def pairs(self, state: Pairs, rec1: Records, rec2: Records, band: Band) -> Pairs:
        if self._gain == 1.0:
            return state
        q1, q2 = rec1[0], rec2[0]
        if isinstance(state, VectorPairs):
            if state.is_self:
                joint = joint_from_minus(q1, q2, jnp.zeros_like(q1))
                ntk = None if state.ntk is None else self._gain * state.ntk
                return replace(state, joint=joint, ntk=ntk)
            old = state.joint
            minus = safe_sqrt(q1) * safe_sqrt(q2) - old.cov
            return replace(state, joint=joint_from_minus(q1, q2, minus)._replace(cov=old.cov))
        first, second = at_first(q1), at_second(q2, state.band)
        distance = state.distance + (first - state.first) + (second - state.second)
        ntk = state.ntk
        if state.is_self:
            same = same_pixel(state.spec.shape, state.band)
            distance = jnp.where(same, 0, distance)
            ntk = None if ntk is None else jnp.where(same, self._gain * ntk, ntk)
        return settle(replace(state, q1=q1, q2=q2, distance=distance, ntk=ntk, pixels=None))

    def apply(self, params: PyTree, x: Array) -> Array:
        if self.mode == "train":
            raise ValueError(
                "Dropout: the finite network is deterministic; use mode='test' for `apply`."
            )
        return x


@dataclass(frozen=True)
class Scale(AbstractLayer):
    """Multiply by a constant, e.g. to weigh the branch of a residual block."""

    factor: float

    def out_spec(self, spec: Spec) -> Spec:
        return spec

    def record(self, state: Pairs, band: Band) -> tuple[Array, ...]:
        return (self.factor**2 * variances(state),)

    def pairs(self, state: Pairs, rec1: Records, rec2: Records, band: Band) -> Pairs:
        c = self.factor**2
        ntk = None if state.ntk is None else c * state.ntk
        if isinstance(state, ImagePairs):
            distance = c * state.distance
            return replace(state, q1=rec1[0], q2=rec2[0], distance=distance, ntk=ntk, pixels=None)
        old = state.joint
        joint = joint_from_minus(rec1[0], rec2[0], c * old.minus)
        return replace(state, joint=joint._replace(cov=c * old.cov, gap=c * old.gap), ntk=ntk)

    def apply(self, params: PyTree, x: Array) -> Array:
        return self.factor * x
