"""How the tables of the pages write rows and seconds."""

from numbers_in_sentences import digits


def table(head: str, rows: list[list[str]]) -> str:
    columns = head.count("|") - 1
    lines = [head, "|" + "---|" * columns, *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines) + "\n"


def seconds(value: float) -> str:
    return f"{digits(value)} s" if value >= 0.0995 else f"{digits(1e3 * value)} ms"
