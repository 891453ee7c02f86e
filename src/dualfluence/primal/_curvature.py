r"""The curvature that every solver in parameter space inverts: `C + λI`, as products.

$$C = \sum_i w_i\,J_i^\top\nabla^2\ell_i\,J_i\;[+\sum_i w_i\,(\nabla^2 f_i)[\nabla\ell_i]],$$

the bracket for the exact Hessian of a network. `C` without it is the Gauss-Newton matrix, which is
positive semidefinite for a convex loss.
"""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from .._support.compile import PRECISION, filter_jit
from ..kernels._linearized import Linearized
from ..linalg import Krylov, lanczos
from ..losses import AbstractLoss
from ..models._passes import gradients_at_once, outputs_at, point_gradient
from ._hessian import Rows, linearised_product, make_rows, network_product
from ._update import tangent_model

Hessian = Literal["gauss-newton", "exact"]

HESSIANS = ("gauss-newton", "exact")

EIGENVALUE_STEPS = 40
"""Products for the ends of the spectrum. Both are good to a per cent or better by then."""


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
    def dtype(self) -> np.dtype:
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
    exactly: bool = False,
) -> tuple[Curvature, Float[Array, "n c"]]:
    """The curvature at `params`, and the outputs there; batches are `exactly` of the model's size."""
    with jax.default_matmul_precision(PRECISION):
        f = outputs_at(model, params, x, linearised)
    size = model.batch_size if exactly and model.batch_size is not None else model.batch(x)
    rows = make_rows(x, targets, weights.astype(f.dtype), f, size)
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


def curvature_roots(
    loss: AbstractLoss, outputs: Float[Array, "n c"], targets: Array, weights: Float[Array, " n"]
) -> Float[Array, "n c r"]:
    """`R_i` as dense blocks: `Σ_r J_iᵀR_i[:, r] (J_iᵀR_i[:, r])ᵀ` adds up to the curvature."""
    n, c = outputs.shape
    eye = jnp.broadcast_to(jnp.eye(c, dtype=outputs.dtype), (n, c, c))
    return loss.hess_factor(outputs, targets, weights).mv(eye)


def flat_rows(curvature: Curvature) -> tuple[Array, Array, Float[Array, " n"], Float[Array, "n c"]]:
    """Points, targets, weights and outputs without batches; padding has weight zero."""
    rows = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), curvature.rows)
    return rows.x, rows.targets, rows.weights, rows.outputs


@filter_jit
def curvature_trace(curvature: Curvature) -> Float[Array, ""]:
    """`Σ_i ‖J_iᵀR_i‖²`: one backward pass per point and output."""
    x, targets, weights, outputs = flat_rows(curvature)
    roots = curvature_roots(curvature.loss, outputs, targets, weights)
    size = max(1, min(gradients_at_once(curvature.model) // outputs.shape[1], x.shape[0]))

    def square(pair: tuple[Array, Array]) -> Array:
        xi, root = pair
        grads = jax.vmap(lambda u: point_gradient(curvature.model, xi, u))(root.T)
        return jnp.sum(grads**2)

    with jax.default_matmul_precision(PRECISION):
        return jnp.sum(jax.lax.map(square, (x, roots), batch_size=size))


@filter_jit
def krylov_space(curvature: Curvature, hessian: Hessian, steps: int, seed: int) -> Krylov:
    """`C` on the span of `steps` Lanczos vectors."""
    product = lambda v: curvature.product(v, hessian)  # noqa: E731
    return lanczos(product, curvature.num_params, curvature.dtype, steps, seed)


def extreme_eigenvalues(curvature: Curvature, hessian: Hessian) -> tuple[float, float]:
    """Smallest and largest eigenvalue of `C`, each moved outwards by its error bound."""
    steps = min(EIGENVALUE_STEPS, curvature.num_params)
    krylov = krylov_space(curvature, hessian, steps, 0)
    values, vectors = krylov.ritz()
    # An eigenvalue lies within β·|last entry| of every Ritz value.
    off = abs(float(krylov.beside[-1])) * np.abs(vectors[-1]) if steps < curvature.num_params else 0
    return float((values - off).min()), float((values + off).max())
