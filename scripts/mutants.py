"""Plant small bugs one at a time in a copy of the tree and see whether `make test` notices.

    python scripts/mutants.py --count 100              (`make mutants`, with the environment of `make test`)
    python scripts/mutants.py --room dual --count 20 --seed 3 --jobs 2

Each bug is one operator, comparison, constant, sign, condition, dropped call or swapped pair of arguments
(`mutations.py`), drawn by seed from the core rooms in turn. The tests are those of the default gate. A first
run of them on a copy whose functions say that they ran maps every test to the functions that it runs; a bug
is then shown to the tests that ran its function, file by file, those of its own room first and then the
quickest, up to the first failure; after them to the other tests of these files, which may use what was
compiled. A test that fails without a bug does not take part. A run longer than `--limit` seconds of CPU,
processes that it starts included, is unfinished, neither seen nor survived; one that takes far longer than
without the bug, or that hangs, counts as seen.

Results are appended to `OUT/results.jsonl` one by one, and a second call goes on where a killed one ended;
`--report` shows what is there.
`OUT/mutants.json` and `OUT/mutants.txt` hold the rates and a line for each survivor. Survivors that cannot
matter, constants that only cost time for example, stand with a reason in `mutants_survivors.toml`.
"""

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mutations import SEEN, Mutant, mutants, parses, watched

ROOT = Path(__file__).parents[1]
REASONS = Path(__file__).with_name("mutants_survivors.toml")
ROOMS = ("_support", "linalg", "losses", "kernels", "infinite", "operators", "problem", "models", "solvers",
         "store", "dual", "attribution", "fitted", "primal", "unlearning")  # fmt: skip
COPIED = ("src", "tests", "docs", "benchmarks", "scripts", ".ci", "README.md", "CONTRIBUTING.md",
          "CHANGELOG.md", "CITATION.cff", "LICENSE", "Makefile", "pyproject.toml")  # fmt: skip
IMPORTED = (
    "jax",
    "jax.numpy",
    "numpy",
    "equinox",
    "jaxtyping",
    "beartype",
    "hypothesis",
    "optax",
    "pytest",
)
"""What every run of tests imports, and no bug changes: imported once, before processes fork."""
QUIETLY = ("-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Hypothesis is a plugin of pytest, which warns where it is imported before pytest reads its plugins."""
STARTING = 60
"""CPU seconds that a run may take besides its tests."""
COMPILED = "compiled"
"""Folder of the programs that the tests compile without a bug: most of them compile the same with it."""
STATES = {"seen": 5, "survived": 9, "explained": 10, "unfinished": 11}
SEEN_STATES = ("failed", "error", "too long")


def sources(room: str) -> list[str]:
    return [
        f.relative_to(ROOT).as_posix()
        for f in sorted((ROOT / "src/dualfluence" / room).rglob("*.py"))
    ]


def digest_of_files(files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for file in sorted(files):
        found.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:16]


def drawn(rooms: list[str], seed: int) -> Iterator[Mutant]:
    """Mutants without end to their variety: one of each room in turn, each at most once."""
    rng, left = random.Random(seed), {}
    for room in rooms:
        left[room] = [
            m for file in sources(room) for m in mutants(file, (ROOT / file).read_bytes())
        ]
        rng.shuffle(left[room])
    while any(left.values()):
        for room in rooms:
            mutant = left[room].pop() if left[room] else None
            if mutant and parses(mutant.plant((ROOT / mutant.file).read_bytes())):
                yield mutant


def copy_tree(target: Path, change: Callable[[str, str], str] | None = None) -> Path:
    """A copy of what the tests read; `change` rewrites the sources of the core rooms."""
    shutil.rmtree(target, ignore_errors=True)
    skip = shutil.ignore_patterns("__pycache__", "_build", ".*cache", "jupyter_execute")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=skip)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, target / name)
    for file in [f for room in ROOMS for f in sources(room)] if change else []:
        (target / file).write_text(change(file, (ROOT / file).read_text()))
    return target


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


def taken(queue: int) -> Iterator[str]:
    """Lines of a pipe that several processes read from, 256 bytes each."""
    while line := os.read(queue, 256):
        yield line.decode().strip()


