"""Sphinx settings: pages in MyST Markdown, tutorials executed while building."""

import hashlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src" / "dualfluence"
sys.path.insert(0, str(HERE / "_ext"))

from dualfluence import __version__  # noqa: E402


def digest_of_source() -> str:
    """A tutorial runs again where the library has changed, not only where its own text has."""
    code = hashlib.sha256()
    for file in sorted(SOURCE.rglob("*.py")):
        code.update(file.relative_to(SOURCE).as_posix().encode() + file.read_bytes())
    return code.hexdigest()[:16]


project = "dualfluence"
author = "the dualfluence authors"
copyright = "the dualfluence authors, Apache-2.0"
version = release = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "markdown_docstrings", "mathml", "namespaces"]
exclude_patterns = ["_build", "results/README.md"]
suppress_warnings = ["mystnb.unknown_mime_type"]

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / "executed" / digest_of_source())
nb_execution_timeout = 300
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 72
add_module_names = False
toc_object_entries_show_parents = "hide"

html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"dualfluence {__version__}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_extra_path = ["results/report.html"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
