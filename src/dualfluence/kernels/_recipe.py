"""Decide, for one function and one input shape, how each parameter enters the kernel, and report it."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jaxtyping import Array

from .._support.points import common_dtype
from .._support.types import Inputs, Leaves
from ._params import Split
from ._program import Op, Program, trace_program
from ._reader import FactorReader, GradientFactor, Scalars

Method = Literal["auto", "structured", "jacobian"]

NOMINAL_TILE = 32
"""Number of points that share the cost of forming a whole gradient, when the two forms are compared."""


@dataclass(frozen=True)
class Leaf:
    """The form in which the gradient of a leaf is kept: `form` is `pair`, `row`, `patches`, `joined`,
    `unused`."""

    slot: int
    size: int
    form: str
    factor: GradientFactor | None = None


@dataclass(frozen=True)
class Group:
    """Gradients with a common $G$: each of `factors` has its own $A$; in `scales` $A$ is a number."""

    factors: tuple[GradientFactor, ...]
    scales: tuple[tuple[Scalars, int], ...] = ()


def prefers_pair(sizes: tuple[int, int, int, int], num_outputs: int) -> bool:
    """Whether two factors need less arithmetic per pair of points than the whole gradient."""
    b, s, m, n = sizes
    squared = num_outputs**2
    pair = b * s * s * (m + squared * (n + 2))
    whole = b * squared * m * n + 2 * b * s * num_outputs * m * n // NOMINAL_TILE
    return pair <= whole


PointFn = Callable[[Leaves, Leaves, Inputs], Array]
"""`fn(leaves, rest, x) -> (c,)`, of one point."""


class Recipe:
    r"""The backward pass of `single`, cut one step short of the gradients.

    **Arguments:**

    - `single`: `single(leaves, rest, x) -> (c,)`, the outputs of one point.
    - `leaves`, `rest`, `x`: shapes of the trainable leaves, of the others, and of one point.
    - `method`: `"auto"` takes two factors or the whole gradient for each leaf, whichever is cheaper.
      `"structured"` takes factors wherever there are any, `"jacobian"` never.
    - `precision`: of products in the model that do not set one, and of the products of the factors.
    """

    def __init__(
        self,
        single: PointFn,
        leaves: Leaves,
        rest: Leaves,
        x: Inputs,
        *,
        method: Method,
        precision: PrecisionLike,
    ) -> None:
        out = jax.eval_shape(single, leaves, rest, x)
        self.num_outputs = int(out.shape[0])
        self.dtype = common_dtype(out.dtype, jnp.float32)
        self.method, self.precision = method, precision

        def backward(
            leaves: Leaves, rest: Leaves, x: Inputs, cotangent: Array
        ) -> tuple[Array, Leaves]:
            outputs, pull = jax.vjp(lambda free: single(free, rest, x), leaves)
            return outputs, pull(cotangent)[0]

        with jax.default_matmul_precision(precision_name(precision)):
            self.program = trace_program(backward, leaves, rest, x, out)
        self.first_input = len(leaves) + len(rest)
        self.reached = self.program.dependents([self.program.inputs[-1]])
        reader = FactorReader(self.program, self.reached)
        self.leaves = [self._leaf(reader, slot) for slot in self.program.outputs[1:]]
        self.groups = self._join(reader)
        self.ops: Sequence[Op] = self.program.needed(self._wanted())

    def _leaf(self, reader: FactorReader, slot: int) -> Leaf:
        size = self.program.size(slot)
        if slot not in self.reached or size == 0:
            return Leaf(slot, size, "unused")
        factor = None if self.method == "jacobian" else reader.read(slot)
        if factor is None:
            return Leaf(slot, size, "row")
        if self.method == "structured" or prefers_pair(factor.sizes, self.num_outputs):
            return Leaf(slot, size, "pair", factor)
        return Leaf(slot, size, "patches" if factor.kind == "conv" else "row", factor)

    def _join(self, reader: FactorReader) -> list[Group]:
        r"""Group gradients by their $G$: $\sum_l (A_l A_l^T) \circ (G G^T)$ is one product."""
        groups: dict[Hashable, Group] = {}
        for k, leaf in enumerate(self.leaves):
            if leaf.form == "pair" and leaf.factor is not None:
                flat = leaf.factor.kind == "dot" and leaf.factor.sizes[:2] == (1, 1)
                key = leaf.factor.right_slot if flat else ("own", k)
                factors = groups[key].factors if key in groups else ()
                groups[key] = Group((*factors, leaf.factor))
        for k, leaf in enumerate(self.leaves):
            root, scalars, sign = reader.root(leaf.slot)
            if leaf.form == "row" and root in groups:
                groups[root] = Group(groups[root].factors, (*groups[root].scales, (scalars, sign)))
                self.leaves[k] = Leaf(leaf.slot, leaf.size, "joined")
        return list(groups.values())

    def _wanted(self) -> set[int]:
        wanted = {self.program.outputs[0]}
        for group in self.groups:
            wanted |= {slot for scalars, _ in group.scales for slot, _ in scalars}
            wanted = wanted.union(*(factor.slots for factor in group.factors))
        for leaf in self.leaves:
            if leaf.form == "row":
                wanted.add(leaf.slot)
            elif leaf.form == "patches" and leaf.factor is not None:
                wanted |= leaf.factor.slots
        return wanted


def precision_name(precision: PrecisionLike) -> str | None:
    """The name that `jax.default_matmul_precision` uses for `precision`."""
    if precision is None:
        return None
    if isinstance(precision, jax.lax.Precision):
        return precision.name.lower()
    return precision if isinstance(precision, str) else "highest"


VIEWS = frozenset(
    {"convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "copy", "neg"}
)
LOOPS = frozenset({"scan", "while", "cond"})
FORMS = {"pair": "two factors", "joined": "two factors", "unused": "zero"}
KINDS = {"dot": "dense", "conv": "conv", "lookup": "embedding"}


@dataclass(frozen=True)
class LeafReport:
    """One parameter leaf: the `rule` of its contribution and the `form` of its gradient."""

    path: str
    shape: tuple[int, ...]
    rule: str
    form: str


@dataclass(frozen=True)
class KernelReport:
    """One `LeafReport` per trainable leaf, and the paths of the leaves held fixed.

    Rules: `dense`, `conv`, `embedding`, `bias`, `scale` if structure was found; `jacobian (…)` with the
    reason if the whole Jacobian of the leaf is formed; `unused` for no dependence (its contribution is
    zero). A shared parameter lists all its uses; their cross terms are included.
    """

    leaves: tuple[LeafReport, ...]
    fixed: tuple[str, ...]

    def __getitem__(self, path: str) -> LeafReport:
        for leaf in self.leaves:
            if leaf.path == path:
                return leaf
        raise KeyError(path)

    def __str__(self) -> str:
        rows = [("parameter", "shape", "rule", "form")]
        rows += [(leaf.path, str(leaf.shape), leaf.rule, leaf.form) for leaf in self.leaves]
        widths = [max(len(row[k]) for row in rows) for k in range(4)]
        lines = ["  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)) for row in rows]
        if self.fixed:
            lines.append(f"held fixed: {', '.join(self.fixed)}")
        return "\n".join(line.rstrip() for line in lines)


def make_report(recipe: Recipe, split: Split, uses: Sequence[tuple[str, ...]]) -> KernelReport:
    """Describe the forms of the recipe and the `uses` in the forward pass."""
    paths = [
        path for path, role in zip(split.paths, split.roles, strict=True) if role == "trainable"
    ]
    fixed = [
        path for path, role in zip(split.paths, split.roles, strict=True) if role != "trainable"
    ]
    leaves = [
        LeafReport(
            path,
            recipe.program.shape(leaf.slot),
            _rule(leaf, entries, recipe.method),
            FORMS.get(leaf.form, "whole gradient"),
        )
        for path, leaf, entries in zip(paths, recipe.leaves, uses, strict=True)
    ]
    return KernelReport(tuple(leaves), tuple(fixed))


def _rule(leaf: Leaf, uses: tuple[str, ...], method: str) -> str:
    if leaf.form == "unused":
        return "unused"
    if method == "jacobian":
        return "jacobian (asked for)"
    kinds = tuple(dict.fromkeys(uses))
    named = " + ".join(kinds) + (" (shared)" if len(uses) > 1 else "")
    if kinds and set(kinds) <= {"bias", "scale"}:
        return named
    if leaf.factor is not None:
        known = set(kinds) <= set(KINDS.values())
        return named if kinds and known else KINDS.get(leaf.factor.kind, "dense")
    loops = [kind for kind in kinds if kind in LOOPS]
    reason = f"inside {loops[0]}" if loops else named
    return f"jacobian ({reason or 'no structure found'})"


def read_uses(single: PointFn, leaves: Leaves, rest: Leaves, x: Inputs) -> list[tuple[str, ...]]:
    """For every leaf, the kinds of its uses in the forward pass."""
    program = trace_program(single, leaves, rest, x)
    varies = program.dependents(program.inputs[len(leaves) + len(rest) :])
    return [_uses(program, slot, varies) for slot in program.inputs[: len(leaves)]]


def _uses(program: Program, leaf: int, varies: set[int]) -> tuple[str, ...]:
    """Follow a leaf through its views; `bent` views were combined with another array on the way."""
    views, bent, found = {leaf}, set(), []
    for op in program.ops:
        for k, slot in enumerate(op.ins):
            if slot not in views:
                continue
            others = [other for j, other in enumerate(op.ins) if j != k]
            kind = _use(op, k, any(other in varies for other in others))
            if kind is not None:
                plain = slot not in bent or kind in ("bias", "scale")
                found.append(kind if plain else f"mul before {kind}")
                continue
            views.update(op.outs)
            scaled = op.name in ("mul", "div") and any(program.size(s) > 1 for s in others)
            if slot in bent or scaled:
                bent.update(op.outs)
    return tuple(found)


def _use(op: Op, k: int, beside_data: bool) -> str | None:
    """The use that `op` makes of its operand `k`, a view of a parameter; `None` if the result is
    another view of it."""
    name = op.name
    if name in VIEWS:
        return None
    if name in ("mul", "add", "sub") or (name == "div" and k == 0):
        if not beside_data:
            return None if op.ins[0] != op.ins[1] else name
        return "scale" if name in ("mul", "div") else "bias"
    kinds = {"dot_general": "dense", "conv_general_dilated": "conv"}
    if name == "gather" and k == 0:
        kinds = {"gather": "embedding"}
    return kinds.get(name, name) if beside_data else name