def make_map(out: Path, jobs: int, tests: list[str]) -> dict[str, dict[str, Any]]:
    """Functions, seconds and failures of every file of these tests; what is known is not run again."""
    path = (
        out
        / f"map-{digest_of_files([*(ROOT / 'src').rglob('*.py'), *(ROOT / 'tests').rglob('*.py')])}.jsonl"
    )
    files = [f.relative_to(ROOT).as_posix() for f in (ROOT / "tests").rglob("test_*.py")]
    files = [file for file in files if file.startswith(tuple(tests))]
    known = {
        line["file"]: line["seconds"] for old in out.glob("map-*.jsonl") for line in read_lines(old)
    }
    todo = set(files) - {line["file"] for line in read_lines(path)}
    if todo:
        tree = copy_tree(out / "watched", watched)
        (tree / "src" / "sitecustomize.py").write_text(IN_PROCESSES)
        print(f"Mapping {len(todo)} files of tests to the functions that they run ...", flush=True)
        queue, end = os.pipe()
        for file in sorted(todo, key=lambda f: (-known.get(f, 30), -(ROOT / f).stat().st_size)):
            os.write(end, file.ljust(256).encode())
        os.close(end)
        commands = (([file], [Mapped(path)]) for file in taken(queue))  # each process its own copy
        running = [
            fork(tree, out / f"map-{k}.log", commands, out / f"{COMPILED}-{k}") for k in range(jobs)
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in running]
        STARTED.clear()
        os.close(queue)
        shutil.rmtree(tree)
        for k in range(jobs):
            shutil.copytree(out / f"{COMPILED}-{k}", out / COMPILED, dirs_exist_ok=True)
            shutil.rmtree(out / f"{COMPILED}-{k}")
        if set(codes) != {0}:
            raise SystemExit(f"The tests do not run on a copy: see {out}/map-*.log.")
        for file in sorted(todo - {line["file"] for line in read_lines(path)}):
            print(f"No test of {file} runs by default, or it cannot be imported here.", flush=True)
            append(
                path, {"file": file, "seconds": 0.0, "took": {}, "runs": {}, "failed": []}
            )  # no test by default
    return {line["file"]: line for line in read_lines(path) if line["file"] in files}


def tests_for(mutant: Mutant, found: dict[str, dict[str, Any]]) -> dict[str, set[str]]:
    """Tests by file that run what was changed: files of its room first, then the quickest first."""
    room, key = mutant.file.split("/")[2], f"{mutant.file}::{mutant.function}"
    ran = {file: set(line["runs"].get(key, ())) for file, line in found.items()}
    if not any(ran.values()):  # outside functions, or in one that runs while its module is imported
        ran = {
            file: {t for r, tests in line["runs"].items() if r.startswith(f"{mutant.file}::") for t in tests}
            for file, line in found.items()
        }  # fmt: skip

    def order(file: str) -> tuple[bool, float]:
        of_room = file.startswith((f"tests/{room.strip('_')}/", f"tests/test_{room.strip('_')}"))
        return not of_room, sum(found[file]["took"][test] for test in ran[file])

    return {
        file: {f"{file}::{test}" for test in ran[file]}
        for file in sorted((f for f in ran if ran[f]), key=order)
    }


def parts(files: list[str]) -> Iterator[list[str]]:
    """Two files, then four more, and so on: collecting a hundred takes longer than most tests that fail."""
    size = 2
    while files:
        yield files[:size]
        files, size = files[size:], 2 * size


def plant(mutant: Mutant, tree: Path) -> None:
    """Change the file of a tree, and let no compiled file of an earlier change pass for this one's."""
    target = tree / mutant.file
    target.write_bytes(mutant.plant((ROOT / mutant.file).read_bytes()))
    for compiled in target.parent.glob(f"__pycache__/{target.stem}.*"):
        compiled.unlink()


def commands_for(
    chosen: dict[str, set[str]], failing: set[str]
) -> Iterator[tuple[list[str], list[Any]]]:
    """The chosen tests, file by file, and after them what else is in these files."""
    every = set().union(*chosen.values())
    for part in parts(list(chosen)):
        yield ["-x", *part], [Without(failing, every)]
    for part in parts(list(chosen)):
        yield ["-x", *part], [Without(failing | every)]
    if not chosen:
        yield ["-x", "--collect-only", "tests/test_house.py"], []


@dataclass
class Job:
    """A bug on its way through the tests."""

    slot: int
    mutant: Mutant
    files: int
    limit: float
    usual: float
    seconds: float = 0.0
    begun: float = field(default_factory=time.monotonic)


