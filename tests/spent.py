"""CPU seconds of each test, its fixtures and the processes it starts, and a line about them at the end."""

import os

import pytest

SINCE = pytest.StashKey[float]()
SHOWN = 5


def spent():
    """CPU seconds of this process and of those it has waited for, which other processes do not change."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    item.stash[SINCE] = spent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    now = spent()
    report.cpu = now - item.stash[SINCE]
    item.stash[SINCE] = now
    return report


def pytest_terminal_summary(terminalreporter):
    took = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "cpu"):
                took[report.nodeid] = took.get(report.nodeid, 0.0) + report.cpu
    if len(took) < SHOWN:
        return
    slowest = sorted(took, key=took.get, reverse=True)[:SHOWN]
    terminalreporter.write_line(
        f"{len(took)} tests took {sum(took.values()):.0f} s of CPU. Slowest:"
    )
    for name in slowest:
        terminalreporter.write_line(f"  {took[name]:5.1f} s {name}")
    if path := os.environ.get("DUALFLUENCE_TEST_SECONDS"):
        with open(path, "w") as file:
            file.writelines(f"{seconds:.3f}\t{name}\n" for name, seconds in sorted(took.items()))
