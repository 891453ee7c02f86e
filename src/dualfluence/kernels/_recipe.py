"""Decide, for one function and one input shape, how each parameter enters the kernel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._support.trees import common_dtype
from ._factors import GradientFactor, Scalars
from ._program import Op, trace_program
from ._reader import FactorReader

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
        single: Callable[..., Any],
        leaves: Sequence[Any],
        rest: Sequence[Any],
        x: Any,
        *,
        method: Method,
        precision: Any,
    ) -> None:
        out = jax.eval_shape(single, leaves, rest, x)
        self.num_outputs = int(out.shape[0])
        self.dtype = common_dtype(out.dtype, jnp.float32)
        self.method, self.precision = method, precision

        def backward(leaves: Any, rest: Any, x: Any, cotangent: Any) -> Any:
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
        groups: dict[Any, Group] = {}
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


def precision_name(precision: Any) -> str | None:
    """The name that `jax.default_matmul_precision` uses for `precision`."""
    if precision is None:
        return None
    if isinstance(precision, jax.lax.Precision):
        return precision.name.lower()
    return precision if isinstance(precision, str) else "highest"
