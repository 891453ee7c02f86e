r"""Follow the points through a traced function: which axis are they on, and are they ever combined?

A value that depends on the inputs is `OverPoints(axis, inner)`: entry $i$ of that axis belongs to point `i
// inner` and to no other. A value that does not depend on the inputs is `Free(same)`: it is constant
along the axes in `same`, so it treats all points alike. A value that no rule covers is `MIXED`: nothing
is known about it. Rules give proofs only; a `MIXED` function may still keep its points apart.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple, SupportsIndex

import numpy as np
from jax.extend.core import ClosedJaxpr

from .._support.types import Numbers
from ._program import Op, Program, as_program


class OverPoints(NamedTuple):
    """Depends on the inputs; the points lie on `axis`, `inner` entries each."""

    axis: int
    inner: int = 1


class Free(NamedTuple):
    """Does not depend on the inputs, and is constant along the axes in `same`."""

    same: frozenset[int]


class Mixed(Exception):
    """No rule shows that the points stay apart."""


RowState = OverPoints | Free
Shape = tuple[int, ...]
States = Sequence[RowState]


Shapes = Sequence[Shape]


Rule = Callable[[Op, States, Shapes, Shapes, int], RowState]

_ENTRY_BY_ENTRY = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp complex
conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
igamma igammac imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not
one_minus_square optimization_barrier or pow real reduce_precision rem round rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor
"""
ELEMENTWISE = frozenset(_ENTRY_BY_ENTRY.split())
REDUCTIONS = (
    "argmax",
    "argmin",
    *(f"reduce_{k}" for k in ("sum", "max", "min", "prod", "and", "or")),
)
ALONG_AXIS = tuple(f"cum{k}" for k in ("sum", "prod", "max", "min", "logsumexp"))
WINDOWS = tuple(f"reduce_window_{k}" for k in ("sum", "max", "min"))


def follow_rows(program: Program, states: States, n: int) -> list[RowState]:
    """States of the outputs, given those of the inputs; raises `Mixed`."""
    env: dict[int, RowState] = dict(zip(program.inputs, states, strict=True))
    for slot, value in program.consts.items():
        env[slot] = Free(_constant_axes(value))
    for op in program.ops:
        ins = [env[s] for s in op.ins]
        shapes = [program.shape(s) for s in op.ins]
        outs = [program.shape(s) for s in op.outs]
        try:
            found = _step(op, ins, shapes, outs, n)
        except (KeyError, AttributeError) as error:  # another release of JAX spells it otherwise
            raise Mixed(f"{op.name} without {error}") from error
        env.update(zip(op.outs, found, strict=True))
    return [env[s] for s in program.outputs]


def _constant_axes(value: Numbers) -> frozenset[int]:
    shape = np.shape(value)
    return frozenset(d for d, length in enumerate(shape) if length == 1)


def _step(op: Op, ins: States, shapes: Shapes, outs: Shapes, n: int) -> list[RowState]:
    if op.name in CONTROL:
        return CONTROL[op.name](op, ins, shapes, outs, n)
    # Without points nothing can be mixed: only where the value is constant is still needed.
    free = not any(isinstance(s, OverPoints) for s in ins)
    if free:
        return [Free(_same(op, ins, shapes, out)) for out in outs]
    if op.name in ELEMENTWISE:
        state = _meet(ins, shapes)
    elif op.name in RULES:
        state = RULES[op.name](op, ins, shapes, outs, n)
    else:
        raise Mixed(op.name)
    return [state for _ in outs]


def _same(op: Op, ins: States, shapes: Shapes, out: Shape) -> frozenset[int]:
    """Axes along which a value without points is constant."""
    ones = {d for d, length in enumerate(out) if length == 1}
    axes = [s.same for s, shape in zip(ins, shapes, strict=True) if isinstance(s, Free) and shape]
    if op.name in ELEMENTWISE:
        return frozenset(ones | set(range(len(out))).intersection(*axes))
    if op.name == "broadcast_in_dim":
        placed = op.params["broadcast_dimensions"]
        kept = {placed[d] for d in (axes[0] if axes else ())}
        return frozenset(ones | (set(range(len(out))) - set(placed)) | kept)
    if op.name == "transpose":
        return frozenset(op.params["permutation"].index(d) for d in axes[0])
    if op.name == "dot_general":
        return frozenset(
            ones | _same_in_product(op, [s.same for s in ins if isinstance(s, Free)], shapes)
        )
    if op.name == "iota":
        return frozenset(ones | set(range(len(out))) - {op.params["dimension"]})
    return frozenset(ones)


