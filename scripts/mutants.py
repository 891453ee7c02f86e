"""Plant small bugs one at a time in a copy of the tree and see whether `make test` notices.

    python scripts/mutants.py --count 100              (`make mutants`, with the environment of `make test`)
    python scripts/mutants.py --room dual --count 20 --seed 3 --jobs 2

Each bug is one operator, comparison, constant, sign, condition, dropped call or swapped pair of arguments
(`mutations.py`), drawn by seed from the core rooms in turn. The tests are those of the default gate. A first
run of them on a copy whose functions say that they ran maps every test to the functions that it runs; a bug
is then shown to the files that run its function, those of its own room first, of these to the tests that ran
it before the others (which may use what was compiled), and to the first failure. A test that fails without a
bug does not take part. A run longer than `--limit` seconds of CPU is
unfinished, neither seen nor survived; one that takes far longer than without the bug counts as seen.

Results are appended to `OUT/results.jsonl` one by one, and a second call goes on where a killed one ended.
`OUT/mutants.json` and `OUT/mutants.txt` hold the rates and a line for each survivor. Survivors that cannot
matter, constants that only cost time for example, stand with a reason in `mutants_survivors.toml`.
"""

import argparse
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
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
STATES = {"seen": 5, "survived": 9, "explained": 10, "unfinished": 11}
SEEN_STATES = ("failed", "error", "too long")


def sources(room: str) -> list[str]:
    return [
        f.relative_to(ROOT).as_posix()
        for f in sorted((ROOT / "src/dualfluence" / room).rglob("*.py"))
    ]


def digest(files: Iterable[Path]) -> str:
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
        self.out, self.start, self.failed, self.runs = out, time.process_time(), [], {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> None:
        self.seen = sys.modules["builtins"].__dict__.setdefault(SEEN, set())

    def pytest_runtest_teardown(self, item: Any, nextitem: Any) -> None:
        file, _, test = item.nodeid.partition("::")
        for started in Path(os.environ[SEEN]).iterdir():  # what processes of the test have run
            self.seen |= set(started.read_text().split("\n"))
            started.unlink()
        for function in self.seen:
            self.runs.setdefault(function, []).append(test)
        self.seen.clear()
        if nextitem is not None and nextitem.path == item.path:
            return
        now = time.process_time()
        line = {"file": file, "seconds": round(now - self.start, 2),
                "runs": self.runs, "failed": self.failed}  # fmt: skip
        append(self.out, line)
        sys.modules["jax"].clear_caches()  # a program made once runs later without its functions
        self.start, self.failed, self.runs = time.process_time(), [], {}


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
    """Leaves out tests that fail without any bug, and takes those first that ran the function."""

    def __init__(self, failing: set[str], first: set[str]) -> None:
        self.failing, self.first = failing, first

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.failing]
        items.sort(key=lambda item: item.nodeid not in self.first)


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


