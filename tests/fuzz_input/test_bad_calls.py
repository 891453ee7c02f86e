"""No bad call is taken silently, ends in the depths of JAX, or does not end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.host, pytest.mark.ordinary]

HARNESS = Path(__file__).parent / "harness.py"


def run(*options: str) -> dict:
    """In a process of its own: here, the tests' type checker would speak before the library."""
    done = subprocess.run(
        [sys.executable, str(HARNESS), *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.stdout, done.stderr[-2000:]
    summary = json.loads(done.stdout)
    print({name: value for name, value in summary.items() if name != "violations"})
    return summary


def test_bad_calls_are_refused_by_name():
    # In 32 bits, where JAX bends most.
    assert run("--calls", "300")["violations"] == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--x64",)], ids=["32 bits", "64 bits"])
def test_thousands_of_bad_calls_are_refused_by_name(options):
    assert run("--calls", "2000", "--seed", "1", *options)["violations"] == []
