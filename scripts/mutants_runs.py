"""Tests in processes of their own for `mutants.py`: how they start, what they note, when they are stopped."""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mutations import SEEN

QUIETLY = ("-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Hypothesis is a plugin of pytest, which warns where it is imported before pytest reads its plugins."""


COMPILED = "compiled"
"""Folder of the programs that the tests compile without a bug: most of them compile the same with it."""


class Mapped:
    """Notes for every file of tests the functions that it runs, its seconds of CPU, and what fails."""

    def __init__(self, out: Path) -> None:
        self.out, self.failed, self.runs, self.took = out, [], {}, {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> None:
        self.seen = sys.modules["builtins"].__dict__.setdefault(SEEN, set())
        self.start = cpu()

    def pytest_runtest_teardown(self, item: Any, nextitem: Any) -> None:
        file, _, test = item.nodeid.partition("::")
        for started in Path(os.environ[SEEN]).iterdir():  # what processes of the test have run
            self.seen |= set(started.read_text().split("\n"))
            started.unlink()
        for function in self.seen:
            self.runs.setdefault(function, []).append(test)
        self.seen.clear()
        self.took[test] = round(cpu() - self.start, 2)
        if nextitem is not None and nextitem.path == item.path:
            return
        line = {"file": file, "seconds": round(sum(self.took.values()), 2), "took": self.took,
                "runs": self.runs, "failed": self.failed}  # fmt: skip
        append(self.out, line)
        sys.modules["jax"].clear_caches()  # a program made once runs later without its functions
        self.failed, self.runs, self.took = [], {}, {}


IN_PROCESSES = f"""
import atexit, builtins, os

def tell():
    with open(os.path.join(os.environ[{SEEN!r}], str(os.getpid())), "w") as file:
        file.write("\\n".join(builtins.__dict__.get({SEEN!r}, ())))

if {SEEN!r} in os.environ:
    atexit.register(tell)
"""
"""`sitecustomize.py` of the watched copy: processes that tests start write down what they have run."""


class Without:
    """Leaves out tests: those that fail without any bug, those that have run, or all but some."""

    def __init__(self, left: set[str], only: set[str] | None = None) -> None:
        self.left, self.only = left, only

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.left
                    and (self.only is None or item.nodeid in self.only)]  # fmt: skip


class First:
    """Keeps the name of the first test that failed."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.out.exists():
            self.out.write_text(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.out.exists():
            self.out.write_text(f"{report.nodeid} (collecting)")


def cpu() -> float:
    """Seconds of this process and of those that it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def cpu_of(session: int) -> float:
    """Seconds of every process of a session so far, and of those that these have waited for."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What is there; a last line that a kill has cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def keep_programs(folder: Path, write: bool) -> None:
    """Compiled programs are read from a folder, here and in processes that tests start.

    Only the map writes them, each of its processes into a folder of its own: a file that is half written
    would be a failure of the test that reads it.
    """
    settings: dict[str, Any] = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0 if write else 1e9,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        sys.modules["jax"].config.update(name, value)
        os.environ[name.upper()] = str(value)


def fork(
    tree: Path, log: Path, commands: Iterable[tuple[list[str], list[Any]]], programs: Path
) -> int:
    """pytest once for each list of arguments and plugins, in a process of its own and in this tree.

    Returns the number of the process. It leads a session of its own, so that what it starts can be counted.
    """
    programs.mkdir(exist_ok=True)
    pid = os.fork()
    if pid:
        STARTED.append(pid)
        return pid
    code = 0
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(tree)
        paths = [str(tree / "src"), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        os.environ[SEEN] = tempfile.mkdtemp(dir=tree)
        keep_programs(programs, write=programs.name != COMPILED)
        sys.path.insert(0, str(tree / "src"))
        for arguments, plugins in commands:
            code = int(sys.modules["pytest"].main([*arguments, *QUIETLY], plugins=plugins))
            if "-x" not in arguments and code in (1, 2, 5):
                code = 0  # a map goes on; what ends its process otherwise is seen by its code
            if code not in (0, 5):
                break
    except BaseException:
        code = 99
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


STARTED: list[int] = []
"""Sessions that this process has started: they end with it."""


def stop(*_: object) -> None:
    for session in STARTED:
        kill(session)
    sys.exit("Stopped.")


def kill(session: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def wait(running: dict[int, Any]) -> tuple[int, int, float, bool]:
    """The first process to end, its status, seconds, and whether it was stopped: past its limit, or hung."""
    while True:
        for pid, job in running.items():
            used = cpu_of(pid)
            job.seconds = max(job.seconds, used)
            over = used > job.limit or time.monotonic() - job.begun > 3 * job.limit + 60
            if over:
                kill(pid)
            done, status, usage = os.wait4(pid, 0 if over else os.WNOHANG)
            if done:
                STARTED.remove(pid)
                job.seconds = max(job.seconds, usage.ru_utime + usage.ru_stime)
                return pid, status, job.seconds, over
        time.sleep(0.5)


def shown(status: int) -> str:
    if os.WIFSIGNALED(status):
        return "error"
    return {0: "survived", 1: "failed", 5: "survived"}.get(os.WEXITSTATUS(status), "error")
