"""What an option is if nobody gives it: part of the interface, like its name.

`python tests/test_defaults.py` writes `data/defaults.json` anew, after a default was changed on purpose.
"""

import inspect
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).parent / "data" / "defaults.json"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "docs" / "_ext")]

from public import public_names, public_namespaces  # noqa: E402

from ordinary.table import is_member  # noqa: E402

pytestmark = pytest.mark.host


def plain(value):
    """A default in words that are the same on every machine."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    return type(value).__name__


def found():
    """`{"fit": {"max_steps": 1000}}` for public functions, classes and their own methods."""
    rows = {}
    for namespace in public_namespaces():
        module = __import__(namespace, fromlist=["_"])
        room = namespace.removeprefix("dualfluence").removeprefix(".")
        for name, value in public_names(module).items():
            if not callable(value):
                continue
            full = f"{room}.{name}" if room else name
            calls = {full: value}
            if inspect.isclass(value):
                own = {n: getattr(m, "method", m) for n, m in vars(value).items()
                       if not n.startswith("_") and is_member(m)}  # fmt: skip
                calls |= {f"{full}.{n}": m for n, m in own.items() if inspect.isfunction(m)}
            for called, fn in calls.items():
                try:
                    options = inspect.signature(fn).parameters.values()
                except (TypeError, ValueError):
                    continue
                given = {p.name: plain(p.default) for p in options if p.default is not p.empty}
                if given:
                    rows[called] = given
    return rows


def test_defaults_are_those_on_record():
    """An option may be new or gone; one that is on record keeps its default or is recorded anew."""
    now, want = found(), json.loads(RECORD.read_text())
    assert len(want) > 100
    changed = {
        f"{name}({option})": (value, now[name][option])
        for name, options in want.items()
        for option, value in options.items()
        if option in now.get(name, {}) and now[name][option] != value
    }
    assert changed == {}


if __name__ == "__main__":
    RECORD.write_text(json.dumps(found(), indent=1, sort_keys=True) + "\n")
