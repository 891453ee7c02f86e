r"""Follow the points through a traced function: which axis are they on, and are they ever combined?

A value that depends on the inputs is `Points(axis, inner)`: entry $i$ of that axis belongs to point `i
// inner` and to no other. A value that does not depend on the inputs is `Free(same)`: it is constant
along the axes in `same`, so it treats all points alike. A value that no rule covers is `MIXED`: nothing
is known about it. Rules give proofs only; a `MIXED` function may still keep its points apart.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ._program import Op, Program, as_program


class Points(NamedTuple):
    """Depends on the inputs; the points lie on `axis`, `inner` entries each."""

    axis: int
    inner: int = 1


class Free(NamedTuple):
    """Does not depend on the inputs, and is constant along the axes in `same`."""

    same: frozenset[int]


class Mixed(Exception):
    """No rule shows that the points stay apart."""


RowState = Points | Free
Shape = tuple[int, ...]
Rule = Callable[[Op, Sequence[RowState], Sequence[Shape], Sequence[Shape], int], RowState]

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


def follow_rows(program: Program, states: Sequence[RowState], n: int) -> list[RowState]:
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


def _constant_axes(value: Any) -> frozenset[int]:
    shape = np.shape(value)
    return frozenset(d for d, length in enumerate(shape) if length == 1)


def _step(
    op: Op, ins: Sequence[RowState], shapes: Sequence[Shape], outs: Sequence[Shape], n: int
) -> list[RowState]:
    if op.name in CONTROL:
        return CONTROL[op.name](op, ins, shapes, outs, n)
    free = not any(isinstance(s, Points) for s in ins)
    if free:
        return [Free(_same(op, ins, shapes, out)) for out in outs]
    if op.name in ELEMENTWISE:
        state = _meet(ins, shapes)
    elif op.name in RULES:
        state = RULES[op.name](op, ins, shapes, outs, n)
    else:
        raise Mixed(op.name)
    return [state for _ in outs]


def _same(op: Op, ins: Sequence[RowState], shapes: Sequence[Shape], out: Shape) -> frozenset[int]:
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


def _same_in_product(op: Op, same: Sequence[Any], shapes: Sequence[Shape]) -> set[int]:
    """A product is constant along those free axes of an operand along which the operand is constant."""
    found = set()
    for k in (0, 1):
        free, first = _free_axes(op, shapes, k)
        found |= {first + j for j, d in enumerate(free) if d in same[k]}
    return found


def _free_axes(op: Op, shapes: Sequence[Shape], k: int) -> tuple[list[int], int]:
    """The free axes of operand `k` of a product, and the position in the result where they start."""
    summed, paired = op.params["dimension_numbers"]
    free = [[d for d in range(len(shapes[j])) if d not in (*summed[j], *paired[j])] for j in (0, 1)]
    return free[k], len(paired[0]) + (len(free[0]) if k else 0)


def _meet(ins: Sequence[RowState], shapes: Sequence[Shape]) -> Points:
    """The common state of operands that are combined entry by entry."""
    found = {s for s in ins if isinstance(s, Points)}
    if len(found) != 1:
        raise Mixed("points on different axes")
    (state,) = found
    for other, shape in zip(ins, shapes, strict=True):
        if isinstance(other, Free) and shape and state.axis not in other.same:
            raise Mixed("a constant that tells points apart")
    return state


def _broadcast(op: Op, ins: Any, shapes: Any, outs: Any, n: int) -> RowState:
    return ins[0]._replace(axis=op.params["broadcast_dimensions"][ins[0].axis])


def _transpose(op: Op, ins: Any, shapes: Any, outs: Any, n: int) -> RowState:
    return ins[0]._replace(axis=op.params["permutation"].index(ins[0].axis))


def _reshape(op: Op, ins: Any, shapes: Any, outs: Any, n: int) -> RowState:
    before = prod(shapes[0][: ins[0].axis])
    for axis, length in enumerate(outs[0]):
        if prod(outs[0][:axis]) == before and length % n == 0 and length:
            return Points(axis, length // n)
    raise Mixed("reshape")


def _drop(state: Points, gone: Any) -> Points:
    if state.axis in gone:
        raise Mixed("reduced over points")
    return state._replace(axis=state.axis - sum(d < state.axis for d in gone))


def _reduce(op: Op, ins: Any, shapes: Any, outs: Any, n: int) -> RowState:
    return _drop(ins[0], op.params["axes"])


def _squeeze(op: Op, ins: Any, shapes: Any, outs: Any, n: int) -> RowState:
    return _drop(ins[0], op.params["dimensions"])


def _untouched(key: str) -> Rule:
    """Operations along the axes under `key`, which must not contain the axis of the points."""

    def rule(op: Op, ins: Any, shapes: Any, outs: Any, n: int) -> RowState:
        touched = op.params[key]
        state = _meet(ins, shapes)
        if state.axis in (touched if isinstance(touched, tuple | list) else (touched,)):
            raise Mixed(op.name)
        return state

    return rule


def _last_axis(op: Op, ins: Any, shapes: Any, outs: Any, n: int) -> RowState:
    if ins[0].axis == len(shapes[0]) - 1:
        raise Mixed(op.name)
    return ins[0]


def _dot(op: Op, ins: Any, shapes: Any, outs: Any, n: int) -> RowState:
    summed, paired = op.params["dimension_numbers"]
    found = []
    for k, state in enumerate(ins):
        if not isinstance(state, Points):
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
    if len(set(found)) != 1:
        raise Mixed("a product of points with points")
    return found[0]


def _conv(op: Op, ins: Any, shapes: Any, outs: Any, n: int) -> RowState:
    spec = op.params["dimension_numbers"]
    images = isinstance(ins[0], Points) and ins[0].axis == spec.lhs_spec[0]
    if not images or isinstance(ins[1], Points) or op.params["batch_group_count"] != 1:
        raise Mixed("convolution")
    return ins[0]._replace(axis=spec.out_spec[0])


def _gather(op: Op, ins: Any, shapes: Any, outs: Any, n: int) -> RowState:
    d = op.params["dimension_numbers"]
    table, index = ins
    paired = tuple(getattr(d, "operand_batching_dims", ()))
    rows = [k for k in range(len(outs[0])) if k not in d.offset_dims]
    found = []
    if isinstance(index, Points):
        partners = tuple(getattr(d, "start_indices_batching_dims", ()))
        if index.axis in partners:
            own = paired[partners.index(index.axis)]
            if isinstance(table, Free) and own not in table.same:
                raise Mixed("a lookup that tells points apart")
        if index.axis == len(shapes[1]) - 1:
            raise Mixed("a lookup across points")
        found.append(index._replace(axis=rows[index.axis]))
    if isinstance(table, Points):
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


def _slice(op: Op, ins: Any, shapes: Any, outs: Any, n: int) -> RowState:
    state = ins[0]
    starts = any(isinstance(s, Points) for s in ins[1:]) and op.name == "dynamic_slice"
    if starts or not isinstance(state, Points) or outs[0][state.axis] != shapes[0][state.axis]:
        raise Mixed(op.name)
    return state


def _bitcast(op: Op, ins: Any, shapes: Any, outs: Any, n: int) -> RowState:
    # Bytes on the last axis become numbers or the other way round: the points must not be on it.
    if ins[0].axis >= min(len(shapes[0]), len(outs[0])):
        raise Mixed(op.name)
    return ins[0]


def _update_slice(op: Op, ins: Any, shapes: Any, outs: Any, n: int) -> RowState:
    state = _meet(ins[:2], shapes[:2])
    whole = shapes[0][state.axis] == shapes[1][state.axis]
    if not whole or any(isinstance(s, Points) for s in ins[2:]):
        raise Mixed(op.name)
    return state


def _pad(op: Op, ins: Any, shapes: Any, outs: Any, n: int) -> RowState:
    state = _meet(ins, shapes)
    if tuple(op.params["padding_config"][state.axis]) != (0, 0, 0):
        raise Mixed("pad")
    return state


def _window(op: Op, ins: Any, shapes: Any, outs: Any, n: int) -> RowState:
    state = _meet(ins, shapes)
    p, d = op.params, state.axis
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
    points, other = (first, second) if isinstance(first, Points) else (second, first)
    assert isinstance(points, Points)
    if isinstance(other, Free) and points.axis not in other.same:
        raise Mixed("a loop that tells points apart")
    if isinstance(other, Points) and other != points:
        raise Mixed("a loop that moves points")
    return points


def _loop(
    body: Any, fixed: Sequence[RowState], carry: list[RowState], n: int, rest: Any
) -> list[RowState]:
    """Run `body` until the states of its carry no longer change; returns all outputs' states."""
    program = as_program(body)
    while True:
        outs = follow_rows(program, [*fixed, *carry, *rest], n)
        joined = [_join(a, b) for a, b in zip(carry, outs[: len(carry)], strict=True)]
        if joined == carry:
            return [*carry, *outs[len(carry) :]]
        carry = joined


