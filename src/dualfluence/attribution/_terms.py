"""Loss terms of a checkpoint: gradients and directions of outputs, of queries and of training points."""

from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from .._support.compile import HIGHEST, filter_jit
from .._support.types import ApplyFn
from ..kernels._linearized import Linearized
from ..linalg import each
from ..losses import AbstractLoss
from ..problem._quantity import Quantity
from ._probes import Probes, RandomProbes, root_blocks

INSIDE = 100
"""`g_i = R_ih_i` counts as solved if the rest is below this many rounding units of `g_i`. Softmax with a
label of probability below about 1e-5 in float32 is not; such points take the sum with kernels."""

REFINEMENTS = 4
"""Steps of refinement of `h`; each closes all but the share `δ/(s + δ)` along an eigenvalue `s`."""


class Local(eqx.Module):
    """Loss terms at a checkpoint: queries' gradients `v`, and `g`, `R` of the training points."""

    v: Float[Array, "q c"]
    g: Float[Array, "n c"]
    roots: Float[Array, "n c r"]


class Terms(eqx.Module):
    """As `Local`, with directions `P` instead of `R`.

    `h` solves `g = P h` for all points but those `outside`. `left_out` is the share of the curvature (its
    trace) that is not along `P`.
    """

    v: Float[Array, "q c"]
    g: Float[Array, "n c"]
    P: Float[Array, "n c r"]
    h: Float[Array, "n r"]
    outside: Bool[Array, " n"]
    left_out: Float[Array, ""]


class Scored(NamedTuple):
    """Scores of a checkpoint; of probes, what they left out and how much their draw matters.

    `agreement` is, for each query, the correlation between the scores of one half of random probes and of
    the other.
    """

    values: Float[Array, "q n"]
    left_out: Float[Array, ""] | None = None
    agreement: Float[Array, " q"] | None = None
    tokens: Float[Array, "q n t"] | None = None


@filter_jit
def local_terms(
    model: Linearized,
    x: Array,
    targets: Array,
    xq: Array,
    quantity: Quantity,
    loss: AbstractLoss,
) -> Local:
    """Gradients and curvature of the mean loss, and of the measured quantity, at a checkpoint."""
    f, f_q = model.base_outputs(x), model.base_outputs(xq)
    weights = jnp.full(x.shape[0], 1 / x.shape[0], f.dtype)
    g = weights[:, None] * loss.grad(f, targets)
    roots = root_blocks(loss.hess_factor(f, targets, weights), f)
    return Local(quantity.grad(f_q, quantity.targets), g, roots)


@filter_jit
def directed_terms(
    model: Linearized,
    x: Array,
    targets: Array,
    xq: Array,
    quantity: Quantity,
    loss: AbstractLoss,
    probes: Probes | None,
    key: Array,
) -> Terms:
    """As `local_terms` along probes, or along all of the curvature."""
    f, f_q = model.base_outputs(x), model.base_outputs(xq)
    weights = jnp.full(x.shape[0], 1 / x.shape[0], f.dtype)
    g = weights[:, None] * loss.grad(f, targets)
    v = quantity.grad(f_q, quantity.targets)
    held = loss.hess_factor(f, targets, weights)
    if probes is None:
        P = root_blocks(held, f)
        return Terms(v, g, P, *_in_range(P, g), jnp.zeros((), f.dtype))
    P = probes.directions(held, f, key)
    whole = jnp.sum(jnp.broadcast_to(held.hess_diagonal(), f.shape))
    left_out = jnp.maximum(0, 1 - jnp.sum(P**2) / jnp.where(whole > 0, whole, 1))
    if isinstance(probes, RandomProbes):
        left_out = jnp.zeros_like(left_out)  # in the mean over draws
    nothing = jnp.zeros((P.shape[0], P.shape[2]), P.dtype)
    return Terms(v, g, P, nothing, jnp.ones(P.shape[0], bool), left_out)


def _in_range(R: Float[Array, "n c r"], g: Float[Array, "n c"]) -> tuple[Array, Array]:
    """`h` with `g = R h` by refined least squares, and the points where there is none to rounding."""
    eps = jnp.finfo(R.dtype).eps
    gram = jnp.einsum("nca,ncb->nab", R, R, precision=HIGHEST)
    size = jnp.trace(gram, axis1=1, axis2=2)
    shift = 10 * eps * jnp.where(size > 0, size, 1)
    eye = jnp.eye(gram.shape[1], dtype=R.dtype)
    work = gram.shape[1] ** 3
    chol = each(jnp.linalg.cholesky, work, gram + shift[:, None, None] * eye[None])
    solve = lambda chol, b: jax.scipy.linalg.cho_solve((chol, True), b)  # noqa: E731
    h, rest = jnp.zeros(R.shape[::2], R.dtype), g
    for _ in range(REFINEMENTS):
        own = jnp.einsum("ncr,nc->nr", R, rest, precision=HIGHEST)
        h = h + each(solve, work, chol, own)
        rest = g - jnp.einsum("ncr,nr->nc", R, h, precision=HIGHEST)
    norm = partial(jnp.linalg.norm, axis=1)
    return h, norm(rest) > INSIDE * eps * norm(g)


class Folded(eqx.Module):
    """A network seen along directions of outputs of each point: `(x, U) ↦ Uᵀf(x)`."""

    apply_fn: ApplyFn = eqx.field(static=True)

    def __call__(self, params: PyTree, inputs: tuple[Array, Array]) -> Float[Array, "n m"]:
        x, directions = inputs
        f = self.apply_fn(params, x)
        return jnp.einsum("nc,ncm->nm", f, directions.astype(f.dtype), precision=HIGHEST)
