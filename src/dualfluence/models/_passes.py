"""Passes through a linearised network and products with its Jacobian, compiled once per shape."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped

from .._support.compile import filter_jit
from ..kernels._linearized import Linearized


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
