r"""What a dual solver does: one linear system per Newton step.

$$(\lambda I + WK)\,\Delta\alpha = b,\qquad W = RR^\top .$$
"""

import abc
from functools import lru_cache

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..losses import AbstractFactor
from ..operators import AbstractKernelOperator
from ._preconditioner import AbstractPreconditioner


class Solution(eqx.Module):
    """A solve and how it went. `k_value` is `K·value`; `products` counts products with `K`."""

    value: Float[Array, "n c"]
    k_value: Float[Array, "n c"]
    iterations: Int[Array, ""]
    residual: Float[Array, ""]
    converged: Bool[Array, ""]
    products: Int[Array, ""]


class AbstractDualSolver(eqx.Module):
    """Solves `(λI + WK)Δα = b` for any edit and loss."""

    @abc.abstractmethod
    def solve(
        self,
        op: AbstractKernelOperator,
        factor: AbstractFactor,
        ridge: Float[Array, ""],
        b: Float[Array, "n c"],
        k_b: Float[Array, "n c"],
        *,
        preconditioner: AbstractPreconditioner,
        rtol: Float[Array, ""],
    ) -> Solution:
        """`Δα` and `KΔα`, given `b` and `Kb`. `rtol` is a relative residual for iterative ones."""

    def describe(self, op: AbstractKernelOperator) -> str:
        """The solver and why it was chosen, for reports."""
        return _name(self)


@lru_cache(maxsize=64)
def _name(solver: AbstractDualSolver) -> str:
    """Pretty-printing takes as long as a small solve: once per solver."""
    return repr(solver)


def relative_residual(
    op: AbstractKernelOperator,
    factor: AbstractFactor,
    ridge: Float[Array, ""],
    b: Float[Array, "n c"],
    value: Float[Array, "n c"],
    k_value: Float[Array, "n c"],
) -> Float[Array, ""]:
    """`‖b − (λI + WK)Δα‖ / ‖b‖`."""
    defect = b - ridge * value - factor.hess_mv(k_value)
    tiny = jnp.finfo(b.dtype).tiny
    return jnp.linalg.norm(defect) / jnp.maximum(jnp.linalg.norm(b), tiny)