def fork(
    tree: Path, log: Path, args: list[list[str]], plugins: list[Any], seconds: float | None
) -> int:
    """pytest once for each list of arguments, in a process of its own and in this tree; returns its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.setsid()
        if seconds is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 30))
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree / "src")
        os.environ[SEEN] = tempfile.mkdtemp(dir=tree)
        sys.path.insert(0, str(tree / "src"))
        for part in args:  # a part that fails is the last
            code = int(sys.modules["pytest"].main([*part, *QUIETLY], plugins=plugins))
            if code not in (0, 5):
                break
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def shown(status: int) -> str:
    if os.WIFSIGNALED(status):
        return "too long" if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else "error"
    return {0: "survived", 1: "failed", 5: "survived"}.get(os.WEXITSTATUS(status), "error")


def make_map(out: Path, jobs: int, tests: list[str]) -> dict[str, dict[str, Any]]:
    """Functions, seconds and failures of every file of these tests; what is known is not run again."""
    path = (
        out
        / f"map-{digest([*(ROOT / 'src').rglob('*.py'), *(ROOT / 'tests').rglob('*.py')])}.jsonl"
    )
    files = [f.relative_to(ROOT).as_posix() for f in sorted((ROOT / "tests").rglob("test_*.py"))]
    files = [file for file in files if file.startswith(tuple(tests))]
    todo = sorted(set(files) - {line["file"] for line in read_lines(path)})
    if todo:
        tree = copy_tree(out / "watched", watched)
        (tree / "src" / "sitecustomize.py").write_text(IN_PROCESSES)
        print(f"Mapping {len(todo)} files of tests to the functions that they run ...", flush=True)
        running = [
            fork(tree, out / f"map-{k}.log", [todo[k::jobs]], [Mapped(path)], None)
            for k in range(jobs)
            if todo[k::jobs]
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in running]
        shutil.rmtree(tree)
        if not set(codes) <= {0, 1, 5}:
            raise SystemExit(f"The tests do not run on a copy: see {out}/map-*.log.")
        for file in set(todo) - {line["file"] for line in read_lines(path)}:
            append(
                path, {"file": file, "seconds": 0.0, "runs": {}, "failed": []}
            )  # no test by default
    return {line["file"]: line for line in read_lines(path) if line["file"] in files}


def files_for(mutant: Mutant, found: dict[str, dict[str, Any]]) -> list[str]:
    """Files of tests that run what was changed: of its room first, then the quickest first."""
    room = mutant.file.split("/")[2]
    key = f"{mutant.file}::{mutant.function}"
    run = [file for file, line in found.items() if key in line["runs"]]
    if not run:  # outside functions, or in one that runs while its module is imported
        run = [
            f
            for f, line in found.items()
            if any(r.startswith(f"{mutant.file}::") for r in line["runs"])
        ]

    def order(file: str) -> tuple[bool, float]:
        of_room = file.startswith((f"tests/{room.strip('_')}/", f"tests/test_{room.strip('_')}"))
        return not of_room, found[file]["seconds"]

    return sorted(run, key=order)


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


def run(todo: list[Mutant], args: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    """Every mutant in a tree of its job, results appended as they come."""
    trees = [copy_tree(args.out / f"tree-{slot}") for slot in range(args.jobs)]
    free, running = list(range(args.jobs)), {}
    while todo or running:
        while todo and free:
            slot, mutant = free.pop(), todo.pop(0)
            first, files = args.out / f"first-{slot}", files_for(mutant, found)
            first.unlink(missing_ok=True)
            plant(mutant, trees[slot])
            usual = 3 * sum(found[file]["seconds"] for file in files) + STARTING
            key = f"{mutant.file}::{mutant.function}"
            failing = {name for file in files for name in found[file]["failed"]}
            ran = {f"{file}::{test}" for file in files for test in found[file]["runs"].get(key, [])}
            plugins = [Without(failing, ran), First(first)]
            command = [["-x", *part] for part in parts(files)]
            command = command or [["--collect-only", "tests/test_house.py"]]
            pid = fork(
                trees[slot], args.out / f"run-{slot}.log", command, plugins, min(usual, args.limit)
            )
            running[pid] = slot, mutant, len(files), usual
        pid, status, usage = os.wait4(-1, 0)
        slot, mutant, files, usual = running.pop(pid)
        shutil.copy(ROOT / mutant.file, trees[slot] / mutant.file)
        free.append(slot)
        state, first = shown(status), args.out / f"first-{slot}"
        if state == "too long" and args.limit < usual:
            state = "unfinished"
        seconds = round(usage.ru_utime + usage.ru_stime, 1)
        by = first.read_text() if first.exists() else ""
        if state == "error" and not by:  # without the bug the same tests began: the map shows it
            by = "(did not begin) " + (args.out / f"run-{slot}.log").read_text().strip()[-200:]
        line = {**asdict(mutant), "state": state, "seconds": seconds, "files": files, "by": by}
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
    if todo:
        run(todo, args, make_map(args.out, args.jobs, args.tests or ["tests/"]))
    done = {
        (line["file"], line["start"], line["old"], line["new"]): line for line in read_lines(path)
    }
    print(report([done[m.file, m.start, m.old, m.new] for m in chosen], args.out))


if __name__ == "__main__":
    main()