def run(todo: list[Mutant], args: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    """Every mutant in a tree of its job, results appended as they come."""
    trees = [copy_tree(args.out / f"tree-{slot}") for slot in range(args.jobs)]
    free, running = list(range(args.jobs)), {}
    os.environ["ORDINARY"] = "--first"
    while todo or running:
        while todo and free:
            slot, mutant = free.pop(), todo.pop(0)
            first, chosen = args.out / f"first-{slot}", tests_for(mutant, found)
            first.unlink(missing_ok=True)
            plant(mutant, trees[slot])
            usual = 3 * sum(found[file]["seconds"] for file in chosen) + STARTING
            failing = {name for file in chosen for name in found[file]["failed"]}
            plain = commands_for(chosen, failing)
            commands = ((options, [*plugins, First(first)]) for options, plugins in plain)
            pid = fork(trees[slot], args.out / f"run-{slot}.log", commands, args.out / COMPILED)
            running[pid] = Job(slot, mutant, len(chosen), min(usual, args.limit), usual)
        pid, status, seconds, stopped = wait(running)
        job = running.pop(pid)
        mutant, slot = job.mutant, job.slot
        shutil.copy(ROOT / mutant.file, trees[slot] / mutant.file)
        free.append(slot)
        state, first = shown(status), args.out / f"first-{slot}"
        if stopped:  # one that hangs has used less than its limit
            slow = seconds > job.limit and job.limit < job.usual
            state = "unfinished" if slow else "too long"
        by = first.read_text() if first.exists() else ""
        if state == "error" and not by:  # without the bug the same tests began: the map shows it
            by = "(did not begin) " + (args.out / f"run-{slot}.log").read_text().strip()[-200:]
        line = {
            **asdict(mutant),
            "state": state,
            "seconds": round(seconds, 1),
            "files": job.files,
            "by": by,
        }
        append(args.out / "results.jsonl", line)
        print(
            f"{state:10} {seconds:6.0f} s  {mutant.file}:{mutant.line}  {mutant.change[:90]}",
            flush=True,
        )
    for tree in trees:
        shutil.rmtree(tree)


def reason(line: dict[str, Any], reasons: list[dict[str, str]]) -> str:
    """Why this survivor does not matter, from the list; its line is known by its text."""
    text = (ROOT / line["file"]).read_text().splitlines()[line["line"] - 1]
    for entry in reasons:
        if line["file"].endswith(entry["file"]) and entry["line"] in text:
            return entry["reason"]
    return ""


def report(lines: list[dict[str, Any]], out: Path) -> str:
    """A table of rates by room and a line for each survivor, also written as JSON."""
    reasons = tomllib.loads(REASONS.read_text()).get("survivor", []) if REASONS.exists() else []
    count: dict[str, Counter] = defaultdict(Counter)
    for line in lines:
        line["reason"] = reason(line, reasons) if line["state"] == "survived" else ""
        state = (
            "seen"
            if line["state"] in SEEN_STATES
            else "explained"
            if line["reason"]
            else line["state"]
        )
        count[line["file"].split("/")[2]][state] += 1
        count["all"][state] += 1
    table = [f"{'room':12}" + "".join(f" {state:>{width}}" for state, width in STATES.items())]
    for room in [*sorted(set(count) - {"all"}), "all"]:
        row = count[room]
        table.append(
            f"{room:12}" + "".join(f" {row[state]:{width}}" for state, width in STATES.items())
        )
    table.append("")
    for line in sorted(lines, key=lambda one: (one["file"], one["line"])):
        if line["state"] not in SEEN_STATES:
            why = f"  ({line['reason']})" if line["reason"] else ""
            change = " ".join(f"{line['old']} -> {line['new']}".split())
            place = f"{line['file']}:{line['line']} {line['function']}"
            table.append(f"{line['state']:10} {place}: {change}{why}")
    (out / "mutants.json").write_text(json.dumps({"rooms": count, "mutants": lines}, indent=1))
    (out / "mutants.txt").write_text("\n".join(table) + "\n")
    return "\n".join(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="number of bugs in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--room", action="append", choices=ROOMS, help="this room alone; may be repeated"
    )
    parser.add_argument("--tests", action="append", help="only files that start so: tests/dual")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds of CPU for one bug at most"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants")
    parser.add_argument("--anew", action="store_true", help="forget the results that are there")
    parser.add_argument("--report", action="store_true", help="only show the results there are")
    parser.add_argument(
        "--again", action="append", choices=("survived", "unfinished"), help="run these once more"
    )
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "results.jsonl"
    if args.anew:
        path.unlink(missing_ok=True)
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }  # as tests/conftest.py does
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    for name in IMPORTED:
        importlib.import_module(name)
    source = iter(drawn(args.room or list(ROOMS), args.seed))
    chosen = [mutant for _, mutant in zip(range(args.count), source, strict=False)]
    done = {
        (line["file"], line["start"], line["old"], line["new"]): line for line in read_lines(path)
    }
    todo = [
        m
        for m in chosen
        if (line := done.get((m.file, m.start, m.old, m.new))) is None
        or line["state"] in (args.again or [])
    ]
    if todo and not args.report:
        run(todo, args, make_map(args.out, args.jobs, args.tests or ["tests/"]))
    done = {
        (line["file"], line["start"], line["old"], line["new"]): line for line in read_lines(path)
    }
    tried = [done.get((m.file, m.start, m.old, m.new)) for m in chosen]
    print(report([line for line in tried if line is not None], args.out))
    if None in tried:
        print(f"{tried.count(None)} of {len(tried)} have not been tried yet.")


if __name__ == "__main__":
    main()
