r"""The one objective, its stationarity and its certificate. Everything else builds on this file.

$$L_w(\theta) = \sum_i w_i\,\ell(f_i, y_i) + \tfrac{\lambda}{2}\|\theta-\theta_0\|^2,\qquad
  \theta = \theta_0 + J^\top\alpha,\quad f = f_0 + K\alpha,\quad
  \nabla L_w = J^\top\rho,\quad \rho = g + \lambda\alpha .$$
"""

from typing import TYPE_CHECKING

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..losses import AbstractFactor, AbstractLoss

# Weights and ridge come from the host, and compiled functions take them as they are.
if TYPE_CHECKING:
    AnyArray = Array
else:
    AnyArray = Array | np.ndarray


class State(eqx.Module):
    """Dual variables and their product with `K`, which is all that outputs and norms need."""

    alpha: Float[Array, "n c"]
    k_alpha: Float[Array, "n c"]

    def moved(self, delta: Float[Array, "n c"], k_delta: Float[Array, "n c"]) -> "State":
        return State(self.alpha + delta, self.k_alpha + k_delta)


class Problem(eqx.Module):
    """A weighted training set seen through a kernel: `f = offset + Kα`."""

    loss: AbstractLoss
    targets: Array
    weights: Float[AnyArray, " n"]
    ridge: Float[AnyArray, ""]
    offset: Float[Array, "n c"]

    def outputs(self, state: State) -> Float[Array, "n c"]:
        return self.offset + state.k_alpha

    def value(self, state: State) -> Float[Array, ""]:
        """`L_w`, with `‖θ − θ₀‖² = αᵀKα`."""
        losses = self.loss.value(self.outputs(state), self.targets)
        ridge_term = 0.5 * self.ridge * jnp.sum(state.alpha * state.k_alpha)
        return jnp.sum(self.weights * losses) + ridge_term

    def loss_grad(self, state: State) -> Float[Array, "n c"]:
        """`g_i = w_i ∇ℓ_i`."""
        return self.weights[:, None] * self.loss.grad(self.outputs(state), self.targets)

    def residual(self, state: State) -> Float[Array, "n c"]:
        """`ρ = g + λα`, zero at the optimum."""
        return self.loss_grad(state) + self.ridge * state.alpha

    def factor(self, state: State) -> AbstractFactor:
        """`R` with `RRᵀ = W`."""
        return self.loss.hess_factor(self.outputs(state), self.targets, self.weights)
