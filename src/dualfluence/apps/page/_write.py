"""The page's files, and the page as one file that needs no server."""

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

MODULES = (
    "format.js",
    "busy.js",
    "source.js",
    "cards.js",
    "colours.js",
    "map.js",
    "panels.js",
    "query.js",
    "findings.js",
    "main.js",
)
"""The modules in their order of use; a saved page contains them one after the other."""

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
"""Rules for browsers, for both pages: nothing is loaded from or sent to another host."""

SERVED = POLICY + "script-src 'self'; style-src 'self'; connect-src 'self'; frame-ancestors 'none'"
SAVED = POLICY + "script-src 'unsafe-inline'; style-src 'unsafe-inline'"

IMPORT = re.compile(r"^import .*;\n", re.MULTILINE)
EXPORT = re.compile(r"^export ", re.MULTILINE)


@cache
def static_files() -> dict[str, str]:
    """Name and text of every file of the page."""
    names = ("index.html", "style.css", *MODULES)
    folder = files(__name__.rpartition(".")[0]) / "static"
    return {name: (folder / name).read_text("utf-8") for name in names}


def one_file(content: dict[str, Any]) -> str:
    """The page with its data, styles and modules inside; edits need the server, everything else works.

    `content` has `start`, `state`, `scores`, `groups` and `certificate`.
    """
    text = static_files()
    code = "\n".join(EXPORT.sub("", IMPORT.sub("", text[name])) for name in MODULES)
    # "<" could end the script element; in JSON it may be written as an escape.
    data = json.dumps(content, allow_nan=False).replace("<", "\\u003c")
    return _replaced(
        text["index.html"],
        {
            '<link rel="stylesheet" href="style.css">': (
                f'<meta http-equiv="Content-Security-Policy" content="{SAVED}">\n'
                f"<style>\n{text['style.css']}</style>"
            ),
            '<script id="content" type="application/json"></script>': (
                f'<script id="content" type="application/json">{data}</script>'
            ),
            '<script type="module" src="main.js"></script>': (
                f'<script type="module">\n{code}</script>'
            ),
        },
    )


def _replaced(page: str, parts: dict[str, str]) -> str:
    for old, new in parts.items():
        before, found, after = page.partition(old)
        if not found:
            raise ValueError(f"the page has no {old}")
        page = before + new + after
    return page
