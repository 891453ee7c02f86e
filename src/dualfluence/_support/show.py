"""Short texts for results: one screen, names in one column, values in the other."""

from collections.abc import Sequence


def table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """`title`, then one indented line per row; values start in one column."""
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def count(number: int, thing: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
