"""Gradients of single points: as rows, and their products with given vectors."""

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from .._support.compile import PRECISION, filter_jit
from .._support.memory import GRADIENT_BYTES
from ..kernels._linearized import Linearized


def rows_at_once(model: Linearized) -> int:
    """Gradients of single points that may be held together."""
    return max(1, GRADIENT_BYTES // (8 * max(model.num_params, 1)))


def point_gradient(
    model: Linearized, x: Array, direction: Float[Array, " c"]
) -> Float[Array, " p"]:
    """`J(x)ᵀ u` of one point."""
    theta, outputs = model._outputs()
    _, back = jax.vjp(lambda t: outputs(t, x[None])[0], theta)
    return ravel_pytree(back(direction)[0])[0]


@filter_jit
def point_gradients(
    model: Linearized, x: Array, directions: Float[Array, "k c"]
) -> Float[Array, "k p"]:
    """`J(x_i)ᵀ u_i` for each point."""
    with jax.default_matmul_precision(PRECISION):
        return jax.vmap(lambda xi, u: point_gradient(model, xi, u))(x, directions)


@filter_jit
def gradient_products(
    model: Linearized, x: Array, directions: Float[Array, "n c"], v: Float[Array, "k p"]
) -> Float[Array, "k n"]:
    """`v_k · J(x_i)ᵀ u_i` for all pairs."""
    size = min(rows_at_once(model), x.shape[0])

    def one(pair: tuple[Array, Array]) -> Array:
        return v @ point_gradient(model, *pair)

    with jax.default_matmul_precision(PRECISION):
        return jax.lax.map(one, (x, directions), batch_size=size).T


@filter_jit
def gradient_norms(
    model: Linearized, x: Array, directions: Float[Array, "n c"]
) -> Float[Array, " n"]:
    """`‖J(x_i)ᵀ u_i‖` of each point."""
    size = min(rows_at_once(model), x.shape[0])
    with jax.default_matmul_precision(PRECISION):
        return jax.lax.map(
            lambda pair: jnp.linalg.norm(point_gradient(model, *pair)),
            (x, directions),
            batch_size=size,
        )
