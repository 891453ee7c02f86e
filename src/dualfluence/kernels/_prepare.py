"""Prepare the kernel of a function once: check its inputs, make its recipe, keep the compiled pieces.

The pieces evaluate the recipe (the features of a batch of points) and contract the features of two
batches into one kernel tile.
"""

from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from .._support.compile import jit
from .._support.points import common_length, count_points
from .._support.types import AnyLeaf, ApplyFn, Inputs, Leaves, Numbers, Trainable
from ._apart import Apart, Batched
from ._params import Split, opened, split_params, widen_half
from ._reader import Env, scale_product
from ._recipe import Group, Method, PointFn, Recipe, make_report, read_uses
from ._snapshot import Kept, Snapshot, reads

TERMS_AT_ONCE = 6
"""Number of products of tile size that may be in memory at once."""


class Pair(NamedTuple):
    """$A$ `(n, b, s, m)`, or indices `(n, b, s)`, and $G$ `(n, c, b, s, k)` of one gradient."""

    left: Array
    right: Array


class Features(NamedTuple):
    """The contribution of a batch of points to any kernel tile.

    - `pairs`: gradients kept as two factors.
    - `rows`: gradients kept whole, each `(n, c, p)`.
    - `outputs`: `(n, c)`, and `finite`: whether the derivatives of each point are finite, `(n,)`.
    """

    pairs: tuple[Pair, ...]
    rows: tuple[Array, ...]
    outputs: Array
    finite: Array


def take_points(features: Features, index: Array) -> Features:
    """The features of some of the points."""
    return jax.tree.map(lambda a: jnp.take(a, index, axis=0), features)


def contract(
    f1: Features, f2: Features, *, traced: bool, dtype: DTypeLike, precision: PrecisionLike
) -> Array:
    r"""Sum every parameter's contribution to a tile.

    $$K_{ia,jb} = \sum_{\text{pairs}}\sum_{s,t} (A_{is}\cdot A_{jt})(G_{ias}\cdot G_{jbt})
    + \sum_{\text{rows}} R_{ia}\cdot R_{jb}$$

    Each side has its own outputs, unless `traced`.

    **Returns:** `(n1, c1, n2, c2)`, or with `traced` its mean over $a = b$, `(n1, n2)`.
    """
    terms = [_pair_term(p, q, traced, precision) for p, q in zip(f1.pairs, f2.pairs, strict=True)]
    terms += [_gram(p, q, traced, precision) for p, q in zip(f1.rows, f2.rows, strict=True)]
    shape = _tile_shape(f1.outputs.shape, f2.outputs.shape, traced)
    total = terms[0] if terms else jnp.zeros(shape, dtype)
    for k, term in enumerate(terms[1:], start=1):
        # Else the compiler may fuse all sums into one and hold every product for it.
        if k % TERMS_AT_ONCE == 0:
            total = jax.lax.optimization_barrier(total)
        total = total + term
    return total


def _tile_shape(first: tuple[int, ...], second: tuple[int, ...], traced: bool) -> tuple[int, ...]:
    return (first[0], second[0]) if traced else (*first[:2], *second[:2])


def _gram(r1: Array, r2: Array, traced: bool, precision: PrecisionLike) -> Array:
    """$R_{ia}\\cdot R_{jb}$ of `(n, c, p)` arrays, or the mean over equal outputs."""
    if not traced:
        return jax.lax.dot_general(r1, r2, (((2,), (2,)), ((), ())), precision=precision)
    flat1, flat2 = (jnp.reshape(r, (r.shape[0], -1)) for r in (r1, r2))
    return jnp.matmul(flat1, flat2.T, precision=precision) / r1.shape[1]


def _left_gram(a1: Array, a2: Array, dtype: DTypeLike, precision: PrecisionLike) -> Array:
    """$A_i\\cdot A_j$ of `(n, m)` rows, or equality of `(n,)` indices."""
    if a1.ndim == 1:
        return (a1[:, None] == a2[None, :]).astype(dtype)
    return jnp.matmul(a1, a2.T, precision=precision)


def _pair_term(p: Pair, q: Pair, traced: bool, precision: PrecisionLike) -> Array:
    b, s = p.right.shape[2:4]

    def at(k: Array | int, u: Array | int, v: Array | int) -> Array:
        left = _left_gram(p.left[:, k, u], q.left[:, k, v], p.right.dtype, precision)
        right = _gram(p.right[:, :, k, u], q.right[:, :, k, v], traced, precision)
        return right * (left if traced else left[:, None, :, None])

    if b * s == 1:
        return at(0, 0, 0)

    # One position pair at a time: the tile is the only array that grows with n1·n2·c².
    def step(i: Array, total: Array) -> Array:
        k, u, v = i // (s * s), (i // s) % s, i % s
        return total + at(k, u, v)

    shape = _tile_shape(p.right.shape, q.right.shape, traced)
    return jax.lax.fori_loop(0, b * s * s, step, jnp.zeros(shape, p.right.dtype))


