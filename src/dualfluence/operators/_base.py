"""The kernel matrix K as an operator on arrays of shape `(n, c)`."""

import abc
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float

HIGHEST = jax.lax.Precision.HIGHEST
"""Products in the full precision of the dtype: float32 means float32, also on a GPU."""


class AbstractKernelOperator(eqx.Module):
    """`K`, symmetric positive semidefinite. The type is the structure; solvers look at it."""

    @property
    @abc.abstractmethod
    def num_outputs(self) -> int:
        """`c`."""

    @property
    @abc.abstractmethod
    def num_points(self) -> int:
        """`n`."""

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Bytes that hold `K` in this form."""

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """Dtype of `K`."""

    @abc.abstractmethod
    def mv(self, v: Float[Array, "n c"]) -> Float[Array, "n c"]:
        """`K v`."""

    @abc.abstractmethod
    def diagonal(self) -> Float[Array, "n c"]:
        """`K[i, a, i, a]`."""

    @abc.abstractmethod
    def dense(self) -> Float[Array, "nc nc"]:
        """`K` flattened point-major: row `i·c + a`."""

    def mm(self, v: Float[Array, "n c k"]) -> Float[Array, "n c k"]:
        """`K V` for `k` columns at once."""
        return jax.vmap(self.mv, in_axes=2, out_axes=2)(v)
