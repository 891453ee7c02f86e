"""Evaluate a recipe: the features of a batch of points, and their memory."""

from typing import Any

import jax
import jax.numpy as jnp

from ._factors import Env, scale_product
from ._gram import Features, Pair
from ._recipe import Group, Recipe

SMALL_ROW = 65536
"""Whole gradients up to this many entries are joined, so that one product serves them all."""


def point_features(recipe: Recipe, leaves: Any, rest: Any, x: Any) -> tuple[Any, Any, Any]:
    """Factors, whole gradients and outputs of one point, for the cotangent of every output."""
    inputs = jax.tree.leaves((leaves, rest, x))

    def for_output(cotangent: Any) -> tuple[Any, Any, Any, Any]:
        env = recipe.program.evaluate(recipe.ops, [*inputs, cotangent])
        pairs = [_group_pair(recipe, group, env) for group in recipe.groups]
        lefts = tuple(left for left, _ in pairs)
        rights = tuple(right for _, right in pairs)
        return lefts, rights, _rows(recipe, env), env[recipe.program.outputs[0]]

    out_dtype = recipe.program.avals[recipe.program.inputs[-1]].dtype
    one_hots = jnp.eye(recipe.num_outputs, dtype=out_dtype)
    axes = (None, 0, 0, None)
    lefts, rights, rows, outputs = jax.vmap(for_output, out_axes=axes)(one_hots)
    return tuple(map(Pair, lefts, rights)), rows, outputs


def make_features(recipe: Recipe, leaves: Any, rest: Any, x: Any, *, chunk: int) -> Features:
    """`Features` of the points on axis 0 of `x`, computed for at most `chunk` points at once."""
    n = jax.tree.leaves(x)[0].shape[0]

    def point(x: Any) -> tuple[Any, Any, Any]:
        return point_features(recipe, leaves, rest, x)

    if chunk >= n:
        pairs, rows, outputs = jax.vmap(point)(x)
    else:
        pairs, rows, outputs = jax.lax.map(point, x, batch_size=chunk)
    finite = jnp.ones((n,), bool)
    for array in jax.tree.leaves((pairs, rows)):
        finite &= jnp.all(jnp.isfinite(jnp.reshape(array, (n, -1))), axis=1)
    return Features(pairs, rows, outputs, finite)


def _group_pair(recipe: Recipe, group: Group, env: Env) -> tuple[Any, Any]:
    pairs = [factor.pair(env) for factor in group.factors]
    lefts = [left for left, _ in pairs]
    for scalars, sign in group.scales:
        lefts.append(scale_product(env, scalars, sign, recipe.dtype).reshape(1, 1, 1))
    if len(lefts) == 1 and jnp.issubdtype(lefts[0].dtype, jnp.integer):
        left = lefts[0]
    else:
        left = jnp.concatenate([a.astype(recipe.dtype) for a in lefts], axis=-1)
    return left, pairs[0][1].astype(recipe.dtype)


def _rows(recipe: Recipe, env: Env) -> tuple[Any, ...]:
    """Whole gradients for one cotangent, flat; the small ones joined into one."""
    flat = []
    for leaf in recipe.leaves:
        if leaf.form == "row":
            flat.append(jnp.reshape(env[leaf.slot], (-1,)).astype(recipe.dtype))
        elif leaf.form == "patches" and leaf.factor is not None:
            left, right = leaf.factor.pair(env)
            whole = jnp.einsum("bsm,bsn->bmn", left, right, precision=recipe.precision)
            flat.append(jnp.reshape(whole, (-1,)).astype(recipe.dtype))
    small = [row for row in flat if row.size <= SMALL_ROW]
    large = [row for row in flat if row.size > SMALL_ROW]
    return (*large, jnp.concatenate(small)) if small else tuple(large)


def feature_bytes(recipe: Recipe, leaves: Any, rest: Any, x: Any) -> int:
    """Bytes of one point's features."""
    pairs, rows, _ = jax.eval_shape(lambda *args: point_features(recipe, *args), leaves, rest, x)
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((pairs, rows)))


def workspace_bytes(recipe: Recipe) -> int:
    """Peak bytes of the backward pass of one point, slot by slot in program order."""
    program = recipe.program
    varies = program.dependents(program.inputs[recipe.first_input :])
    last_use = {slot: k for k, op in enumerate(recipe.ops) for slot in op.ins}
    live = peak = 0

    def size(slot: int) -> int:
        if slot not in varies:
            return 0
        times = recipe.num_outputs if slot in recipe.reached else 1
        return program.size(slot) * times * getattr(program.avals[slot].dtype, "itemsize", 8)

    for k, op in enumerate(recipe.ops):
        live += sum(size(slot) for slot in op.outs)
        peak = max(peak, live)
        live -= sum(size(slot) for slot in {*op.ins, *op.outs} if last_use.get(slot, k) == k)
    return peak
