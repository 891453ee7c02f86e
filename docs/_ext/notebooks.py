"""Every tutorial as a notebook to download, beside its page.

The notebook holds the page's text and code without outputs: whoever runs it sees their own.
"""

import json
from pathlib import Path
from typing import Any

import nbformat
from myst_nb.core.read import read_myst_markdown_notebook
from myst_parser.config.main import MdParserConfig

FOLDER = "tutorials"
LINK = (
    '<p class="notebook"><a href="{name}.ipynb" download>Download this page as a notebook</a></p>\n'
)


def notebook_of(text: str) -> str:
    """The page's Markdown as a notebook file."""
    found = read_myst_markdown_notebook(text, config=MdParserConfig())
    found.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    for number, cell in enumerate(found.cells):
        cell["id"] = f"cell-{number}"  # random ones would change with every build
    return nbformat.writes(found)


def add_link(
    app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """A link above the text of a tutorial."""
    if pagename.startswith(f"{FOLDER}/") and doctree is not None:
        context["body"] = LINK.format(name=pagename.split("/")[-1]) + context["body"]


def write_notebooks(app: Any, exception: Exception | None) -> None:
    """The notebooks themselves, once the pages are written."""
    if exception is not None or app.builder.format != "html":
        return
    for page in sorted((Path(app.srcdir) / FOLDER).glob("*.md")):
        text = notebook_of(page.read_text("utf-8"))
        assert json.loads(text)["cells"], page
        (Path(app.outdir) / FOLDER / f"{page.stem}.ipynb").write_text(text, "utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.connect("html-page-context", add_link)
    app.connect("build-finished", write_notebooks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
