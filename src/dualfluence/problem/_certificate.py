r"""How far an answer can be from exact retraining, rounding included.

Rounding is estimated to first order, not proved. A product with `K` adds up terms $K_{ij}v_j$ with
$|K_{ij}| \le \sqrt{K_{ii}K_{jj}}$, so row `i` of it is off by about $\epsilon\sqrt{K_{ii}}\,r(v)$ with
the *reach* $r(v)$ of `v`, a norm of $\sqrt{K_{jj}}\,v_j$.
"""

import math
import sys
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._support.checks import check_concrete
from .._support.show import Shown, Table
from ._objective import AnyArray, Problem, State

ROUNDING_FACTOR = 4.0
"""Safety factor on the estimate of rounding. Doubled, certificates near their floor double."""

SIGN_FACTOR = 3.0
"""How much larger than for signs at random a sum's rounding is taken to be, where it has many terms.

Terms of one sign make partial sums grow, but sums run in blocks and lanes. Doubled, the floor of
large problems doubles; small ones, where the sum of magnitudes is smaller, do not notice."""


SHARED = 2.0
"""Rounding units of `‖Jᵀα‖` that a long sum of terms of one sign is off by, before `ROUNDING_FACTOR`.
Measured: 5 of 200,000 equal terms. Doubled, fits of few parameters and many points have bounds up to
twice as large."""


@dataclass(frozen=True, repr=False)
class Certificate(Shown):
    r"""How far an answer can be from exact retraining.

    `L_w` is λ-strongly convex, so $\|\theta-\theta^\star\| \le \|\nabla L_w(\theta)\|/\lambda$ with
    $\|\nabla L_w\| = \sqrt{\rho^\top K\rho}$. The bound speaks of the linearised objective with the
    kernel in use. With a scale `P` of the ridge (see `linearize`) every norm here is that of `P⁻¹`, that of
    gradients the one of `P`: parameter `k` may be off by `√P_k` times the bound.

    - `gradient_norm`: `‖∇L_w‖` as computed.
    - `rounding`: a first-order estimate (not a proof) of what floating point adds to it; it is part
      of the bound, so the bound has a floor.
    - `parameter_norm`: `‖θ − θ₀‖`.
    - `ridge`: `λ`.
    - `gap`: $\|\theta-\theta_0-J^\top\alpha\|$ of a model from `from_trained`, which no edit changes.
      $\nabla L_w = J^\top\rho + \lambda(\theta-\theta_0-J^\top\alpha)$, so it adds to the bound as it is.
    - `certified`: `False` for a network that is not linear in its parameters; its bounds are `inf`.
    - `reading`: what is lost where parameters are handed out in float32: half a rounding unit of each.
    - `noise`: how much of `gradient_norm` rounding can be, an estimate for rows that round independently. No
      part of the bound; steps end where the gradient has fallen to it.
    """

    gradient_norm: float
    rounding: float
    parameter_norm: float
    ridge: float
    gap: float = 0.0
    certified: bool = True
    reading: float = 0.0
    noise: float = 0.0

    @property
    def distance_bound(self) -> float:
        """Upper bound on `‖θ − θ_retrained‖`; `inf` where there is none."""
        if not self.certified:
            return math.inf
        return (self.gradient_norm + self.rounding) / self.ridge + self.gap + self.reading

    @property
    def relative_bound(self) -> float:
        """`distance_bound` over `‖θ − θ₀‖`, at least `‖Jᵀα‖` less the gap; zero where both are."""
        if self.distance_bound == 0:
            return 0.0
        return self.distance_bound / max(self.parameter_norm - self.gap, sys.float_info.min)

    @property
    def at_floor(self) -> bool:
        """Whether the gradient has fallen to what rounding adds to it."""
        return self.gradient_norm <= max(self.rounding, self.noise)

    def summary(self) -> str:
        """The bound in one line."""
        if not self.certified:
            return "none: the network is not linear in its parameters"
        gap = f", of which a gap of {self.gap:.2g}" if self.gap else ""
        return f"‖θ − θ*‖ ≤ {self.distance_bound:.2g}, {self.relative_bound:.2g} of ‖θ − θ₀‖{gap}"

    def _table(self) -> Table:
        rows = [("bound", self.summary())]
        names = ("distance_bound", "relative_bound", "gradient_norm", "rounding", "parameter_norm")
        rows += [(name, f"{getattr(self, name):.6g}") for name in (*names, "ridge", "gap")]
        return "Certificate", [*rows, ("certified", str(self.certified))]


class Norms(eqx.Module):
    """What a certificate is made of, on the device."""

    gradient: Float[Array, ""]
    rounding: Float[Array, ""]
    parameters: Float[Array, ""]
    noise: Float[Array, ""]

    @property
    def at_floor(self) -> Bool[Array, ""]:
        """Whether the gradient may be all rounding."""
        return self.gradient <= jnp.maximum(self.rounding, self.noise)

    def certificate(self, ridge: float) -> Certificate:
        """On the host, as plain numbers."""
        check_concrete("certificate", self.gradient)
        gradient, rounding, parameters, noise = map(
            float, jax.device_get((self.gradient, self.rounding, self.parameters, self.noise))
        )
        return Certificate(gradient, rounding, parameters, ridge, noise=noise)


