r"""Angles without cancellation: each covariance is stored with its distance from the parallel case.

For two centred Gaussians with standard deviations $r_1, r_2$, $s = r_1 r_2$ and covariance $K$, the
*gap* is $s - |K| \ge 0$. If it is computed from $s$ and $K$, half of the digits of the angle are lost
near parallel points. Here every layer transforms the gap itself, by sums of non-negative terms.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


class Joint(NamedTuple):
    """Pairs of Gaussians, all arrays broadcast against each other."""

    q1: Array  # variance of the first
    q2: Array  # variance of the second
    r1: Array  # their square roots
    r2: Array
    cov: Array
    gap: Array  # r1 r2 - |cov|

    @property
    def minus(self) -> Array:
        """$s - K$ without cancellation."""
        return jnp.where(self.cov >= 0, self.gap, 2 * self.r1 * self.r2 - self.gap)

    @property
    def distance(self) -> Array:
        r"""$E(u-v)^2 = 2(s - K) + (r_1 - r_2)^2$."""
        return 2 * self.minus + (self.r1 - self.r2) ** 2


def safe_sqrt(x: Array) -> Array:
    """Square root, 0 and with derivative 0 where `x <= 0`."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


def safe_divide(x: Array, y: Array, otherwise: float = 0.0) -> Array:
    """`x / y`, `otherwise` and with derivative 0 where `y` is 0."""
    nonzero = y != 0
    return jnp.where(nonzero, x / jnp.where(nonzero, y, 1), otherwise)


def coincide(distance: Array, q1: Array, q2: Array) -> Array:
    """Whether the two are equal up to rounding.

    Not `distance == 0`: compilers fuse multiplications into the difference of two equal products,
    which leaves the rounding error of one of them, squared.
    """
    eps = jnp.finfo(distance.dtype).eps
    return distance <= (8 * eps) ** 2 * (q1 + q2)


def joint_from_minus(q1: Array, q2: Array, minus: Array) -> Joint:
    """A `Joint` from the variances and $s - K$."""
    r1, r2 = safe_sqrt(q1), safe_sqrt(q2)
    s = r1 * r2
    minus = jnp.clip(minus, 0, 2 * s)
    return Joint(q1, q2, r1, r2, s - minus, jnp.minimum(minus, 2 * s - minus))


def joint_from_distance(r1: Array, r2: Array, distance: Array) -> Joint:
    """A `Joint` from the deviations and $E(u-v)^2$; exact where the two are equal."""
    s = r1 * r2
    minus = jnp.clip((distance - (r1 - r2) ** 2) / 2, 0, 2 * s)
    return Joint(r1 * r1, r2 * r2, r1, r2, s - minus, jnp.minimum(minus, 2 * s - minus))


def add_joints(left: Joint, right: Joint, q1: Array, q2: Array) -> Joint:
    r"""The sum of two independent pairs, `q1` and `q2` the summed variances.

    The gaps add, plus the Cauchy-Schwarz defect
    $s - s_l - s_r = (r_{1l}r_{2r} - r_{1r}r_{2l})^2 / (s + s_l + s_r)$.
    """
    r1, r2 = safe_sqrt(q1), safe_sqrt(q2)
    s_left, s_right = left.r1 * left.r2, right.r1 * right.r2
    cross = (left.r1 * right.r2 - right.r1 * left.r2) ** 2
    defect = safe_divide(cross, r1 * r2 + s_left + s_right)
    minus = left.minus + right.minus + defect
    plus = (2 * s_left - left.minus) + (2 * s_right - right.minus) + defect
    cov = left.cov + right.cov
    return Joint(q1, q2, r1, r2, cov, jnp.where(cov >= 0, minus, plus))


def _series(function: Callable[[np.ndarray], np.ndarray], degree: int) -> list[float]:
    """Power coefficients in `2 g - 1` of a function of `g` on [0, 1], highest first."""
    # Interpolation at Chebyshev points converges like 5.83^-degree (the singularity is at g = 2);
    # the power basis on [-1, 1] loses only 2.41^degree of that, so no digit at these degrees.
    target: Any = lambda x: function((x + 1) / 2)  # noqa: E731
    cheb = np.polynomial.chebyshev.chebinterpolate(target, degree)
    return np.polynomial.chebyshev.cheb2poly(cheb)[::-1].tolist()


def _angle(g: np.ndarray) -> np.ndarray:
    r"""$\varphi/\sqrt g$ for $\cos\varphi = 1-g$."""
    return 2 * np.arcsin(np.sqrt(g / 2)) / np.sqrt(g)


def _bend(g: np.ndarray) -> np.ndarray:
    r"""$(\sin\varphi-\varphi\cos\varphi)/g^{3/2}$, near 0 by its own series."""
    direct = (np.sqrt(2 - g) - (1 - g) * _angle(g)) / g
    k = np.arange(1, 40)
    # sin f - f cos f = sum_k (-1)^(k+1) 2k f^(2k+1) / (2k+1)!
    f = _angle(g) * np.sqrt(g)
    terms = (-1.0) ** (k + 1) * 2 * k * f[..., None] ** (2 * k + 1)
    factorials = np.cumprod(np.concatenate([[6.0], (2 * k[1:]) * (2 * k[1:] + 1.0)]))
    small = np.sum(terms / factorials, axis=-1) / g**1.5
    return np.where(g < 0.5, small, direct)


_DEGREES = {4: 11, 8: 22}
_ANGLE = {size: _series(_angle, degree) for size, degree in _DEGREES.items()}
_BEND = {size: _series(_bend, degree) for size, degree in _DEGREES.items()}


def _polynomial(coefs: list[float], x: Array) -> Array:
    value = coefs[0] * x + coefs[1]
    for c in coefs[2:]:
        value = value * x + c
    return value


def nearest_angle(joint: Joint) -> tuple[Array, Array]:
    r"""The angle $\varphi\in[0,\pi/2]$ of the pair to the nearer of parallel and opposite.

    **Returns:** $\varphi$ and $\sin\varphi-\varphi\cos\varphi$; a quarter turn where a variance
    is 0. Polynomials in the gap times a square root: they vectorise, `atan2` does not on CPUs,
    and there is no division per pair.
    """
    inverse1, inverse2 = (safe_divide(jnp.ones_like(r), r) for r in (joint.r1, joint.r2))
    scale = inverse1 * inverse2
    g = jnp.where(scale > 0, jnp.clip(joint.gap * scale, 0, 1), 1)
    root = safe_sqrt(g)
    x, size = 2 * g - 1, 8 if g.dtype.itemsize == 8 else 4
    return root * _polynomial(_ANGLE[size], x), root * g * _polynomial(_BEND[size], x)
