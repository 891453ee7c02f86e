"""Formulas as MathML, made while building: pages ask no other host for a script, and read offline."""

import re
from html import escape
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
SIZES = re.compile(r"\\[Bb]igg?(?=\\|[(\[|)\]])")
"""Sizes of brackets without a side, which docutils does not know."""

TAG = re.compile(r"\\tag\{([^}]*)\}")


def to_mathml(formula: str, where: nodes.Node, *, block: bool) -> str:
    """The formula; what cannot be read is a warning, which fails the build."""
    try:
        return latex2mathml.tex2mathml(SIZES.sub("", formula), as_block=block)
    except (MathError, SyntaxError) as error:
        LOGGER.warning("formula not understood: %s: %s", error, formula, location=where)
        return f"<code>{escape(formula)}</code>"


def inline(self: Any, node: nodes.math) -> None:
    self.body.append(to_mathml(node.astext(), node, block=False))
    raise nodes.SkipNode


def display(self: Any, node: nodes.math_block) -> None:
    formula = node.astext()
    tag = TAG.search(formula)
    number = f'<span class="formula-tag">({escape(tag[1])})</span>' if tag else ""
    self.body.append(self.starttag(node, "div", CLASS="formula"))
    self.body.append(to_mathml(TAG.sub("", formula), node, block=True) + number + "</div>")
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
