"""Proof, from its operations, that a network is affine in its parameters."""

import jax
from jaxtyping import Array

from .._support.types import Inputs, Leaves
from ._linearized import Linearized
from ._params import split_params
from ._program import Op, Program, as_program, mentions

LINEAR = frozenset(
    {
        "neg",
        "reshape",
        "broadcast_in_dim",
        "transpose",
        "squeeze",
        "expand_dims",
        "slice",
        "rev",
        "concatenate",
        "reduce_sum",
        "cumsum",
        "copy",
        "add",
        "add_any",
        "sub",
        "split",
    }
)
"""Operations that are linear in all of their inputs together."""

BILINEAR = frozenset({"mul", "dot_general", "conv_general_dilated"})
"""Operations that are linear in each of two inputs: affine while one of them is free of parameters."""

FIRST_ONLY = frozenset({"div", "gather", "dynamic_slice", "reduce_window_sum", "pad"})
"""Operations that are linear in their first input, while the others are free of parameters."""


def is_affine(model: Linearized, x: Inputs) -> bool:
    """Whether `f(θ, x)` is `f₀(x) + J(x)θ` for every `θ`, judged by its operations alone.

    `False` means that no proof was found: some operation is not in the lists of this module.
    """
    split, leaves, rest = split_params(model.params, model._mask())

    def outputs(leaves: Leaves, rest: Leaves, x: Inputs) -> Array:
        return model.apply_fn(split.merge(leaves, rest), x)

    closed = jax.make_jaxpr(outputs)(leaves, rest, x)
    if mentions(closed.jaxpr, "custom_"):
        return False  # a derivative of its own need not be that of the operations
    program = as_program(closed)
    count = len(jax.tree.leaves(leaves))
    moving = program.dependents(program.inputs[:count])
    needed = program.needed(program.outputs)
    return all(_is_affine(op, program, moving) for op in needed if moving.intersection(op.ins))


def _is_affine(op: Op, program: Program, moving: set[int]) -> bool:
    where = [k for k, slot in enumerate(op.ins) if slot in moving]
    if op.name == "convert_element_type":
        return _keeps_numbers(program, op)
    if op.name in LINEAR:
        return True
    if op.name in BILINEAR:
        return len(where) == 1
    if op.name == "select_n":
        return 0 not in where
    return op.name in FIRST_ONLY and where == [0]


def _keeps_numbers(program: Program, op: Op) -> bool:
    """Whether a cast keeps all values: one to integers or to fewer digits is a step function."""
    before, after = (program.avals[slot].dtype for slot in (op.ins[0], op.outs[0]))
    wider = after.itemsize >= before.itemsize
    return wider and before.kind == after.kind == "f"
