"""Planted bugs change what a program computes, one at a time, and the watched source says what ran."""

import ast
import builtins
from pathlib import Path

import pytest
from mutants import tests_for as files_and_tests
from mutations import SEEN, Mutant, mutants, watched

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.host

SOURCE = '''"""A docstring: 1 + 1."""

from typing import Literal

LIMIT = 3


@register(2)
def clipped(x: "float | 1", low: Literal[0, 1] = 0, *, progress=True) -> "int < 2":
    """Adds 1 and 2."""
    check(x, low)
    if x < low and not progress:
        raise ValueError(f"expected {x + 1}, got {low - 1}")
    θ = -max(x, low)
    for a, b in zip(y, y, strict=True):
        pass
    log(θ, progress=True)
    return θ * 2.5
'''


def changes():
    source = SOURCE.encode()
    found = {(m.kind, m.change) for m in mutants("m.py", source)}
    for mutant in mutants("m.py", source):
        assert source.splitlines()[mutant.line - 1].decode().find(mutant.old.split("\n")[0]) >= 0
    return found


def test_every_kind_of_bug_is_planted_once_and_nothing_else():
    assert changes() == {
        ("constant", "3 -> (4)"),
        ("constant", "0 -> (1)"),
        ("dropped call", "check(x, low) -> pass"),
        ("dropped call", "log(θ, progress=True) -> pass"),
        ("swapped arguments", "x, low -> low, x"),
        ("condition", "x < low and not progress -> (not (x < low and not progress))"),
        ("and/or", "and -> or"),
        ("comparison", "< -> <="),
        ("sign", "-max(x, low) -> max(x, low)"),
        ("sign", "θ * 2.5 -> -(θ * 2.5)"),
        ("operator", "* -> /"),
        ("constant", "2.5 -> (5.0)"),
    }


def test_a_planted_bug_changes_what_is_computed():
    source = b"def f(x):\n    y = x\n    return y + 1\n"
    (bug,) = (m for m in mutants("m.py", source) if m.kind == "operator")
    assert (bug.function, bug.line) == ("f", 3)
    values = []
    for each in (source, bug.plant(source)):
        scope = {}
        exec(each, scope)
        values.append(scope["f"](5))
    assert values == [6, 4]


def test_a_watched_source_says_which_functions_ran(monkeypatch):
    source = (
        '"""Says so."""\n\nclass A:\n    def one(self):\n        """One."""\n        if True:\n'
        "            return self.two()\n\n    def two(self):\n        def inner():\n            return 2\n"
        "\n        return inner()\n\n    def three(self):\n        pass\n"
    )
    monkeypatch.setattr(builtins, SEEN, set(), raising=False)
    scope = {}
    exec(watched("m.py", source), scope)
    assert scope["A"]().one() == 2
    assert getattr(builtins, SEEN) == {"m.py::A.one", "m.py::A.two", "m.py::A.two.inner"}


@pytest.mark.parametrize("file", ["dual/_newton.py", "_support/checks.py", "kernels/_reader.py"])
def test_sources_of_the_library_stay_python_when_watched(file):
    text = (ROOT / "src" / "dualfluence" / file).read_text()
    names = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    marks = watched(file, text).count("_planted_seen.add(")
    ast.parse(watched(file, text))
    assert 0.8 * len(names) <= marks <= len(names)


def test_bugs_in_defaults_are_shown_to_the_tests_of_defaults():
    """A class body runs where its module is imported, which no test is known for."""
    file = "src/dualfluence/primal/_low_rank.py"
    rank = Mutant(file, 0, 2, "50", "(51)", "constant", 83, "Nystrom")
    solve = Mutant(file, 0, 2, "1", "(2)", "constant", 99, "Nystrom.prepare")
    seconds = {"test_a": 1.0, "test_b": 2.0}
    found = {
        "tests/test_defaults.py": {"runs": {}, "took": {"test_record": 0.5}},
        "tests/primal/test_solvers.py": {
            "runs": {f"{file}::Nystrom.prepare": ["test_a"]},
            "took": seconds,
        },
    }
    assert files_and_tests(rank, found) == {
        "tests/primal/test_solvers.py": {"tests/primal/test_solvers.py::test_a"},
        "tests/test_defaults.py": {"tests/test_defaults.py::test_record"},
    }
    assert files_and_tests(solve, found) == {
        "tests/primal/test_solvers.py": {"tests/primal/test_solvers.py::test_a"}
    }
