"""Short texts for results: one screen, names in one column, values in the other."""

import dataclasses
from collections.abc import Sequence
from html import escape
from typing import Any

import jax

Table = tuple[str, Sequence[tuple[str, str]]]
"""A title, and names with their values."""


class Shown:
    """A result that prints as one screen, and as a table where a notebook shows it.

    It must come first among the bases, with `@dataclass(repr=False)`, because it makes the text. A
    dataclass that does not override `_table` shows its fields, arrays by shape and trees by size: no
    weights, no data.
    """

    def _table(self) -> Table:
        own: Any = self
        rows = [(f.name, described(getattr(self, f.name))) for f in dataclasses.fields(own)]
        return type(self).__name__, rows

    def __repr__(self) -> str:
        return table(*self._table())

    def _repr_html_(self) -> str:
        return html_table(*self._table())


def table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """`title`, then one indented line per row; values start in one column."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def described(value: Any) -> str:
    """A value in a few words."""
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{tuple(value.shape)} {value.dtype}"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    leaves = jax.tree.leaves(value)
    if len(leaves) <= 8 and all(isinstance(leaf, str | int | float) for leaf in leaves):
        return repr(value)
    sizes = [int(getattr(leaf, "size", 1)) for leaf in leaves]
    return f"{type(value).__name__} of {count(len(leaves), 'leaf', 'leaves')}, {count(sum(sizes), 'number')}"


def html_table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """The same as HTML; all text is escaped, because names and notes may contain anything."""
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<div><strong>{escape(title)}</strong><table>{''.join(cells)}</table></div>"


def count(number: int, thing: str, things: str | None = None) -> str:
    """`1 step`, `2,000 steps`; `things` is the plural if it is not the word with an s."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"
