r"""The approximation that the paper mentions after its equations 1 and 5: the Hessian of all points.

It saves the curvature of the retained points, so one factorisation would serve every removal. Its error is
the leverage of the removed points, not their share. A network with more parameters than data has directions
that one point alone determines. There the error is large even if one point goes.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..._support.compile import filter_jit
from ...operators import AbstractKernelOperator
from ...problem._objective import Problem, State
from ._forms import (
    AbstractPaperForm,
    CGSolution,
    FormSolution,
    after_cg,
    solve_by_cg,
    split_removal,
)


@dataclass(frozen=True)
class FullDataHessian(AbstractPaperForm):
    r"""A removal with the Hessian of all points in place of that of the retained ones.

    With $W$ the curvature before the removal,

    $$(\lambda I + WK)\,\Delta\alpha = \lambda\Bigl(\tfrac{n_f}{n}\alpha - \alpha_{\mathcal D_f}\Bigr),$$

    where $\alpha_{\mathcal D_f}$ is zero at retained points. This is eq. 1 (or 5) with
    $\nabla^2L_{\mathcal D}$ as Hessian. Its step is not exact for squared error either. With more parameters
    than data, it misses a large part of the change even if one point goes; use `Fitted.edit`.

    - `max_steps`, `rtol`: of conjugate gradients on the symmetric form.
    """

    max_steps: int = 500
    rtol: float = 1e-8

    def solve(
        self, op: AbstractKernelOperator, before: Problem, after: Problem, state: State
    ) -> FormSolution:
        _, gone = split_removal(before, after)
        forgotten = jnp.zeros_like(state.alpha).at[gone].set(state.alpha[gone])
        share = jnp.asarray(np.asarray(before.weights)[gone].sum(), state.alpha.dtype)
        rtol = jnp.asarray(self.rtol, state.alpha.dtype)
        b = before.ridge * (share * state.alpha - forgotten)
        found, delta = _solve(op, before, state, b, rtol, self.max_steps)
        return after_cg(found, delta, products=2, rtol=self.rtol)


@filter_jit
def _solve(
    op: AbstractKernelOperator,
    before: Problem,
    state: State,
    b: Float[Array, "n c"],
    rtol: Float[Array, ""],
    max_steps: int,
) -> tuple[CGSolution, Float[Array, "n c"]]:
    """The solution of the system with `B = λI + RᵀKR`, and `Δα`."""
    factor, ridge = before.factor(state), before.ridge

    def mv(z: Array) -> tuple[Array, Array]:
        return ridge * z + factor.rmv(op.mv(factor.mv(z))), z

    found = solve_by_cg(mv, factor.rmv(op.mv(b)), rtol, max_steps)
    return found, (b - factor.mv(found.x)) / ridge
