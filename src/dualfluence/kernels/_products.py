r"""Products with the Jacobian of a network, batch by batch, and $Kv = J(J^T v)$ made of them."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.lax import PrecisionLike
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from .._support.compile import HIGHEST, jit
from .._support.points import count_points
from .._support.types import ApplyFn, Inputs, Leaves, Numbers, Trainable
from ._apart import Apart, push_through
from ._params import Split, opened, split_params
from ._prepare import as_inputs, check_outputs
from ._recipe import precision_name
from ._snapshot import Kept, take_snapshot

DEFAULT_BATCH = 256
"""Default number of points that are differentiated at once."""

Outputs = Callable[[PyTree, Inputs], Array]
"""`fn(theta, x) -> (n, c)`, with only the differentiated leaves in `theta`."""


def push_rows(fn: Outputs, theta: PyTree, x: Inputs, tangent: PyTree, size: int) -> Array:
    """$J(x)$ times `tangent`, shape `(n, c)`, `size` points at a time."""
    return map_rows(lambda xb: push_through(lambda t: fn(t, xb), theta, tangent), x, size)


def pull_rows(fn: Outputs, theta: PyTree, x: Inputs, v: Array, size: int) -> PyTree:
    """$J(x)^T v$, summed over points, `size` points at a time."""

    def pull(xb: Inputs, vb: Array) -> PyTree:
        f, back = jax.vjp(lambda t: fn(t, xb), theta)
        # Dual variables of a refined fit are wider than the network.
        return back(vb.astype(f.dtype))[0]

    def add(total: PyTree, batch: tuple[Inputs, Array]) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, pull(*batch)), None

    if _length(x) <= size:
        return pull(x, v)
    # Repeated points in the last batch get v = 0, so they add nothing.
    batches = (jax.tree.map(partial(cut, size=size), x), cut(v, size, zeros=True))
    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, theta), batches)[0]


def map_rows(fn: Callable[[Inputs], Array], x: Inputs, size: int) -> Array:
    """`fn` of `x`, `size` points at a time."""
    n = _length(x)
    if n <= size:
        return fn(x)
    out = jax.lax.map(fn, jax.tree.map(partial(cut, size=size), x))
    return out.reshape(-1, *out.shape[2:])[:n]


def cut(x: ArrayLike, size: int, *, zeros: bool = False) -> Array:
    """`x` as `(num_batches, size, ...)`, padded with its last row or with zeros."""
    x = jnp.asarray(x)
    missing = -x.shape[0] % size
    if missing:
        tail = jnp.zeros_like(x[:1]) if zeros else x[-1:]
        x = jnp.concatenate([x, jnp.repeat(tail, missing, axis=0)])
    return x.reshape(-1, size, *x.shape[1:])


def _length(x: Inputs) -> int:
    return jax.tree.leaves(x)[0].shape[0]


def ntk_mv(
    apply_fn: ApplyFn,
    params: PyTree,
    x: Inputs,
    v: Numbers,
    batch_size: int = DEFAULT_BATCH,
    *,
    trainable: Trainable = None,
    precision: PrecisionLike = HIGHEST,
) -> Array:
    r"""The product $Kv = J(J^T v)$ with the empirical NTK, computed without forming the NTK.

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
    apply_fn, trainable = opened("ntk_mv", apply_fn, trainable)
    split, leaves, rest = split_params(params, trainable)
    n, v = count_points(x), jnp.asarray(v)

    def outputs(leaves: Leaves, rest: Leaves, x: Inputs) -> PyTree:
        return apply_fn(split.merge(leaves, rest), x)

    out = jax.eval_shape(outputs, leaves, rest, x)
    check_outputs("ntk_mv", out, n)
    if v.shape != out.shape:
        raise ValueError(
            f"ntk_mv: v must have the shape of the outputs, {out.shape}, got {v.shape}."
        )
    if batch_size < 1:
        raise ValueError(f"ntk_mv: batch_size must be at least 1, got {batch_size}.")
    args = (split, min(batch_size, n), precision, leaves, rest, x, v.astype(out.dtype))
    if any(isinstance(a, Tracer) for a in jax.tree.leaves((leaves, rest, x))):
        return _product(apply_fn, *args)
    now = take_snapshot(apply_fn, split.merge(leaves, rest), x)
    try:
        known = _KEPT.get((now, split))
    except TypeError:
        Apart(outputs, leaves, rest, x).check(leaves, rest, x)
        return _product(apply_fn, *args)
    apart = known or _KEPT.put((now, split), Apart(outputs, leaves, rest, x))
    apart.check(leaves, rest, x)
    return _jitted(now, *args)


_KEPT = Kept[Apart](64)
"""Guards of functions, kept so that repeated products do not repeat a proof."""


def _product(
    apply_fn: ApplyFn,
    split: Split,
    size: int,
    precision: PrecisionLike,
    leaves: Leaves,
    rest: Leaves,
    x: Inputs,
    v: Array,
) -> Array:
    def outputs(free: PyTree, xb: Inputs) -> PyTree:
        return apply_fn(split.merge(free, rest), xb)

    with jax.default_matmul_precision(precision_name(precision)):
        pulled = pull_rows(outputs, leaves, x, v, size)
        return push_rows(outputs, leaves, x, pulled, size)


_jitted = jit(_product, static_argnums=(0, 1, 2, 3))