def measure_norms(
    problem: Problem,
    state: State,
    rho: Float[Array, "n c"],
    k_rho: Float[Array, "n c"],
    kernel_diagonal: Float[Array, "n c"],
) -> Norms:
    """The certificate's parts at `state` from its residual `ρ` and `Kρ`."""
    return norms_of_square(problem, state, rho, jnp.sum(rho * k_rho), kernel_diagonal)


def norms_of_square(
    problem: Problem,
    state: State,
    rho: Float[Array, "n c"],
    square: Float[Array, ""],
    kernel_diagonal: Float[Array, "n c"],
) -> Norms:
    """The same from `ρᵀKρ`, or from what it is at most."""
    root = jnp.sqrt(jnp.maximum(kernel_diagonal, 0))
    square = jnp.maximum(square, 0)
    # ρᵀKρ can cancel, to zero where ρ is in the null space of Jᵀ: its own rounding stays below
    # the root.
    parameters = jnp.sqrt(jnp.maximum(jnp.sum(state.alpha * state.k_alpha), 0))
    # ρᵀKρ can cancel, to zero where ρ is in the null space of Jᵀ: its own rounding stays below
    # the root.
    size, own_noise = reach(root, rho), problem.residual_noise(state)
    output_noise = _output_noise(problem, state, root, parameters)
    moved = problem.gradient_noise(state, output_noise)
    # So does its underflow, one loss per term of the sum, except where the residual is exactly zero
    # or the kernel in use is.
    some = jnp.any((root > 0) & ((rho != 0) | (own_noise + moved > 0)))
    lost = jnp.where(some, rho.size * _tiny(size), 0)
    own = ROUNDING_FACTOR * problem.eps * size**2 + lost
    more = own / jnp.maximum(jnp.sqrt(square + own) + jnp.sqrt(square), _tiny(own))
    alone, both = root * own_noise, root * (own_noise + moved)
    carried = _carried(problem.ridge, root, output_noise, moved)
    return Norms(
        gradient=jnp.sqrt(square),
        rounding=more + ROUNDING_FACTOR * (_norm(alone, jnp.sum(alone)) + carried),
        parameters=parameters,
        noise=more + ROUNDING_FACTOR * _norm(both, jnp.sum(both)),
    )


def reach(root: Float[Array, "n c"], v: Float[Array, "n c"]) -> Float[Array, ""]:
    """The norm of `√K_jj v_j` that rounding of a sum over `j` is in proportion to."""
    terms = root * jnp.abs(v)
    total = jnp.sum(terms)
    return jnp.minimum(total, SIGN_FACTOR * _norm(terms, total))


def _norm(terms: Float[Array, "n c"], total: Float[Array, ""]) -> Float[Array, ""]:
    """Of terms that are not negative, scaled by their sum, because squares of small ones are zero."""
    scale = jnp.clip(total, _tiny(terms), jnp.finfo(terms.dtype).max)
    return scale * jnp.sqrt(jnp.sum((terms / scale) ** 2))


def _carried(
    ridge: Float[AnyArray, ""],
    root: Float[Array, "n c"],
    output_noise: Float[Array, "n c"],
    moved: Float[Array, "n c"],
) -> Float[Array, ""]:
    """What outputs that are off by `δf` do to the optimum, times `λ`, however rows round together.

    They are exact for another offset, whose optimum is away by `‖(λ + JᵀWJ)⁻¹JᵀWδf‖`. As `σ/(λ + σ²)` is at
    most `1/(2√λ)` and at most `σ/λ`, that is at most `√(δfᵀWδf)/(2√λ)` and at most `‖JᵀWδf‖/λ`. `moved` is
    `|Wδf|` entry by entry.
    """
    # Roots first, so that products of small numbers do not underflow.
    square = jnp.sqrt(output_noise) * jnp.sqrt(moved)
    total = 0.5 * jnp.sqrt(ridge) * _norm(square, jnp.sum(square))
    return jnp.minimum(total, jnp.sum(root * moved))


def _output_noise(
    problem: Problem, state: State, root: Float[Array, "n c"], parameters: Float[Array, ""]
) -> Float[Array, "n c"]:
    """Rounding of `f = offset + Kα`.

    Where terms of `Jᵀα` point the same way, its partial sums grow up to `‖Jᵀα‖`, and all rows share what
    rounding does to them.
    """
    product = root * (reach(root, state.alpha) + SHARED * parameters + state.drift)
    return problem.eps * (jnp.abs(problem.outputs(state)) + jnp.abs(state.k_alpha) + product)


def _tiny(like: Array) -> Array:
    return jnp.asarray(jnp.finfo(like.dtype).tiny, like.dtype)
