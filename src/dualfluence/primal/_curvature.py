r"""The curvature that every solver in parameter space inverts: `C + λI`, as products.

$$C = \sum_i w_i\,J_i^\top\nabla^2\ell_i\,J_i\;[+\sum_i w_i\,(\nabla^2 f_i)[\nabla\ell_i]],$$

the bracket for the exact Hessian of a network. `C` without it is the Gauss-Newton matrix, which is
positive semidefinite for a convex loss.
"""

from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from .._support.compile import filter_jit
from ..dual._readout import outputs_at
from ..kernels._linearized import Linearized
from ..losses import AbstractLoss
from ._hessian import Rows, linearised_product, make_rows, network_product
from ._update import PRECISION, tangent_model

Hessian = Literal["gauss-newton", "exact"]

HESSIANS = ("gauss-newton", "exact")


class Curvature(eqx.Module):
    """Products with `C` on flat parameter vectors, one batch of points at a time.

    - `model`: the network at the parameters whose Jacobian is meant.
    - `rows`: training points in batches, with weights and outputs.
    - `ridge`: `λ`.
    - `linearised`: the model is linear in its parameters, so that both Hessians are one.
    """

    model: Linearized
    loss: AbstractLoss
    rows: Rows
    ridge: Float[Array, ""]
    linearised: bool = eqx.field(static=True)

    @property
    def num_params(self) -> int:
        return self.model.num_params

    @property
    def dtype(self) -> Any:
        return self.rows.outputs.dtype

    def product(self, v: Float[Array, " p"], hessian: Hessian) -> Float[Array, " p"]:
        """`C v`, the ridge left out."""
        _, unravel = ravel_pytree(self.model.split(self.model.params)[0])
        exact = hessian == "exact" and not self.linearised
        product = network_product if exact else linearised_product
        return ravel_pytree(product(self.model, self.loss, self.rows, unravel(v)))[0]

    def shift(self, damping: float) -> Float[Array, ""]:
        """`λ` and the solver's damping, which stand on the diagonal beside `C`."""
        return self.ridge + jnp.asarray(damping, self.ridge.dtype)


@filter_jit
def make_curvature(
    model: Linearized,
    params: PyTree,
    x: Array,
    targets: Array,
    weights: Float[Array, " n"],
    loss: AbstractLoss,
    ridge: Float[Array, ""],
    linearised: bool,
) -> tuple[Curvature, Float[Array, "n c"]]:
    """The curvature at `params`, and the outputs there."""
    with jax.default_matmul_precision(PRECISION):
        f = outputs_at(model, params, x, linearised)
    rows = make_rows(x, targets, weights.astype(f.dtype), f, model.batch(x))
    tangent = tangent_model(model, params, linearised)
    return Curvature(tangent, loss, rows, ridge.astype(f.dtype), linearised), f


@filter_jit
def products(curvature: Curvature, v: Float[Array, "k p"], hessian: Hessian) -> Float[Array, "k p"]:
    """`C v` for each row of `v`."""
    with jax.default_matmul_precision(PRECISION):
        return jax.lax.map(lambda row: curvature.product(row, hessian), v)


@filter_jit
def relative_residuals(
    curvature: Curvature,
    shift: Float[Array, ""],
    value: Float[Array, "k p"],
    b: Float[Array, "k p"],
    hessian: Hessian,
) -> Float[Array, " k"]:
    """`‖b − (C + shift) x‖ / ‖b‖` for each pair of rows."""
    with jax.default_matmul_precision(PRECISION):
        left = jax.lax.map(lambda row: curvature.product(row, hessian), value) + shift * value
    size = jnp.linalg.norm(b, axis=1)
    return jnp.linalg.norm(b - left, axis=1) / jnp.maximum(size, jnp.finfo(b.dtype).tiny)
