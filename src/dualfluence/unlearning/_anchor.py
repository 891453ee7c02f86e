r"""The data that a stream of removals keeps from one factorisation.

At an *anchor*, a state with curvature `W₀`, let $A = \lambda I + W_0K$. Its inverse is stored as

$$N = KA^{-1} = \tfrac1\lambda\left(K - KR\,B^{-1}R^\top K\right),\qquad A^{-1} = \tfrac1\lambda(I - W_0N),$$

so that one symmetric matrix gives both a step and its product with `K`.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._support.compile import ARRAYS, HIGHEST, filter_jit
from .._support.memory import memory_budget
from ..fitted._fitted import Fitted
from ..linalg import Krylov, lanczos
from ..losses import AbstractFactor
from ..operators import AbstractKernelOperator
from ..problem._objective import Problem, State
from ..solvers import SpectralPreconditioner, spectral_preconditioner
from ._anchor_mesh import fits_on_mesh, invert_on_mesh

MATRICES = 4
"""Number of matrices of the size of `K` that a factorisation holds at once."""

BOUND_RANK = 512
"""Columns of the sketch that bounds `ρᵀKρ`. With twice this value, certificates tighten a little and
cost more."""

KRYLOV_STEPS, KRYLOV_SHARE = 60, 0.95
"""Steps of Lanczos' method for the norm of what the sketch leaves, and the share of that norm that a
random start reaches but for a chance of `1.65√(n·c)·exp(−119√0.05)`, 5e-10 at 10⁴ (Kuczyński and
Woźniakowski, 1992, theorem 4.2). The power method attains two thirds in as many steps."""

SLACK = 64.0
"""Assumed error of a product with `L`, in rounding units of float32 and relative to the norm of `L`. It
is a thousandth of what the remainder adds."""

PROBES, PROBE_SAFETY = 16, 2.0
"""Random vectors that measure how far `N` is from `KA⁻¹` row by row, and the factor on what they show:
16 squares fall below a quarter of their mean with a chance of 1e-4."""


class Majorant(eqx.Module):
    """`K ≼ LLᵀ + eI`, so that `ρᵀKρ` is bounded by a thin product; or `K` itself if it is small.

    - `features`: `Lᵀ` in float32, which every request reads; `None` for `K` itself.
    - `rest`: `e`, for `L` as it is stored.
    - `slack`: how much rounding of `Lᵀρ` can add to its norm, for a `ρ` of norm one.
    """

    features: Float[Array, "r nc"] | None
    rest: Float[Array, ""]
    slack: Float[Array, ""]

    def square(self, op: AbstractKernelOperator, v: Float[Array, "n c"]) -> Float[Array, ""]:
        """An upper bound on `vᵀKv`."""
        if self.features is None:
            return jnp.sum(v * op.mv(v))
        # A vector of zeros is not scaled: its bound is zero, and there is nothing to divide by.
        norm = jnp.linalg.norm(v)
        # Scaled first: squares of a small residual would leave the range of float32.
        unit = (v / jnp.where(norm > 0, norm, 1)).astype(self.features.dtype).reshape(-1)
        inner = jnp.linalg.norm(jnp.dot(self.features, unit, precision=HIGHEST)).astype(v.dtype)
        return norm**2 * ((inner + self.slack) ** 2 + self.rest)


class Anchor(eqx.Module):
    """A state's curvature and the explicit inverse that goes with it.

    - `op`: `K`.
    - `problem`: the objective; later objectives of the stream differ only in their weights.
    - `N`: `K(λI + W₀K)⁻¹`, shape `(n·c, n·c)`, symmetric. On a mesh its columns are on the devices.
    - `hess`, `roots`: `W₀` and `R` of `W₀ = RRᵀ` in blocks, with the weights of the anchor.
    - `alpha`, `n_alpha`: `α` at the anchor, and `Nα`.
    - `kernel_diagonal`: diagonal of `K`.
    - `error`: largest error of a row of `N` over `√K_ii`, in units of rounding.
    - `majorant`: bounds `ρᵀKρ`.
    """

    op: AbstractKernelOperator
    problem: Problem
    N: Float[Array, "nc nc"]
    hess: Float[Array, "n c c"]
    roots: Float[Array, "n c c"]
    alpha: Float[Array, "n c"]
    n_alpha: Float[Array, "n c"]
    kernel_diagonal: Float[Array, "n c"]
    error: Float[Array, ""]
    majorant: Majorant


def can_anchor(fitted: Fitted) -> bool:
    """Whether the explicit inverse exists for this structure of `K` and fits into memory."""
    op, ref = fitted.kernel_op, fitted.reference
    if ref is not None and ref.certified and not ref.proven:
        return False  # a network that was only found linear is looked at after every edit
    if op.layout.sharding is not None:
        return fits_on_mesh(fitted)
    if not op.has_entries:
        return False
    size = op.num_points * op.num_outputs
    # Beyond that a removal goes through a fit's solver, which needs less memory and more time.
    return MATRICES * size**2 * jnp.dtype(op.dtype).itemsize <= memory_budget()


def make_anchor(fitted: Fitted, majorant: Majorant | None = None) -> Anchor:
    """Factorise at the state of `fitted`, which has no spare rows. Cost: about three `(n·c)³`."""
    op: Any = fitted.kernel_op
    # On the device: programs get it with every request.
    problem = jax.tree.map(
        lambda a: jnp.asarray(a) if isinstance(a, ARRAYS) else a, fitted.problem()
    )
    factor = _factor(problem, fitted.state)
    ridge = fitted.layout.scalar(fitted.ridge, op.dtype)
    on_mesh = fitted.layout.sharding is not None
    N, hess, roots = invert_on_mesh(fitted, factor) if on_mesh else _invert(op, factor, ridge)
    error = _measure_error(op, N, hess, ridge, fitted.kernel_diagonal)
    if majorant is None:
        majorant = make_majorant(op)
    alpha, diagonal = fitted.state.alpha, fitted.kernel_diagonal
    n_alpha = _product(N, alpha)
    return Anchor(op, problem, N, hess, roots, alpha, n_alpha, diagonal, error, majorant)


def make_majorant(op: AbstractKernelOperator) -> Majorant:
    """A sketch of a dense `K` and the norm of the remainder; a Kronecker `K` needs no sketch, because
    its products are fast."""
    size = op.num_points * op.num_outputs
    # A sketch of a quarter of the unknowns or more would be hardly cheaper to multiply with than `K`.
    if op.is_kronecker or size <= 4 * BOUND_RANK:
        return _itself(op)
    sketch = spectral_preconditioner(op, BOUND_RANK, jax.random.key(0), 2)
    L = sketch.features.astype(jnp.float32)
    stored = SpectralPreconditioner(L.astype(op.dtype))
    slack = SLACK * float(jnp.finfo(jnp.float32).eps) * jnp.linalg.norm(stored.features)
    return Majorant(
        L.reshape(size, -1).T, jnp.asarray(_rest_norm(op, stored) / KRYLOV_SHARE, op.dtype), slack
    )


def _itself(op: AbstractKernelOperator) -> Majorant:
    zero = jnp.zeros((), op.dtype)
    return Majorant(None, zero, zero)


@filter_jit
def _factor(problem: Problem, state: State) -> AbstractFactor:
    return problem.factor(state)


@filter_jit
def _invert(
    op: AbstractKernelOperator, factor: AbstractFactor, ridge: Float[Array, ""]
) -> tuple[Array, Array, Array]:
    n, c = op.num_points, op.num_outputs
    K, size = op.dense(), n * c
    RK = factor.rmv(K.reshape(n, c, size)).reshape(size, size)
    B = factor.rmv(RK.T.reshape(n, c, size)).reshape(size, size)
    # Rounding leaves `RᵀKR` asymmetric by about an `eps` of it; the ridge keeps it definite.
    L = jnp.linalg.cholesky(0.5 * (B + B.T) + ridge * jnp.eye(size, dtype=K.dtype))
    T = jax.scipy.linalg.solve_triangular(L, RK, lower=True)
    N = (K - jnp.dot(T.T, T, precision=HIGHEST)) / ridge
    eye = jnp.broadcast_to(jnp.eye(c, dtype=K.dtype), (n, c, c))
    return N, factor.hess_mv(eye), factor.mv(eye)


@filter_jit
def _product(N: Float[Array, "nc nc"], alpha: Float[Array, "n c"]) -> Float[Array, "n c"]:
    return jnp.dot(N, alpha.reshape(-1), precision=HIGHEST).reshape(alpha.shape)


@filter_jit
def _measure_error(
    op: AbstractKernelOperator,
    N: Float[Array, "nc nc"],
    hess: Float[Array, "n c c"],
    ridge: Float[Array, ""],
    kernel_diagonal: Float[Array, "n c"],
) -> Float[Array, ""]:
    """Largest row of `KA⁻¹ − N` with `A⁻¹` read from `N`, over `√K_ii`, in units of rounding."""
    n, c = op.num_points, op.num_outputs
    z = jax.random.normal(jax.random.key(1), (n, c, PROBES), op.dtype)
    Nz = jnp.dot(N, z.reshape(n * c, PROBES), precision=HIGHEST).reshape(z.shape)
    step = (z - jnp.einsum("nab,nbk->nak", hess, Nz, precision=HIGHEST)) / ridge
    rows = jnp.sqrt(jnp.mean((op.mm(step) - Nz) ** 2, axis=2))
    # A diagonal below zero is rounding of zero, and a point with `K_ii = 0` has a row of zeros: no error.
    root = jnp.sqrt(jnp.maximum(kernel_diagonal, 0))
    share = jnp.where(root > 0, rows / jnp.where(root > 0, root, 1), 0)
    return PROBE_SAFETY * jnp.max(share) / float(jnp.finfo(op.dtype).eps)


def _rest_norm(op: AbstractKernelOperator, sketch: SpectralPreconditioner) -> float:
    """Largest eigenvalue of `K − LLᵀ` as far as Lanczos' method sees it."""
    return float(np.abs(_rest_space(op, sketch).ritz()[0]).max())


@filter_jit
def _rest_space(op: AbstractKernelOperator, sketch: SpectralPreconditioner) -> Krylov:
    n, c, r = sketch.features.shape
    L = sketch.features.reshape(n * c, r)

    def rest(v: Float[Array, " nc"]) -> Float[Array, " nc"]:
        return op.mv(v.reshape(n, c)).reshape(-1) - L @ (v @ L)

    return lanczos(rest, n * c, op.dtype, min(KRYLOV_STEPS, n * c), 2)
