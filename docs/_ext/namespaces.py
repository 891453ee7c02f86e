"""The directive `namespace`: every public name of a module, documented from its docstring.

    ```{namespace} dualfluence
    fit from_trained
    ```

With names it documents these. Without names it documents what no directive before it on the page has, so
that no exported name is missing. Names of the root are not repeated in the rooms they come from.
A module that is not there is left out: adapters may not be.
"""

import importlib
import inspect
from typing import Any

from public import ROOT, public_names
from sphinx.util.docutils import SphinxDirective


class Namespace(SphinxDirective):
    required_arguments = 1
    has_content = True

    def run(self) -> list[Any]:
        where = self.arguments[0]
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError:
            return self.parse_text_to_nodes(f"`{where}` is not part of this version.")
        shown = self.env.temp_data.setdefault(f"namespace {where}", set())
        public = public_names(module)
        asked = " ".join(self.content).split()
        names = asked or [name for name in public if name not in shown]
        shown.update(names)
        root = public_names(importlib.import_module(ROOT)) if where != ROOT else {}
        again = [name for name in names if root.get(name) is public[name]]
        text = _also(again) + "".join(
            _entry(where, name, public[name]) for name in names if name not in again
        )
        return self.parse_text_to_nodes(text)


def _also(names: list[str]) -> str:
    links = ", ".join(f"{{py:obj}}`~{ROOT}.{name}`" for name in names)
    return f"Also available from here: {links}.\n\n" if names else ""


def _entry(where: str, name: str, value: Any) -> str:
    if inspect.isclass(value):
        lines = [f".. autoclass:: {where}.{name}", "   :members:", *_class_options(value)]
    elif callable(value):
        lines = [f".. autofunction:: {where}.{name}"]
    else:
        lines = [f".. data:: {where}.{name}", f"   :value: {value!r}"]
    return "\n".join(["```{eval-rst}", *lines, "```", "", ""])


def _class_options(value: type) -> list[str]:
    """Methods of our own base classes belong to what a user holds in hand."""
    bases = value.__mro__[1:]
    foreign = [b.__name__ for b in bases if not b.__module__.startswith(ROOT)]
    ours = [b for b in bases if b.__module__.startswith(ROOT)]
    return [f"   :inherited-members: {','.join(foreign)}"] if ours else []


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("namespace", Namespace)
    return {"parallel_read_safe": True}
