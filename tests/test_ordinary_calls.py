"""Every public name is called with default arguments on ordinary input, in float32 as well as in float64.

The rows are in `ordinary/`: what each calls, and the truth that it compares with. Processes of their own run
them, because a process of these tests is in float64.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ordinary import rows, table

WORKER = Path(__file__).parent / "ordinary_worker.py"

pytestmark = pytest.mark.host


def called():
    return {name for row in table.ROWS for name in row.names}


def test_every_public_name_has_a_row():
    assert rows.__all__
    assert sorted(table.names_to_call() - called()) == []


def test_every_row_is_of_public_names():
    assert sorted(called() - table.names_to_call()) == []


def test_every_name_has_a_quick_row():
    quick = {name for row in table.ROWS if row.quick for name in row.names}
    assert sorted(called() - quick) == []


def test_the_rows_call_what_they_name():
    words = table.mentioned()
    assert sorted(name for name in called() if name.rsplit(".", 1)[-1] not in words) == []


def test_the_default_run_has_every_size_and_width():
    taken = {at for k, row in enumerate(table.ROWS) for at in row.sizes("slice", k)}
    assert {n for n, _ in taken} == set(table.SIZES)
    assert {c for _, c in taken} == set(table.WIDTHS)


def failures(*arguments):
    """What the worker found, less what is mended elsewhere; more than nothing must have been called."""
    done = subprocess.run(
        [sys.executable, str(WORKER), *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["calls"] > 900
    return found["failures"]


@pytest.mark.parametrize("bits", [32, pytest.param(64, marks=pytest.mark.thorough)])
def test_ordinary_calls(bits):
    """In float32 by default: nearly every other test is in float64."""
    assert failures("slice", bits) == []


@pytest.mark.thorough
@pytest.mark.parametrize(("turn", "bits"), [(1, 32), pytest.param(2, 64, marks=pytest.mark.slow)])
def test_ordinary_calls_at_other_sizes(turn, bits):
    assert failures(f"turn {turn}", bits) == []


@pytest.mark.slow
@pytest.mark.parametrize("bits", [32, 64])
def test_ordinary_calls_at_every_size(bits):
    assert failures("full", bits) == []