def _same_in_product(op: Op, same: Sequence[frozenset[int]], shapes: Shapes) -> set[int]:
    """A product is constant along those free axes of an operand along which the operand is constant."""
    found = set()
    for k in (0, 1):
        free, first = _free_axes(op, shapes, k)
        found |= {first + j for j, d in enumerate(free) if d in same[k]}
    return found


def _free_axes(op: Op, shapes: Shapes, k: int) -> tuple[list[int], int]:
    """The free axes of operand `k` of a product, and the position in the result where they start."""
    summed, paired = op.params["dimension_numbers"]
    free = [[d for d in range(len(shapes[j])) if d not in (*summed[j], *paired[j])] for j in (0, 1)]
    return free[k], len(paired[0]) + (len(free[0]) if k else 0)


def _meet(ins: States, shapes: Shapes) -> OverPoints:
    """The common state of operands that are combined entry by entry."""
    found = {s for s in ins if isinstance(s, OverPoints)}
    # Entry by entry, the first point of one operand would meet another point of the other.
    if len(found) != 1:
        raise Mixed("points on different axes")
    (state,) = found
    for other, shape in zip(ins, shapes, strict=True):
        if isinstance(other, Free) and shape and state.axis not in other.same:
            raise Mixed("a constant that tells points apart")
    return state


def _first(op: Op, ins: States) -> OverPoints:
    """The first operand of operations that keep points only there."""
    if not isinstance(ins[0], OverPoints):
        raise Mixed(op.name)
    return ins[0]


def _broadcast(op: Op, ins: States, shapes: Shapes, outs: Shapes, n: int) -> RowState:
    state = _first(op, ins)
    return state._replace(axis=op.params["broadcast_dimensions"][state.axis])


def _transpose(op: Op, ins: States, shapes: Shapes, outs: Shapes, n: int) -> RowState:
    state = _first(op, ins)
    return state._replace(axis=op.params["permutation"].index(state.axis))


