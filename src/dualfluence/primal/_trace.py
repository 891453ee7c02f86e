"""The trace of the Gauss-Newton matrix, exactly, for the share that a low rank captures."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._support.compile import filter_jit
from ._curvature import Curvature
from ._gradients import _gradient, curvature_roots, flat_rows, rows_at_once
from ._update import PRECISION


@filter_jit
def curvature_trace(curvature: Curvature) -> Float[Array, ""]:
    """`Σ_i ‖J_iᵀR_i‖²`: one backward pass per point and output."""
    x, targets, weights, outputs = flat_rows(curvature)
    roots = curvature_roots(curvature.loss, outputs, targets, weights)
    size = max(1, min(rows_at_once(curvature.model) // outputs.shape[1], x.shape[0]))

    def square(pair: tuple[Array, Array]) -> Array:
        xi, root = pair
        grads = jax.vmap(lambda u: _gradient(curvature.model, xi, u))(root.T)
        return jnp.sum(grads**2)

    with jax.default_matmul_precision(PRECISION):
        return jnp.sum(jax.lax.map(square, (x, roots), batch_size=size))
