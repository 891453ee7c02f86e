"""Check a ledger and a saved model with NumPy alone.

This module and `_verify_model` compute hashes, losses, residual and bound from their definitions, so
that they do not repeat a mistake of the code that made the files. They share with that code only the
functions that read files and limit their size. Every field that can be computed is computed; the report
names the fields that have to be trusted.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._support.files import MissingFileError
from ._verify_model import check_model, joined

ZERO = "0" * 64
FORMAT = "dualfluence-ledger-2"
FIELDS = {
    *("format", "sequence", "before", "hash", "kind", "count", "time", "until", "how", "payload"),
    *("model_before", "model_after", "points", "retained", "certificate", "removal", "software"),
    *("device", "references_mode", "references", "references_hash"),
}
CLAIMS = {
    *("distance_bound", "gradient_norm", "rounding", "parameter_norm", "ridge", "gap", "certified"),
}


@dataclass
class Report:
    """The result of a check.

    - `lines`: lines read.
    - `head`: hash of the last line. Keep it somewhere else: if somebody later deletes lines at the end,
      the line with that hash is missing.
    - `problems`: descriptions of what is wrong; empty means that everything agrees.
    - `trusted`: descriptions of data that were trusted without being computed.
    - `line`: the line with which the model was compared, if a model was given.
    - `claimed`, `computed`: the distance bound that the line states, and the one computed here.
    - `retained`: number of training points with a positive weight.
    """

    lines: int = 0
    head: str = ZERO
    problems: list[str] = field(default_factory=list)
    trusted: list[str] = field(default_factory=list)
    line: int | None = None
    claimed: float | None = None
    computed: float | None = None
    retained: int | None = None

    @property
    def valid(self) -> bool:
        return not self.problems

    def summary(self) -> str:
        """The result in a few lines."""
        said = [f"PROBLEM: {problem}" for problem in self.problems]
        if self.valid:
            said = [f"{self.lines} lines; each follows from the one before", f"head {self.head}"]
        if self.line is not None:
            which = "the last" if self.line == self.lines else f"not the last of {self.lines}"
            said.append(f"the model was compared with line {self.line}, {which}")
        if self.computed is not None:
            claim = "no bound" if self.claimed is None else f"{self.claimed:.6g}"
            said.append(
                f"line {self.line}: distance to retraining on the {self.retained} retained points at most "
                f"{self.computed:.6g}, computed here from the residual; the ledger claims {claim}"
            )
        said += [f"ON TRUST: {what}" for what in self.trusted]
        return "\n".join(said)


def verify(
    ledger: Any,
    model: Any = None,
    *,
    kernel: Callable[[Any, Any], Any] | None = None,
    at: int | None = None,
    head: str | None = None,
) -> Report:
    """Check the chain of a ledger, and the certificate of a model saved from its desk.

    The model must belong to the last line (or to line `at`), and its rows must match the commitments of
    the ledger.

    **Arguments:**

    - `ledger`: the file, or its folder.
    - `model`: a file written by `Desk.checkpoint`.
    - `kernel`: a function `kernel(x1, x2)` of shape `(n1, n2)` or `(n1, c, n2, c)`, computed independently.
      If the ridge has a scale, it is `JPJᵀ`. A `K` in the file must agree with this kernel. Without
      `kernel` the file must hold `K` (`include_kernel=True`), which is then trusted; `trusted` says so.
    - `at`: the line that the model belongs to, if it is not the last one.
    - `head`: the hash of a line that you kept earlier; a ledger without that line is a problem.
    """
    path, report = _path(ledger), Report()
    if at is not None and (type(at) is not int or at < 1):
        raise ValueError(f"verify: at must be the number of a line, from 1, got {at!r}.")
    if head is not None and not (isinstance(head, str) and re.fullmatch("[0-9a-f]{64}", head)):
        raise ValueError(f"verify: head must be 64 hexadecimal digits, got {head!r}.")
    path = path / "ledger.jsonl" if path.is_dir() else path
    if not path.exists():
        raise MissingFileError(f"verify: there is no file {path}.")
    lines = _chain(path.read_bytes(), report)
    if head is not None and head not in [line["hash"] for line in lines]:
        report.problems.append(
            f"none of the {len(lines)} lines has the hash {head}: the ledger was cut before that line, or "
            "is another one"
        )
    if at is not None and at > len(lines):
        report.problems.append(f"there is no line {at} in {len(lines)} lines")
    elif model is not None and lines:
        line = lines[-1 if at is None else at - 1]
        check_model(_path(model), lines, line, kernel, report)
    return report


def _path(given: Any) -> Path:
    if not isinstance(given, (str, Path)):
        raise TypeError(f"verify: a path must be a string or a Path, got {type(given).__name__}.")
    return Path(given)


def _chain(raw: bytes, report: Report) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    pieces = raw.split(b"\n")
    if not raw:
        report.problems.append("the ledger is empty")
    if pieces[-1]:
        report.problems.append(f"line {len(pieces)} has no end: it is torn or was changed")
    for number, piece in enumerate(pieces[:-1], start=1):
        found = _line(piece, number, report.head)
        if isinstance(found, str):
            report.problems.append(f"line {number} {found}")
            break
        wrong = _contradiction(lines[-1], found) if lines else _wrong_start(found)
        if wrong is not None:
            report.problems.append(f"line {number} {wrong}")
        report.head = found["hash"]
        lines.append(found)
    report.lines = len(lines)
    return lines


def _line(piece: bytes, number: int, before: str) -> dict[str, Any] | str:
    try:
        found = json.loads(piece.decode("utf-8"), parse_constant=_refused)
        written = isinstance(found, dict) and _text(found) == piece
    except (ValueError, RecursionError):
        return "is not JSON"
    if not written:
        return "is not in the form in which it was written"
    rest = {key: value for key, value in found.items() if key not in ("hash", "references")}
    if hashlib.sha256(_text(rest)).hexdigest() != found.get("hash"):
        return "does not have the hash of its fields"
    if found.get("before") != before or found.get("sequence") != number:
        return "does not follow from the line before"
    if found.get("format") != FORMAT:
        return f"has format {found.get('format')!r}; this release checks {FORMAT!r}"
    claim = found.get("certificate")
    if set(found) != FIELDS or not isinstance(claim, dict) or set(claim) != CLAIMS:
        return "does not have the fields of a line"
    if not _are_numbers(found, claim):
        return "has fields that should be numbers and are not"
    named = found["references"]
    if named is not None:
        try:
            parts = (named["blind"].encode(), _text(named["names"]))
        except (TypeError, KeyError, AttributeError):
            return "has references in another form"
        if len(named) != 2 or joined(*parts) != found["references_hash"]:
            return "has other references than it was written with"
    return found


def _are_numbers(line: dict[str, Any], claim: dict[str, Any]) -> bool:
    numbers = [claim[name] for name in CLAIMS - {"distance_bound", "certified"}]
    numbers += [] if claim["distance_bound"] is None else [claim["distance_bound"]]
    counts = [line["count"], line["retained"]]
    return (
        all(type(value) in (int, float) and value >= 0 for value in numbers)
        and all(type(value) is int and value >= 0 for value in counts)
        and type(claim["certified"]) is bool
    )


def _wrong_start(line: dict[str, Any]) -> str | None:
    return None if line["kind"] == "open" else "is the first line but does not open a ledger"


def _contradiction(before: dict[str, Any], line: dict[str, Any]) -> str | None:
    """Contradictions between a line and the line before it, whatever the hashes."""
    kind, count = line["kind"], line["count"]
    if kind == "open":
        return "opens a ledger that is already open"
    if line["model_before"] != before["model_after"]:
        return "starts from another model"
    if kind == "remove" and line["model_after"] == line["model_before"]:
        return "removes points but does not change the model"
    change = {"remove": -count, "add": count}.get(kind, 0)
    if line["retained"] != before["retained"] + change or line["retained"] < 1:
        return f"leaves {line['retained']} points of {before['retained']}"
    if kind in ("remove", "relabel", "correct", "add") and count < 1:
        return "is a request without points"
    if kind not in ("relabel", "correct", "add") and line["points"] != before["points"]:
        return "changes features or targets, but its kind of request does not"
    return None


def _refused(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
