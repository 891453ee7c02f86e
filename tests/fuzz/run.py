"""Many random problems on many cores.

`python tests/fuzz/run.py --problems 5000 --workers 14 --out record.json`

Each worker takes chunks of problems that share their compiled programs. The record is written every
half minute, and a run that finds one goes on where it stopped. A problem beyond `--limit` seconds is
killed and recorded as a hang; a worker that dies is recorded as a death of its problem. Ends with status 1
if anything was found.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import numpy as np

WRITE_EVERY = 30.0
BINS = 10
"""Bins per decade of the histogram of bound over truth."""

HERE = pathlib.Path(__file__).resolve().parent
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
COUNTS = ("certificates", "refusals", "undecided", "well_posed")


def quiet_environment() -> None:
    """One core per worker, compiling fast rather than well, float64 and no accelerator."""
    os.environ.update(dict.fromkeys(THREADS, "1"))
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    os.environ["JAX_ENABLE_X64"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"


def _check_of(job: str) -> Callable[[int], Any]:
    sys.path.insert(0, str(HERE))
    import checker  # JAX reads the environment as it is imported
    import relu_fits

    return {"certificates": checker.check_problem, "fits": relu_fits.check_fit}[job]


def _settle() -> None:
    """Forget compiled programs between chunks: nothing of the last one is used again."""
    import jax

    jax.clear_caches()


def work(pipe: connection.Connection, job: str) -> None:
    """A worker: takes lists of problems until the pipe closes."""
    check = _check_of(job)
    while True:
        try:
            indices = pipe.recv()
        except EOFError:
            return
        for index in indices:
            pipe.send(("start", index))
            pipe.send(("done", vars(check(index))))
        _settle()
        pipe.send(("idle", None))


class Tally:
    """The record of a run: counts, findings, and which problems are done."""

    def __init__(self, path: pathlib.Path, settings: dict[str, Any]):
        self.path, self.settings, self.seconds = path, settings, 0.0
        self.done: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.findings: list[dict[str, Any]] = []
        self.histograms: dict[str, Counter[int]] = {}
        if path.exists():
            self._resume(json.loads(path.read_text()))

    def _resume(self, old: dict[str, Any]) -> None:
        if old["settings"] != self.settings:
            raise SystemExit(
                f"{self.path} is of another run: {old['settings']}. Give another --out."
            )
        self.done = {i for low, high in old["done"] for i in range(low, high)}
        self.counts.update({k: old[k] for k in COUNTS})
        self.counts["cpu_seconds"] = old["problem_seconds"]
        self.findings, self.seconds = old["findings"], old["seconds"]
        for name, part in old["ratios"].items():
            self.histograms[name] = Counter({int(k): v for k, v in part["histogram"].items()})

    def add(self, record: dict[str, Any]) -> None:
        self.done.add(record["index"])
        self.counts.update({k: record[k] for k in COUNTS})
        self.counts["cpu_seconds"] += record["seconds"]
        self.findings += record["findings"]
        for group, ratio in record["ratios"]:
            place = int(np.floor(np.clip(np.log10(max(ratio, 1e-300)), -20, 60) * BINS))
            self.histograms.setdefault(group, Counter())[place] += 1

    def lost(self, index: int, kind: str, detail: str) -> None:
        self.done.add(index)
        finding = {"index": index, "kind": kind, "call": "", "detail": detail, "problem": ""}
        self.findings.append(finding)

    def summary(self) -> dict[str, Any]:
        kinds = Counter(f["kind"] for f in self.findings)
        return {
            "settings": self.settings,
            "commit": _commit(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "seconds": round(self.seconds, 1),
            "problem_seconds": round(self.counts["cpu_seconds"], 1),
            "problems": len(self.done),
            **{k: self.counts[k] for k in COUNTS},
            "violations": dict(kinds.most_common()),
            "seeds": {k: [f["index"] for f in self.findings if f["kind"] == k] for k in kinds},
            "ratios": {name: _quantiles(h) for name, h in sorted(self.histograms.items())},
            "done": _ranges(self.done),
            "findings": self.findings,
        }

    def write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.summary(), indent=1, ensure_ascii=False) + "\n")
        part.replace(self.path)


def _quantiles(histogram: Counter[int]) -> dict[str, Any]:
    """Of bound over true distance: lower edges of bins in which quantiles fall."""
    places = np.array(sorted(histogram))
    total = np.cumsum([histogram[int(k)] for k in places])
    at = {}
    for name, part in (("minimum", 0.0), ("median", 0.5), ("99 %", 0.99), ("maximum", 1.0)):
        place = places[np.searchsorted(total, part * total[-1])]
        at[name] = float(f"{10 ** (place / BINS):.3g}")
    return {
        **at,
        "count": int(total[-1]),
        "histogram": {str(k): histogram[k] for k in sorted(histogram)},
    }


def _ranges(done: set[int]) -> list[list[int]]:
    ranges: list[list[int]] = []
    for i in sorted(done):
        if ranges and ranges[-1][1] == i:
            ranges[-1][1] = i + 1
        else:
            ranges.append([i, i + 1])
    return ranges


def _commit() -> str:
    call = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(call, capture_output=True, text=True, check=False).stdout.strip()


class Worker:
    """A process with what it is doing and since when."""

    def __init__(self, job: str):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, job), daemon=True)
        self.process.start()
        theirs.close()
        self.left: list[int] = []
        self.since = time.monotonic()

    def give(self, indices: list[int]) -> None:
        self.left, self.since = list(indices), time.monotonic()
        self.pipe.send(indices)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run(job: str, problems: int, workers: int, limit: float, tally: Tally, chunk: int) -> None:
    """All problems that are not done, chunk by chunk."""
    queue = [
        [i for i in range(low, min(low + chunk, problems)) if i not in tally.done]
        for low in range(0, problems, chunk)
    ]
    queue = [part for part in queue if part]
    # One at a time: processes that import JAX together fight over the disk.
    staff = [Worker(job) for _ in range(min(workers, len(queue)))]
    start, before, written = time.monotonic(), tally.seconds, time.monotonic()
    for worker in staff:
        worker.give(queue.pop(0))
    while staff:
        ready = connection.wait([w.pipe for w in staff], timeout=1.0)
        for worker in list(staff):
            alive = _listen(worker, tally) if worker.pipe in ready else True
            late = worker.left and time.monotonic() - worker.since > limit
            if not alive or late:
                _lose(worker, tally, "hang" if alive else "death", limit)
                staff.remove(worker)
                if worker.left:
                    queue.insert(0, worker.left)
                if queue:
                    staff.append(Worker(job))
                    staff[-1].give(queue.pop(0))
            elif not worker.left:
                if queue:
                    worker.give(queue.pop(0))
                else:
                    worker.end()
                    staff.remove(worker)
        tally.seconds = before + time.monotonic() - start
        if time.monotonic() - written > WRITE_EVERY:
            tally.write()
            written = time.monotonic()
    tally.write()


def _listen(worker: Worker, tally: Tally) -> bool:
    """One message from a worker; false if it is dead."""
    try:
        kind, value = worker.pipe.recv()
    except (EOFError, OSError):
        return False
    worker.since = time.monotonic()
    if kind == "done":
        tally.add(value)
        worker.left = [i for i in worker.left if i != value["index"]]
    return True


def _lose(worker: Worker, tally: Tally, kind: str, limit: float) -> None:
    """The problem that a worker was at is lost; the rest of its chunk is not."""
    worker.end()
    detail = (
        f"no answer within {limit:g} s" if kind == "hang" else f"status {worker.process.exitcode}"
    )
    if worker.left:
        tally.lost(worker.left[0], kind, detail)
        worker.left = worker.left[1:]


def show(job: str, indices: list[int]) -> int:
    """Single problems in this process, to look into a finding."""
    check = _check_of(job)
    found = 0
    for index in indices:
        record = check(index)
        found += len(record.findings)
        print(
            f"{index}: {record.what}: {record.certificates} certificates, {record.refusals} refusals"
        )
        for finding in record.findings:
            print(f"  {finding['kind']}: {finding['call']}: {finding['detail']}")
    return 1 if found else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--job", choices=("certificates", "fits"), default="certificates")
    parser.add_argument("--problems", type=int, default=5000)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--out", type=pathlib.Path, help="the record, a JSON file")
    parser.add_argument("--only", type=int, nargs="+", help="show these problems, here and now")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one problem")
    args = parser.parse_args(argv)
    quiet_environment()
    if args.only:
        return show(args.job, args.only)
    if args.out is None:
        parser.error("give --out for a run, or --only for single problems")
    tally = Tally(args.out, {"job": args.job, "problems": args.problems})
    run(args.job, args.problems, args.workers, args.limit, tally, chunk=20)
    told = {k: v for k, v in tally.summary().items() if k not in ("findings", "done", "seeds")}
    for part in told["ratios"].values():
        del part["histogram"]
    print(json.dumps(told, indent=1, ensure_ascii=False))
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