SMALL_ROW = 65536
"""Whole gradients up to this many entries are joined, so that one product serves them all."""


Rows = tuple[Array, ...]


PointFeatures = tuple[tuple[Pair, ...], Rows, Array]


def point_features(recipe: Recipe, leaves: Leaves, rest: Leaves, x: Inputs) -> PointFeatures:
    """Factors, whole gradients and outputs of one point, for the cotangent of every output."""
    inputs = jax.tree.leaves((leaves, rest, x))

    def for_output(cotangent: Array) -> tuple[Rows, Rows, Rows, Array]:
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


def make_features(
    recipe: Recipe, leaves: Leaves, rest: Leaves, x: Inputs, *, chunk: int
) -> Features:
    """`Features` of the points on axis 0 of `x`, computed for at most `chunk` points at once."""
    n = jax.tree.leaves(x)[0].shape[0]

    def point(x: Inputs) -> PointFeatures:
        return point_features(recipe, leaves, rest, x)

    if chunk >= n:
        pairs, rows, outputs = jax.vmap(point)(x)
    else:
        pairs, rows, outputs = jax.lax.map(point, x, batch_size=chunk)
    finite = jnp.ones((n,), bool)
    for array in jax.tree.leaves((pairs, rows)):
        finite &= jnp.all(jnp.isfinite(jnp.reshape(array, (n, -1))), axis=1)
    return Features(pairs, rows, outputs, finite)


def _group_pair(recipe: Recipe, group: Group, env: Env) -> tuple[Array, Array]:
    pairs = [factor.pair(env) for factor in group.factors]
    lefts = [left for left, _ in pairs]
    for scalars, sign in group.scales:
        lefts.append(scale_product(env, scalars, sign, recipe.dtype).reshape(1, 1, 1))
    if len(lefts) == 1 and jnp.issubdtype(lefts[0].dtype, jnp.integer):
        left = lefts[0]
    else:
        left = jnp.concatenate([a.astype(recipe.dtype) for a in lefts], axis=-1)
    return left, pairs[0][1].astype(recipe.dtype)


def _rows(recipe: Recipe, env: Env) -> Rows:
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


def feature_bytes(recipe: Recipe, leaves: Leaves, rest: Leaves, x: Inputs) -> int:
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


MAX_KEPT = 16
"""Number of compiled kernels that are kept for repeated calls."""


Args = tuple[Leaves, Leaves, Inputs]
"""Trainable leaves, fixed ones, and inputs."""


class Prepared:
    """A recipe with its compiled features and tiles, and the guard of its function."""

    def __init__(
        self,
        single: PointFn,
        batched: Batched,
        split: Split,
        shapes: Args,
        recipe: Recipe,
    ) -> None:
        leaves, rest, point = shapes
        self.recipe = recipe
        self.report = make_report(recipe, split, read_uses(single, leaves, rest, point))
        self.feature_bytes = feature_bytes(recipe, leaves, rest, point)
        self.workspace_bytes = workspace_bytes(recipe)
        self._features = jit(partial(make_features, recipe), static_argnames="chunk")
        tile = partial(contract, dtype=recipe.dtype, precision=recipe.precision)
        self.tile = jit(tile, static_argnames="traced")
        self.tile_at = jit(
            lambda f1, f2, i, j, traced: tile(
                take_points(f1, i), take_points(f2, j), traced=traced
            ),
            static_argnames="traced",
        )
        self._apart = Apart(batched, leaves, rest, jax.tree.map(_as_batch, point))

    def features(self, leaves: Leaves, rest: Leaves, x: Inputs, chunk: int) -> Features:
        return self._features(leaves, rest, x, chunk=chunk)

    def check_apart(self, leaves: Leaves, rest: Leaves, x: Inputs) -> None:
        """Raise if outputs or derivatives of a point change with the other points."""
        self._apart.check(leaves, rest, x)


_KEPT = Kept[Prepared](MAX_KEPT)


