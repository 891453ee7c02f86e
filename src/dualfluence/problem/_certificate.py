r"""How far an answer can be from exact retraining, rounding included.

Rounding is estimated to first order, not proved. A product with `K` adds up terms $K_{ij}v_j$ with
$|K_{ij}| \le \sqrt{K_{ii}K_{jj}}$, so row `i` of it is off by about $\epsilon\sqrt{K_{ii}}\,r(v)$ with
the *reach* $r(v)$ of `v`, a norm of $\sqrt{K_{jj}}\,v_j$.

`Stats` is the record of a run: what it took, and how long.
"""

import math
import sys
from dataclasses import dataclass
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .._support.checks import check_concrete
from .._support.show import Shown, Table, count
from ._objective import HostArray, Problem, State

OnFailure = Literal["raise", "report"]


class NotConverged(RuntimeError):
    """A solve or a fit did not reach its tolerance. The message states the distance that was reached."""


class Stats(NamedTuple):
    """How an answer was reached.

    - `steps`: Newton steps.
    - `iterations`: iterations of the linear solver, over all steps.
    - `products`: products with `K`, all included.
    - `converged`: whether the answer is what was asked for; if rounding ended the run, `notes` say so.
    - `residual`: relative residual of the last linear solve.
    - `seconds`: wall time until the result was ready.
    - `solver`, `reason`: the linear solver, and why that one.
    - `notes`: what else happened: form of `K`, precision, preconditioner, floor of rounding.
    - `edits`: edits by a number of steps in a row, since the last answer that met a tolerance.
    """

    steps: int
    iterations: int
    products: int
    converged: bool
    residual: float
    seconds: float
    solver: str
    reason: str
    notes: tuple[str, ...] = ()
    edits: int = 0

    def summary(self) -> str:
        """The run in one line."""
        ended = "converged" if self.converged else "not converged"
        parts = (count(self.steps, "step"), count(self.products, "product") + " with K")
        return f"{', '.join(parts)}, {self.seconds:.2g} s, {ended}"

    def _table(self) -> Table:
        rows = [("run", self.summary()), ("solver", f"{self.solver} ({self.reason})")]
        rows.append(("iterations", f"{self.iterations:,}, relative residual {self.residual:.2g}"))
        if self.edits:
            rows.append(("edits", f"{self.edits:,} in a row since the last that met a tolerance"))
        return "Stats", [*rows, *(("note", note) for note in self.notes)]

    # A tuple has no other bases.
    __repr__, _repr_html_ = Shown.__repr__, Shown._repr_html_  # pyright: ignore


ROUNDING_FACTOR = 4.0
"""Safety factor on the estimate of rounding. With twice this value, certificates near their floor double."""

SIGN_FACTOR = 3.0
"""Assumed rounding of a sum of many terms, as a multiple of that for random signs.

Terms of one sign make partial sums grow, but sums run in blocks and lanes. With twice this value, the
floor of large problems doubles; small ones do not change, because for them the sum of magnitudes is the
smaller limit."""


SHARED = 2.0
"""Assumed error of a long sum of terms of one sign, in rounding units of `‖Jᵀα‖`, before
`ROUNDING_FACTOR`. For 200,000 equal terms 5 units were measured. With twice this value, fits of few
parameters and many points have bounds up to twice as large."""


