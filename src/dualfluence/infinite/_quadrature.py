"""Any other elementwise activation, by Gauss-Hermite quadrature."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._support.compile import HIGHEST
from ._gap import Joint, safe_divide, safe_sqrt
from ._piecewise import AbstractActivation, derivative
from ._smooth import smooth_joint


@lru_cache
def _hermite(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Quadrature points, and the weights that give the normalised Hermite coefficients."""
    z, w = np.polynomial.hermite_e.hermegauss(nodes)
    w = w / math.sqrt(2 * math.pi)
    rows = [np.ones_like(z), z]
    for k in range(1, nodes - 1):
        rows.append((z * rows[k] - math.sqrt(k) * rows[k - 1]) / math.sqrt(k + 1))
    return z, w * np.stack(rows[:nodes])


@dataclass(frozen=True)
class Activation(AbstractActivation):
    r"""Any elementwise function, by quadrature.

    The Hermite coefficients $h_k(q) = E\,\phi(\sqrt q z)He_k(z)/\sqrt{k!}$ come from Gauss-Hermite
    quadrature once per point, and Mehler's formula $K' = \sum_k h_k(q_1)h_k(q_2)\rho^k$ is a polynomial
    per pair, positive semi-definite by construction. The error falls fast in `nodes` for smooth $\phi$
    (tanh, softplus, swish, ...) at small variances. For $\phi = \operatorname{erf}$ it falls like
    $(2q\rho/(1+2q))^\text{nodes}$, so 64 nodes give 11 digits at $q=1$ but 4 for equal points at $q=3$.
    Kinks leave an error of order `1/nodes`; in the NTK at nearly equal points its order is `1/√nodes`.

    **Arguments:**

    - `function`: acts on arrays elementwise; its derivative is taken with `jax.grad`.
    - `nodes`: quadrature points, and terms of the sum.
    """

    function_: Callable[..., Array]
    nodes: int = 64

    def __post_init__(self) -> None:
        if not 2 <= self.nodes <= 180:
            raise ValueError(
                f"Activation: nodes must be between 2 and 180, got {self.nodes}. "
                "Gauss-Hermite weights underflow beyond."
            )

    def function(self, x: Array) -> Array:
        return self.function_(x)

    def _coefficients(self, function: Callable[..., Array], r: Array) -> Array:
        z, weights = _hermite(self.nodes)
        points = r[None] * jnp.asarray(z, r.dtype).reshape(-1, *[1] * r.ndim)
        weights = jnp.asarray(weights, r.dtype)
        return jnp.tensordot(weights, function(points), 1, precision=HIGHEST)

    def variance(self, q: Array) -> Array:
        return jnp.sum(self._coefficients(self.function_, safe_sqrt(q)) ** 2, axis=0)

    def dual(self, pair: Joint, q1: Array, q2: Array) -> tuple[Joint, Array]:
        s = pair.r1 * pair.r2
        near = safe_divide(pair.gap, s, 1.0)
        rho = jnp.where(pair.cov >= 0, 1 - near, near - 1)
        cov = self._mehler(self.function_, pair, rho)
        slope = self._mehler(derivative(self.function_), pair, rho)
        return smooth_joint(pair, q1, q2, cov, None), slope

    def _mehler(self, function: Callable[..., Array], pair: Joint, rho: Array) -> Array:
        h1 = self._coefficients(function, pair.r1)
        h2 = self._coefficients(function, pair.r2)
        total = h1[-1] * h2[-1]
        for k in range(self.nodes - 2, -1, -1):
            total = total * rho + h1[k] * h2[k]
        return total

    def __repr__(self) -> str:
        name = getattr(self.function_, "__name__", repr(self.function_))
        return f"Activation({name}, nodes={self.nodes})"

    @property
    def note(self) -> str:
        return f"Gauss-Hermite quadrature, {self.nodes} nodes"
