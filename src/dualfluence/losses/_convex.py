"""Any convex per-point loss through automatic differentiation."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .._support.checks import as_dtype, as_jax, check_finite
from .._support.options import check_function
from .._support.types import Numbers
from ..linalg import spectrum_each
from ._losses import AbstractLoss, BlockFactor

FUNCTION_UNITS = 16.0
"""Assumed error, in units in the last place, of an elementary function in the user's loss: compilers
approximate functions like `tanh`. With twice this value, certificates near their floor double."""


class Convex(AbstractLoss):
    """A loss of your own: `fn(f, y)` takes one point's outputs `(c,)` and its target, and returns a scalar.

    Gradient and Hessian blocks come from automatic differentiation, the factor `R` from an
    eigendecomposition of each `c×c` block: `O(n c³)`. A fit or an edit raises an error if it finds
    curvature that is more negative than rounding explains.

    **Arguments:**

    - `fn`: twice differentiable and convex in its first argument.
    - `name`: the name of the loss in reports and saved files.
    """

    fn: Callable[[Array, Array], Array] = eqx.field(static=True)
    name: str = eqx.field(static=True, default="convex")

    def __check_init__(self) -> None:
        check_function("Convex: fn", self.fn, "of one point's outputs and target")

    def prepare_targets(self, targets: Numbers, num_outputs: int | None, dtype: DTypeLike) -> Array:
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

    def grad_noise(
        self, outputs: Float[Array, "n c"], targets: Array, noise: Float[Array, "n c"]
    ) -> Float[Array, "n c"]:
        # What `fn` adds up is unknown. The gradient changed from its value at zero outputs to the
        # present one, so terms of either size may have cancelled.
        eps = jnp.finfo(outputs.dtype).eps
        terms = FUNCTION_UNITS * jnp.abs(self.grad(outputs, targets))
        terms = terms + FUNCTION_UNITS * jnp.abs(self.grad(jnp.zeros_like(outputs), targets))
        hess = jnp.abs(jax.vmap(jax.hessian(self.fn))(outputs, targets))
        carried = noise + eps * jnp.abs(outputs)
        return eps * terms + jnp.einsum("nij,nj->ni", hess, carried, precision="highest")

    def hess_mv(
        self, outputs: Float[Array, "n c"], targets: Array, v: Float[Array, "n c"]
    ) -> Float[Array, "n c"]:
        return jax.jvp(lambda f: self.grad(f, targets), (outputs,), (v,))[1]

    def hess_factor(
        self, outputs: Float[Array, "n c"], targets: Array, weights: Float[Array, " n"]
    ) -> BlockFactor:
        hess = jax.vmap(jax.hessian(self.fn))(outputs, targets)
        values, vectors = spectrum_each(0.5 * (hess + jnp.swapaxes(hess, 1, 2)))
        roots = jnp.sqrt(weights.reshape(-1, 1) * jnp.maximum(values, 0))
        return BlockFactor(vectors * roots[:, None, :], self._convexity(outputs, targets, values))

    def _convexity(
        self, outputs: Float[Array, "n c"], targets: Array, values: Float[Array, "n c"]
    ) -> Float[Array, ""]:
        """The smallest Hessian eigenvalue, divided by the scale to which rounding is compared.

        This scale is the largest eigenvalue of all points, or the slope divided by the size of outputs
        and targets: far from its target a loss such as `√(1 + r²)` has terms of that size which cancel.
        """
        tiny = jnp.finfo(values.dtype).tiny
        slope = jnp.max(jnp.abs(self.grad(outputs, targets)), axis=1)
        size = jnp.maximum(jnp.max(jnp.abs(outputs), axis=1), 1)
        if jnp.issubdtype(targets.dtype, jnp.inexact):
            size = jnp.maximum(size, jnp.max(jnp.abs(targets.reshape(size.shape[0], -1)), axis=1))
        largest = jnp.maximum(jnp.max(jnp.abs(values)), jnp.max(slope / size))
        return jnp.min(values) / jnp.maximum(largest, tiny)
