"""Smooth activations with closed-form kernels."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._gap import Joint, coincide, joint_from_distance, joint_from_minus, safe_sqrt
from ._piecewise import AbstractActivation

SIGMOID_SCALE = 2.4020563531719796
"""Width at which an error function fits the logistic function best."""

GELU_LIPSCHITZ = 1.13
"""Upper bound on the slope of x Phi(x), attained near x = sqrt 2."""


def smooth_joint(pair: Joint, q1: Array, q2: Array, cov: Array, lipschitz: float | None) -> Joint:
    r"""The pair after a smooth activation with covariance `cov`.

    By $E(\phi(u)-\phi(v))^2 \le L^2 E(u-v)^2$ the distance is 0 at equal points, where
    $q_1' + q_2' - 2K'$ would leave rounding errors whose square root a later ReLU sees.
    """
    before = pair.distance
    distance = jnp.maximum(q1 + q2 - 2 * cov, 0)
    if lipschitz is None:
        distance = jnp.where(coincide(before, pair.q1, pair.q2), 0, distance)
    else:
        distance = jnp.minimum(distance, lipschitz**2 * before)
    joint = joint_from_distance(safe_sqrt(q1), safe_sqrt(q2), distance)
    return joint._replace(q1=q1, q2=q2, cov=cov)


class AbstractSmooth(AbstractActivation):
    """An activation given by its two expectations."""

    @property
    def lipschitz(self) -> float | None:
        """A bound on the slope, `None` where there is none."""
        return None

    def moments(self, pair: Joint) -> tuple[Array, Array]:
        r"""$E\phi(u)\phi(v)$ and $E\phi'(u)\phi'(v)$."""
        raise NotImplementedError

    def variance(self, q: Array) -> Array:
        return self.moments(joint_from_minus(q, q, jnp.zeros_like(q)))[0]

    def dual(self, pair: Joint, q1: Array, q2: Array) -> tuple[Joint, Array]:
        cov, slope = self.moments(pair)
        return smooth_joint(pair, q1, q2, cov, self.lipschitz), slope


def _determinant(pair: Joint, scale: float) -> Array:
    r"""$(1+cq_1)(1+cq_2) - c^2K^2$, the last difference taken from the gap."""
    s = pair.r1 * pair.r2
    return 1 + scale * (pair.q1 + pair.q2) + scale**2 * pair.gap * (2 * s - pair.gap)


@dataclass(frozen=True)
class Erf(AbstractSmooth):
    r"""$a\,\mathrm{erf}(bx) + c$ (Williams 1997):
    $K' = \frac{2a^2}\pi\arcsin\frac{2b^2K}{\sqrt{(1+2b^2q_1)(1+2b^2q_2)}} + c^2$."""

    a: float = 1.0
    b: float = 1.0
    c: float = 0.0

    @property
    def lipschitz(self) -> float:
        return 2 / math.sqrt(math.pi) * abs(self.a * self.b)

    def function(self, x: Array) -> Array:
        return self.a * jax.scipy.special.erf(self.b * x) + self.c

    def moments(self, pair: Joint) -> tuple[Array, Array]:
        b2 = self.b**2
        root = jnp.sqrt(_determinant(pair, 2 * b2))
        angle = jnp.arctan2(2 * b2 * pair.cov, root)
        return (
            2 / math.pi * self.a**2 * angle + self.c**2,
            4 / math.pi * self.a**2 * b2 / root,
        )


def SigmoidLike() -> Erf:
    """An error function fitted to the logistic function: $(1 + erf(x / 2.402)) / 2$."""
    return Erf(0.5, 1 / SIGMOID_SCALE, 0.5)


@dataclass(frozen=True)
class Gelu(AbstractSmooth):
    r"""$x\Phi(x)$, the exact GELU (not the tanh approximation).

    With $P = E\Phi(u)\Phi(v)$ and $F = E\varphi(u)\varphi(v)$, Stein's lemma gives
    $K' = KP + F\,[q_1q_2 - K^2 + K^2(\tfrac1{1+q_1}+\tfrac1{1+q_2})]$ and
    $E\phi'\phi' = P + KF\,[\tfrac1{1+q_1}+\tfrac1{1+q_2}+\tfrac1{(1+q_1)(1+q_2)-K^2}]$.
    """

    @property
    def lipschitz(self) -> float:
        return GELU_LIPSCHITZ

    def function(self, x: Array) -> Array:
        return jax.nn.gelu(x, approximate=False)

    def moments(self, pair: Joint) -> tuple[Array, Array]:
        K, det = pair.cov, _determinant(pair, 1.0)
        F = 1 / (2 * math.pi * jnp.sqrt(det))
        P = 0.25 + jnp.arctan2(K, jnp.sqrt(det)) / (2 * math.pi)
        shrink = 1 / (1 + pair.q1) + 1 / (1 + pair.q2)
        area = pair.gap * (2 * pair.r1 * pair.r2 - pair.gap)
        return K * P + F * (area + K * K * shrink), P + K * F * (shrink + 1 / det)


