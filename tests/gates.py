"""Which command runs which test: the expressions of markers in pyproject.toml and in the Makefile.

A marker stands on the test, or on a file as `pytestmark`. A test without one runs with `make test`.
"""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

COLLECTED = pytest.StashKey[dict[str, set[str]]]()
"""Markers of every test found, also of those that `-m` leaves out."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    config.stash[COLLECTED] = {i.nodeid: {m.name for m in i.iter_markers()} for i in items}


def default():
    """What runs without `-m`."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    return re.search(r"-m '([^']+)'", options["addopts"]).group(1)


def targets():
    """Expression of markers of every target of the Makefile that runs pytest."""
    rules = re.findall(r"^([\w-]+):.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    found = {name: re.search(r"-m '([^']+)'", body) for name, body in rules if "pytest" in body}
    return {name: m.group(1) if m else default() for name, m in found.items()}


def on_every_change():
    """Targets that `.ci/run` makes."""
    return re.findall(r"\bmake ([\w-]+)", (ROOT / ".ci" / "run").read_text())


def selects(expression, markers):
    """Whether `-m expression` runs a test with these markers."""
    names = set(re.findall(r"\w+", expression)) - {"not", "and", "or"}
    return eval(expression, {"__builtins__": {}}, {name: name in markers for name in names})


def table(rows, quick):
    """Rows for `parametrize`, of which `make test` runs those in `quick` and `make thorough` the others."""
    left = [row for row in quick if row not in list(rows)]
    assert not left, f"no rows of this table: {left}"
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else (row,)),
            marks=[] if row in quick else [pytest.mark.thorough],
        )
        for row in rows
    ]
