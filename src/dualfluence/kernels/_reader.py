"""Find, in a traced backward pass, the factors that make each parameter gradient."""

from math import prod
from typing import Any

import numpy as np
from jax.core import Tracer

from ._factors import (
    AxisOrder,
    ConvFactor,
    DotFactor,
    GradientFactor,
    LookupFactor,
    Scalars,
    merge_uses,
)
from ._program import Op, Program


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
            if scalar is not None and op.ins[1 - k] in self.reached:
                same = self.program.size(op.ins[1 - k]) == self.program.size(op.outs[0])
                return (op.ins[1 - k], ((scalar, power),), 1) if same else None
        return None

    def _scalar_slot(self, slot: int) -> int | None:
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
        return value is not None and not isinstance(value, Tracer) and not np.any(value)


def _free_shape(
    shape: tuple[int, ...], batch: tuple[int, ...], summed: tuple[int, ...]
) -> AxisOrder:
    return tuple(n for d, n in enumerate(shape) if d not in batch and d not in summed)
