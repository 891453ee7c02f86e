"""The files of a run: pieces while it runs, then one JSON file. Files are written completely or not at
all."""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..._support.archive import checking, read_archive, write_archive
from ..._support.files import FileError, write_whole
from ..compare._machine import commit, device_name, environment
from ._config import Config, as_json

FORMAT = 1
"""Version of the results files."""

CACHE = "dualfluence-arrays"
"""Format name of the caches of a run."""

KEYED = ("percentages", "ridges", "cold", "seeds")
"""Settings that only select pieces; a resumed run may select others."""


class OutOfBudget(Exception):
    """The time budget is spent; finished pieces are on disk."""


class ResultsFolder:
    """A folder of results.

    Pieces are in `pieces/<experiment>/`, each with the fingerprint of the settings it came from: a
    resumed run uses those that match and computes the rest. Arrays that experiments share are in
    `cache/`.

    **Arguments:**

    - `out`: the folder.
    - `resume`: use the results of an earlier run.
    - `budget`: seconds after which no new piece is started.
    """

    def __init__(self, out: Path, *, resume: bool = False, budget: float | None = None) -> None:
        self.out, self.resume, self.budget = out, resume, budget
        self._start = time.monotonic()
        self._fresh: set[str] = set()

    def check_budget(self) -> None:
        if self.budget is not None and time.monotonic() - self._start > self.budget:
            raise OutOfBudget

    def arrays(
        self, settings: Any, compute: Callable[[], list[Any]], *, anew: bool = False
    ) -> list[np.ndarray]:
        """Arrays for `settings`: from the cache, or computed and cached. With `anew` they are always
        computed."""
        name = fingerprint(settings)
        path = self.out / "cache" / f"{name}.npz"
        if not anew and (self.resume or name in self._fresh):
            # Not there, damaged, or of an earlier version: computed again.
            with suppress(FileError):
                _, found = read_archive(path, CACHE, FORMAT)
                return [found[f"a{i}"] for i in range(len(found))]
        self.check_budget()
        values = [np.asarray(value) for value in compute()]
        named = {f"a{i}": value for i, value in enumerate(values)}
        write_archive(path, {"format": CACHE, "version": FORMAT}, named)
        self._fresh.add(name)
        return values


class Run:
    """One experiment's pieces and its final file."""

    def __init__(
        self, store: ResultsFolder, name: str, scale: str, config: Config, seed: int
    ) -> None:
        self.store, self.name, self.scale, self.config, self.seed = store, name, scale, config, seed
        self.pieces: dict[str, Any] = {}
        self.complete = True
        self.left_out: tuple[str, ...] = ()  # what could not run here, in words
        # Pieces are per percentage and ridge: asking for more of them keeps those that are there.
        fixed = {k: v for k, v in as_json(config).items() if k not in KEYED}
        self._fingerprint = fingerprint([name, fixed, seed])

    def piece(self, key: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The values under `key`: from disk when resuming, else computed and written."""
        path = self.store.out / "pieces" / self.name / f"{key.replace('/', '-')}.json"
        found = self._read(path) if self.store.resume else None
        if found is None:
            self.store.check_budget()
            start = time.perf_counter()
            values = compute()
            found = {
                "fingerprint": self._fingerprint,
                "seconds": time.perf_counter() - start,
                "device": device_name(),
                "commit": commit(),
                "values": plain(values),
            }
            write_json(path, found)
        self.pieces[key] = {k: v for k, v in found.items() if k != "fingerprint"}
        return found["values"]

    def _read(self, path: Path) -> dict[str, Any] | None:
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError):  # damaged from outside: computed again
            return None
        known = isinstance(found, dict) and found.get("fingerprint") == self._fingerprint
        return found if known and {"seconds", "device", "values"} <= found.keys() else None

    def _measured_on(self) -> dict[str, str]:
        """The devices of the pieces: a resumed run may put results together on another machine."""
        devices = sorted({piece["device"] for piece in self.pieces.values()})
        return {"device": ", ".join(devices)} if devices else {}

    def finish(self) -> Path:
        """Write `<experiment>.json` from the pieces."""
        path = self.store.out / f"{self.name}.json"
        if not self.pieces and path.exists():
            return path  # nothing came of this run; what an earlier one found stays
        write_json(
            path,
            {
                "format": FORMAT,
                "experiment": self.name,
                "scale": self.scale,
                "complete": self.complete,
                "left_out": list(self.left_out),
                "seed": self.seed,
                "config": as_json(self.config),
                "environment": environment() | self._measured_on(),
                "pieces": self.pieces,
            },
        )
        return path


def read_results(out: Path, name: str) -> dict[str, Any] | None:
    """The results that `Run.finish` wrote, or `None`."""
    path = out / f"{name}.json"
    if not path.exists():
        return None
    with checking(path):
        return json.loads(path.read_text())


def write_json(path: Path, value: Any) -> None:
    """JSON, atomically; not-a-number and infinity become `null`."""
    text = json.dumps(plain(value), indent=1, allow_nan=False) + "\n"
    write_whole(path, text)


def plain(value: Any) -> Any:
    """Arrays and scalars as lists and numbers of JSON."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray | jax.Array):
        return plain(np.asarray(value).tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def fingerprint(settings: Any) -> str:
    """A fingerprint of the settings, sixteen hexadecimal digits."""
    text = json.dumps(plain(settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