def _reshape(op: Op, ins: States, shapes: Shapes, outs: Shapes, n: int) -> RowState:
    before = prod(shapes[0][: _first(op, ins).axis])
    for axis, length in enumerate(outs[0]):
        # The axes in front must have as many entries as before, and whole points must stay in one piece.
        if prod(outs[0][:axis]) == before and length % n == 0 and length:
            return OverPoints(axis, length // n)
    raise Mixed("reshape")


def _drop(state: OverPoints, gone: Sequence[SupportsIndex]) -> OverPoints:
    # A sum, mean or maximum over the axis of the points is what batch norm does.
    if state.axis in gone:
        raise Mixed("reduced over points")
    return state._replace(axis=state.axis - sum(int(d) < state.axis for d in gone))


def _reduce(op: Op, ins: States, shapes: Shapes, outs: Shapes, n: int) -> RowState:
    return _drop(_first(op, ins), op.params["axes"])


def _squeeze(op: Op, ins: States, shapes: Shapes, outs: Shapes, n: int) -> RowState:
    return _drop(_first(op, ins), op.params["dimensions"])


def _untouched(key: str) -> Rule:
    """Operations along the axes under `key`, which must not contain the axis of the points."""

    def rule(op: Op, ins: States, shapes: Shapes, outs: Shapes, n: int) -> RowState:
        touched = op.params[key]
        state = _meet(ins, shapes)
        if state.axis in (touched if isinstance(touched, tuple | list) else (touched,)):
            raise Mixed(op.name)
        return state

    return rule


def _last_axis(op: Op, ins: States, shapes: Shapes, outs: Shapes, n: int) -> RowState:
    state = _first(op, ins)
    # The largest of several points are not those of each.
    if state.axis == len(shapes[0]) - 1:
        raise Mixed(op.name)
    return state


def _dot(op: Op, ins: States, shapes: Shapes, outs: Shapes, n: int) -> RowState:
    summed, paired = op.params["dimension_numbers"]
    found = []
    for k, state in enumerate(ins):
        if not isinstance(state, OverPoints):
            continue
        if state.axis in summed[k]:
            raise Mixed("a product that sums over points")
        if state.axis in paired[k]:
            place = paired[k].index(state.axis)
            other = ins[1 - k]
            if isinstance(other, Free) and paired[1 - k][place] not in other.same:
                raise Mixed("a product that tells points apart")
        else:
            free, first = _free_axes(op, shapes, k)
            place = first + free.index(state.axis)
        found.append(state._replace(axis=place))
    # Both operands have points, and they do not meet in pairs: an outer product of points.
    if len(set(found)) != 1:
        raise Mixed("a product of points with points")
    return found[0]


def _conv(op: Op, ins: States, shapes: Shapes, outs: Shapes, n: int) -> RowState:
    spec = op.params["dimension_numbers"]
    images = _first(op, ins)
    # Points on the axis of images stay there, unless groups of images meet different filters.
    plain = images.axis == spec.lhs_spec[0] and op.params["batch_group_count"] == 1
    if not plain or isinstance(ins[1], OverPoints):
        raise Mixed("convolution")
    return images._replace(axis=spec.out_spec[0])


def _gather(op: Op, ins: States, shapes: Shapes, outs: Shapes, n: int) -> RowState:
    d = op.params["dimension_numbers"]
    table, index = ins
    paired = tuple(getattr(d, "operand_batching_dims", ()))
    rows = [k for k in range(len(outs[0])) if k not in d.offset_dims]
    found = []
    if isinstance(index, OverPoints):
        partners = tuple(getattr(d, "start_indices_batching_dims", ()))
        if index.axis in partners:
            own = paired[partners.index(index.axis)]
            if isinstance(table, Free) and own not in table.same:
                raise Mixed("a lookup that tells points apart")
        # The last axis holds the parts of one position, which would come from different points.
        if index.axis == len(shapes[1]) - 1:
            raise Mixed("a lookup across points")
        found.append(index._replace(axis=rows[index.axis]))
    if isinstance(table, OverPoints):
        if table.axis in paired:
            own = d.start_indices_batching_dims[paired.index(table.axis)]
            if isinstance(index, Free) and own not in index.same:
                raise Mixed("a lookup that tells points apart")
            found.append(table._replace(axis=rows[own]))
        else:
            kept = [k for k in range(len(shapes[0])) if k not in (*d.collapsed_slice_dims, *paired)]
            whole = op.params["slice_sizes"][table.axis] == shapes[0][table.axis]
            if table.axis not in kept or not whole:
                raise Mixed("a lookup of points")
            found.append(table._replace(axis=d.offset_dims[kept.index(table.axis)]))
    if len(set(found)) != 1:
        raise Mixed("a lookup of points by points")
    return found[0]


def _slice(op: Op, ins: States, shapes: Shapes, outs: Shapes, n: int) -> RowState:
    state = ins[0]
    # A start that depends on points moves the window for all of them, and a part of the axis of points no
    # longer has one entry for each.
    starts = any(isinstance(s, OverPoints) for s in ins[1:]) and op.name == "dynamic_slice"
    if starts or not isinstance(state, OverPoints) or outs[0][state.axis] != shapes[0][state.axis]:
        raise Mixed(op.name)
    return state


def _bitcast(op: Op, ins: States, shapes: Shapes, outs: Shapes, n: int) -> RowState:
    # Bytes on the last axis become numbers or the other way round: the points must not be on it.
    state = _first(op, ins)
    if state.axis >= min(len(shapes[0]), len(outs[0])):
        raise Mixed(op.name)
    return state


def _update_slice(op: Op, ins: States, shapes: Shapes, outs: Shapes, n: int) -> RowState:
    state = _meet(ins[:2], shapes[:2])
    # An update of some points only would leave others, and where it starts may depend on them.
    whole = shapes[0][state.axis] == shapes[1][state.axis]
    if not whole or any(isinstance(s, OverPoints) for s in ins[2:]):
        raise Mixed(op.name)
    return state


def _pad(op: Op, ins: States, shapes: Shapes, outs: Shapes, n: int) -> RowState:
    state = _meet(ins, shapes)
    # Padded entries belong to no point.
    if tuple(op.params["padding_config"][state.axis]) != (0, 0, 0):
        raise Mixed("pad")
    return state


def _window(op: Op, ins: States, shapes: Shapes, outs: Shapes, n: int) -> RowState:
    state = _meet(ins, shapes)
    p, d = op.params, state.axis
    # A window across the axis of the points sees neighbours.
    plain = p["window_dimensions"][d] == 1 and shapes[0][d] == outs[0][d]
    if not plain or tuple(p["padding"][d]) != (0, 0):
        raise Mixed(op.name)
    return state


RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "gather": _gather,
    "bitcast_convert_type": _bitcast,
    "slice": _slice,
    "dynamic_slice": _slice,
    "dynamic_update_slice": _update_slice,
    "pad": _pad,
    "concatenate": _untouched("dimension"),
    "rev": _untouched("dimensions"),
    "sort": _untouched("dimension"),
    "split": _untouched("axis"),
    "top_k": _last_axis,
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(ALONG_AXIS, _untouched("axis")),
    **dict.fromkeys(WINDOWS, _window),
}