@dataclass(frozen=True)
class Sin(AbstractSmooth):
    r"""$a\sin(bx + c)$:
    $K' = \frac{a^2}2[e^{-b^2E(u-v)^2/2} - \cos 2c\; e^{-b^2E(u+v)^2/2}]$."""

    a: float = 1.0
    b: float = 1.0
    c: float = 0.0

    @property
    def lipschitz(self) -> float:
        return abs(self.a * self.b)

    def function(self, x: Array) -> Array:
        return self.a * jnp.sin(self.b * x + self.c)

    def moments(self, pair: Joint) -> tuple[Array, Array]:
        half, b2 = self.a**2 / 2, self.b**2
        near = jnp.exp(-b2 * pair.distance / 2)
        far = math.cos(2 * self.c) * jnp.exp(-b2 * (pair.q1 + pair.q2 - pair.distance / 2))
        return half * (near - far), half * b2 * (near + far)


def Cos(a: float = 1.0, b: float = 1.0, c: float = 0.0) -> Sin:
    r"""$a\cos(bx + c)$."""
    return Sin(a, b, c + math.pi / 2)


def Rbf(gamma: float = 1.0) -> Sin:
    r"""$\sqrt2\sin(\sqrt{2\gamma}\,x + \pi/4)$, whose kernel is $e^{-\gamma E(u-v)^2}$."""
    return Sin(math.sqrt(2), math.sqrt(2 * gamma), math.pi / 4)


@dataclass(frozen=True)
class Gaussian(AbstractSmooth):
    r"""$a\,e^{bx^2}$, $b<0$: $K' = a^2/\sqrt{\det(I-2b\Sigma)}$."""

    a: float = 1.0
    b: float = -1.0

    def __post_init__(self) -> None:
        if self.b > 0:
            raise ValueError(
                f"Gaussian: b must not be positive (no finite variance), got {self.b}."
            )

    @property
    def lipschitz(self) -> float:
        return abs(self.a) * math.sqrt(2 * abs(self.b) / math.e)

    def function(self, x: Array) -> Array:
        return self.a * jnp.exp(self.b * x * x)

    def moments(self, pair: Joint) -> tuple[Array, Array]:
        det = _determinant(pair, -2 * self.b)
        cov = self.a**2 / jnp.sqrt(det)
        return cov, 4 * self.b**2 * cov * pair.cov / det


@dataclass(frozen=True)
class Exp(AbstractSmooth):
    r"""$a\,e^{bx}$: $K' = a^2 e^{b^2E(u+v)^2/2}$."""

    a: float = 1.0
    b: float = 1.0

    def function(self, x: Array) -> Array:
        return self.a * jnp.exp(self.b * x)

    def moments(self, pair: Joint) -> tuple[Array, Array]:
        cov = self.a**2 * jnp.exp(self.b**2 * (pair.q1 + pair.q2 - pair.distance / 2))
        return cov, self.b**2 * cov


@dataclass(frozen=True)
class Polynomial(AbstractSmooth):
    r"""$\sum_i c_i x^i$, `coefs` from the constant up:
    $K' = \sum_k \frac{K^k}{k!}\,E\phi^{(k)}(u)\,E\phi^{(k)}(v)$."""

    coefs: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.coefs:
            raise ValueError("Polynomial: expected at least one coefficient, got none.")

    def function(self, x: Array) -> Array:
        return jnp.polyval(jnp.asarray(self.coefs[::-1], x.dtype), x)

    def moments(self, pair: Joint) -> tuple[Array, Array]:
        slopes = tuple(i * c for i, c in enumerate(self.coefs))[1:] or (0.0,)
        return _price(self.coefs, pair), _price(slopes, pair)


def _price(coefs: tuple[float, ...], pair: Joint) -> Array:
    total = jnp.zeros_like(pair.cov)
    for k in range(len(coefs)):
        means = _mean(coefs, pair.q1) * _mean(coefs, pair.q2)
        total = total + pair.cov**k / math.factorial(k) * means
        coefs = tuple(i * c for i, c in enumerate(coefs))[1:]
    return total


def _mean(coefs: tuple[float, ...], q: Array) -> Array:
    """Mean of the polynomial of a Gaussian of variance `q`: only even powers, (2m-1)!! q^m."""
    total = jnp.zeros_like(q)
    for m in range(0, len(coefs), 2):
        total = total + coefs[m] * math.prod(range(1, m, 2)) * q ** (m // 2)
    return total
