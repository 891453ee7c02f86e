"""Factors R with RRᵀ = W, the weighted block-diagonal Hessian of the loss in the outputs.

A factor multiplies arrays of shape `(n, c, ...)`. Its type is its structure: solvers look at it.
"""

import abc

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float


def _per_point(values: Array, like: Array) -> Array:
    """Append axes so that `(n, c)` values multiply `(n, c, ...)` arrays without rank promotion."""
    return values.reshape(values.shape + (1,) * (like.ndim - values.ndim))


class AbstractFactor(eqx.Module):
    """`R`, a block-diagonal square root of `W = diag(w) ⊗ ∇²ℓ`."""

    @abc.abstractmethod
    def mv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n c ..."]:
        """`R v`."""

    @abc.abstractmethod
    def rmv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n c ..."]:
        """`Rᵀ v`."""

    @abc.abstractmethod
    def hess_diagonal(self) -> Float[Array, "n k"]:
        """Diagonal of `W`, one column where it is the same for all outputs."""

    def hess_mv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n c ..."]:
        """`W v = R Rᵀ v`."""
        return self.mv(self.rmv(v))

    def narrow(self) -> "AbstractFactor":
        """`R` without columns that are always empty: `rmv` then returns fewer rows per point."""
        return self

    @property
    def min_curvature(self) -> Float[Array, ""]:
        """Smallest eigenvalue met over the largest; below rounding means a loss that is not convex."""
        return jnp.zeros(())


class DiagonalFactor(AbstractFactor):
    """`R = diag(scale)`; one column (`(n, 1)`) where all outputs of a point share their curvature."""

    scale: Float[Array, "n k"]

    def mv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n c ..."]:
        return _per_point(self.scale, v) * v

    def rmv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n c ..."]:
        return self.mv(v)

    def hess_diagonal(self) -> Float[Array, "n k"]:
        return self.scale**2


class SoftmaxFactor(AbstractFactor):
    r"""`R = √w (diag √p − p √pᵀ)`, so that `RRᵀ = w (diag p − p pᵀ)`: no eigendecomposition."""

    root_weights: Float[Array, "n 1"]
    root_probs: Float[Array, "n c"]

    def mv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n c ..."]:
        q, w = _per_point(self.root_probs, v), _per_point(self.root_weights, v)
        return w * q * (v - q * jnp.sum(q * v, axis=1, keepdims=True))

    def rmv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n c ..."]:
        q, w = _per_point(self.root_probs, v), _per_point(self.root_weights, v)
        return w * q * (v - jnp.sum(q * q * v, axis=1, keepdims=True))

    def hess_diagonal(self) -> Float[Array, "n k"]:
        p = self.root_probs**2
        return self.root_weights**2 * p * (1 - p)

    def narrow(self) -> AbstractFactor:
        if self.root_probs.shape[1] == 1:
            return self
        last = jnp.zeros(self.root_probs.shape[1], self.root_probs.dtype).at[-1].set(1)
        u = self.root_probs + last[None, :]
        return NarrowSoftmaxFactor(self, u / jnp.linalg.norm(u, axis=1, keepdims=True))


class NarrowSoftmaxFactor(AbstractFactor):
    """`R` of softmax, of rank `c − 1`, as `c − 1` columns per point.

    The Householder reflection `I − 2uuᵀ` takes `√p`, which `R` maps to zero, to the last axis.
    """

    full: SoftmaxFactor
    u: Float[Array, "n c"]

    def mv(self, v: Float[Array, "n r ..."]) -> Float[Array, "n c ..."]:
        padded = jnp.concatenate([v, jnp.zeros_like(v[:, :1])], axis=1)
        return self.full.mv(self._reflect(padded))

    def rmv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n r ..."]:
        return self._reflect(self.full.rmv(v))[:, :-1]

    def hess_diagonal(self) -> Float[Array, "n k"]:
        return self.full.hess_diagonal()

    def _reflect(self, v: Float[Array, "n c ..."]) -> Float[Array, "n c ..."]:
        u = _per_point(self.u, v)
        return v - 2 * u * jnp.sum(u * v, axis=1, keepdims=True)


class BlockFactor(AbstractFactor):
    """Dense `c×c` blocks `R_i`, for any convex loss."""

    blocks: Float[Array, "n c c"]
    curvature: Float[Array, ""]

    def mv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n c ..."]:
        return jnp.einsum("nij,nj...->ni...", self.blocks, v, precision="highest")

    def rmv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n c ..."]:
        return jnp.einsum("nji,nj...->ni...", self.blocks, v, precision="highest")

    def hess_diagonal(self) -> Float[Array, "n k"]:
        return jnp.sum(self.blocks**2, axis=2)

    @property
    def min_curvature(self) -> Float[Array, ""]:
        return self.curvature
