r"""The training set, the objective and its stationarity. Everything else builds on this file.

$$L_w(\theta) = \sum_i w_i\,\ell(f_i, y_i) + \tfrac{\lambda}{2}\|\theta-\theta_0\|^2,\qquad
  \theta = \theta_0 + J^\top\alpha,\quad f = f_0 + K\alpha,\quad
  \nabla L_w = J^\top\rho,\quad \rho = g + \lambda\alpha .$$
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._support.checks import check_queries
from .._support.points import Form
from .._support.show import Shown
from .._support.types import Inputs
from ..losses import AbstractFactor, AbstractLoss
from ..operators._base import Layout

# Weights and ridge come from the host, and compiled functions take them as they are.
if TYPE_CHECKING:
    HostArray = Array
else:
    HostArray = Array | np.ndarray


FLOAT = np.finfo(np.float64)


@dataclass(frozen=True, eq=False, repr=False)
class TrainingSet(Shown):
    """Features, prepared targets and sample weights `s`; the objective uses `w = s / Σs`.

    Removed points keep their row with weight zero: positions never shift and programs need no
    recompilation. `purged` are the positions whose features and targets were deleted, so that no edit
    can bring them back. `form` describes how rows of `x` unpack, if features are a tree of arrays.
    """

    x: Array
    targets: Array
    sample_weights: np.ndarray
    purged: np.ndarray | None = None
    form: Form | None = None

    @property
    def features(self) -> Inputs:
        """Features in the form in which they were given: one array, or a tree of arrays."""
        return self.x if self.form is None else self.form.unpack(self.x)

    def queries(self, xq: Inputs, name: str = "queries") -> Array:
        """Queries of the same form, checked, and packed if the features are a tree."""
        return check_queries(xq, self.x, name, form=self.form)

    def same_objective(self, other: "TrainingSet") -> bool:
        """Whether both have the same targets with the same weights; rows of weight zero do not count."""
        n, here, there = other.num_points, self.sample_weights, other.sample_weights
        if self.num_points != n and here[n:].any():
            return False
        if not np.array_equal(here[:n], there):
            return False
        if self.targets is other.targets:
            return True
        kept = there > 0
        return np.array_equal(np.asarray(self.targets)[:n][kept], np.asarray(other.targets)[kept])

    @property
    def num_points(self) -> int:
        return self.x.shape[0]

    @property
    def weights(self) -> np.ndarray:
        """`w_i = s_i / Σ_j s_j`, for a mean loss over the remaining points."""
        return normalised(self.sample_weights)


def normalised(sample_weights: np.ndarray) -> np.ndarray:
    """`s / Σs`, for each column if there are several, also if the sum overflows float64."""
    with np.errstate(over="ignore"):
        total = sample_weights.sum(axis=0)
    if not np.all((total >= FLOAT.tiny) & (total <= FLOAT.max)):
        sample_weights = sample_weights / sample_weights.max(axis=0)
        total = sample_weights.sum(axis=0)
    return sample_weights / total


class State(eqx.Module):
    """Dual variables and their product with `K`. Outputs and norms need nothing else.

    - `alpha`: `α`.
    - `k_alpha`: `Kα`, from one product or as the sum of several.
    - `drift`: the rounding in `k_alpha` beyond that of a single product, in the units of `reach`. It is
      zero right after `k_alpha` was computed as one product.
    """

    alpha: Float[Array, "n c"]
    k_alpha: Float[Array, "n c"]
    drift: Float[HostArray, ""]

    def __init__(self, alpha: Array, k_alpha: Array, drift: Any = None) -> None:
        self.alpha, self.k_alpha = alpha, k_alpha
        none: Any = np.zeros((), alpha.dtype)
        self.drift = none if drift is None else drift

    def moved(
        self, delta: Float[Array, "n c"], k_delta: Float[Array, "n c"], drift: Any = 0.0
    ) -> "State":
        """The state after a step whose product with `K` rounds by `drift`."""
        return State(self.alpha + delta, self.k_alpha + k_delta, self.drift + drift)


class Problem(eqx.Module):
    """A weighted training set and its kernel: `f = offset + Kα`.

    - `loss`, `targets`, `weights`: `ℓ`, `y` and `w`, which sum to one. Weights `(n, k)` stand for `k`
      problems, which `each_column` tells apart.
    - `ridge`: `λ`.
    - `offset`: outputs at `α = 0`.
    - `epsilon`: rounding unit of the arithmetic that made `K` and the outputs; by default that of
      their dtype.
    """

    loss: AbstractLoss
    targets: Array
    weights: Float[HostArray, " n"]
    ridge: Float[HostArray, ""]
    offset: Float[Array, "n c"]
    epsilon: float | None = eqx.field(static=True, default=None)

    @property
    def eps(self) -> float:
        own = float(jnp.finfo(self.offset.dtype).eps)
        return own if self.epsilon is None else max(own, self.epsilon)

    def outputs(self, state: State) -> Float[Array, "n c"]:
        return self.offset + state.k_alpha

    def value(self, state: State) -> Float[Array, ""]:
        """`L_w`, with `‖θ − θ₀‖² = αᵀKα`."""
        losses = self.loss.value(self.outputs(state), self.targets)
        ridge_term = 0.5 * self.ridge * jnp.sum(state.alpha * state.k_alpha)
        return jnp.sum(self.weights * losses) + ridge_term

    def value_noise(self, state: State) -> Float[Array, ""]:
        """An estimate of the rounding of `value`, from the rounding of the outputs and of the sum."""
        f = self.outputs(state)
        losses = jnp.abs(self.loss.value(f, self.targets))
        slopes = jnp.sum(jnp.abs(self.loss.grad(f, self.targets) * f), axis=1)
        ridge_term = self.ridge * jnp.sum(jnp.abs(state.alpha * state.k_alpha))
        return self.eps * (jnp.sum(self.weights * (losses + slopes)) + ridge_term)

    def loss_grad(self, state: State) -> Float[Array, "n c"]:
        """`g_i = w_i ∇ℓ_i`."""
        return self.weights[:, None] * self.loss.grad(self.outputs(state), self.targets)

    def residual(self, state: State) -> Float[Array, "n c"]:
        """`ρ = g + λα`, zero at the optimum."""
        return self.loss_grad(state) + self.ridge * state.alpha

    def residual_noise(self, state: State) -> Float[Array, "n c"]:
        """An estimate of the rounding of `residual` at the present outputs."""
        f = self.outputs(state)
        noise = self.loss.grad_noise(f, self.targets, jnp.zeros_like(f))
        size = jnp.abs(self.loss_grad(state)) + self.ridge * jnp.abs(state.alpha)
        return self.weights[:, None] * noise + self.eps * size

    def gradient_noise(
        self, state: State, output_noise: Float[Array, "n c"]
    ) -> Float[Array, "n c"]:
        """The change of `g` if outputs are off by `δf`: `wᵢ|Hᵢ|δfᵢ`, or an upper bound on it."""
        f = self.outputs(state)
        still = self.loss.grad_noise(f, self.targets, jnp.zeros_like(f))
        moved = self.loss.grad_noise(f, self.targets, output_noise) - still
        return self.weights[:, None] * jnp.maximum(moved, 0)

    def factor(self, state: State) -> AbstractFactor:
        """`R` with `RRᵀ = W`."""
        return self.loss.hess_factor(self.outputs(state), self.targets, self.weights)


def each_column(fn: Callable[..., Any], problem: Problem, *args: Any) -> Any:
    """`fn(problem, *args)`, or the same for each column of weights if they are `(n, k)`.

    Columns share all of the problem but the weights. Every array of `args` and of the result then has one
    more axis, the last. A product with `K` inside of `fn` becomes one product with `k` columns.
    """
    if problem.weights.ndim == 1:
        return fn(problem, *args)

    def column(weights: Array, args: tuple[Any, ...]) -> Any:
        return fn(eqx.tree_at(lambda p: p.weights, problem, weights), *args)

    return jax.vmap(column, in_axes=-1, out_axes=-1)(problem.weights, args)


def make_problem(
    data: TrainingSet,
    loss: AbstractLoss,
    ridge: float,
    offset: Float[Array, "n c"],
    layout: Layout,
    epsilon: float | None = None,
) -> Problem:
    """The objective's arrays, in the dtype of the outputs, on the rows of `layout`."""
    weights: Any = data.weights.astype(offset.dtype)
    if layout.sharding is None and layout.num_rows == data.num_points:
        # As they are: a compiled function takes arrays of the host faster than device_put does.
        scalar: Any = np.asarray(ridge, offset.dtype)
        return Problem(loss, data.targets, weights, scalar, offset, epsilon)
    targets, weights = layout.place(data.targets, "last"), layout.place(weights)
    return Problem(loss, targets, weights, layout.scalar(ridge, offset.dtype), offset, epsilon)
