"""Passes through a linearised network and products with its Jacobian, compiled once per shape,
gradients of single points, and checks of networks and trained parameters from users."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree, Shaped

from .._support.checks import all_finite, as_dtype
from .._support.compile import PRECISION, filter_jit
from .._support.memory import GRADIENT_BYTES
from ..kernels._linearized import Linearized


def check_network(model: Linearized, x: Array, num_outputs: int | None) -> int:
    """`c` of a network, after a check that it runs on all points and on one."""
    # All points first, as the user gave them; batches have any number of points, down to one.
    for points in (x, x[:1]):
        model._traced_shape(points)
    c = model.apply_shape(x)[1]
    if num_outputs not in (None, c):
        raise ValueError(
            f"num_outputs: {num_outputs} was given, but apply_fn has {c} outputs. Leave it out: "
            "the number follows from the network."
        )
    if jnp.finfo(model.dtype).bits < 32:
        raise ValueError(
            f"linearize: expected parameters in float32 or float64, got {model.dtype}, which "
            "linear solvers do not support. Convert them, e.g. by jax.tree.map(jnp.float32, "
            "params)."
        )
    return c


def check_params(name: str, model: Linearized, params: PyTree) -> PyTree:
    """`params` with trainable leaves as finite arrays in the shapes and dtypes of `model.params`."""
    want, got = jax.tree.structure(model.params), jax.tree.structure(params)
    if want != got:
        raise ValueError(
            f"{name} must have the tree structure of the parameters given to linearize, {want}, got "
            f"{got}."
        )
    paths = jax.tree_util.tree_leaves_with_path(model.params)
    rows = zip(paths, jax.tree.leaves(params), model.trainable, strict=True)
    leaves = [
        _like(f"{name}{jax.tree_util.keystr(path)}", leaf, base, used)
        for (path, base), leaf, used in rows
    ]
    return jax.tree.unflatten(got, leaves)


def _like(name: str, leaf: Any, base: Any, used: bool) -> Any:
    array = as_dtype(name, leaf, base.dtype) if used else leaf
    if np.shape(array) != np.shape(base):
        raise ValueError(
            f"{name} must have the shape {np.shape(base)} that linearize was given, got "
            f"{np.shape(array)}."
        )
    if not used:
        return leaf
    if not all_finite(name, array):
        raise ValueError(f"{name} has NaN or inf. Did training diverge?")
    return array


@filter_jit
def base_outputs(model: Linearized, x: Shaped[Array, "n ..."]) -> Array:
    """`f(x; θ₀)`."""
    return model.base_outputs(x)


@filter_jit
def outputs_at(model: Linearized, params: PyTree, x: Array, linearised: bool) -> Array:
    """The network, or its linearisation, at any parameters; compiled once per shape."""
    return model.linearised(params, x) if linearised else model(params, x)


@filter_jit
def cross_mv(model: Linearized, xq: Array, x: Array, v: Array) -> Array:
    """`J(xq) J(x)ᵀ v`."""
    return model.jvp(xq, model.vjp(x, v))


@filter_jit
def make_jacobian(model: Linearized, x: Array) -> PyTree:
    """`J(x)`."""
    return model.jacobian(x)


@filter_jit
def push(model: Linearized, xq: Array, tangent: PyTree) -> Array:
    """`J(xq) t`."""
    return model.jvp(xq, tangent)


def _times_jacobian(model: Linearized, J: PyTree, x: Array, v: Array) -> PyTree:
    n = jax.tree.leaves(J)[0].shape[0]
    flat = v[:n].astype(model.dtype).reshape(-1)

    def leaf(part: Array) -> Array:
        rows = part.reshape(flat.size, -1)
        return jnp.dot(flat, rows, precision="highest").reshape(part.shape[2:])

    step = jax.tree.map(leaf, J)
    if x.shape[0] == n:
        return step
    return jax.tree.map(jnp.add, step, model.vjp(x[n:], v[n:]))


held_pull_back = filter_jit(_times_jacobian)


@filter_jit
def held_moved_params(
    model: Linearized, J: PyTree, params: PyTree, x: Array, v: Array, since: Array | None
) -> PyTree:
    """`moved_params` if the Jacobian `J` of the first points is in memory."""
    return moved(model, params, _times_jacobian(model, J, x, v if since is None else v - since))


@filter_jit
def pull_back(model: Linearized, x: Array, v: Array) -> PyTree:
    """`J(x)ᵀ v`."""
    return model.vjp(x, v)


@filter_jit
def moved_params(
    model: Linearized, params: PyTree, x: Array, v: Array, since: Array | None
) -> PyTree:
    """`θ + J(x)ᵀ(v − since)` in one compiled program."""
    return moved(model, params, model.vjp(x, v if since is None else v - since))


def moved(model: Linearized, params: PyTree, step: PyTree) -> PyTree:
    """`θ + step`; leaves that are not trainable stay unchanged."""
    theta, frozen = model.split(params)
    return model.leave(eqx.combine(jax.tree.map(jnp.add, theta, step), frozen))


def gradients_at_once(model: Linearized) -> int:
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
    size = min(gradients_at_once(model), x.shape[0])

    def one(pair: tuple[Array, Array]) -> Array:
        return v @ point_gradient(model, *pair)

    with jax.default_matmul_precision(PRECISION):
        return jax.lax.map(one, (x, directions), batch_size=size).T


@filter_jit
def gradient_norms(
    model: Linearized, x: Array, directions: Float[Array, "n c"]
) -> Float[Array, " n"]:
    """`‖J(x_i)ᵀ u_i‖` of each point."""
    size = min(gradients_at_once(model), x.shape[0])
    with jax.default_matmul_precision(PRECISION):
        return jax.lax.map(
            lambda pair: jnp.linalg.norm(point_gradient(model, *pair)),
            (x, directions),
            batch_size=size,
        )
