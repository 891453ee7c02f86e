"""Report, for every parameter, how it enters the function and which rule its kernel uses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ._params import Split
from ._program import Op, Program, trace_program
from ._recipe import Leaf, Recipe

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


def read_uses(
    single: Callable[..., Any], leaves: Sequence[Any], rest: Sequence[Any], x: Any
) -> list[tuple[str, ...]]:
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
