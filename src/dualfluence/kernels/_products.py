"""Products with the empirical NTK that never form it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._support.compile import jit
from ._params import Split, split_params
from ._plan import precision_name
from ._prepare import as_inputs, check_outputs, num_points
from ._program import mentions

DEFAULT_BATCH = 256
"""Points differentiated at once unless told otherwise."""


def ntk_mv(
    apply_fn: Callable[..., Any],
    params: Any,
    x: Any,
    v: Any,
    batch_size: int = DEFAULT_BATCH,
    *,
    trainable: Any = None,
    precision: Any = jax.lax.Precision.HIGHEST,
) -> Array:
    r"""The product $Kv = J(J^T v)$ with the empirical NTK, without the NTK.

    $J^T v$ is summed over batches by reverse mode, then $J$ applied batch by batch in forward mode:
    about five evaluations of `apply_fn` per point, memory for one batch and two copies of the
    parameters. Differentiable, and may be called inside `jax.jit`.

    **Arguments:**

    - `apply_fn`, `params`, `trainable`, `precision`: as for `empirical_kernel`.
    - `x`: inputs, points on axis 0.
    - `v`: one number per point and output, shape `(n, c)`.
    - `batch_size`: points differentiated at once.

    **Returns:** $Kv$, shape `(n, c)`.
    """
    x, _ = as_inputs(x, None)
    split, leaves, rest = split_params(params, trainable)
    n, v = num_points(x), jnp.asarray(v)

    def outputs(leaves: Any, rest: Any, x: Any) -> Any:
        return apply_fn(split.merge(leaves, rest), x)

    out = jax.eval_shape(outputs, leaves, rest, x)
    check_outputs(out, n)
    if v.shape != out.shape:
        raise ValueError(
            f"ntk_mv: v must have the shape of the outputs, {out.shape}, got {v.shape}."
        )
    if batch_size < 1:
        raise ValueError(f"ntk_mv: batch_size must be at least 1, got {batch_size}.")
    size = min(batch_size, n)
    try:
        hash((apply_fn, split))
    except TypeError:
        return _product(apply_fn, split, size, precision, leaves, rest, x, v.astype(out.dtype))
    return _jitted(apply_fn, split, size, precision, leaves, rest, x, v.astype(out.dtype))


def _product(
    apply_fn: Any,
    split: Split,
    size: int,
    precision: Any,
    leaves: Any,
    rest: Any,
    x: Any,
    v: Array,
) -> Array:
    n = num_points(x)
    batches = jax.tree.map(partial(_batches, size=size), x)
    # Repeated points in the last batch get v = 0, so they add nothing.
    padded = jnp.concatenate([v, jnp.zeros((-n % size, v.shape[1]), v.dtype)])
    v_batches = jnp.reshape(padded, (-1, size, v.shape[1]))

    def outputs(free: Any, xb: Any) -> Any:
        return apply_fn(split.merge(free, rest), xb)

    def add(total: Any, batch: Any) -> tuple[Any, None]:
        xb, vb = batch
        (part,) = jax.vjp(lambda free: outputs(free, xb), leaves)[1](vb)
        return jax.tree.map(jnp.add, total, part), None

    def apply(xb: Any) -> Array:
        return _push(lambda free: outputs(free, xb), leaves, pulled)

    with jax.default_matmul_precision(precision_name(precision)):
        zeros = jax.tree.map(jnp.zeros_like, leaves)
        pulled, _ = jax.lax.scan(add, zeros, (batches, v_batches))
        pushed = jax.lax.map(apply, batches)
    return jnp.reshape(pushed, (-1, v.shape[1]))[:n]


def _push(fn: Callable[..., Any], leaves: Any, tangent: Any) -> Array:
    """$J$ times `tangent`; where a custom reverse rule forbids forward mode, as $(J^T)^T$."""
    if not mentions(jax.make_jaxpr(fn)(leaves), "custom_vjp_call"):
        return jax.jvp(fn, (leaves,), (tangent,))[1]
    outputs, pull = jax.vjp(fn, leaves)
    return jax.linear_transpose(lambda v: pull(v)[0], outputs)(tangent)[0]


_jitted = jit(_product, static_argnums=(0, 1, 2, 3))


def _batches(x: Any, size: int) -> Array:
    """`(batches, size, ...)`, the last row repeated to fill up."""
    x = jnp.asarray(x)
    missing = -x.shape[0] % size
    if missing:
        x = jnp.concatenate([x, jnp.repeat(x[-1:], missing, axis=0)])
    return jnp.reshape(x, (-1, size, *x.shape[1:]))
