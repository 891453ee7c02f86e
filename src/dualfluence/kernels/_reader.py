r"""Find, in a traced backward pass, the factors that make each parameter gradient.

The gradient of a weight is linear in the cotangent, and its last step is an outer product $\partial f_c
/ \partial W = \sum_s A_s \otimes G_{c,s}$ of a factor that does not depend on the cotangent ($A$:
activations, patches, indices) and one that does ($G$). Stopping one step before the end gives the two
factors, without any knowledge of the forward function.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array

from ._program import Op, Program

Env = Mapping[int, Any]
"""Values of the slots of a program."""

AxisOrder = tuple[Any, ...]
"""The changes of axes between a product and the gradient of the leaf, step by step. Two products with
the same steps may be added; `primal` follows the steps to find the position of each entry in the
leaf."""

Scalars = tuple[tuple[int, int], ...]
"""Slots of single numbers, each with the power 1 or -1 at which it multiplies a gradient."""


@dataclass(frozen=True)
class GradientFactor:
    r"""A gradient $\sum_s A_{b,s} \otimes G_{b,s}$; sizes are `(b, s, m, n)` for one point.

    - `scalars`: slots that multiply (`+1`) or divide (`-1`) it; `sign` is its sign.
    - `axis_order`: the permutation from the axes of the product to those of the leaf; products with
      equal axis orders may be added.
    """

    sizes: tuple[int, int, int, int]
    scalars: Scalars
    sign: int
    axis_order: AxisOrder
    right_slot: int

    kind = "abstract"

    @abstractmethod
    def left(self, env: Env) -> Array:
        """$A$, shape `(b, s, m)`, or integer indices `(b, s)` standing for one-hot rows."""

    @abstractmethod
    def right(self, env: Env) -> Array:
        """$G$ for one cotangent, shape `(b, s, n)`."""

    @property
    def slots(self) -> set[int]:
        return {self.right_slot, *(s for s, _ in self.scalars)}

    def pair(self, env: Env) -> tuple[Array, Array]:
        """Both factors, multiplied with the scalars."""
        left, right = self.left(env), self.right(env)
        if not self.scalars and self.sign == 1:
            return left, right
        scale = scale_product(env, self.scalars, self.sign, right.dtype)
        if jnp.issubdtype(left.dtype, jnp.integer):
            return left, right * scale
        return left * scale.astype(left.dtype), right


def scale_product(env: Env, scalars: Scalars, sign: int, dtype: DTypeLike) -> Array:
    """The product of `scalars`, each a slot with power 1 or -1."""
    total = jnp.asarray(sign, dtype)
    for slot, power in scalars:
        value = jnp.reshape(jnp.asarray(env[slot]), ()).astype(dtype)
        total = total * value if power > 0 else total / value
    return total


@dataclass(frozen=True)
class DotFactor(GradientFactor):
    """Both factors are the operands of a `dot_general`."""

    left_slot: int
    left_dims: tuple[tuple[int, ...], tuple[int, ...]]
    right_dims: tuple[tuple[int, ...], tuple[int, ...]] | None

    kind = "dot"

    @property
    def slots(self) -> set[int]:
        return super().slots | {self.left_slot}

    def left(self, env: Env) -> Array:
        return _batch_sum_free(env[self.left_slot], *self.left_dims)

    def right(self, env: Env) -> Array:
        if self.right_dims is None:
            return jnp.reshape(env[self.right_slot], (1, 1, -1))
        return _batch_sum_free(env[self.right_slot], *self.right_dims)


@dataclass(frozen=True)
class ConvFactor(GradientFactor):
    """$A$ holds the input patches under each output position, $G$ the output cotangents."""

    left_slot: int
    params: Mapping[str, Any]

    kind = "conv"

    @property
    def slots(self) -> set[int]:
        return super().slots | {self.left_slot}

    def left(self, env: Env) -> Array:
        p, groups = self.params, self.sizes[0]
        spec = p["dimension_numbers"]
        lhs = jnp.transpose(
            env[self.left_slot], (spec.lhs_spec[1], spec.lhs_spec[0], *spec.lhs_spec[2:])
        )
        patches = _patches(
            lhs, p, self.params["taps"], self.params["window"]
        )  # (taps, sum, in, *s)
        patches = jnp.reshape(patches, (*patches.shape[:2], groups, -1, prod(patches.shape[3:])))
        return jnp.reshape(jnp.transpose(patches, (2, 1, 4, 0, 3)), self.sizes[:3])

    def right(self, env: Env) -> Array:
        spec = self.params["dimension_numbers"].rhs_spec
        rhs = jnp.transpose(env[self.right_slot], (spec[0], spec[1], *spec[2:]))
        rhs = jnp.reshape(rhs, (self.sizes[0], self.sizes[3], self.sizes[1]))
        return jnp.swapaxes(rhs, 1, 2)


@dataclass(frozen=True)
class LookupFactor(GradientFactor):
    """$A$ is one-hot rows, stored as indices; rows with an index out of range have no gradient."""

    left_slot: int
    component: int
    clips: bool

    kind = "lookup"

    @property
    def slots(self) -> set[int]:
        return super().slots | {self.left_slot}

    def left(self, env: Env) -> Array:
        idx = env[self.left_slot]
        found = jnp.reshape(idx[..., self.component], self.sizes[:2])
        if self.clips:
            return jnp.clip(found, 0, self.sizes[2] - 1)
        # An index has one entry per axis. JAX drops a row whose index is not zero on the other axes,
        # because it would stick out there: -1 marks such a row as out of range.
        strays = jnp.reshape(jnp.any(idx != 0, axis=-1, where=self._others(idx)), found.shape)
        return jnp.where(strays, -1, found)

    def _others(self, idx: Array) -> Array:
        return jnp.arange(idx.shape[-1]) != self.component

    def right(self, env: Env) -> Array:
        # A dropped row has no gradient: its cotangent must not reach the kernel.
        idx = self.left(env)[..., None]
        rows = jnp.reshape(env[self.right_slot], (*self.sizes[:2], self.sizes[3]))
        inside = (idx >= 0) & (idx < self.sizes[2])
        return jnp.where(inside, rows, jnp.zeros_like(rows))


def _batch_sum_free(x: Array, batch: tuple[int, ...], summed: tuple[int, ...]) -> Array:
    free = [d for d in range(x.ndim) if d not in batch and d not in summed]
    shape = x.shape
    x = jnp.transpose(x, (*batch, *summed, *free))
    return jnp.reshape(x, tuple(prod(shape[d] for d in dims) for dims in (batch, summed, free)))


def _patches(
    x: Array, p: Mapping[str, Any], taps: tuple[int, ...], window: tuple[int, ...]
) -> Array:
    """Strided windows of `(a, b, *spatial)`: shape `(taps, a, b, *window)`."""
    # JAX writes a weight's gradient as a convolution of inputs with cotangents: its outputs are the
    # taps of the filter and its window goes over output positions. So the taps step by its strides,
    # and positions by its dilation.
    steps, spread = p["window_strides"], p["rhs_dilation"]
    config = [(0, 0, 0), (0, 0, 0)]
    for d, length in enumerate(x.shape[2:]):
        low, hole = p["padding"][d][0], p["lhs_dilation"][d] - 1
        dilated = length + max(length - 1, 0) * hole
        # Exactly as far as the last window reaches; a negative padding cuts off what none reads.
        needed = (taps[d] - 1) * steps[d] + (window[d] - 1) * spread[d] + 1
        config.append((low, needed - dilated - low, hole))
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), config)

    def at(tap: tuple[int, ...]) -> Array:
        start = [t * s for t, s in zip(tap, steps, strict=True)]
        limit = [a + (w - 1) * r + 1 for a, w, r in zip(start, window, spread, strict=True)]
        return jax.lax.slice(x, (0, 0, *start), (*x.shape[:2], *limit), (1, 1, *spread))

    return jnp.stack([at(tap) for tap in np.ndindex(*taps)])


@dataclass(frozen=True)
class SharedFactor(GradientFactor):
    """Several uses of one parameter: their sums over `s` are concatenated, so cross terms are kept."""

    parts: tuple[GradientFactor, ...]

    kind = "shared"

    @property
    def slots(self) -> set[int]:
        return set().union(*(part.slots for part in self.parts))

    def left(self, env: Env) -> Array:
        return jnp.concatenate([part.pair(env)[0] for part in self.parts], axis=1)

    def right(self, env: Env) -> Array:
        return jnp.concatenate([part.pair(env)[1] for part in self.parts], axis=1)


def merge_uses(terms: tuple[GradientFactor, ...]) -> GradientFactor | None:
    """One factor for the sum of `terms`, or `None` if their axis orders differ."""
    first = terms[0]
    b, _, m, n = first.sizes
    alike = all(
        (t.kind, t.axis_order, t.sizes[0], t.sizes[2:]) == (first.kind, first.axis_order, b, (m, n))
        for t in terms
    )
    if not alike:
        return None
    if len(terms) == 1:
        return first
    sizes = (b, sum(t.sizes[1] for t in terms), m, n)
    return SharedFactor(sizes, (), 1, first.axis_order, first.right_slot, terms)


class FactorReader:
    """Finds factors in the backward `program`; `reached` are the slots that depend on the cotangent."""

    def __init__(self, program: Program, reached: set[int]) -> None:
        self.program, self.reached = program, reached

    def read(self, slot: int) -> GradientFactor | None:
        """The factors of the gradient in `slot`, or `None` if there are none.

        A parameter used more than once has a sum of products; uses with equal axis orders become one
        factor with a longer sum, others have no common factors.
        """
        terms = self._terms(slot, (), 1, ())
        # No use at all, or one without factors: the whole gradient is formed instead.
        return merge_uses(tuple(terms)) if terms else None

    def root(self, slot: int) -> tuple[int, Scalars, int]:
        """Follow `slot` back through reshapes and scalar factors, which keep the flat order."""
        scalars: Scalars = ()
        sign = 1
        while (op := self.program.producer.get(slot)) is not None:
            if self._keeps_order(op):
                slot = op.ins[0]
            elif (found := self._scalar(op)) is not None:
                slot, extra, flip = found
                scalars, sign = scalars + extra, sign * flip
            else:
                break
        return slot, scalars, sign

    def _terms(
        self, slot: int, scalars: Scalars, sign: int, axis_order: AxisOrder
    ) -> list[GradientFactor] | None:
        op = self.program.producer.get(slot)
        # An input of the program, or a constant gradient: no product makes it.
        if op is None or slot not in self.reached:
            return None
        # A parameter that is used twice: its gradient is the sum over uses. (`add` with broadcasting
        # would repeat entries and is not such a sum.)
        if op.name in ("add_any", "add") and self.program.shape(op.ins[0]) == self.program.shape(
            op.ins[1]
        ):
            parts = [self._terms(s, scalars, sign, axis_order) for s in op.ins if s in self.reached]
            # One use without factors leaves the sum without: the cross terms would be lost.
            if any(part is None for part in parts):
                return None
            return [term for part in parts if part is not None for term in part]
        if self._keeps_order(op) or op.name == "transpose":
            here = (op.name, op.params.get("permutation"), self.program.shape(op.outs[0]))
            return self._terms(op.ins[0], scalars, sign, (*axis_order, here))
        if (found := self._scalar(op)) is not None:
            inner, extra, flip = found
            return self._terms(inner, scalars + extra, sign * flip, axis_order)
        factor = self._factor(op, scalars, sign, axis_order)
        return None if factor is None else [factor]

    def _keeps_order(self, op: Op) -> bool:
        """Whether the entries of the result are those of the input, in the same flat order."""
        size = self.program.size
        if op.name in ("squeeze", "expand_dims", "copy", "copy_p", "convert_element_type"):
            return True
        # With `dimensions` the axes change places before the reshape.
        if op.name == "reshape":
            return op.params.get("dimensions") is None
        if op.name in ("broadcast_in_dim", "reduce_sum"):
            # Of equal size they only add or drop axes of length one.
            return size(op.ins[0]) == size(op.outs[0])
        if op.name == "transpose":
            # Axes of length one may go anywhere.
            shape = self.program.shape(op.ins[0])
            kept = [d for d in op.params["permutation"] if shape[d] != 1]
            return kept == sorted(kept)
        return False

    def _scalar(self, op: Op) -> tuple[int, Scalars, int] | None:
        """`(slot, scalars, sign)` if `op` multiplies `slot` by one number, else `None`."""
        if op.name == "neg":
            return op.ins[0], (), -1
        if op.name not in ("mul", "div"):
            return None
        # The number is what the cotangent does not reach: either operand of a product, the divisor.
        for k, power in ((1, 1), (0, 1)) if op.name == "mul" else ((1, -1),):
            scalar = self._scalar_slot(op.ins[k])
            # The other operand must carry the gradient, and keep its size: a broadcast repeats entries.
            if scalar is not None and op.ins[1 - k] in self.reached:
                same = self.program.size(op.ins[1 - k]) == self.program.size(op.outs[0])
                return (op.ins[1 - k], ((scalar, power),), 1) if same else None
        return None

    def _scalar_slot(self, slot: int) -> int | None:
        # A number that the cotangent reaches would make the gradient quadratic in it.
        if slot in self.reached:
            return None
        if self.program.size(slot) == 1:
            return slot
        op = self.program.producer.get(slot)
        if op is not None and op.name == "broadcast_in_dim" and self.program.size(op.ins[0]) == 1:
            return op.ins[0]
        return None

    def _factor(
        self, op: Op, scalars: Scalars, sign: int, axis_order: AxisOrder
    ) -> GradientFactor | None:
        common = {"scalars": scalars, "sign": sign}
        if op.name == "dot_general":
            return self._dot(op, axis_order, common)
        if op.name == "conv_general_dilated":
            return self._conv(op, axis_order, common)
        if op.name in ("scatter-add", "scatter_add"):
            return self._lookup(op, axis_order, common)
        return None

    def _dot(self, op: Op, axis_order: AxisOrder, common: dict[str, Any]) -> DotFactor | None:
        left, right = op.ins
        (sum_l, sum_r), (batch_l, batch_r) = op.params["dimension_numbers"]
        dims_l, dims_r = (tuple(batch_l), tuple(sum_l)), (tuple(batch_r), tuple(sum_r))
        # A is what the cotangent does not reach, G what it does: put A on the left.
        swapped = left in self.reached
        if swapped:
            left, right, dims_l, dims_r = right, left, dims_r, dims_l
        # Reached by both or by neither: not the outer product of a weight's gradient.
        if left in self.reached or right not in self.reached:
            return None
        shape_l, shape_r = self.program.shape(left), self.program.shape(right)
        b, s = (prod(shape_l[d] for d in dims) for dims in dims_l)
        # An operand without entries has no sizes to divide by.
        sizes = (b, s, prod(shape_l) // max(b * s, 1), prod(shape_r) // max(b * s, 1))
        free = (swapped, _free_shape(shape_l, *dims_l), _free_shape(shape_r, *dims_r))
        if b * s == 1:
            # Named by where it comes from, so that a bias and a weight find their common factor.
            right, scalars, sign = self.root(right)
            common = {"scalars": common["scalars"] + scalars, "sign": common["sign"] * sign}
        return DotFactor(
            sizes=sizes,
            axis_order=(*axis_order, "dot", tuple(shape_l[d] for d in dims_l[0]), free),
            right_slot=right,
            left_slot=left,
            left_dims=dims_l,
            right_dims=None if b * s == 1 else dims_r,
            **common,
        )

    def _conv(self, op: Op, axis_order: AxisOrder, common: dict[str, Any]) -> ConvFactor | None:
        left, right = op.ins
        p, spec = op.params, op.params["dimension_numbers"]
        # JAX transposes a grouped convolution into one with batch groups; feature groups here mean that
        # this is another convolution than the last step of a weight's gradient.
        if left in self.reached or right not in self.reached or p["feature_group_count"] != 1:
            return None
        lhs, rhs, out = (self.program.shape(s) for s in (left, right, op.outs[0]))
        # Inputs and cotangents change places against the forward pass: the sum goes over points and
        # positions (the window here), and what comes out are the taps of the filter.
        groups = p["batch_group_count"]
        taps = tuple(out[d] for d in spec.out_spec[2:])
        window = tuple(rhs[d] for d in spec.rhs_spec[2:])
        sizes = (
            groups,
            lhs[spec.lhs_spec[1]] * prod(window),
            prod(taps) * lhs[spec.lhs_spec[0]] // groups,
            rhs[spec.rhs_spec[0]] // groups,
        )
        return ConvFactor(
            sizes=sizes,
            axis_order=(*axis_order, "conv", str(spec), out, groups),
            right_slot=right,
            left_slot=left,
            params={**p, "taps": taps, "window": window},
            **common,
        )

    def _lookup(self, op: Op, axis_order: AxisOrder, common: dict[str, Any]) -> LookupFactor | None:
        # The gradient of `table[idx]`: cotangents of rows added into a table of zeros.
        table, idx, rows = op.ins
        d = op.params["dimension_numbers"]
        shape, row_shape = self.program.shape(table), self.program.shape(rows)
        window = tuple(row_shape[k] for k in d.update_window_dims)
        trailing = tuple(range(len(row_shape) - len(window), len(row_shape)))
        # Whole rows along axis 0: any other start index can only be zero.
        whole = {(): (1, *shape[1:]), (0,): shape[1:]}.get(tuple(d.inserted_window_dims))
        # Any other scatter is left to the whole gradient: a wrong factor would make a wrong kernel.
        plain = (
            window == whole
            and 0 in d.scatter_dims_to_operand_dims
            and tuple(d.update_window_dims) == trailing
            and not getattr(d, "operand_batching_dims", ())
        )
        if not plain or not self._is_zero(table) or rows not in self.reached or idx in self.reached:
            return None
        return LookupFactor(
            sizes=(1, prod(row_shape) // max(prod(window), 1), shape[0], prod(window)),
            axis_order=(*axis_order, "lookup", shape),
            right_slot=rows,
            left_slot=idx,
            component=tuple(d.scatter_dims_to_operand_dims).index(0),
            clips="CLIP" in str(op.params.get("mode")).upper(),
            **common,
        )

    def _is_zero(self, slot: int) -> bool:
        op = self.program.producer.get(slot)
        if op is not None and op.name == "broadcast_in_dim":
            slot = op.ins[0]
        value = self.program.consts.get(slot)
        # Under `jit` a closed-over array has no values to look at, so it may be anything.
        return value is not None and not isinstance(value, Tracer) and not np.any(value)


def _free_shape(
    shape: tuple[int, ...], batch: tuple[int, ...], summed: tuple[int, ...]
) -> AxisOrder:
    return tuple(n for d, n in enumerate(shape) if d not in batch and d not in summed)
