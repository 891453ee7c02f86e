"""Facts about a network from its jaxpr: the values it closes over, and its least precise rounding."""

import hashlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core as jex_core

from .._support.trees import is_array
from ._params import opened
from ._program import as_program, inner_jaxprs

TF32_EPS = 2.0**-10
"""Rounding unit of TF32 products, which round their operands to 10 bits."""

COARSE_PRODUCTS = {"gpu": TF32_EPS, "cuda": TF32_EPS, "rocm": TF32_EPS, "tpu": 2.0**-7}
"""Rounding unit of float32 products at less than the highest precision; on a CPU they are exact."""


class Arithmetic(NamedTuple):
    """The least precise rounding between parameters and outputs: its unit, and the operation."""

    eps: float
    name: str


def shapes_of(tree: Any, points: int | None = None) -> Any:
    """Arrays as their shapes, with `points` of them on axis 0 if that is given."""

    def shape_of(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        shape = leaf.shape if points is None else (points, *leaf.shape[1:])
        weak = bool(getattr(jax.typeof(leaf), "weak_type", False)) if _typed(leaf) else False
        return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=weak)

    return jax.tree.map(shape_of, tree)


def _typed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


def trace(fn: Callable[..., Any], *args: Any, return_shape: bool = False) -> Any:
    """The jaxpr of `fn` now: for the same function JAX would return an earlier one.

    `return_shape=True` returns the outputs' shapes as well, in the tree that `fn` returns.
    """
    leaves, treedef = jax.tree.flatten(args)
    where = [k for k, leaf in enumerate(leaves) if is_array(leaf)]

    def anew(*arrays: Any) -> Any:
        full = list(leaves)
        for k, array in zip(where, arrays, strict=True):
            full[k] = array
        return fn(*jax.tree.unflatten(treedef, full))

    return jax.make_jaxpr(anew, return_shape=return_shape)(*(leaves[k] for k in where))


def program_digest(closed: Any, *, shapes: bool = True) -> str:
    """A checksum of a traced function: its operations, numbers and closed-over arrays.

    `shapes=False` leaves out values that may change with the number of points.
    """
    checksum = hashlib.blake2b(digest_size=16)
    for part in _parts(closed.jaxpr, closed.consts, shapes):
        checksum.update(part)
    return checksum.hexdigest()


def _parts(jaxpr: Any, consts: Iterable[Any], shapes: bool) -> Iterable[bytes]:
    names: dict[Any, int] = {}
    for value in consts:
        yield array_digest(value)
    for var in (*jaxpr.constvars, *jaxpr.invars):
        names[var] = len(names)
        if shapes:
            yield str(var.aval).encode()
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name.encode()
        for atom in eqn.invars:
            literal = isinstance(atom, jex_core.Literal)
            yield _number(atom.val) if literal else str(names[atom]).encode()
        for body in inner_jaxprs(eqn):
            yield from _parts(getattr(body, "jaxpr", body), getattr(body, "consts", ()), shapes)
        if shapes:
            yield str([_plain(eqn.params[key]) for key in sorted(eqn.params)]).encode()
        for var in eqn.outvars:
            names[var] = len(names)


def _number(value: Any) -> bytes:
    return f"{np.asarray(value).dtype}{np.asarray(value).tobytes()!r}".encode()


def _plain(value: Any) -> Any:
    """Settings that compare by value; functions and the like differ from trace to trace."""
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value if isinstance(value, str | int | float | complex | bool | np.dtype) else None


_DIGESTS: dict[int, tuple[Any, bytes]] = {}
"""Checksums of JAX arrays, which never change: `id -> (weak reference, checksum)`."""


def array_digest(value: Any) -> bytes:
    """A checksum of an array's contents, computed once for each JAX array."""
    if isinstance(value, Tracer) or not getattr(value, "is_fully_addressable", True):
        return f"id {id(value)}".encode()
    if not isinstance(value, jax.Array):
        return _bytes_digest(np.asarray(value))
    known = _DIGESTS.get(id(value))
    if known is None or known[0]() is not value:
        keys = jnp.issubdtype(value.dtype, jax.dtypes.extended)
        host = np.asarray(jax.random.key_data(value) if keys else value)
        key = id(value)
        known = (weakref.ref(value, lambda _: _DIGESTS.pop(key, None)), _bytes_digest(host))
        _DIGESTS[key] = known
    return known[1]


def _bytes_digest(array: np.ndarray) -> bytes:
    checksum = hashlib.blake2b(f"{array.dtype}{array.shape}".encode(), digest_size=16)
    checksum.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return checksum.digest()


def arithmetic(closed: Any, num_params: int) -> Arithmetic:
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


def _units(op: Any, outs: Iterable[Any]) -> list[Arithmetic]:
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


def _of_dtype(dtype: Any) -> Arithmetic:
    return Arithmetic(float(jnp.finfo(dtype).eps), jnp.dtype(dtype).name)


def _of_product(precision: Any) -> list[Arithmetic]:
    """Products that request less than the precision of their dtype."""
    asked = precision if isinstance(precision, tuple) else (precision,)
    names = {getattr(p, "name", str(p)).upper() for p in asked}
    if any("BF16" in name for name in names):
        return [Arithmetic(2.0**-7, "bfloat16 products")]
    if any(name.startswith(("TF32", "F16")) for name in names):
        return [Arithmetic(TF32_EPS, "TF32 products")]
    eps = COARSE_PRODUCTS.get(jax.default_backend())
    if eps is None or not names & {"DEFAULT", "HIGH"}:
        return []
    return [Arithmetic(eps, "products at reduced precision")]


def narrowest_dtype(apply_fn: Callable[..., Any], params: Any, x: Any) -> Any:
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
