r"""Hessian-vector products of the training objective, one batch of points in memory at a time.

$$\nabla^2 L_w(\theta)\,v = \sum_i w_i\,J_i^\top\nabla^2\ell_i J_i v \;[+\; \sum_i w_i\,(\nabla^2 f_i)
[\nabla\ell_i]\,v] + \lambda v,$$

the bracket only where the model is not linear in its parameters.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from ..kernels._apart import jacobian_products
from ..kernels._linearized import Linearized
from ..kernels._products import cut
from ..losses import AbstractLoss


class Rows(eqx.Module):
    """Training rows in batches, `(num_batches, batch, ...)`; padding has weight zero."""

    x: Array
    targets: Array
    weights: Float[Array, "k b"]
    outputs: Float[Array, "k b c"]


def make_rows(
    x: Array, targets: Array, weights: Float[Array, " n"], outputs: Float[Array, "n c"], size: int
) -> Rows:
    """Cut once, outside the solver's loop."""
    return Rows(
        x=cut(x, size),
        targets=cut(targets, size),
        weights=cut(weights, size, zeros=True),
        outputs=cut(outputs, size),
    )


def linearised_product(model: Linearized, loss: AbstractLoss, rows: Rows, v: PyTree) -> PyTree:
    """`JᵀWJv` with `J` at `model.params`: the exact Hessian of the linearised model's loss."""
    theta, frozen = model.split(model.params)

    def batch(row: Rows) -> PyTree:
        push, pull = jacobian_products(
            lambda t: model.apply_fn(eqx.combine(t, frozen), row.x), theta
        )
        curved = loss.hess_mv(row.outputs, row.targets, push(v))
        return pull(row.weights[:, None] * curved)

    return _sumcut(batch, rows)


def network_product(model: Linearized, loss: AbstractLoss, rows: Rows, v: PyTree) -> PyTree:
    """The network's own Hessian product at `model.params`, forward over reverse."""
    theta, frozen = model.split(model.params)

    def batch(row: Rows) -> PyTree:
        def grad(t: PyTree) -> PyTree:
            f, back = jax.vjp(lambda s: model.apply_fn(eqx.combine(s, frozen), row.x), t)
            return back(row.weights[:, None] * loss.grad(f, row.targets))[0]

        return jax.jvp(grad, (theta,), (v,))[1]

    return _sumcut(batch, rows)


def _sumcut(fn: Callable[[Rows], PyTree], rows: Rows) -> PyTree:
    first = jax.tree.map(lambda a: a[0], rows)
    if rows.x.shape[0] == 1:
        return fn(first)
    start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(fn, first))

    def add(total: PyTree, row: Rows) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, fn(row)), None

    return jax.lax.scan(add, start, rows)[0]
