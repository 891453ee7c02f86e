r"""Preconditioners for `B = λI + RᵀKR`, built once from `K` and reused for every `R` and edit."""

import abc
from collections.abc import Callable
from typing import NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from .._support.compile import filter_jit
from ..linalg import cholesky, lower_inverse
from ..losses import AbstractFactor
from ..operators import AbstractKernelOperator, UnsupportedStructure

Apply = Callable[[Float[Array, "n c"]], Float[Array, "n c"]]

ORTHONORMAL_PASSES = 3
"""Number of passes of Cholesky-QR. One fewer leaves columns that are dependent up to rounding far from
orthonormal; one more only costs two thin products."""

SAFE_SHIFT = 64.0
"""A small matrix that rounding made indefinite is shifted by so many `eps` of its trace. With twice
this value, the smallest directions of a sketch count for less."""

RIDGE_FLOOR = 8.0
"""The ridge of a preconditioner is at least so many `eps` of its trace. With twice this value,
conjugate gradients take a little longer where `λ` is below that."""


@custom_vmap
def any_column(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    """Returns `flag`. Under `vmap` it returns one value for all columns: whether the flag is set in any
    of them.

    `lax.cond` on the flag of one column becomes a `select` under `vmap`, which computes the rare branch
    every time. On this flag it stays a branch.
    """
    return flag


@any_column.def_vmap
def _(size: int, batched: list[bool], flag: Array) -> tuple[Array, bool]:
    return jnp.any(flag), False


class AbstractPreconditioner(eqx.Module):
    """Approximates `B⁻¹` for the factor `R` of the current step."""

    @abc.abstractmethod
    def inverse(self, factor: AbstractFactor, ridge: Float[Array, ""]) -> Apply:
        """`v ↦ P⁻¹v` with `P ≈ λI + RᵀKR`."""

    @property
    def sketch(self) -> Float[Array, "n c r"] | None:
        """`L` of `K ≈ LLᵀ`, one row per training point; `None` without a sketch."""
        self._refuse()

    def on_rows(self, move: Callable[[Array], Array]) -> "AbstractPreconditioner":
        """The same preconditioner after `move` has changed the rows of its `(n, c, r)` array."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnsupportedStructure(
            f"{type(self).__name__} is not made of one row per training point, so that it can be neither "
            "stored nor moved to other rows."
        )


class NoPreconditioner(AbstractPreconditioner):
    """`P = I`."""

    def inverse(self, factor: AbstractFactor, ridge: Float[Array, ""]) -> Apply:
        return lambda v: v

    @property
    def sketch(self) -> None:
        return None

    def on_rows(self, move: Callable[[Array], Array]) -> "NoPreconditioner":
        return self


class SpectralPreconditioner(AbstractPreconditioner):
    r"""From a low-rank `K ≈ LLᵀ`: `P = λI + FFᵀ` with `F = RᵀL`, inverted by Woodbury.

    `L` does not depend on weights, labels or removed points, so one sketch of `K` serves every later
    request. Each request costs one `r×r` Cholesky factor and two thin products per iteration.
    """

    features: Float[Array, "n c r"]

    @property
    def sketch(self) -> Float[Array, "n c r"]:
        return self.features

    def on_rows(self, move: Callable[[Array], Array]) -> "SpectralPreconditioner":
        return SpectralPreconditioner(move(self.features))

    def inverse(self, factor: AbstractFactor, ridge: Float[Array, ""]) -> Apply:
        F = factor.rmv(self.features).reshape(-1, self.features.shape[2])
        gram = jnp.dot(F.T, F, precision="highest")
        # Below the rounding of FFᵀ a ridge would leave P⁻¹ indefinite: P then takes a larger one.
        floor = RIDGE_FLOOR * jnp.finfo(gram.dtype).eps * jnp.trace(gram)
        ridge = jnp.maximum(ridge, floor)
        eye = jnp.eye(gram.shape[0], dtype=gram.dtype)
        # The small inverse once: an application is then three thin products, no triangular solve.
        # An approximate inverse is all that a preconditioner has to be.
        root = _inverse_root(gram + ridge * eye)

        def apply(v: Float[Array, "n c"]) -> Float[Array, "n c"]:
            flat = v.reshape(-1)
            inner = jnp.dot(root, jnp.dot(F.T, flat, precision="highest"), precision="highest")
            inner = jnp.dot(F, jnp.dot(root.T, inner, precision="highest"), precision="highest")
            return ((flat - inner) / ridge).reshape(v.shape)

        return apply


@filter_jit
def spectral_preconditioner(
    op: AbstractKernelOperator, rank: int, key: PRNGKeyArray, power_steps: int = 1
) -> SpectralPreconditioner:
    r"""Nyström sketch of `K` with `rank` columns after `power_steps` rounds of subspace iteration.

    $K \approx KQ(Q^\top KQ)^{-1}Q^\top K$. Cost: `power_steps + 1` products with `rank` columns, each
    of which reads a dense `K` once.
    """
    n, c = op.num_points, op.num_outputs
    dtype = op.dtype
    Q = jax.random.normal(key, (n * c, rank), dtype)

    def times_k(columns: Array) -> Array:
        return op.mm(columns.reshape(n, c, rank)).reshape(n * c, rank)

    def times_shifted(columns: Array) -> Array:
        """`(K + εI)Q`, with `ε` of rounding size: `K` may have fewer than `rank` eigenvalues."""
        product = times_k(columns)
        size = jnp.linalg.norm(product)
        return product + jnp.finfo(dtype).eps * jnp.where(size > 0, size, 1) * columns

    Q = orthonormal(Q)
    # An orthonormal basis between two products: powers of `K` alone would all turn to its largest direction.
    for _ in range(power_steps):
        Q = orthonormal(times_shifted(Q))
    KQ = times_shifted(Q)
    # Rounding leaves `QᵀKQ` slightly asymmetric, and Cholesky's method reads one half of it: the mean of
    # both is nearer to `K`.
    gram = jnp.dot(Q.T, KQ, precision="highest")
    L = jnp.dot(KQ, _inverse_root(0.5 * (gram + gram.T)).T, precision="highest")
    return SpectralPreconditioner(L.reshape(n, c, rank))


def orthonormal(columns: Float[Array, "m r"]) -> Float[Array, "m r"]:
    r"""An orthonormal basis of the columns' span by shifted Cholesky-QR (Fukaya et al., 2020).

    $Q = AL^{-\top}$ with $LL^\top = A^\top A + sI$, repeated: each pass divides the condition number by
    about $1/\sqrt{\varepsilon}$, so that three suffice for columns that are dependent up to rounding.
    Thin products and factors of size `r` only; Householder's QR works column by column and takes
    seconds if its threads have to wait for a core.
    """
    eps = jnp.finfo(columns.dtype).eps
    for _ in range(ORTHONORMAL_PASSES):
        gram = jnp.dot(columns.T, columns, precision="highest")
        # A shift of rounding size keeps the factor real. Where `K` is zero, its columns have no size.
        size = jnp.trace(gram)
        shift = eps * jnp.where(size > 0, size, 1) * jnp.eye(gram.shape[0], dtype=gram.dtype)
        columns = jnp.dot(columns, _inverse_root(gram + shift).T, precision="highest")
    return columns


def _inverse_root(matrix: Float[Array, "r r"]) -> Float[Array, "r r"]:
    """`L⁻¹` with `LLᵀ` the matrix. It is small, and with it every later solve is a product.

    A matrix that rounding made indefinite is shifted. This is harmless, because the result is only a
    basis or a preconditioner.
    """
    eye = jnp.eye(matrix.shape[0], dtype=matrix.dtype)
    shift = SAFE_SHIFT * jnp.finfo(matrix.dtype).eps * jnp.maximum(jnp.trace(matrix), 0)
    # A matrix of zeros has no trace to measure by; any shift makes it definite.
    shift = jnp.where(shift > 0, shift, 1)
    chol = cholesky(matrix)
    # JAX returns NaN at a pivot that is not positive. The second factor is computed only then.
    failed = jnp.isnan(chol).any()
    chol = jax.lax.cond(
        any_column(failed),
        lambda: jnp.where(failed, cholesky(matrix + shift * eye), chol),
        lambda: chol,
    )
    return lower_inverse(chol)
