r"""Angles that do not cancel: a covariance is carried with its distance from being parallel.

For two centred Gaussians with standard deviations $r_1, r_2$, $s = r_1 r_2$ and covariance $K$,
the *gap* is $s - |K| \ge 0$. Computed from $s$ and $K$ near parallel points it loses half of the
digits of the angle; here every layer transforms the gap itself, by sums of non-negative terms.
"""

from typing import NamedTuple

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


def joint_from_minus(q1: Array, q2: Array, minus: Array) -> Joint:
    """A `Joint` from the variances and $s - K$."""
    r1, r2 = safe_sqrt(q1), safe_sqrt(q2)
    s = r1 * r2
    minus = jnp.clip(minus, 0, 2 * s)
    return Joint(q1, q2, r1, r2, s - minus, jnp.minimum(minus, 2 * s - minus))


def joint_from_distance(q1: Array, q2: Array, distance: Array) -> Joint:
    """A `Joint` from the variances and $E(u-v)^2$; exact where the two are equal."""
    r1, r2 = safe_sqrt(q1), safe_sqrt(q2)
    return joint_from_minus(q1, q2, (distance - (r1 - r2) ** 2) / 2)


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


def _angle_series(degree: int) -> np.ndarray:
    """Power coefficients in `2 g - 1` of `arccos(1 - g) / sqrt(g)` on [0, 1]."""

    def f(x: np.ndarray) -> np.ndarray:
        g = (x + 1) / 2
        return 2 * np.arcsin(np.sqrt(g / 2)) / np.sqrt(g)

    # Interpolation at Chebyshev points converges like 5.83^-degree (the singularity is at g = 2);
    # the power basis on [-1, 1] loses only 2.41^degree of that, so no digit at these degrees.
    return np.polynomial.chebyshev.cheb2poly(np.polynomial.chebyshev.chebinterpolate(f, degree))


_SERIES = {4: _angle_series(11), 8: _angle_series(22)}


def nearest_angle(joint: Joint) -> tuple[Array, Array, Array]:
    r"""The angle $\varphi\in[0,\pi/2]$ between the pair, taken to the nearer of parallel and opposite.

    **Returns:** $\varphi$, $\sin\varphi$ and $1-\cos\varphi$ = gap / s; a quarter turn where a
    variance is 0. A polynomial times a square root: it vectorises, `atan2` does not on CPUs.
    """
    s = joint.r1 * joint.r2
    g = jnp.clip(safe_divide(joint.gap, s, 1.0), 0, 1)
    root = safe_sqrt(g)
    series = _SERIES[8 if g.dtype.itemsize == 8 else 4]
    x = 2 * g - 1
    value = jnp.full_like(x, series[-1])
    for c in series[-2::-1]:
        value = value * x + float(c)
    return root * value, root * jnp.sqrt(2 - g), g
