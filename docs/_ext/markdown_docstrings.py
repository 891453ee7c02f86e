"""Docstrings are written in Markdown with dollar mathematics; autodoc reads reStructuredText.

The subset in use is small: code between backticks, `$…$` and `$$…$$`, lists, bold words.
"""

import re
from typing import Any

DISPLAY = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)
INLINE = re.compile(r"(?<!\\)\$([^$\n]+(?:\n[^$\n]+)?)\$")
CODE = re.compile(r"(`+)([^`]+)\1")


def to_rest(text: str) -> str:
    """The same text in reStructuredText."""
    parts = DISPLAY.split(text)
    for i, part in enumerate(parts):
        parts[i] = _display(part, _indent(parts[i - 1])) if i % 2 else _inline(part)
    return "".join(parts)


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


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", convert)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}
