"""How far an answer can be from exact retraining."""

import sys
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._support.checks import check_concrete
from ._objective import Problem, State

ROUNDING_FACTOR = 4.0
"""Safety factor on the first-order, root-sum-square estimate of rounding."""


@dataclass(frozen=True)
class Certificate:
    r"""How far an answer can be from exact retraining.

    `L_w` is λ-strongly convex, so $\|\theta-\theta^\star\| \le \|\nabla L_w(\theta)\|/\lambda$ with
    $\|\nabla L_w\| = \sqrt{\rho^\top K\rho}$. The bound speaks of the linearised objective with the
    kernel in use. `rounding` is a first-order estimate (not a proof) of what floating point adds
    to the gradient; it is part of the bound, so the bound has a floor.
    """

    gradient_norm: float
    rounding: float
    parameter_norm: float
    ridge: float

    @property
    def distance_bound(self) -> float:
        """Upper bound on `‖θ − θ_retrained‖`."""
        return (self.gradient_norm + self.rounding) / self.ridge

    @property
    def relative_bound(self) -> float:
        """`distance_bound` over `‖θ − θ₀‖`."""
        return self.distance_bound / max(self.parameter_norm, sys.float_info.min)

    @property
    def at_floor(self) -> bool:
        """Whether the gradient has fallen to what rounding adds to it."""
        return self.gradient_norm <= self.rounding


class Norms(eqx.Module):
    """What a certificate is made of, on the device."""

    gradient: Float[Array, ""]
    rounding: Float[Array, ""]
    parameters: Float[Array, ""]

    def certificate(self, ridge: float) -> Certificate:
        """On the host, as plain numbers."""
        check_concrete("certificate", self.gradient)
        gradient, rounding, parameters = jax.device_get(
            (self.gradient, self.rounding, self.parameters)
        )
        return Certificate(float(gradient), float(rounding), float(parameters), ridge)


def measure_norms(
    problem: Problem,
    state: State,
    rho: Float[Array, "n c"],
    k_rho: Float[Array, "n c"],
    kernel_diagonal: Float[Array, "n c"],
) -> Norms:
    """The certificate's parts at `state` from its residual `ρ` and `Kρ`."""
    return Norms(
        gradient=_root(jnp.sum(rho * k_rho)),
        rounding=_rounding(problem, state, kernel_diagonal),
        parameters=_root(jnp.sum(state.alpha * state.k_alpha)),
    )


def _rounding(problem: Problem, state: State, diagonal: Float[Array, "n c"]) -> Array:
    """Rounding of `f = offset + Kα` and of `g + λα`, carried to `‖Jᵀδρ‖`, errors independent."""
    eps = jnp.finfo(state.alpha.dtype).eps
    diagonal = jnp.maximum(diagonal, 0)
    reach = jnp.sqrt(jnp.sum(diagonal * state.alpha**2))
    delta_f = jnp.abs(problem.outputs(state)) + jnp.sqrt(diagonal) * reach
    size = jnp.abs(problem.loss_grad(state)) + problem.ridge * jnp.abs(state.alpha)
    delta_rho = problem.factor(state).hess_diagonal() * delta_f + size
    return ROUNDING_FACTOR * eps * jnp.sqrt(jnp.sum(diagonal * delta_rho**2))


def _root(square: Array) -> Array:
    return jnp.sqrt(jnp.maximum(square, 0))
