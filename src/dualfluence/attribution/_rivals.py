"""Known scores for comparison, with exact kernels: gradient dot product, TRAK."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._support.compile import jit
from ..dual._quantity import as_quantity
from ..kernels import empirical_kernel
from ..kernels._linearized import linearize
from ..losses import AbstractLoss, SoftmaxCrossEntropy
from ._checkpoint import _Folded, local_terms

DAMPINGS = (1e-3, 1e-2, 1e-1)
"""Ridges of TRAK that are tried, over the mean diagonal of its kernel."""


def gradient_dot(
    apply_fn: Any,
    params: PyTree,
    x: Any,
    y: Any,
    xq: Any,
    yq: Any,
    *,
    loss: AbstractLoss | None = None,
) -> np.ndarray:
    """`∇ℓ_q·∇ℓ_i` at one checkpoint, `(q, n)`: TracIn's score there, without a solve."""
    loss = SoftmaxCrossEntropy() if loss is None else loss
    model = linearize(apply_fn, params)
    features, queries = jnp.asarray(x), jnp.asarray(xq)
    c = model.apply_shape(features[:1])[1]
    targets = loss.prepare_targets(y, c, model.dtype)
    quantity = as_quantity("loss", loss, yq, queries.shape[0], c, model.dtype)
    local = local_terms(model, features, targets, queries, quantity, loss)
    block = _folded_kernel(apply_fn, params, (queries, local.v), (features, local.g))
    return np.asarray(block[:, 0, :, 0])


def trak(
    apply_fn: Any,
    models: Sequence[PyTree],
    x: Any,
    y: Any,
    xq: Any,
    yq: Any,
    *,
    damping: float = 1e-2,
) -> np.ndarray:
    r"""TRAK (Park et al. 2023) without its random projection, `(q, n)`.

    With `φ` the gradient of the margin, $\phi_q\Phi^\top(\Phi\Phi^\top + \rho I)^{-1}$ and the mean
    of $1 - p_i$, each averaged over models first, then multiplied. Class labels only. Positive: the
    point raises the margin, so that leaving it out raises the loss.

    **Arguments:**

    - `models`: parameters, of models trained on random halves in the original.
    - `damping`: `ρ` over the mean diagonal of `ΦΦᵀ`.
    """
    total = missing = np.zeros(())
    for params in models:
        (solved,), short = trak_terms(apply_fn, params, x, y, xq, yq, dampings=(damping,))
        total, missing = total + solved, missing + short
    return total * missing / len(models) ** 2


def trak_terms(
    apply_fn: Any,
    params: PyTree,
    x: Any,
    y: Any,
    xq: Any,
    yq: Any,
    *,
    dampings: Sequence[float] = DAMPINGS,
) -> tuple[list[np.ndarray], np.ndarray]:
    """One model's `φ_qΦᵀ(ΦΦᵀ + ρI)⁻¹` for each damping, `(q, n)`, and its `1 − p_i`, `(n,)`."""
    features, queries = jnp.asarray(x), jnp.asarray(xq)
    u, short = _margin_direction(apply_fn(params, features), jnp.asarray(y))
    u_q, _ = _margin_direction(apply_fn(params, queries), jnp.asarray(yq))
    K = _folded_kernel(apply_fn, params, (features, u), None)[:, 0, :, 0]
    K_q = _folded_kernel(apply_fn, params, (queries, u_q), (features, u))[:, 0, :, 0]
    solved = [np.asarray(_ridge_solve(K, K_q, jnp.asarray(d, K.dtype))) for d in dampings]
    return solved, np.asarray(short)


def _folded_kernel(apply_fn: Any, params: PyTree, a: Any, b: Any) -> Array:
    with jax.default_matmul_precision("highest"):
        return empirical_kernel(_Folded(apply_fn), params, a, b, progress=False).value


@jit
def _margin_direction(
    outputs: Float[Array, "n c"], labels: Array
) -> tuple[Float[Array, "n c"], Float[Array, " n"]]:
    """Gradient of the margin in the outputs, and `1 − p` of the label."""
    own = jax.nn.one_hot(labels, outputs.shape[1], dtype=outputs.dtype)
    others = jax.nn.softmax(jnp.where(own > 0, -jnp.inf, outputs), axis=1)
    return own - others, 1 - jnp.sum(jax.nn.softmax(outputs, axis=1) * own, axis=1)


@jit
def _ridge_solve(K: Array, K_q: Array, damping: Array) -> Array:
    ridge = damping * jnp.mean(jnp.diagonal(K))
    chol = jax.scipy.linalg.cho_factor(K + ridge * jnp.eye(K.shape[0], dtype=K.dtype), lower=True)
    return jax.scipy.linalg.cho_solve(chol, K_q.T).T
