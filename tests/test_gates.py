"""Every test runs somewhere, every room is seen by `make test`, and nothing runs twice in `.ci/run`."""

import re

import pytest

import gates
from test_house import ORDER

pytestmark = pytest.mark.host

ELSEWHERE = {"slow", "gpu", "frameworks"}
"""What `.ci/run` leaves out: minutes, an accelerator, frameworks that need not be installed."""

ROOMS = [room for line in ORDER[1:] for room in line.split() if room not in ("_plan", "metrics")]
ROOMS = [
    room.removeprefix("_") for room in ROOMS if room not in ("_public", "__init__", "__main__")
]


@pytest.fixture
def collected(request):
    """Markers by test, of what this run of pytest found."""
    return request.config.stash[gates.COLLECTED]


def test_every_test_runs_with_some_command(collected):
    targets = gates.targets()
    lost = [
        name
        for name, markers in collected.items()
        if not any(gates.selects(expression, markers) for expression in targets.values())
    ]
    assert lost == []


def test_every_change_runs_everything_quick_once(collected):
    targets = gates.targets()
    expressions = [targets[name] for name in gates.on_every_change() if name in targets]
    assert gates.default() in expressions
    runs = {
        name: sum(gates.selects(expression, markers) for expression in expressions)
        for name, markers in collected.items()
        if not markers & ELSEWHERE
    }
    assert {name: count for name, count in runs.items() if count != 1} == {}


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_is_seen_by_default(collected, room):
    here = re.compile(rf"tests/({room}/|test_{room}\w*\.py)")
    found = {name: markers for name, markers in collected.items() if here.match(name)}
    if not found:
        tests = (gates.ROOT / "tests").rglob("test_*.py")
        assert any(here.match(f.relative_to(gates.ROOT).as_posix()) for f in tests)
        pytest.skip("No test of this room was collected.")
    assert any(gates.selects(gates.default(), markers) for markers in found.values())


def test_a_test_that_nothing_runs_is_seen():
    targets = gates.targets()
    assert set(targets) >= {"test", "thorough", "browser", "slow", "test-gpu", "frameworks"}
    runs = {name for name, expression in targets.items() if gates.selects(expression, {"thorough"})}
    assert runs == {"thorough", "test-gpu"}
    assert {name for name, one in targets.items() if gates.selects(one, {"gpu"})} == {"test-gpu"}
    assert not any(gates.selects(one, {"gpu", "host"}) for one in targets.values())
