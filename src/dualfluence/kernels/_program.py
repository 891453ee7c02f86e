"""A jaxpr as one flat list of operations: nested calls inlined, variables numbered."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

INLINED = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "remat",
        "remat2",
        "checkpoint",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
    }
)
"""Calls replaced by their body. Custom rules too: this code does not differentiate again."""

BODY_KEYS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


@dataclass(frozen=True)
class Op:
    """One primitive application; `ins` and `outs` are slot numbers."""

    primitive: Any
    params: dict[str, Any]
    ins: tuple[int, ...]
    outs: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.primitive.name


@dataclass
class Program:
    """A straight-line program over numbered slots.

    `avals[s]` is the abstract value of slot `s`, `consts[s]` its value if it is a constant.
    """

    avals: list[Any] = field(default_factory=list)
    consts: dict[int, Any] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    producer: dict[int, Op] = field(default_factory=dict)

    def new_slot(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def constant(self, aval: Any, value: Any) -> int:
        slot = self.new_slot(aval)
        self.consts[slot] = value
        return slot

    def shape(self, slot: int) -> tuple[int, ...]:
        return tuple(self.avals[slot].shape)

    def size(self, slot: int) -> int:
        size = 1
        for length in self.shape(slot):
            size *= length
        return size

    def dependents(self, roots: Iterable[int]) -> set[int]:
        """Every slot whose value may depend on one of `roots`."""
        found = set(roots)
        for op in self.ops:
            if any(s in found for s in op.ins):
                found.update(op.outs)
        return found

    def needed(self, wanted: Iterable[int]) -> list[Op]:
        """The operations that `wanted` needs, in order."""
        live, kept = set(wanted), []
        for op in reversed(self.ops):
            if any(s in live for s in op.outs):
                kept.append(op)
                live.update(op.ins)
        return kept[::-1]

    def evaluate(self, ops: Sequence[Op], values: Sequence[Any]) -> dict[int, Any]:
        """Run `ops` with `values` for the inputs; returns every slot's value."""
        env = dict(self.consts)
        env.update(zip(self.inputs, values, strict=True))
        for op in ops:
            results = _bind(op, [env[s] for s in op.ins])
            env.update(zip(op.outs, results, strict=True))
        return env


def _bind(op: Op, values: list[Any]) -> Sequence[Any]:
    # Primitives that hold functions say themselves how to bind; older JAX lists those apart.
    found = op.primitive.get_bind_params(op.params)
    functions, params = found if isinstance(found, tuple) else ((), found)
    result = op.primitive.bind(*functions, *values, **params)
    return result if op.primitive.multiple_results else [result]


def trace_program(fn: Callable[..., Any], *args: Any) -> Program:
    """Trace `fn` at `args` (arrays or `jax.ShapeDtypeStruct`) into a `Program`."""
    return as_program(jax.make_jaxpr(fn)(*args))


def as_program(closed: Any) -> Program:
    """A traced function as a `Program`."""
    program = Program()
    env = {v: program.new_slot(v.aval) for v in closed.jaxpr.invars}
    program.inputs = list(env.values())
    _inline(program, closed.jaxpr, closed.consts, env)
    program.outputs = [_slot(program, env, atom) for atom in closed.jaxpr.outvars]
    program.producer = {s: op for op in program.ops for s in op.outs}
    return program


def largest_activation(fn: Callable[..., Any], x: Any) -> int:
    """Bytes of the largest array on the way from `x` to `fn(x)`."""
    program = trace_program(fn, x)
    slots = program.dependents(program.inputs)
    return max(program.size(s) * program.avals[s].dtype.itemsize for s in slots)


def _slot(program: Program, env: dict[Any, int], atom: Any) -> int:
    if isinstance(atom, jex_core.Literal):
        return program.constant(atom.aval, atom.val)
    return env[atom]


def own_copy(value: Any) -> Any:
    """A constant that no other code can write to: JAX lets closed-over NumPy arrays share memory."""
    return value if isinstance(value, jax.Array) else np.array(value)


def _inline(program: Program, jaxpr: Any, consts: Sequence[Any], env: dict[Any, int]) -> None:
    for var, value in zip(jaxpr.constvars, consts, strict=True):
        env[var] = program.constant(var.aval, own_copy(value))
    for eqn in jaxpr.eqns:
        ins = tuple(_slot(program, env, atom) for atom in eqn.invars)
        body = _body(eqn)
        if body is None:
            outs = tuple(program.new_slot(v.aval) for v in eqn.outvars)
            program.ops.append(Op(eqn.primitive, dict(eqn.params), ins, outs))
        else:
            inner, inner_consts = body
            inner_env = dict(zip(inner.invars, ins, strict=True))
            _inline(program, inner, inner_consts, inner_env)
            outs = tuple(_slot(program, inner_env, atom) for atom in inner.outvars)
        env.update(zip(eqn.outvars, outs, strict=True))


def _body(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    if eqn.primitive.name not in INLINED:
        return None
    for key in BODY_KEYS:
        body = eqn.params.get(key)
        if body is not None and hasattr(body, "consts"):
            jaxpr, consts = body.jaxpr, body.consts
        elif body is not None and not getattr(body, "constvars", ()):
            jaxpr, consts = body, ()
        else:
            continue
        return (jaxpr, consts) if len(jaxpr.invars) == len(eqn.invars) else None
    return None


def mentions(jaxpr: Any, prefix: str) -> bool:
    """Whether a primitive whose name starts with `prefix` occurs in `jaxpr`, at any depth."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith(prefix):
            return True
        if any(mentions(body, prefix) for body in inner_jaxprs(eqn)):
            return True
    return False


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The bodies (jaxprs, closed or open) among the parameters of an equation or an `Op`."""
    found = [v for p in eqn.params.values() for v in (p if isinstance(p, tuple) else (p,))]
    return [v for v in found if hasattr(getattr(v, "jaxpr", v), "eqns")]
