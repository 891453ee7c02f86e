r"""The empirical NTK along one direction of outputs per point: `v_iᵀ K_ij`, never the whole of `K`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike
from jaxtyping import Array, PyTree

from .._support.compile import HIGHEST, jit
from .._support.memory import tile_budget
from .._support.points import count_points
from .._support.types import ApplyFn, Inputs, Trainable
from ._empirical import even_parts, require_finite
from ._prepare import TERMS_AT_ONCE, Features, Pair, Prepared, as_inputs, prepare_kernel


def kernel_along(
    apply_fn: ApplyFn,
    params: PyTree,
    x1: Inputs,
    v: Array,
    x2: Inputs,
    *,
    trainable: Trainable = None,
    precision: PrecisionLike = HIGHEST,
    tile_bytes: int | None = None,
) -> Array:
    r"""$\sum_a v_{ia} K_{ia,jb}$, for about `1/c` of the work of the whole kernel.

    Gradients of `x1` are multiplied with `v` before any product. Everything else is as in
    `empirical_kernel`.

    **Returns:** the folded kernel, shape `(n1, n2, c)`.
    """
    x1, x2 = as_inputs(x1, x2)
    prepared, leaves, rest = prepare_kernel(apply_fn, params, x1, trainable, "auto", precision)
    prepared.check_apart(leaves, rest, x1)
    n1, n2, c = count_points(x1), count_points(x2), prepared.recipe.num_outputs
    v = jnp.asarray(v, prepared.recipe.dtype)
    size = np.dtype(prepared.recipe.dtype).itemsize
    budget = tile_bytes or tile_budget(n1 * n2 * c * size)
    quarter = max(1, budget // 4 // prepared.feature_bytes)
    chunk = max(1, budget // 2 // max(prepared.workspace_bytes, 1))

    def features(name: str, x: Inputs, part: slice) -> Features:
        made = prepared.features(leaves, rest, jax.tree.map(lambda a: a[part], x), chunk)
        require_finite(name, np.arange(part.start, part.stop), made.outputs, made.finite)
        return made

    rows = even_parts(n1, quarter)
    folded = [fold_outputs(features("x1", x1, part), v[part]) for part in rows]
    first = jax.tree.map(lambda *parts: jnp.concatenate(parts), *folded)
    del folded
    entry = n1 * c * size * min(len(prepared.recipe.groups) + 3, TERMS_AT_ONCE + 2)
    columns = even_parts(n2, min(quarter, max(1, budget // 2 // entry)))
    tiles = [_tile(prepared, first, features("x2", x2, part)) for part in columns]
    return jnp.concatenate(tiles, axis=1)


def _tile(prepared: Prepared, f1: Features, f2: Features) -> Array:
    return jax.block_until_ready(prepared.tile(f1, f2, traced=False)[:, 0])


@jit
def fold_outputs(features: Features, v: Array) -> Features:
    """Features of the one output `v·f` of each point."""

    def fold(a: Array) -> Array:
        return jnp.einsum("nc,nc...->n...", v, a, precision=HIGHEST)[:, None]

    pairs = tuple(Pair(pair.left, fold(pair.right)) for pair in features.pairs)
    rows = tuple(fold(row) for row in features.rows)
    return Features(pairs, rows, fold(features.outputs), features.finite)