def prepare_kernel(
    apply_fn: ApplyFn,
    params: PyTree,
    x: Inputs,
    trainable: Trainable,
    method: Method,
    precision: PrecisionLike,
) -> tuple[Prepared, Leaves, Leaves]:
    """Make a recipe for the kernel of `apply_fn`, or reuse the recipe of an earlier call with the same
    shapes.

    **Returns:** the prepared kernel, the trainable leaves and the fixed arrays.
    """
    if method not in ("auto", "structured", "jacobian"):
        raise ValueError(
            f'empirical kernel: method must be "auto", "structured" or "jacobian", got {method!r}.'
        )
    apply_fn, trainable = opened("empirical kernel", apply_fn, trainable)
    split, leaves, rest = split_params(params, trainable)
    args = (leaves, rest, x)
    found = _KEPT.get(_key(apply_fn, split, args, (method, precision)))
    if found is None:
        found = _build(apply_fn, split, args, method, precision)
        # The key of now: a function that counts its calls has changed what it closes over.
        _KEPT.put(_key(apply_fn, split, args, (method, precision)), found)
    return found, leaves, rest


def _build(
    apply_fn: ApplyFn,
    split: Split,
    args: Args,
    method: Method,
    precision: PrecisionLike,
) -> Prepared:
    def batched(leaves: Leaves, rest: Leaves, x: Inputs) -> PyTree:
        return apply_fn(split.merge(leaves, rest), x)

    leaves, rest, x = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    check_outputs("empirical kernel", jax.eval_shape(batched, leaves, rest, x), count_points(x))
    point = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), x)

    def single(leaves: Leaves, rest: Leaves, x: Inputs) -> Array:
        out = batched(leaves, rest, jax.tree.map(lambda a: a[None], x))
        return jnp.reshape(out, (out.shape[1],))

    recipe = Recipe(single, leaves, rest, point, method=method, precision=precision)
    return Prepared(single, batched, split, (leaves, rest, point), recipe)


def _as_batch(point: AnyLeaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, *point.shape), point.dtype)


def _key(apply_fn: ApplyFn, split: Split, args: Args, options: Hashable) -> Hashable:
    """The key of a recipe; `None`, so that a new one is made, if it is not hashable or is being traced."""
    arrays, structure = jax.tree.flatten(args)
    if any(isinstance(a, Tracer) for a in arrays):
        return None
    shapes = tuple((a.shape, str(a.dtype)) for a in jax.tree.leaves(args[:2]))
    shapes += tuple((a.shape[1:], str(a.dtype)) for a in jax.tree.leaves(args[2]))
    read = () if isinstance(apply_fn, Snapshot) else reads(apply_fn)
    key = (apply_fn, read, split, structure, shapes, options, str(jnp.result_type(float)))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def as_inputs(x1: Inputs, x2: Inputs | None) -> tuple[Inputs, Inputs | None]:
    """Both inputs as arrays (NumPy stays in host memory), checked against each other."""
    first = _as_points("x1", x1)
    if x2 is None:
        return first, None
    second = _as_points("x2", x2)
    kinds = [
        (jax.tree.structure(x), [(a.shape[1:], str(a.dtype)) for a in jax.tree.leaves(x)])
        for x in (first, second)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError(
            "empirical kernel: x1 and x2 must agree in all but the number of points, got"
            f" {kinds[0][1]} and {kinds[1][1]} per point (shape, dtype)."
        )
    return first, second


def _as_points(name: str, x: Inputs) -> Inputs:
    arrays = jax.tree.map(_as_input, x)
    if common_length(f"empirical kernel: {name}", jax.tree.leaves(arrays)) == 0:
        raise ValueError(f"empirical kernel: {name} needs one or more points on axis 0, got none.")
    return arrays


def _as_input(x: AnyLeaf | Numbers) -> AnyLeaf:
    if isinstance(x, jax.ShapeDtypeStruct):
        return widen_half(x)
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
        return x.astype(jax.dtypes.canonicalize_dtype(widen_dtype(x.dtype)), copy=False)
    return widen_half(x)


def widen_dtype(dtype: DTypeLike) -> DTypeLike:
    """The dtype that `widen` gives."""
    half = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.float32 if half else dtype


def check_outputs(what: str, out: PyTree, n: int) -> int:
    """The number of outputs `c`, or an error if `out` is not one real array of shape `(n, c)`."""
    arrays = jax.tree.leaves(out)
    alone = len(arrays) == 1 and arrays[0] is out
    shape = tuple(out.shape) if alone else f"{len(arrays)} arrays in a {type(out).__name__}"
    if not alone or len(shape) != 2 or shape[0] != n or shape[1] == 0:
        raise ValueError(
            f"{what}: apply_fn(params, x) must return an array of shape (n, c) = ({n}, c), got {shape}. A "
            "scalar output still needs its axis: return f[:, None]. Flatten other axes, drop auxiliary "
            "outputs."
        )
    if not jnp.issubdtype(out.dtype, jnp.floating):
        raise ValueError(
            f"{what}: apply_fn(params, x) must return real floating-point numbers, got {out.dtype}. "
            "Return scores before any argmax, rounding or comparison."
        )
    return out.shape[1]
