r"""Where parameters enter a function as a product: `∂f/∂W = Σ_s A_s ⊗ G_s`, and in which order.

The places are found in the backward pass by the reader of `kernels`: dense layers, convolutions,
embeddings, and the biases and scales that share a dense layer's `G`. An approximation of the curvature
by Kronecker factors also needs to know which entry of the product belongs to which entry of the
parameter. The same operations show this.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from .._support.compile import PRECISION
from .._support.types import AnyLeaf, Leaves
from ..kernels._linearized import Linearized
from ..kernels._params import split_params
from ..kernels._program import trace_program
from ..kernels._reader import Env, FactorReader, GradientFactor, Scalars, scale_product
from ..kernels._snapshot import Kept

FACTOR_LIMIT = 8192
"""Largest side of a factor that is decomposed; doubled, the decomposition takes eight times as long."""

EXACT_LIMIT = 1024
"""Parameters without factors, up to this many in a leaf, get their exact block; more, its diagonal."""


@dataclass(frozen=True)
class Place:
    """Leaves whose gradient is one sum of products; sizes `(b, s, m, n)` as for a factor.

    - `leaves`: positions among the trainable leaves, those with an `A` of their own first.
    - `factors`: of the leaves that have one; the others have a number (`scales`) for `A`.
    - `orders`: for each leaf, where its entries stand in its part of `(b, m, n)`.
    """

    leaves: tuple[int, ...]
    factors: tuple[GradientFactor, ...]
    scales: tuple[tuple[Scalars, int], ...]
    orders: tuple[np.ndarray, ...]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        b, s, _, n = self.factors[0].sizes
        return b, s, sum(f.sizes[2] for f in self.factors) + len(self.scales), n

    @property
    def widths(self) -> list[int]:
        """Rows of each leaf's part."""
        return [f.sizes[2] for f in self.factors] + [1] * len(self.scales)

    @property
    def looks_up(self) -> bool:
        """Whether `A` is one-hot rows, kept as integers."""
        return _lookup_part(self.factors[0]) and len(self.leaves) == 1

    def pair(self, env: Env, dtype: DTypeLike) -> tuple[Array, Array]:
        """`A`, `(b, s, m)` or integers `(b, s)`, and `G`, `(b, s, n)`, for one cotangent."""
        pairs = [factor.pair(env) for factor in self.factors]
        if self.looks_up:
            return pairs[0][0], pairs[0][1].astype(dtype)
        lefts = [left.astype(dtype) for left, _ in pairs]
        for scalars, sign in self.scales:
            lefts.append(scale_product(env, scalars, sign, dtype).reshape(1, 1, 1))
        return jnp.concatenate(lefts, axis=-1), pairs[0][1].astype(dtype)

    def gather(self, leaves: Sequence[Any]) -> Array:
        """The leaves of this place as `(b, m, n)`; leaves of other places are not read, and may be
        `None`."""
        b, _, _, n = self.sizes
        parts = [
            jnp.reshape(leaves[k], (-1,))[order].reshape(b, m, n)
            for k, order, m in zip(self.leaves, self.orders, self.widths, strict=True)
        ]
        return jnp.concatenate(parts, axis=1)

    def scatter(self, block: Array) -> list[tuple[int, Array]]:
        """The entries of `(b, m, n)` back in the order of the leaves, flat."""
        ends = np.cumsum(self.widths)[:-1]
        found = []
        for k, order, part in zip(
            self.leaves, self.orders, jnp.split(block, ends, axis=1), strict=True
        ):
            found.append((k, jnp.reshape(part, (-1,))[np.argsort(order)]))
        return found


PointFactors = tuple[list[Array], list[Array], list[Array]]
"""`A`s, `G`s, and whole gradients where there are no factors."""


class Places:
    """The backward pass of one network at one shape of points, with its places.

    - `places`: sums of products.
    - `whole`: leaves without a place: `(leaf, slot, size)`.
    - `paths`: names of the leaves.
    """

    def __init__(self, model: Linearized, x: AnyLeaf) -> None:
        mask = jax.tree.unflatten(jax.tree.structure(model.params), model.trainable)
        split, leaves, rest = split_params(model.params, mask)
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (leaves, rest))
        point = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

        def single(leaves: Leaves, rest: Leaves, x: Array) -> Array:
            return model.apply_fn(split.merge(leaves, rest), x[None])[0]

        def backward(leaves: Leaves, rest: Leaves, x: Array, cotangent: Array) -> Leaves:
            _, pull = jax.vjp(lambda free: single(free, rest, x), leaves)
            return pull(cotangent)[0]

        with jax.default_matmul_precision(PRECISION):
            out = jax.eval_shape(single, *shapes, point)
            self.program = trace_program(backward, *shapes, point, out)
        names = zip(split.paths, split.roles, strict=True)
        self.paths = [path for path, role in names if role == "trainable"]
        self.reached = self.program.dependents([self.program.inputs[-1]])
        self.num_outputs = int(out.shape[0])
        reader = FactorReader(self.program, self.reached)
        self.places, self.whole = _find(reader, self.program.outputs, self.reached)
        self.ops = self.program.needed(self._wanted())

    def _wanted(self) -> set[int]:
        wanted = {slot for _, slot, _ in self.whole}
        for place in self.places:
            wanted |= {slot for scalars, _ in place.scales for slot, _ in scalars}
            wanted = wanted.union(*(factor.slots for factor in place.factors))
        return wanted

    def point(self, inputs: Leaves, cotangents: Array, dtype: DTypeLike) -> PointFactors:
        """`A`s, `G`s and whole gradients of one point; the last two have an axis of cotangents."""

        def one(cotangent: Array) -> PointFactors:
            env = self.program.evaluate(self.ops, [*inputs, cotangent])
            pairs = [place.pair(env, dtype) for place in self.places]
            whole = [jnp.reshape(env[slot], (-1,)).astype(dtype) for _, slot, _ in self.whole]
            return [a for a, _ in pairs], [g for _, g in pairs], whole

        out_dtype = self.program.avals[self.program.inputs[-1]].dtype
        return jax.vmap(one, out_axes=(None, 0, 0))(cotangents.astype(out_dtype))


