"""Docstrings are written in Markdown with dollar mathematics; autodoc reads reStructuredText.

The subset in use is small: code between backticks, `$…$` and `$$…$$`, lists, tables, bold words.
"""

import re
from typing import Any

DISPLAY = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)
INLINE = re.compile(r"(?<!\\)\$([^$\n]+(?:\n[^$\n]+)?)\$")
TABLE = re.compile(r"(?:^[ ]*\|.*\|[ ]*$\n?){3,}", re.MULTILINE)
CODE = re.compile(r"(`+)([^`]+)\1")


def to_rest(text: str) -> str:
    """The same text in reStructuredText."""
    parts = DISPLAY.split(TABLE.sub(_table, text))
    for i, part in enumerate(parts):
        parts[i] = _display(part, _indent(parts[i - 1])) if i % 2 else _inline(part)
    return "".join(parts)


def _table(found: re.Match[str]) -> str:
    """A Markdown table as a list table; its second line only draws."""
    rows = [line.strip().strip("|").split("|") for line in found[0].strip().splitlines()]
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in [rows[0], *rows[2:]]:
        lines += [f"   {'-' if i else '* -'} {cell.strip()}" for i, cell in enumerate(row)]
    lines = [
        line if line.startswith("   *") else line.replace("   - ", "     - ") for line in lines
    ]
    return "\n" + "\n".join(lines) + "\n\n"


def _indent(before: str) -> str:
    line = before.rsplit("\n", 1)[-1] if before else ""
    return line[: len(line) - len(line.lstrip())]


def _display(formula: str, indent: str) -> str:
    lines = "\n".join(f"{indent}   {line.strip()}" for line in formula.strip().splitlines())
    return f"\n\n{indent}.. math::\n\n{lines}\n\n{indent}"


def _inline(text: str) -> str:
    pieces = CODE.split(text)  # text, ticks, code, text, ticks, code, ...
    out = []
    for i in range(0, len(pieces), 3):
        out.append(_mathematics(pieces[i]))
        if i + 2 < len(pieces):
            out.append(_code(pieces[i + 2]))
    return _separate(out)


def _code(code: str) -> str:
    return "``" + re.sub(r"\s*\n\s*", " ", code.strip()) + "``"


def _mathematics(text: str) -> str:
    def role(found: re.Match[str]) -> str:
        return ":math:`" + re.sub(r"\s*\n\s*", " ", found[1].strip()) + "`"

    return INLINE.sub(role, text)


def _separate(pieces: list[str]) -> str:
    """Markup must be set off from letters beside it: `` `K`s `` becomes ```` ``K``\\ s ````."""
    text = ""
    for piece in pieces:
        touching = text and piece and (text[-1] == "`" and piece[0].isalnum())
        leading = text and piece.startswith("``") and text[-1].isalnum()
        text += ("\\ " if touching or leading else "") + piece
    return re.sub(r"(:math:`[^`]+`)(?=[A-Za-z0-9])", r"\1\\ ", text)


def convert(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Event `autodoc-process-docstring`."""
    lines[:] = to_rest("\n".join(lines)).splitlines()


def skip(app: Any, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Fields of named tuples are in the docstring of their class."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def shorten(
    app: Any,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Event `autodoc-process-signature`: `Array`, wherever JAX keeps it."""
    short = [text and text.replace("jaxlib._jax.Array", "Array") for text in (signature, returns)]
    return short[0], short[1]


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", convert)
    app.connect("autodoc-process-signature", shorten)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}
