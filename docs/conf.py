"""Sphinx settings: pages in MyST Markdown, tutorials executed while building."""

import hashlib
import http.client
import sys
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
OTHERS = {
    "python": "https://docs.python.org/3/",
    "numpy": "https://numpy.org/doc/stable/",
    "jax": "https://docs.jax.dev/en/latest/",
    "equinox": "https://docs.kidger.site/equinox/",
    "sklearn": "https://scikit-learn.org/stable/",
}
"""Documentation of other projects that names in signatures lead to."""
PATIENCE = 3.0
"""Seconds for each of them to answer. Without a network the pages are built without these links."""

SOURCE = HERE.parent / "src" / "dualfluence"
sys.path.insert(0, str(HERE / "_ext"))

from dualfluence import __version__  # noqa: E402


def digest_of_source() -> str:
    """A tutorial runs again where the library has changed, not only where its own text has."""
    code = hashlib.sha256()
    for file in sorted(SOURCE.rglob("*.py")):
        code.update(file.relative_to(SOURCE).as_posix().encode() + file.read_bytes())
    return code.hexdigest()[:16]


def has_inventory(address: str) -> bool:
    """Whether a project's list of names can be read: Sphinx would warn, and warnings end the build."""
    try:
        with urllib.request.urlopen(f"{address}objects.inv", timeout=PATIENCE) as answer:
            return answer.read(32).startswith(b"# Sphinx inventory")
    except (OSError, ValueError, http.client.HTTPException):
        return False


project = "dualfluence"
author = "the dualfluence authors"
copyright = "the dualfluence authors, Apache-2.0"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "markdown_docstrings",
    "mathml",
    "namespaces",
    "notebooks",
]
exclude_patterns = ["_build", "results/README.md"]
suppress_warnings = ["mystnb.unknown_mime_type"]

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / "executed" / digest_of_source())
nb_execution_timeout = 300
nb_merge_streams = True

intersphinx_mapping = {name: (at, None) for name, at in OTHERS.items() if has_inventory(at)}
intersphinx_timeout = 30
intersphinx_disabled_reftypes = ["*"]  # only names in signatures, which nobody marks up

copybutton_exclude = ".linenos, .gp, .go"
copybutton_selector = "div.highlight pre"

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
