"""Influence functions, data attribution and unlearning in data space.

The usual order: linearise a model, fit it, edit its training set, and ask what changed.

Nothing is imported before a public name is used, not even JAX, so `dualfluence --help` is fast.
"""

from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from ._public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    names = __dir__()
    if name == "__all__":
        return names
    try:
        return globals()[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    from . import _public

    found = {name: value for name, value in vars(_public).items() if not name.startswith("_")}
    globals().update(found)
    return sorted([*found, "__version__"])
