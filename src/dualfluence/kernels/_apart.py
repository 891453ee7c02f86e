r"""Check that the output at a point does not depend on other points: $f(x)_i$ is a function of $x_i$.

Batch norm in training mode, attention across the batch or `x - x.mean(0)` have no per-point Jacobian,
and every number computed from one would be wrong. The jaxpr is examined first. This proves for most
networks, and for all parameters at once, that points are independent, and computes nothing. If there is
no proof, a probe of three points decides for the present parameters.

Also here: the two products with the Jacobian of a function, also if a `custom_vjp` forbids forward mode.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from .._support.compile import PRECISION, jit
from .._support.types import Inputs, Leaves
from ._program import as_program, mentions, program_checksum, shapes_of, trace
from ._rows import Free, Mixed, OverPoints, follow_rows

Product = Callable[[PyTree], PyTree]


def jacobian_products(fn: Callable[[PyTree], PyTree], theta: PyTree) -> tuple[Product, Product]:
    r"""$t \mapsto Jt$ and $v \mapsto J^T v$ of `fn` at `theta`, with one forward pass for both."""
    if not mentions(jax.make_jaxpr(fn)(theta), "custom_vjp_call"):
        _, push = jax.linearize(fn, theta)
        back = jax.linear_transpose(push, theta)
        return push, lambda v: back(v)[0]
    outputs, pull = jax.vjp(fn, theta)
    return lambda t: _transposed(pull, outputs, t), lambda v: pull(v)[0]


def push_through(fn: Callable[[PyTree], PyTree], theta: PyTree, tangent: PyTree) -> PyTree:
    """$J$ times `tangent`. If a custom reverse rule forbids forward mode, it is computed as $(J^T)^T$."""
    if not mentions(jax.make_jaxpr(fn)(theta), "custom_vjp_call"):
        return jax.jvp(fn, (theta,), (tangent,))[1]
    outputs, pull = jax.vjp(fn, theta)
    return _transposed(pull, outputs, tangent)


def _transposed(pull: Product, outputs: PyTree, tangent: PyTree) -> PyTree:
    try:
        return jax.linear_transpose(lambda v: pull(v)[0], outputs)(tangent)[0]
    except Exception as error:  # whatever JAX raises for whichever operation is not linear
        raise ValueError(
            "linearize: apply_fn has a custom_vjp whose backward rule is not linear in the "
            "cotangent (gradient clipping is such a rule), so it has no Jacobian. Use the "
            f"function without that rule. JAX says: {error}"
        ) from error


Batched = Callable[[Leaves, Leaves, Inputs], Array]
"""`fn(leaves, rest, x) -> (n, c)`, differentiated with respect to `leaves`."""

SAME_PROGRAM = 64
"""Rounding units by which a row may change with its neighbours. The same program runs on the same
numbers of the row, so this is almost zero. Only sums in another order (atomic additions on a GPU)
remain."""

OTHER_PROGRAM = 1e4
"""Rounding units by which a row may change with the size of its batch, because another program may sum
in another order; at most `LOOSEST` of the size of the outputs."""

LOOSEST = 2e-2
"""Relative change of half-precision layers that is allowed between batch sizes."""

REMEMBERED = 8
"""Number of sets of parameters whose probe is remembered."""


def proves_apart(fn: Batched, leaves: Leaves, rest: Leaves, x: Inputs) -> bool:
    """Whether the jaxpr shows that outputs and derivatives of a point depend on that point alone.

    It must also be the same for two and for three points: a function may divide by their number.
    """
    leaves, rest = shapes_of(leaves), shapes_of(rest)
    if mentions(trace(fn, leaves, rest, shapes_of(x, 3)), "custom_vjp_call"):
        return False

    def moved(leaves: Leaves, rest: Leaves, x: Inputs) -> tuple[Array, Array]:
        return jax.jvp(lambda free: fn(free, rest, x), (leaves,), (leaves,))

    two, three = (trace(moved, leaves, rest, shapes_of(x, n)) for n in (2, 3))
    if program_checksum(two, shapes=False) != program_checksum(three, shapes=False):
        return False
    program = as_program(three)
    num_rows = len(jax.tree.leaves(x))
    states = [
        Free(frozenset(d for d, length in enumerate(program.shape(s)) if length == 1))
        for s in program.inputs[:-num_rows]
    ]
    try:
        outs = follow_rows(program, [*states, *[OverPoints(0)] * num_rows], 3)
    except Mixed:
        return False
    return all(s == OverPoints(0) or (isinstance(s, Free) and 0 in s.same) for s in outs)


class Apart:
    """The guard of one function at one shape of inputs: a proof, or a probe for each new `leaves`."""

    def __init__(self, fn: Batched, leaves: Leaves, rest: Leaves, x: Inputs) -> None:
        self.proven = proves_apart(fn, leaves, rest, x)
        if not self.proven:
            _check_jacobian(fn, leaves, rest, x)
        self._row = jit(partial(_middle_row, fn))
        self._passed: list[tuple[weakref.ref[Array], ...]] = []

    def check(self, leaves: Leaves, rest: Leaves, x: Inputs) -> None:
        """Raise `ValueError` if the output at a point depends on other points."""
        arrays = [a for a in jax.tree.leaves((leaves, rest)) if isinstance(a, jax.Array)]
        if self.proven or any(isinstance(a, Tracer) for a in (*arrays, *jax.tree.leaves(x))):
            return
        if any(all(ref() is a for ref, a in zip(p, arrays, strict=True)) for p in self._passed):
            return
        self._probe(leaves, rest, jax.tree.map(np.asarray, x))
        # Only what has passed is remembered, and for as long as the arrays live.
        passed = tuple(weakref.ref(a) for a in arrays)
        self._passed = [*self._passed[1 - REMEMBERED :], passed]

    def _probe(self, leaves: Leaves, rest: Leaves, x: Inputs) -> None:
        first, second, alone = (jax.tree.map(make, x) for make in (_rows, _other_rows, _one_row))
        f, g = self._row(leaves, rest, first)
        f_other, g_other = self._row(leaves, rest, second)
        f_alone, g_alone = self._row(leaves, rest, alone)
        unit = float(jnp.finfo(f.dtype).eps)
        tight, loose = SAME_PROGRAM * unit, min(LOOSEST, OTHER_PROGRAM * unit)
        _compare("with other points", "outputs", [f], [f_other], tight)
        _compare("with other points", "derivatives", g, g_other, tight)
        _compare("with others instead of alone", "outputs", [f], [f_alone], loose)
        _compare("with others instead of alone", "derivatives", g, g_alone, loose)


def _check_jacobian(fn: Batched, leaves: Leaves, rest: Leaves, x: Inputs) -> None:
    """Raise a clear error if a reverse rule is not linear, before anything is computed."""
    leaves, rest, x = shapes_of(leaves), shapes_of(rest), shapes_of(x, 1)
    trace(
        lambda *args: push_through(lambda free: fn(free, *args[1:]), args[0], args[0]),
        leaves,
        rest,
        x,
    )


def _middle_row(fn: Batched, leaves: Leaves, rest: Leaves, x: Inputs) -> tuple[Array, list[Array]]:
    """Outputs of the middle point, and a combination of their derivatives.

    It runs at full precision. The rounding of products at low precision, the default on some
    devices, would look like a dependence on other points.
    """
    with jax.default_matmul_precision(PRECISION):
        f, back = jax.vjp(lambda free: fn(free, rest, x), leaves)
        middle = f.shape[0] // 2
        mix = np.random.default_rng(0).normal(size=f.shape[1]).astype(f.dtype)
        (grads,) = back(jnp.zeros_like(f).at[middle].set(mix))
    return f[middle], jax.tree.leaves(grads)


def _rows(x: np.ndarray) -> np.ndarray:
    """Three points; the first one is repeated if there are fewer."""
    return x[np.arange(3) % len(x)]


def _one_row(x: np.ndarray) -> np.ndarray:
    return _rows(x)[1:2]


def _other_rows(x: np.ndarray) -> np.ndarray:
    """The same point between other points, which are taken from the end of the data and moved a little."""
    rows = _rows(x)
    others = x[[-1, -2 % len(x)]]
    if np.issubdtype(rows.dtype, np.integer) or rows.dtype == bool:
        apart = others if (others != rows[::2]).any() else np.zeros_like(others)
    else:
        size = np.mean(np.abs(others)) or 1
        apart = (0.9 * others + 0.2 * size).astype(rows.dtype)
    return np.stack([apart[0], rows[1], apart[1]])


def _compare(
    cause: str, what: str, first: Sequence[Array], second: Sequence[Array], slack: float
) -> None:
    """Raise if the two differ by more than `slack` of their size; NaN is reported elsewhere."""
    pairs = [(np.asarray(a), np.asarray(b)) for a, b in zip(first, second, strict=True)]
    if not all(np.isfinite(a).all() and np.isfinite(b).all() for a, b in pairs):
        return
    size = max((float(np.max(np.abs(a), initial=0)) for pair in pairs for a in pair), default=0.0)
    gap = max((float(np.max(np.abs(a - b), initial=0)) for a, b in pairs), default=0.0)
    if gap > slack * size:
        raise ValueError(
            f"apply_fn: the output at one point depends on other points: the {what} of one point change "
            f"by {gap:.3g} (their size is {size:.3g}) when it is evaluated together {cause}, so no "
            "per-point derivative exists. Put batch norm and dropout in inference mode; take no means, sums "
            "or attention over axis 0."
        )
