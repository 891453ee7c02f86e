r"""Certified removal: Gaussian perturbation calibrated to the certificate.

Publish $\theta + \xi$, $\xi\sim N(0,\sigma^2I)$. The unlearned $\theta_u$ is within $\Delta$ of the
retrained optimum $\theta_r$ (the certificate), so distinguishing $\theta_u+\xi$ from $\theta_r+\xi$ is
distinguishing $N(0,1)$ from $N(\mu,1)$ with $\mu\le\Delta/\sigma$: $\mu$-Gaussian indistinguishability
(Dong, Roth and Su, 2022), and $(\epsilon,\delta)$ by the exact curve

$$\delta(\epsilon) = \Phi\!\left(\tfrac\mu2-\tfrac\epsilon\mu\right)
  - e^\epsilon\,\Phi\!\left(-\tfrac\mu2-\tfrac\epsilon\mu\right)$$

(Balle and Wang, 2018, theorem 8, the *analytic* Gaussian mechanism; the classic
$\sigma=\Delta\sqrt{2\ln(1.25/\delta)}/\epsilon$ is looser and holds for $\epsilon\le1$ only).
Publications compose as $\mu^2=\sum\mu_i^2$.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._support.compile import in_own_precision
from .._support.show import Shown, Table, described
from .._support.types import Inputs
from ..fitted._fitted import Fitted
from ..kernels._params import Shifted
from ._desk import Desk

NORMAL = NormalDist()


class BudgetSpent(RuntimeError):
    """Publishing would exceed the budget, even after retraining."""


def delta_of(epsilon: float, mu: float) -> float:
    """Smallest `δ` at `ε` for a Gaussian shift of `μ` (Balle and Wang, theorem 8)."""
    if mu == 0:
        return 0.0
    low = -mu / 2 - epsilon / mu
    # e^ε Φ(low) by logarithms: ε may be large where Φ is tiny.
    tail = NORMAL.cdf(low)
    second = math.exp(epsilon + math.log(tail)) if tail > 0 else 0.0
    return max(NORMAL.cdf(mu / 2 - epsilon / mu) - second, 0.0)


def mu_of(epsilon: float, delta: float) -> float:
    """Largest `μ` that satisfies (ε, δ), by bisection; rounded down."""
    if not epsilon > 0 or not 0 < delta < 1:
        raise ValueError(
            f"removal: expected ε > 0 and δ in (0, 1), got ε = {epsilon}, δ = {delta}."
        )
    low, high = 0.0, 1.0
    while delta_of(epsilon, high) < delta:
        high *= 2
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if delta_of(epsilon, middle) <= delta else (low, middle)
    return low


def sigma_of(distance: float, epsilon: float, delta: float) -> float:
    """Standard deviation of the noise that hides a distance at (ε, δ)."""
    return distance / mu_of(epsilon, delta)


class Published(NamedTuple):
    """A published result, and its cost.

    - `value`: perturbed parameters or outputs.
    - `mu`, `mu_total`: `μ` of this publication, and of all publications so far.
    - `epsilon`, `delta`: the equivalent of `mu_total` at the `δ` of the budget.
    - `retrained`: whether the budget made retraining necessary.
    """

    value: PyTree
    mu: float
    mu_total: float
    epsilon: float
    delta: float
    retrained: bool

    def _table(self) -> Table:
        return "Published", [(name, described(value)) for name, value in self._asdict().items()]

    __repr__, _repr_html_ = Shown.__repr__, Shown._repr_html_  # pyright: ignore


class Publisher:
    """Publishes the model of a desk under one budget; the ledger has the cost of earlier publications.

    **Arguments:**

    - `desk`: the desk of the model.
    - `epsilon`, `delta`: the budget over all publications.
    - `sigma`: standard deviation of the noise, in units of the parameters; with a scale `P` of the
      ridge, the noise of parameter `k` has standard deviation `σ√P_k`, because distances are certified
      in the norm of `P⁻¹`.
    """

    def __init__(self, desk: Desk, *, epsilon: float, delta: float, sigma: float) -> None:
        if not (math.isfinite(sigma) and sigma > 0):
            raise ValueError(f"removal: sigma must be positive, got {sigma}.")
        self.desk, self.delta, self.sigma = desk, delta, sigma
        self.limit = mu_of(epsilon, delta)

    @property
    def spent(self) -> float:
        """`μ` of all publications so far."""
        parts = [line["removal"]["mu"] for line in self.desk.ledger if line["kind"] == "publish"]
        return math.sqrt(sum(mu**2 for mu in parts))

    def params(self) -> Published:
        """`θ + N(0, σ²I)`, with a scale of the ridge `θ + N(0, σ²P)`."""
        return self._publish(lambda model, rng: perturbed_params(model, self.sigma, rng))

    def outputs(self, xq: Inputs) -> Published:
        """Outputs at queries plus `N(0, σ²K)`, for models without parameters."""
        return self._publish(lambda model, rng: perturbed_outputs(model, xq, self.sigma, rng))

    def _publish(self, draw: Callable[[Fitted, np.random.Generator], PyTree]) -> Published:
        mu, retrained = self._cost(), False
        if math.hypot(self.spent, mu) > self.limit:
            self.desk.retrain()
            mu, retrained = self._cost(), True
        total = math.hypot(self.spent, mu)
        if total > self.limit:
            raise BudgetSpent(
                f"removal: publishing would spend μ = {total:.3g} of {self.limit:.3g} even after "
                "retraining. Use a larger sigma or budget; a publication cannot be undone."
            )
        spent = {"mu": mu, "mu_total": total, "sigma": self.sigma, "delta": self.delta}
        spent |= {"mu_limit": self.limit, "retrained": retrained}
        # On record before anything leaves: a crash may lose a publication, never its cost.
        self.desk.record_publication(spent)
        value = draw(self.desk.model, np.random.default_rng())
        return Published(value, mu, total, epsilon_of(total, self.delta), self.delta, retrained)

    def _cost(self) -> float:
        bound = self.desk.certificate.distance_bound
        if not math.isfinite(bound):
            raise ValueError(
                "removal: this model has no certificate (the network is not linear in its "
                "parameters), so nobody knows how much noise would be enough."
            )
        return bound / self.sigma


def epsilon_of(mu: float, delta: float) -> float:
    """Smallest `ε` at `δ` for a Gaussian shift of `μ`, rounded up."""
    if delta_of(0.0, mu) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while delta_of(high, mu) > delta:
        high *= 2
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if delta_of(middle, mu) <= delta else (middle, high)
    return high


@in_own_precision
def perturbed_params(model: Fitted, sigma: float, rng: np.random.Generator) -> PyTree:
    """Parameters with noise in the norm of the certificate."""
    network = model.source.network
    entered = None if network is None else network.enter(model.params())
    if not isinstance(entered, Shifted):
        return perturbed(model.params(), sigma, rng)
    return replace(entered, move=perturbed(entered.move, sigma, rng)).params()


def perturbed(params: PyTree, sigma: float, rng: np.random.Generator) -> PyTree:
    """Every floating leaf with independent Gaussian noise."""

    def noisy(leaf: PyTree) -> PyTree:
        if not eqx.is_inexact_array(leaf):
            return leaf
        return leaf + jnp.asarray(sigma * rng.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree.map(noisy, params)


@in_own_precision
def perturbed_outputs(
    model: Fitted, xq: Inputs, sigma: float, rng: np.random.Generator
) -> Float[Array, "q c"]:
    r"""$f + \sigma K_{qq}^{1/2}z$, jointly over the queries.

    $\|f_u - f_r\|_{\mathcal H}\le\Delta$ gives $d^\top K_{qq}^{-1}d\le\Delta^2$ for the differences `d`
    at any points. Therefore the shift is again at most $\Delta/\sigma$. If a query is asked twice,
    publish the first answer again: fresh noise is a new publication.
    """
    outputs = model.predict(xq)
    q, c = outputs.shape
    queries = model.data.queries(xq)
    op = model.source.operator(queries, c, form="auto", progress=False)
    K = np.asarray(op.dense(), np.float64)
    values, vectors = np.linalg.eigh(0.5 * (K + K.T))
    root = vectors * np.sqrt(np.maximum(values, 0))
    noise = sigma * (root @ rng.standard_normal(q * c)).reshape(q, c)
    return outputs + jnp.asarray(noise, outputs.dtype)


__all__ = ["BudgetSpent", "Published", "Publisher", "delta_of", "epsilon_of", "mu_of", "sigma_of"]
