"""The comparison kit: what readers of results import, one look per method, one stopwatch."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.apps.compare import _look, _names
from dualfluence.apps.compare._networks import Architecture, fully_connected, make_network
from dualfluence.apps.compare._timing import time_calls

pytestmark = pytest.mark.host

APPS = Path(dfl.__file__).parent / "apps"
RESULTS = Path(__file__).parents[2] / "docs" / "results"

READ_VERDICTS = """
import sys, json
from pathlib import Path
import dualfluence.apps.compare._look, dualfluence.apps.compare._names
import dualfluence.apps.paper._read, dualfluence.apps.paper._results, dualfluence.apps.paper._verdicts
from dualfluence.apps.paper._claims import CLAIMS, COMPARISONS
from dualfluence.apps.paper._results import read_results

found = {name: read_results(Path(sys.argv[1]), name) for name in CLAIMS}
found = {name: results for name, results in found.items() if results is not None}
verdicts = [c.verdict for name, results in found.items() for c in CLAIMS[name](results)]
values = [v.differs for name, results in found.items() for v in COMPARISONS[name](results)]
assert "matplotlib" not in sys.modules, "plotting was imported"
print(json.dumps(verdicts))
"""


def test_verdicts_and_results_are_read_without_plotting():
    command = [sys.executable, "-c", READ_VERDICTS, str(RESULTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(done.stdout.splitlines()[-1])
    held, failed = verdicts.count("holds"), verdicts.count("does not hold")
    # The committed report states what the committed numbers say.
    assert f"{held} claims hold, {failed} do not" in (RESULTS / "report.html").read_text()


def top_level_imports(path):
    """First parts of the modules that a file imports when it is imported itself."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or "").split(".")[0])
    return found


def test_commands_import_what_they_need_when_they_run():
    registered = ("attribute", "explore", "serve")
    files = [APPS / "cli" / name for name in ("__init__.py", "_app.py")]
    files += [APPS / room / name for room in registered for name in ("__init__.py", "_commands.py")]
    start = set().union(*(top_level_imports(file) for file in files))
    own = {"..._version", *(f"..{room}" for room in registered)}
    assert start - set(sys.stdlib_module_names) - own == {"typer"}


@pytest.mark.parametrize("name", ["_names.py", "_look.py"])
def test_names_and_looks_import_neither_jax_nor_plotting(name):
    assert top_level_imports(APPS / "compare" / name) <= {"typing", "._names"}


def test_every_method_has_a_look_of_its_own():
    methods = {v for k, v in vars(_names).items() if k.isupper() and isinstance(v, str)}
    assert methods == set(_look.STYLES) == set(_look.COLOURS)
    looks = {json.dumps(style, sort_keys=True) for style in _look.STYLES.values()}
    assert len(looks) == len(methods)
    assert not set(_look.SCALE) & set(_look.COLOURS.values())


def test_the_papers_network_is_one_network():
    model = fully_connected((6, 5, 5, 2), 3)
    params = make_network(Architecture("fcnn", 2, 5)).init(jax.random.key(3), (6,), outputs=2)
    for got, want in zip(jax.tree.leaves(model.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_stopwatch_counts_every_call():
    calls = []
    result, seconds = time_calls(lambda: calls.append(1) or len(calls), 3)
    assert (result, len(seconds)) == (3, 3)
    assert min(seconds) >= 0