def _shift(state: RowState, by: int) -> RowState:
    """The state with a scan's axis taken away in front (`by = -1`) or put there (`by = 1`)."""
    if isinstance(state, Free):
        return Free(frozenset(d + by for d in state.same if d + by >= 0))
    if state.axis + by < 0:
        raise Mixed("a loop over points")
    return state._replace(axis=state.axis + by)


def _scan(
    op: Op, ins: Sequence[RowState], shapes: Sequence[Shape], outs: Sequence[Shape], n: int
) -> list[RowState]:
    fixed, carry = _scan_groups(op, shapes, outs)
    rows = [_shift(s, -1) for s in ins[fixed + carry :]]
    start = list(ins[fixed : fixed + carry])
    ends = _loop(op.params["jaxpr"], ins[:fixed], start, n, rows)
    return [*ends[:carry], *(_shift(s, 1) for s in ends[carry:])]


def _scan_groups(op: Op, shapes: Sequence[Shape], outs: Sequence[Shape]) -> tuple[int, int]:
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


def _while(
    op: Op, ins: Sequence[RowState], shapes: Sequence[Shape], outs: Sequence[Shape], n: int
) -> list[RowState]:
    first, second = op.params["cond_nconsts"], op.params["body_nconsts"]
    carry = list(ins[first + second :])
    ends = _loop(op.params["body_jaxpr"], ins[first : first + second], carry, n, ())
    (going,) = follow_rows(as_program(op.params["cond_jaxpr"]), [*ins[:first], *ends], n)
    if isinstance(going, Points):
        raise Mixed("a loop whose length depends on points")
    return ends


def _cond(
    op: Op, ins: Sequence[RowState], shapes: Sequence[Shape], outs: Sequence[Shape], n: int
) -> list[RowState]:
    if isinstance(ins[0], Points):
        raise Mixed("a branch that depends on points")
    branches = [follow_rows(as_program(body), ins[1:], n) for body in op.params["branches"]]
    ends = branches[0]
    for other in branches[1:]:
        ends = [_join(a, b) for a, b in zip(ends, other, strict=True)]
    return ends


Control = Callable[[Op, Sequence[RowState], Sequence[Shape], Sequence[Shape], int], list[RowState]]
CONTROL: dict[str, Control] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
