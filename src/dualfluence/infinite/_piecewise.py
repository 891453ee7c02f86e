"""Piecewise linear activations: the arc-cosine family, and the interface of all activations."""

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ._gap import Joint, nearest_angle
from ._spec import AbstractLayer, Band, Records, Spec
from ._states import ImagePairs, Pairs, VectorPairs, settle
from ._windows import at_first, at_second


class AbstractActivation(AbstractLayer):
    r"""An elementwise $\phi$: $K' = E\phi(u)\phi(v)$, $\Theta' = \Theta\,E\phi'(u)\phi'(v)$.

    `dual` gives $K'$ with its gap (see `_gap`) and $E\phi'\phi'$ for pairs $(u, v)$.
    """

    @abc.abstractmethod
    def function(self, x: Array) -> Array:
        """The activation itself."""

    @abc.abstractmethod
    def dual(self, pair: Joint, q1: Array, q2: Array) -> tuple[Joint, Array]:
        """The pair after the activation, and the covariance of derivatives; `q1`, `q2`: variances after
        the activation."""

    @abc.abstractmethod
    def variance(self, q: Array) -> Array:
        r"""$E\phi(u)^2$ for $u$ of variance `q`."""

    def out_spec(self, spec: Spec) -> Spec:
        if not spec.gaussian:
            raise ValueError(
                f"{self}: an activation needs Gaussian inputs, that is, a Dense, Conv or "
                "GlobalSelfAttention after the input, after Flatten and after every other activation. "
                "Put a Dense or Conv before this one."
            )
        return replace(spec, gaussian=False, fresh=False)

    def record(self, state: Pairs, band: Band) -> tuple[Array, ...]:
        q = state.q1 if isinstance(state, ImagePairs) else state.joint.q1
        return (self.variance(q),)

    def pairs(self, state: Pairs, rec1: Records, rec2: Records, band: Band) -> Pairs:
        spec = self.out_spec(state.spec)
        if isinstance(state, ImagePairs):
            q1, q2 = at_first(rec1[0]), at_second(rec2[0], state.band)
        else:
            q1, q2 = rec1[0], rec2[0]
        joint, slope = self.dual(state.joint, q1, q2)
        ntk = None if state.ntk is None else state.ntk * slope
        if isinstance(state, VectorPairs):
            return VectorPairs(joint, ntk, spec, state.is_self)
        return settle(
            ImagePairs(rec1[0], rec2[0], joint.distance, ntk, state.band, spec, state.is_self)
        )

    def apply(self, params: PyTree, x: Array) -> Array:
        return self.function(x)


@dataclass(frozen=True)
class ABRelu(AbstractActivation):
    r"""$a\min(x,0) + b\max(x,0)$.

    With $\theta$ the angle of the pair,
    $K' = \frac{(a-b)^2}{2\pi}s(\sin\theta-\theta\cos\theta) + \frac{a^2+b^2}2 K$ and
    $E\phi'\phi' = \frac{a^2+b^2}2 - \frac{(a-b)^2}{2\pi}\theta$ (Cho & Saul 2009, degrees 1, 0);
    computed from the smaller of $\theta$ and $\pi-\theta$, so that no digits cancel. $s$ is the product of
    the two standard deviations. A zero vector
    counts as orthogonal to everything.
    """

    a: float
    b: float

    def function(self, x: Array) -> Array:
        return self.a * jnp.minimum(x, 0) + self.b * jnp.maximum(x, 0)

    def variance(self, q: Array) -> Array:
        return (self.a**2 + self.b**2) / 2 * q

    def dual(self, pair: Joint, q1: Array, q2: Array) -> tuple[Joint, Array]:
        a, b = self.a, self.b
        phi, bend = nearest_angle(pair)
        linear, curve = (a * a + b * b) / 2, (a - b) ** 2 / (2 * math.pi)
        s = pair.r1 * pair.r2
        bend = curve * s * bend
        ahead = pair.cov >= 0
        cov = jnp.where(ahead, linear * pair.cov, a * b * pair.cov) + bend
        behind = jnp.where(ahead, 0, (a + b) ** 2 / 2 * jnp.abs(pair.cov))
        minus = jnp.maximum(linear * pair.gap - bend + behind, 0)
        gap = jnp.where(cov >= 0, minus, 2 * linear * s - minus)
        slope = jnp.where(ahead, linear - curve * phi, a * b + curve * phi)
        # Homogeneous: the deviations only scale, which spares their square roots.
        r1, r2 = (math.sqrt(linear) * r for r in (pair.r1, pair.r2))
        return Joint(linear * pair.q1, linear * pair.q2, r1, r2, cov, gap), slope


def Relu() -> ABRelu:
    r"""$\max(x, 0)$."""
    return ABRelu(0.0, 1.0)


def LeakyRelu(alpha: float = 0.01) -> ABRelu:
    r"""$\max(x, 0) + \alpha\min(x, 0)$."""
    return ABRelu(alpha, 1.0)


def Abs() -> ABRelu:
    r"""$|x|$."""
    return ABRelu(-1.0, 1.0)


@dataclass(frozen=True)
class Sign(AbstractActivation):
    r"""The sign: $K' = 1 - 2\theta/\pi$. Its derivative is 0, so the NTK sees only later layers."""

    def function(self, x: Array) -> Array:
        return jnp.sign(x)

    def variance(self, q: Array) -> Array:
        return jnp.where(q > 0, jnp.ones_like(q), 0)

    def dual(self, pair: Joint, q1: Array, q2: Array) -> tuple[Joint, Array]:
        phi, _ = nearest_angle(pair)
        zero = pair.r1 * pair.r2 == 0
        gap = jnp.where(zero, 0, 2 * phi / math.pi)
        cov = jnp.where(zero, 0, jnp.where(pair.cov >= 0, 1 - gap, gap - 1))
        return Joint(q1, q2, q1, q2, cov, gap), jnp.zeros_like(cov)


Scalar = Callable[[Array], Array]
"""An elementwise function."""


def derivative(function: Scalar) -> Scalar:
    """Elementwise derivative of a scalar function."""
    return jnp.vectorize(jax.grad(function))
