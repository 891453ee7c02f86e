"""Any convex per-point loss through automatic differentiation."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._support.checks import as_dtype, as_jax, check_finite
from .._support.options import check_function
from ._base import AbstractLoss
from ._factors import BlockFactor


class Convex(AbstractLoss):
    """`fn(f, y)` for one point: outputs of shape `(c,)` and that point's target to a scalar.

    Gradient and Hessian blocks come from automatic differentiation, the factor `R` from an
    eigendecomposition of each `c×c` block: `O(n c³)`. Negative curvature beyond rounding is an
    error of the fit or edit that meets it.

    **Arguments:**

    - `fn`: twice differentiable and convex in its first argument.
    - `name`: how the loss is called in reports and saved files.
    """

    fn: Callable[[Array, Array], Array] = eqx.field(static=True)
    name: str = eqx.field(static=True, default="convex")

    def __check_init__(self) -> None:
        check_function("Convex: fn", self.fn, "of one point's outputs and target")

    def prepare_targets(self, targets: Any, num_outputs: int | None, dtype: Any) -> Array:
        array = as_jax("Convex targets", targets)
        if array.ndim == 0:
            raise ValueError("Convex: targets need one row per point, got a scalar.")
        check_finite("Convex targets", array)
        floating = all(jnp.issubdtype(d, jnp.inexact) for d in (array.dtype, dtype))
        if not floating:
            return array
        cast = as_dtype("Convex targets", array, dtype)
        check_finite("Convex targets", cast)
        return cast

    def value(self, outputs: Float[Array, "n c"], targets: Array) -> Float[Array, " n"]:
        return jax.vmap(self.fn)(outputs, targets)

    def grad(self, outputs: Float[Array, "n c"], targets: Array) -> Float[Array, "n c"]:
        return jax.vmap(jax.grad(self.fn))(outputs, targets)

    def hess_mv(
        self, outputs: Float[Array, "n c"], targets: Array, v: Float[Array, "n c"]
    ) -> Float[Array, "n c"]:
        return jax.jvp(lambda f: self.grad(f, targets), (outputs,), (v,))[1]

    def hess_factor(
        self, outputs: Float[Array, "n c"], targets: Array, weights: Float[Array, " n"]
    ) -> BlockFactor:
        hess = jax.vmap(jax.hessian(self.fn))(outputs, targets)
        values, vectors = jnp.linalg.eigh(0.5 * (hess + jnp.swapaxes(hess, 1, 2)))
        largest = jnp.maximum(jnp.max(jnp.abs(values)), jnp.finfo(values.dtype).tiny)
        roots = jnp.sqrt(weights.reshape(-1, 1) * jnp.maximum(values, 0))
        return BlockFactor(vectors * roots[:, None, :], jnp.min(values) / largest)