_KEPT = Kept[Places](16)
"""Places of functions, so that repeated requests need no compilation."""


def find_places(model: Linearized, x: AnyLeaf) -> Places:
    """The places of a bound model for points like those of `x`."""
    shapes = tuple((a.shape, str(a.dtype)) for a in jax.tree.leaves(model.split(model.params)[0]))
    key = (model.apply_fn, model.trainable, shapes, x.shape[1:], str(x.dtype))
    try:
        known = _KEPT.get(key)
    except TypeError:  # a function that has no hash
        return Places(model, x)
    return known or _KEPT.put(key, Places(model, x))


def _find(
    reader: FactorReader, slots: Sequence[int], reached: set[int]
) -> tuple[list[Place], list[tuple[int, int, int]]]:
    """Leaves by their `G`; a leaf without factors joins the place whose `G` it is a multiple of."""
    found: dict[Hashable, Place] = {}
    left: list[int] = []
    for k, slot in enumerate(slots):
        size = reader.program.size(slot)
        factor = reader.read(slot) if slot in reached and size else None
        if factor is None or max(_sides(factor)) > FACTOR_LIMIT:
            left.append(k)
            continue
        flat = factor.kind == "dot" and factor.sizes[:2] == (1, 1)
        key = factor.right_slot if flat else ("own", k)
        before = found.get(key, Place((), (), (), ()))
        order = _order(factor, reader.program.shape(slot))
        found[key] = Place(
            (*before.leaves, k), (*before.factors, factor), (), (*before.orders, order)
        )
    whole = []
    for k in left:
        slot, size = slots[k], reader.program.size(slots[k])
        root, scalars, sign = reader.root(slot)
        if slot in reached and root in found and found[root].sizes[3] == size:
            place = found[root]
            found[root] = Place(
                (*place.leaves, k),
                place.factors,
                (*place.scales, (scalars, sign)),
                (*place.orders, np.arange(size)),
            )
        else:
            whole.append((k, slot, size))
    return list(found.values()), whole


def _sides(factor: GradientFactor) -> tuple[int, int]:
    """Sides that have to be decomposed: one-hot rows have a diagonal factor."""
    return (0 if _lookup_part(factor) else factor.sizes[2]), factor.sizes[3]


def _lookup_part(factor: GradientFactor) -> bool:
    return getattr(factor, "parts", (factor,))[0].kind == "lookup"


def _order(factor: GradientFactor, shape: tuple[int, ...]) -> np.ndarray:
    """For every entry of `(b, m, n)`, its place in the flat leaf."""
    part = getattr(factor, "parts", (factor,))[0]
    b, _, m, n = factor.sizes
    index = np.arange(b * m * n).reshape(b, m, n)
    makers = {"dot": _dot_output, "conv": _conv_output}
    kinds = [i for i, step in enumerate(factor.axis_order) if isinstance(step, str)]
    views, own = factor.axis_order[: kinds[0]], factor.axis_order[kinds[0] :]
    # An embedding's table is (m, n) as it stands.
    array = makers[part.kind](index, part, own) if part.kind in makers else index
    for name, permutation, out_shape in reversed(views):
        array = array.transpose(permutation) if name == "transpose" else array
        array = array.reshape(out_shape)
    return np.argsort(array.reshape(prod(shape)))


def _dot_output(index: np.ndarray, part: Any, own: Any) -> np.ndarray:
    _, batch, (swapped, free_left, free_right) = own
    if swapped:
        return index.transpose(0, 2, 1).reshape(*batch, *free_right, *free_left)
    return index.reshape(*batch, *free_left, *free_right)


def _conv_output(index: np.ndarray, part: Any, own: Any) -> np.ndarray:
    taps, spec = part.params["taps"], part.params["dimension_numbers"].out_spec
    groups, n = index.shape[0], index.shape[2]
    index = index.reshape(groups, prod(taps), -1, n)  # (groups, taps, inputs, outputs)
    index = index.transpose(2, 0, 3, 1).reshape(-1, groups * n, *taps)
    # The output's axis spec[k] is the k-th of (inputs, outputs, taps).
    return index.transpose(np.argsort(spec))
