"""What is public: the names that the reference documents, read from the package itself."""

import importlib
import inspect
from types import ModuleType
from typing import Any

ROOT = "dualfluence"


def public_names(module: ModuleType) -> dict[str, Any]:
    """What a user may import from here: `__all__`, or what has no underscore and is ours."""
    names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    found = {name: getattr(module, name) for name in names}
    return {n: v for n, v in found.items() if not isinstance(v, ModuleType) and _is_ours(v, module)}


def _is_ours(value: Any, module: ModuleType) -> bool:
    home = getattr(value, "__module__", None)
    if hasattr(module, "__path__"):  # a package only re-exports
        return home is None or home.startswith(ROOT)
    return home == module.__name__


def public_namespaces() -> list[str]:
    """The root and every package or module that it exports, with theirs."""
    found, queue = [], [importlib.import_module(ROOT)]
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
    return f"import {name} as {name}" in inspect.getsource(module)
