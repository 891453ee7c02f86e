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
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mutants_runs import (
    COMPILED,
    IN_PROCESSES,
    STARTED,
    First,
    Mapped,
    Without,
    append,
    fork,
    read_lines,
    shown,
    stop,
    wait,
)
from mutations import Mutant, mutants, parses, watched

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
STARTING = 60
"""CPU seconds that a run may take besides its tests."""
DEFAULTS = "tests/test_defaults.py"
"""Runs no function, but compares the defaults of options, which stand outside of them."""
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
        ran |= {f: set(line["took"]) for f, line in found.items() if f == DEFAULTS}

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
