r"""Changes of outputs at another ridge, from `Q = K(λI + WK)⁻¹`, which the fit's `K` and curvature give.

With `λ_i = λ(1 − w_i)` and `b = −(g + λ_iα)` the outputs of point `i`, once it is left out, move by
`(Qb)_i + Q_{ii}τ_i`; see `_leave_one_out` for `τ`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._support.compile import HIGHEST, filter_jit
from ..linalg import solve_each
from ._leave_one_out import Terms


class Moves(NamedTuple):
    """Changes of outputs: of each point left out, and of all points at the new ridge."""

    left_out: Float[Array, "n c"]
    kept: Float[Array, "n c"]


@filter_jit
def left_out_moves(
    terms: Terms, lam: Float[Array, " n"], Q_b: Float[Array, "n c"], Q_own: Float[Array, "n c c"]
) -> Float[Array, "n c"]:
    """`(Qb)_i + Q_{ii}τ_i`."""
    b = -(terms.loss_grad + lam[:, None] * terms.alpha)
    # A⁻¹b = (b − W Q b)/λ.
    base = (b - terms.factor.hess_mv(Q_b)) / lam[:, None]
    small = jnp.eye(b.shape[1], dtype=b.dtype)[None] - terms.factor.hess_mv(Q_own)
    tau = lam[:, None] * solve_each(small, -terms.alpha - base)
    return Q_b + jnp.einsum("nab,nb->na", Q_own, tau, precision=HIGHEST)
