"""What is public: the names that the reference documents, read from the package itself."""

import importlib
import inspect
import re
from types import ModuleType
from typing import Any

ROOT = "dualfluence"


RE_EXPORT = re.compile(r"\bimport (\w+) as \1$", re.MULTILINE)


def public_names(module: ModuleType) -> dict[str, Any]:
    """What a user may import from here: `__all__`, what a package re-exports, what a module defines.

    A name whose framework is not installed is left out.
    """
    found = {}
    for name in _names(module):
        try:
            value = getattr(module, name)
        except ImportError:
            continue
        if not isinstance(value, ModuleType):
            found[name] = value
    return found


def _names(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    if hasattr(module, "__path__"):
        return [n for n in RE_EXPORT.findall(_source(module)) if not n.startswith("_")]
    own = {n: v for n, v in vars(module).items() if not n.startswith("_")}
    return [n for n, v in own.items() if getattr(v, "__module__", None) == module.__name__]


def public_namespaces() -> list[str]:
    """The root and every package or module that it exports, with theirs."""
    found, queue = [], [importlib.import_module(ROOT)]
    dir(queue[0])  # imports what it names
    while queue:
        module = queue.pop(0)
        found.append(module.__name__)
        inner = [v for n, v in vars(module).items() if not n.startswith("_")]
        shown = [m for m in inner if isinstance(m, ModuleType) and m.__name__.startswith(ROOT)]
        exported = {m.__name__ for m in shown if _is_exported(m, module)}
        queue += [m for m in shown if m.__name__ in exported - set(found)]
    return found


def _is_exported(inner: ModuleType, module: ModuleType) -> bool:
    """Named in the package's own imports: others are there because somebody imported them."""
    name = inner.__name__.rpartition(".")[2]
    return f"import {name} as {name}" in _source(module)


def _source(module: ModuleType) -> str:
    """The text of a package's imports; the root has its own in `_public`."""
    home = importlib.import_module(f"{ROOT}._public") if module.__name__ == ROOT else module
    return inspect.getsource(home)
