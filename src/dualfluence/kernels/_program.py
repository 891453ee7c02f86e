"""A jaxpr as one flat list of operations: nested calls inlined, variables numbered.

From it follow the values that a network closes over, and its least precise rounding.
"""

import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from .._support.points import is_array
from .._support.types import ApplyFn, Inputs
from ._params import opened

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

    primitive: Primitive
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

    avals: list[ShapedArray] = field(default_factory=list)
    consts: dict[int, Any] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    producer: dict[int, Op] = field(default_factory=dict)

    def new_slot(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def constant(self, aval: Any, value: object) -> int:
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


def trace_program(fn: Callable[..., PyTree], *args: PyTree) -> Program:
    """Trace `fn` at `args` (arrays or `jax.ShapeDtypeStruct`) into a `Program`."""
    return as_program(jax.make_jaxpr(fn)(*args))


def as_program(closed: ClosedJaxpr) -> Program:
    """A traced function as a `Program`."""
    program = Program()
    env = {v: program.new_slot(v.aval) for v in closed.jaxpr.invars}
    program.inputs = list(env.values())
    _inline(program, closed.jaxpr, closed.consts, env)
    program.outputs = [_slot(program, env, atom) for atom in closed.jaxpr.outvars]
    program.producer = {s: op for op in program.ops for s in op.outs}
    return program


def largest_activation(fn: Callable[[Inputs], Array], x: Inputs) -> int:
    """Bytes of the largest array on the way from `x` to `fn(x)`."""
    program = trace_program(fn, x)
    slots = program.dependents(program.inputs)
    return max(program.size(s) * program.avals[s].dtype.itemsize for s in slots)


Atom = Var | Literal
"""What an operation reads: the result of another one, or a number written into the program."""


def _slot(program: Program, env: dict[Var, int], atom: Atom) -> int:
    if isinstance(atom, Literal):
        return program.constant(atom.aval, atom.val)
    return env[atom]


def own_copy(value: object) -> Array | np.ndarray:
    """A constant that no other code can write to: JAX lets closed-over NumPy arrays share memory."""
    return value if isinstance(value, jax.Array) else np.array(value)


def _inline(program: Program, jaxpr: Jaxpr, consts: Sequence[Any], env: dict[Var, int]) -> None:
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


def _body(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    if eqn.primitive.name not in INLINED:
        return None
    for key in BODY_KEYS:
        body = eqn.params.get(key)
        # A closed body brings its constants. An open one counts only where it needs none, because its
        # equation does not say which of the operands they would be.
        if body is not None and hasattr(body, "consts"):
            jaxpr, consts = body.jaxpr, body.consts
        elif body is not None and not getattr(body, "constvars", ()):
            jaxpr, consts = body, ()
        else:
            continue
        # Operands beside those of the body (rules, or their constants) cannot be matched up: the call stays
        # one operation, without factors.
        return (jaxpr, consts) if len(jaxpr.invars) == len(eqn.invars) else None
    return None


AnyJaxpr = Jaxpr | ClosedJaxpr


def mentions(jaxpr: AnyJaxpr, prefix: str) -> bool:
    """Whether a primitive whose name starts with `prefix` occurs in `jaxpr`, at any depth."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith(prefix):
            return True
        if any(mentions(body, prefix) for body in inner_jaxprs(eqn)):
            return True
    return False


def inner_jaxprs(eqn: JaxprEqn | Op) -> list[AnyJaxpr]:
    """The bodies (jaxprs, closed or open) among the parameters of an equation or an `Op`."""
    found = [v for p in eqn.params.values() for v in (p if isinstance(p, tuple) else (p,))]
    return [v for v in found if hasattr(getattr(v, "jaxpr", v), "eqns")]


TF32_EPS = 2.0**-10
"""Rounding unit of TF32 products, which round their operands to 10 bits."""

COARSE_PRODUCTS = {"gpu": TF32_EPS, "cuda": TF32_EPS, "rocm": TF32_EPS, "tpu": 2.0**-7}
"""Rounding unit of float32 products at less than the highest precision; on a CPU they are exact."""


class Arithmetic(NamedTuple):
    """The least precise rounding between parameters and outputs: its unit, and the operation."""

    eps: float
    name: str


def shapes_of(tree: PyTree, points: int | None = None) -> PyTree:
    """Arrays as their shapes, with `points` of them on axis 0 if that is given."""

    def shape_of(leaf: object) -> object:
        if not is_array(leaf):
            return leaf
        shape = leaf.shape if points is None else (points, *leaf.shape[1:])
        weak = bool(getattr(jax.typeof(leaf), "weak_type", False)) if _typed(leaf) else False
        return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=weak)

    return jax.tree.map(shape_of, tree)


def _typed(leaf: object) -> bool:
    return isinstance(leaf, jax.Array)


def trace(fn: Callable[..., PyTree], *args: PyTree, return_shape: bool = False) -> Any:
    """The jaxpr of `fn` now: for the same function JAX would return an earlier one.

    `return_shape=True` returns the outputs' shapes as well, in the tree that `fn` returns.
    """
    leaves, treedef = jax.tree.flatten(args)
    where = [k for k, leaf in enumerate(leaves) if is_array(leaf)]

    def anew(*arrays: Array) -> PyTree:
        # Settings that are not arrays stay Python values: tracing them would change what the function does.
        full = list(leaves)
        for k, array in zip(where, arrays, strict=True):
            full[k] = array
        return fn(*jax.tree.unflatten(treedef, full))

    return jax.make_jaxpr(anew, return_shape=return_shape)(*(leaves[k] for k in where))


def program_checksum(closed: ClosedJaxpr, *, shapes: bool = True) -> str:
    """A checksum of a traced function: its operations, numbers and closed-over arrays.

    `shapes=False` leaves out values that may change with the number of points.
    """
    checksum = hashlib.blake2b(digest_size=16)
    for part in _parts(closed, shapes):
        checksum.update(part)
    return checksum.hexdigest()


def _parts(body: AnyJaxpr, shapes: bool) -> Iterable[bytes]:
    jaxpr, consts = (body.jaxpr, body.consts) if isinstance(body, ClosedJaxpr) else (body, ())
    names: dict[Var, int] = {}
    for value in consts:
        yield array_checksum(value)
    for var in (*jaxpr.constvars, *jaxpr.invars):
        names[var] = len(names)
        if shapes:
            yield str(var.aval).encode()
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name.encode()
        for atom in eqn.invars:
            literal = isinstance(atom, Literal)
            yield _number(atom.val) if literal else str(names[atom]).encode()
        for body in inner_jaxprs(eqn):
            yield from _parts(body, shapes)
        if shapes:
            yield str([_plain(eqn.params[key]) for key in sorted(eqn.params)]).encode()
        for var in eqn.outvars:
            names[var] = len(names)


def _number(value: object) -> bytes:
    return f"{np.asarray(value).dtype}{np.asarray(value).tobytes()!r}".encode()


def _plain(value: object) -> object:
    """Settings that compare by value; functions and the like differ from trace to trace."""
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | int | float | complex | bool | np.dtype) else None


_CHECKSUMS: dict[int, tuple[weakref.ref[jax.Array], bytes]] = {}
"""Checksums of JAX arrays, which never change: `id -> (weak reference, checksum)`."""


def array_checksum(value: object) -> bytes:
    """A checksum of an array's contents, computed once for each JAX array.

    It is compared within a process only. `archive.digest_of_array` is for files: slower, and the same for
    all dtypes that NumPy knows as raw bytes, such as the kinds of float8.
    """
    # Their numbers cannot be read here; two different objects then count as different.
    if isinstance(value, Tracer) or not getattr(value, "is_fully_addressable", True):
        return f"id {id(value)}".encode()
    if not isinstance(value, jax.Array):
        return _bytes_checksum(np.asarray(value))
    known = _CHECKSUMS.get(id(value))
    # Numbers of dead objects are given out again, so that the reference decides, not the number.
    if known is None or known[0]() is not value:
        keys = jnp.issubdtype(value.dtype, jax.dtypes.extended)
        host = np.asarray(jax.random.key_data(value) if keys else value)
        key = id(value)
        known = (weakref.ref(value, lambda _: _CHECKSUMS.pop(key, None)), _bytes_checksum(host))
        _CHECKSUMS[key] = known
    return known[1]


def _bytes_checksum(array: np.ndarray) -> bytes:
    checksum = hashlib.blake2b(f"{array.dtype}{array.shape}".encode(), digest_size=16)
    checksum.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return checksum.digest()


def arithmetic(closed: ClosedJaxpr, num_params: int) -> Arithmetic:
    """The least precise rounding on the way from the first `num_params` inputs to the outputs.

    On the way from the data alone only half precision counts: compilers may skip such a rounding in
    one program and not in the next.
    """
    program = as_program(closed)
    from_params = program.dependents(program.inputs[:num_params])
    from_data = program.dependents(program.inputs[num_params:])
    found = [_of_dtype(program.avals[s].dtype) for s in program.outputs]
    for op in program.needed(program.outputs):
        own = any(s in from_params for s in op.outs)
        if own or any(s in from_data for s in op.outs):
            units = _units(op, (program.avals[s] for s in op.outs))
            found += [u for u in units if own or u.eps > TF32_EPS / 2]
    return max(found, key=lambda a: a.eps)


def _units(op: Op | JaxprEqn, outs: Iterable[Any]) -> list[Arithmetic]:
    """Rounding units of an operation and of everything inside it."""
    if op.primitive.name == "bitcast_convert_type":  # bytes of packed points: nothing is rounded
        return []
    found = [_of_dtype(aval.dtype) for aval in outs if _is_float(aval)]
    if op.params.get("precision") is not None and found:
        found += _of_product(op.params["precision"])
    if "mantissa_bits" in op.params:
        bits = op.params["mantissa_bits"]
        found.append(Arithmetic(2.0**-bits, f"{bits}-bit mantissas"))
    for body in inner_jaxprs(op):
        for eqn in getattr(body, "jaxpr", body).eqns:
            found += _units(eqn, (v.aval for v in eqn.outvars))
    return found


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", jnp.int32), jnp.inexact)


def _of_dtype(dtype: DTypeLike) -> Arithmetic:
    return Arithmetic(float(jnp.finfo(dtype).eps), jnp.dtype(dtype).name)


def _of_product(precision: PrecisionLike) -> list[Arithmetic]:
    """Products that request less than the precision of their dtype."""
    asked = precision if isinstance(precision, tuple) else (precision,)
    names = {getattr(p, "name", str(p)).upper() for p in asked}
    if any("BF16" in name for name in names):
        return [Arithmetic(2.0**-7, "bfloat16 products")]
    if any(name.startswith(("TF32", "F16")) for name in names):
        return [Arithmetic(TF32_EPS, "TF32 products")]
    eps = COARSE_PRODUCTS.get(jax.default_backend())
    # On other backends, and at the highest precision, products round like their dtype.
    if eps is None or not names & {"DEFAULT", "HIGH"}:
        return []
    return [Arithmetic(eps, "products at reduced precision")]


def narrowest_dtype(apply_fn: ApplyFn, params: PyTree, x: Inputs) -> np.dtype:
    """The narrowest floating type that `apply_fn` computes with on its way to the outputs.

    TF32 products, for which there is no dtype, round like float16.
    """
    apply_fn = opened("narrowest_dtype", apply_fn, None)[0]
    closed = trace(apply_fn, shapes_of(params), shapes_of(x))
    count = len([leaf for leaf in jax.tree.leaves(params) if is_array(leaf)])
    unit = arithmetic(closed, count)
    kinds = (jnp.float64, jnp.float32, jnp.float16, jnp.bfloat16)
    same = [kind for kind in kinds if float(jnp.finfo(kind).eps) == unit.eps]
    return jnp.dtype(unit.name if not same else same[0])
