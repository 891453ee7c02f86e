"""Factors R with RRᵀ = W, the weighted block-diagonal Hessian of the loss in the outputs.

A factor multiplies arrays of shape `(n, c, ...)`. Its class tells solvers its structure.
"""

import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

CURVATURE_SLACK = 1e3
"""A Hessian eigenvalue below `-CURVATURE_SLACK·eps` of the largest is not rounding."""


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
        """Diagonal of `W`; one column if it is the same for all outputs."""

    def hess_mv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n c ..."]:
        """`W v = R Rᵀ v`."""
        return self.mv(self.rmv(v))

    def folded(self, K: Float[Array, "nc nc"], c: int) -> Float[Array, "nr nr"]:
        """`RᵀKR`, with `c` rows of `K` per point."""
        m = K.shape[0]
        half = self.rmv(K.reshape(m // c, c, m)).reshape(-1, m)
        size = half.shape[0]
        return self.rmv(half.T.reshape(m // c, c, size)).reshape(size, size)

    def narrow(self) -> "AbstractFactor":
        """`R` without columns that are always empty: `rmv` then returns fewer rows per point."""
        return self

    @property
    def min_curvature(self) -> Float[Array, ""]:
        """The smallest eigenvalue divided by the largest. A value more negative than rounding explains
        means that the loss is not convex."""
        return jnp.zeros(())


class DiagonalFactor(AbstractFactor):
    """`R = diag(scale)`; one column (`(n, 1)`) if all outputs of a point have the same curvature."""

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
        c = self.root_probs.shape[1]
        if c == 1:
            return self
        # Householder: I − 2uuᵀ takes √p, which R maps to zero, to the last axis.
        last = jnp.zeros(c, self.root_probs.dtype).at[-1].set(1)
        u = self.root_probs + last[None, :]
        u = u / jnp.linalg.norm(u, axis=1, keepdims=True)
        eye = jnp.eye(c, dtype=u.dtype)
        turn = eye[None] - 2 * u[:, :, None] * u[:, None, :]
        return BlockFactor(self.mv(turn[:, :, :-1]), self.min_curvature)


class BlockFactor(AbstractFactor):
    """Dense blocks `R_i`, `c×c` for any convex loss, with fewer columns if the rank is known."""

    blocks: Float[Array, "n c r"]
    curvature: Float[Array, ""]

    def mv(self, v: Float[Array, "n r ..."]) -> Float[Array, "n c ..."]:
        return jnp.einsum("nij,nj...->ni...", self.blocks, v, precision="highest")

    def rmv(self, v: Float[Array, "n c ..."]) -> Float[Array, "n r ..."]:
        return jnp.einsum("nji,nj...->ni...", self.blocks, v, precision="highest")

    def hess_diagonal(self) -> Float[Array, "n k"]:
        return jnp.sum(self.blocks**2, axis=2)

    @property
    def min_curvature(self) -> Float[Array, ""]:
        return self.curvature


def check_convex(what: str, lowest: float, dtype: Any) -> None:
    """Raise where the smallest eigenvalue of the loss's Hessian, over the largest, is no rounding."""
    if lowest < -CURVATURE_SLACK * float(jnp.finfo(dtype).eps):
        raise ValueError(
            f"{what}: the loss has negative curvature (smallest Hessian eigenvalue {lowest:.3g} of the "
            "largest). It must be convex in the outputs."
        )