@dataclass(frozen=True, repr=False)
class Certificate(Shown):
    r"""How far an answer can be from exact retraining.

    `L_w` is λ-strongly convex, so $\|\theta-\theta^\star\| \le \|\nabla L_w(\theta)\|/\lambda$ with
    $\|\nabla L_w\| = \sqrt{\rho^\top K\rho}$. The bound is about the linearised objective with the
    kernel in use. With a scale `P` of the ridge (see `linearize`) norms of parameters are taken with
    `P⁻¹` and norms of gradients with `P`. Parameter `k` may then be off by `√P_k` times the bound.

    - `gradient_norm`: `‖∇L_w‖` as computed.
    - `rounding`: a first-order estimate (not a proof) of the effect of floating point. It is part of
      the bound, so the bound has a floor.
    - `parameter_norm`: `‖θ − θ₀‖`.
    - `ridge`: `λ`.
    - `gap`: $\|\theta-\theta_0-J^\top\alpha\|$ of a model from `from_trained`; edits do not change it.
      $\nabla L_w = J^\top\rho + \lambda(\theta-\theta_0-J^\top\alpha)$, so the gap is added to the bound
      as it is, not divided by `λ`.
    - `certified`: `False` for a network that is not linear in its parameters; its bounds are `inf`.
    - `reading`: the rounding of parameters when they are returned in float32: half a rounding unit of each.
    - `noise`: how much of `gradient_norm` can be rounding, an estimate for rows that round
      independently. It is not part of the bound; steps end when the gradient has fallen to `noise`.
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
        """Upper bound on `‖θ − θ_retrained‖`; `inf` if there is none."""
        if not self.certified:
            return math.inf
        return (self.gradient_norm + self.rounding) / self.ridge + self.gap + self.reading

    @property
    def relative_bound(self) -> float:
        """`distance_bound` divided by a lower bound on `‖θ − θ₀‖`, which is `‖Jᵀα‖` less the gap. It is
        zero if both are zero."""
        if self.distance_bound == 0:
            return 0.0
        return self.distance_bound / max(self.parameter_norm - self.gap, sys.float_info.min)

    @property
    def at_floor(self) -> bool:
        """Whether the gradient is as small as the rounding in it."""
        return self.gradient_norm <= max(self.rounding, self.noise)

    def summary(self) -> str:
        """The bound in one line."""
        if not self.certified:
            return "none: the network is not linear in its parameters"
        gap = f", including a gap of {self.gap:.2g}" if self.gap else ""
        return f"‖θ − θ*‖ ≤ {self.distance_bound:.2g}, {self.relative_bound:.2g} of ‖θ − θ₀‖{gap}"

    def _table(self) -> Table:
        rows = [("bound", self.summary())]
        names = ("distance_bound", "relative_bound", "gradient_norm", "rounding", "parameter_norm")
        rows += [(name, f"{getattr(self, name):.6g}") for name in (*names, "ridge", "gap")]
        return "Certificate", [*rows, ("certified", str(self.certified))]


class Norms(eqx.Module):
    """The parts of a certificate, on the device."""

    gradient: Float[Array, ""]
    rounding: Float[Array, ""]
    parameters: Float[Array, ""]
    noise: Float[Array, ""]

    @property
    def at_floor(self) -> Bool[Array, ""]:
        """Whether the whole gradient may be rounding."""
        return self.gradient <= jnp.maximum(self.rounding, self.noise)

    def certificate(self, ridge: float) -> Certificate:
        """The same on the host, as plain numbers."""
        (only,) = self.certificates(ridge)
        return only

    def certificates(self, ridge: float) -> list[Certificate]:
        """One certificate for each column, or a single one."""
        check_concrete("certificate", self.gradient)
        parts = jax.device_get((self.gradient, self.rounding, self.parameters, self.noise))
        columns = zip(*(np.ravel(part).tolist() for part in parts), strict=True)
        return [
            Certificate(gradient, rounding, parameters, ridge, noise=noise)
            for gradient, rounding, parameters, noise in columns
        ]


def measure_norms(
    problem: Problem,
    state: State,
    rho: Float[Array, "n c"],
    k_rho: Float[Array, "n c"],
    kernel_diagonal: Float[Array, "n c"],
) -> Norms:
    """The parts of the certificate at `state`, from the residual `ρ` at `state` and from `Kρ`."""
    return norms_of_square(problem, state, rho, jnp.sum(rho * k_rho), kernel_diagonal)


def norms_of_square(
    problem: Problem,
    state: State,
    rho: Float[Array, "n c"],
    square: Float[Array, ""],
    kernel_diagonal: Float[Array, "n c"],
) -> Norms:
    """The same from `ρᵀKρ`, or from an upper bound on it."""
    root = jnp.sqrt(jnp.maximum(kernel_diagonal, 0))
    square = jnp.maximum(square, 0)
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
    """The norm of `√K_jj v_j` to which the rounding of a sum over `j` is proportional."""
    terms = root * jnp.abs(v)
    total = jnp.sum(terms)
    return jnp.minimum(total, SIGN_FACTOR * _norm(terms, total))


def _norm(terms: Float[Array, "n c"], total: Float[Array, ""]) -> Float[Array, ""]:
    """The norm of terms that are not negative. They are scaled by their sum, because squares of small
    terms are zero."""
    scale = jnp.clip(total, _tiny(terms), jnp.finfo(terms.dtype).max)
    return scale * jnp.sqrt(jnp.sum((terms / scale) ** 2))


def _carried(
    ridge: Float[HostArray, ""],
    root: Float[Array, "n c"],
    output_noise: Float[Array, "n c"],
    moved: Float[Array, "n c"],
) -> Float[Array, ""]:
    """How far outputs that are off by `δf` move the optimum, times `λ`, however the rounding of rows is
    correlated.

    Such outputs are exact for another offset, and its optimum is away by `‖(λ + JᵀWJ)⁻¹JᵀWδf‖`. As
    `σ/(λ + σ²)` is at most `1/(2√λ)` and at most `σ/λ`, that is at most `√(δfᵀWδf)/(2√λ)` and at most
    `‖JᵀWδf‖/λ`. `moved` is `|Wδf|` entry by entry.
    """
    # Roots first, so that products of small numbers do not underflow.
    square = jnp.sqrt(output_noise) * jnp.sqrt(moved)
    total = 0.5 * jnp.sqrt(ridge) * _norm(square, jnp.sum(square))
    return jnp.minimum(total, jnp.sum(root * moved))


def _output_noise(
    problem: Problem, state: State, root: Float[Array, "n c"], parameters: Float[Array, ""]
) -> Float[Array, "n c"]:
    """Rounding of `f = offset + Kα`.

    If terms of `Jᵀα` point the same way, its partial sums grow up to `‖Jᵀα‖`, and their rounding
    affects all rows.
    """
    product = root * (reach(root, state.alpha) + SHARED * parameters + state.drift)
    return problem.eps * (jnp.abs(problem.outputs(state)) + jnp.abs(state.k_alpha) + product)


def _tiny(like: Array) -> Array:
    return jnp.asarray(jnp.finfo(like.dtype).tiny, like.dtype)