def _join(first: RowState, second: RowState) -> RowState:
    if isinstance(first, Free) and isinstance(second, Free):
        return Free(first.same & second.same)
    return _meet_loop(first, second)


def _meet_loop(first: RowState, second: RowState) -> RowState:
    points, other = (first, second) if isinstance(first, OverPoints) else (second, first)
    assert isinstance(points, OverPoints)
    if isinstance(other, Free) and points.axis not in other.same:
        raise Mixed("a loop that tells points apart")
    if isinstance(other, OverPoints) and other != points:
        raise Mixed("a loop that moves points")
    return points


def _loop(
    body: ClosedJaxpr, fixed: States, carry: list[RowState], n: int, rest: States
) -> list[RowState]:
    """Run `body` until the states of its carry no longer change; returns all outputs' states."""
    program = as_program(body)
    while True:
        outs = follow_rows(program, [*fixed, *carry, *rest], n)
        joined = [_join(a, b) for a, b in zip(carry, outs[: len(carry)], strict=True)]
        # States only ever lose knowledge, and there are finitely many: this ends.
        if joined == carry:
            return [*carry, *outs[len(carry) :]]
        carry = joined


def _shift(state: RowState, by: int) -> RowState:
    """The state with a scan's axis taken away in front (`by = -1`) or put there (`by = 1`)."""
    if isinstance(state, Free):
        return Free(frozenset(d + by for d in state.same if d + by >= 0))
    # Each turn of such a loop is one point, and its carry is handed from point to point.
    if state.axis + by < 0:
        raise Mixed("a loop over points")
    return state._replace(axis=state.axis + by)


def _scan(op: Op, ins: States, shapes: Shapes, outs: Shapes, n: int) -> list[RowState]:
    fixed, carry = _scan_groups(op, shapes, outs)
    rows = [_shift(s, -1) for s in ins[fixed + carry :]]
    start = list(ins[fixed : fixed + carry])
    ends = _loop(op.params["jaxpr"], ins[:fixed], start, n, rows)
    return [*ends[:carry], *(_shift(s, 1) for s in ends[carry:])]


def _scan_groups(op: Op, shapes: Shapes, outs: Shapes) -> tuple[int, int]:
    """How many operands of a scan are fixed, and how many it carries.

    Newer releases of JAX do not give these numbers. An operand that is scanned over has one more axis
    outside than inside.
    """
    if "num_consts" in op.params:
        return op.params["num_consts"], op.params["num_carry"]
    inner = op.params["jaxpr"]
    carry = sum(len(v.shape) == len(s) for v, s in zip(inner.out_avals, outs, strict=True))
    held = sum(len(v.shape) == len(s) for v, s in zip(inner.in_avals, shapes, strict=True))
    return held - carry, carry


def _while(op: Op, ins: States, shapes: Shapes, outs: Shapes, n: int) -> list[RowState]:
    first, second = op.params["cond_nconsts"], op.params["body_nconsts"]
    carry = list(ins[first + second :])
    ends = _loop(op.params["body_jaxpr"], ins[first : first + second], carry, n, ())
    (going,) = follow_rows(as_program(op.params["cond_jaxpr"]), [*ins[:first], *ends], n)
    # All points would run for as long as the slowest one does.
    if isinstance(going, OverPoints):
        raise Mixed("a loop whose length depends on points")
    return ends


def _cond(op: Op, ins: States, shapes: Shapes, outs: Shapes, n: int) -> list[RowState]:
    if isinstance(ins[0], OverPoints):
        raise Mixed("a branch that depends on points")
    branches = [follow_rows(as_program(body), ins[1:], n) for body in op.params["branches"]]
    ends = branches[0]
    for other in branches[1:]:
        ends = [_join(a, b) for a, b in zip(ends, other, strict=True)]
    return ends


Control = Callable[[Op, States, Shapes, Shapes, int], list[RowState]]
CONTROL: dict[str, Control] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
