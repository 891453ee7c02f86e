r"""The interface of dual solvers: they solve one linear system per Newton step.

$$(\lambda I + WK)\,\Delta\alpha = b,\qquad W = RR^\top .$$
"""

import abc
from dataclasses import fields
from functools import lru_cache

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..losses import AbstractFactor
from ..operators import AbstractKernelOperator
from ._preconditioner import AbstractPreconditioner


class LinearSystem(eqx.Module):
    """`(λI + WK)Δα = b`, and data that help to solve it.

    - `op`, `factor`, `ridge`: `K`, `R` with `RRᵀ = W`, and `λ`.
    - `b`, `k_b`: the right-hand side and `K b`, which a Newton step computes anyway.
    - `preconditioner`: for `B = λI + RᵀKR`.
    - `rtol`: relative residual that an iterative solver stops at.
    """

    op: AbstractKernelOperator
    factor: AbstractFactor
    ridge: Float[Array, ""]
    b: Float[Array, "n c"]
    k_b: Float[Array, "n c"]
    preconditioner: AbstractPreconditioner
    rtol: Float[Array, ""]

    def defect(
        self, value: Float[Array, "n c"], k_value: Float[Array, "n c"]
    ) -> Float[Array, "n c"]:
        """`b − (λI + WK)Δα`."""
        return self.b - self.ridge * value - self.factor.hess_mv(k_value)

    def relative_residual(
        self, value: Float[Array, "n c"], k_value: Float[Array, "n c"]
    ) -> Float[Array, ""]:
        """`‖b − (λI + WK)Δα‖ / ‖b‖`."""
        size = jnp.maximum(jnp.linalg.norm(self.b), jnp.finfo(self.b.dtype).tiny)
        return jnp.linalg.norm(self.defect(value, k_value)) / size

    def is_stable(
        self, value: Float[Array, "n c"], k_value: Float[Array, "n c"]
    ) -> Bool[Array, ""]:
        """Whether the defect is only rounding, compared with the terms it consists of. A direct solve
        can do no better.

        If these terms cancel, the defect may still be large compared with `b`.
        """
        terms = jnp.linalg.norm(self.b) + self.ridge * jnp.linalg.norm(value)
        terms = terms + jnp.linalg.norm(self.factor.hess_mv(k_value))
        limit = jnp.cbrt(jnp.finfo(self.b.dtype).eps) * terms
        return jnp.linalg.norm(self.defect(value, k_value)) <= limit


class Solution(eqx.Module):
    """The result of a solve, and facts about it.

    - `value`, `k_value`: `Δα` and `KΔα`.
    - `reach`: size of the vectors whose products with `K` are summed to `k_value`. If these vectors are
      larger than `value`, they cancel in the sum; the rounding of `k_value` is proportional to `reach`.
    - `iterations`, `products`: iterations of the solver, and all products with `K`.
    - `residual`, `converged`: relative residual of the system, and whether it is within the tolerance.
    - `jitter`: shift of the diagonal that a factorisation needed, or zero.
    """

    value: Float[Array, "n c"]
    k_value: Float[Array, "n c"]
    reach: Float[Array, "n c"]
    iterations: Int[Array, ""]
    residual: Float[Array, ""]
    converged: Bool[Array, ""]
    products: Int[Array, ""]
    jitter: Float[Array, ""]


class AbstractDualSolver(eqx.Module):
    """Solves `(λI + WK)Δα = b` for any edit and loss."""

    @abc.abstractmethod
    def solve(self, system: LinearSystem) -> Solution:
        """`Δα` and `KΔα`."""

    def describe(self, op: AbstractKernelOperator) -> str:
        """The solver in words, for reports."""
        return _name(self)


@lru_cache(maxsize=64)
def _name(solver: AbstractDualSolver) -> str:
    """`CG`, or `CG(max_steps=50)`: the class and the options that differ from its defaults.

    It is computed once per solver, because reading the fields takes as long as a small solve.
    """
    own = [(f.name, getattr(solver, f.name), f.default) for f in fields(solver)]
    told = ", ".join(f"{name}={value!r}" for name, value, default in own if value != default)
    return f"{type(solver).__name__}({told})" if told else type(solver).__name__
