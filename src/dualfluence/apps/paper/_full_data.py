r"""The approximation that the paper mentions after its equations 1 and 5: the Hessian of all points.

It saves the curvature of the retained points, so one factorisation would serve every removal. Its error is of
the size of the removed share.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..._support.compile import filter_jit
from ...operators import AbstractKernelOperator
from ...problem._objective import Problem, State
from ...solvers import conjugate_gradients
from ._forms import RESIDUAL_SLACK, AbstractPaperForm, FormSolution, split_removal


@dataclass(frozen=True)
class FullDataHessian(AbstractPaperForm):
    r"""A removal with the Hessian of all points in place of that of the retained ones.

    With $W$ the curvature before the removal,

    $$(\lambda I + WK)\,\Delta\alpha = \lambda\Bigl(\tfrac{n_f}{n}\alpha - \alpha_{\mathcal D_f}\Bigr),$$

    where $\alpha_{\mathcal D_f}$ is zero at retained points. This is eq. 1 (or 5) with
    $\nabla^2L_{\mathcal D}$ as Hessian. Its step is not exact for squared error either; use
    `Fitted.edit` where the share of removed points is not small.

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
        delta, iterations, residual = _solve(op, before, state, b, rtol, self.max_steps)
        reached = float(residual) <= RESIDUAL_SLACK * self.rtol
        return FormSolution(delta, int(iterations), 2, float(residual), reached)


@filter_jit
def _solve(
    op: AbstractKernelOperator,
    before: Problem,
    state: State,
    b: Float[Array, "n c"],
    rtol: Float[Array, ""],
    max_steps: int,
) -> tuple[Float[Array, "n c"], Array, Float[Array, ""]]:
    """`Δα`, the steps, and the relative residual of the system with `B = λI + RᵀKR`."""
    factor, ridge = before.factor(state), before.ridge

    def mv(z: Array) -> tuple[Array, Array]:
        return ridge * z + factor.rmv(op.mv(factor.mv(z))), z

    rhs = factor.rmv(op.mv(b))
    found = conjugate_gradients(mv, rhs, rtol=rtol, max_steps=max_steps)
    defect = jnp.linalg.norm(rhs - mv(found.x)[0])
    tiny = jnp.finfo(rhs.dtype).tiny
    residual = defect / jnp.maximum(jnp.linalg.norm(rhs), tiny)
    return (b - factor.mv(found.x)) / ridge, found.iterations, residual
