"""An append-only file of requests and answers; every line contains the hash of the line before.

A line is one JSON object. Its `hash` is the SHA-256 of its other fields. References to persons are in
the field `references`. The hash covers them only by a commitment (`references_hash`), so references can
be erased or replaced later and the chain can still be verified.
"""

import hashlib
import hmac
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from .._support.files import FileError, fcntl, in_words, write_whole
from .._support.types import Json

References = Literal["keep", "pseudonymise", "erase"]
"""The treatment of references: kept as salted hashes, replaced by numbers, or dropped."""

START = "0" * 64
"""The hash before the first line."""

FORMAT = "dualfluence-ledger-2"

HASH = re.compile("[0-9a-f]{64}")

FIELDS = frozenset(
    (
        *(
            "format",
            "sequence",
            "before",
            "hash",
            "kind",
            "count",
            "time",
            "until",
            "how",
            "payload",
        ),
        *(
            "model_before",
            "model_after",
            "points",
            "retained",
            "certificate",
            "removal",
            "software",
        ),
        *("device", "references_mode", "references", "references_hash"),
    )
)
"""All fields of a line."""

CHANGE_ROWS = frozenset(("relabel", "correct", "add"))
"""Requests that bring new rows; no other request may change the commitment to the rows."""

CHANGE_COUNT = {"remove": -1, "add": 1}
"""Change of the number of points by a request, for each point in it."""


class LedgerError(FileError):
    """A ledger was changed, is in use by another writer, or cannot be written."""


def canonical(value: object) -> bytes:
    """The canonical text of a value: keys in order, no spaces, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8")


def digest_of_parts(*parts: bytes) -> str:
    """SHA-256 of the parts, each with its length, so that different parts cannot give the same bytes."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.hexdigest()


def reference(salt: bytes, name: str) -> str:
    """A person's reference: a keyed hash, useless without the salt."""
    return hmac.new(salt, name.encode("utf-8"), hashlib.sha256).hexdigest()


def seal_line(fields: Json) -> Json:
    """The line with its hash, which covers every field except the references themselves."""
    covered = {name: value for name, value in fields.items() if name not in ("references", "hash")}
    return {**fields, "hash": hashlib.sha256(canonical(covered)).hexdigest()}


def commit_references(names: list[str], blind: str) -> str:
    """The commitment to references in the chain: a hash from which nobody can guess them once `blind`
    is deleted."""
    return digest_of_parts(blind.encode(), canonical(names))


def missing_head(head: object, hashes: list[str]) -> str | None:
    """An explanation if no line has the hash that somebody kept, else `None`."""
    if not isinstance(head, str) or not HASH.fullmatch(head):
        raise ValueError(
            f"head: expected the hash of a line, 64 hexadecimal digits in lower case, got {head!r}."
        )
    if head in hashes:
        return None
    return (
        f"none of the {len(hashes)} lines has the hash {head}: the ledger ends before that line, or is "
        "another one"
    )


def check_line(raw: bytes, number: int, before: str) -> Json:
    """One line, or an error that names it."""

    def refuse(why: str) -> LedgerError:
        return LedgerError(
            f"ledger: line {number} was changed: {why}. Restore the file from a copy; nothing after "
            f"line {number - 1} can be trusted."
        )

    try:
        fields = json.loads(raw, object_pairs_hook=_no_doubles, parse_constant=_no_number)
        written = isinstance(fields, dict) and canonical(fields) == raw
    except (ValueError, RecursionError) as error:
        raise refuse("it is not JSON") from error
    if not written:
        raise refuse("it is not written the way this file is written")
    if fields.get("sequence") != number or fields.get("before") != before:
        raise refuse("it does not follow from the line before")
    if seal_line(fields)["hash"] != fields.get("hash"):
        raise refuse("its hash is not that of its fields")
    if fields.get("format") != FORMAT:
        raise LedgerError(
            f"ledger: line {number} has format {fields.get('format')!r}, this release reads "
            f"{FORMAT!r}. Open it with the release that wrote it, or start a new ledger in "
            "another folder."
        )
    if set(fields) != FIELDS:
        raise refuse("it does not have the fields of a line")
    if fields["references"] is not None:
        _check_references(fields, refuse)
    return fields


NEEDED = ("kind", "count", "retained", "points", "model_before", "model_after")
"""Fields that the line before determines."""


def contradiction(line: Json, last: Json | None) -> str | None:
    """A contradiction between a line and the line before it, in words; hashes do not detect it."""
    missing = [name for name in NEEDED if name not in line]
    if missing:
        return f"it has no {', '.join(missing)}"
    kind, count = line["kind"], line["count"]
    if (last is None) != (kind == "open"):
        return "only the first line opens a ledger"
    if type(count) is not int or type(line["retained"]) is not int or line["retained"] < 1:
        return "its numbers of points are not valid"
    if last is None:
        return None
    if line["model_before"] != last["model_after"]:
        return "it starts from another model than that at the end of the line before"
    if kind == "remove" and line["model_after"] == line["model_before"]:
        return "it removes points but does not change the model"
    if line["retained"] != last["retained"] + CHANGE_COUNT.get(kind, 0) * count:
        return f"it leaves {line['retained']} points of {last['retained']}"
    if kind not in CHANGE_ROWS and line["points"] != last["points"]:
        return "it changes features or targets, which its kind of request does not"
    return None


def _check_references(fields: Json, refuse: Callable[[str], Exception]) -> None:
    given = fields["references"]
    known = isinstance(given, dict) and set(given) == {"names", "blind"}
    known = known and isinstance(given["names"], list) and isinstance(given["blind"], str)
    if not known or commit_references(given["names"], given["blind"]) != fields["references_hash"]:
        raise refuse("its references are not those that it was written with")


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _no_doubles(pairs: list[tuple[str, object]]) -> Json:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field comes twice")
    return found


def read_lines(path: Path) -> tuple[list[Json], int, bool]:
    """All whole lines, the bytes they take, and whether a torn line follows them.

    A crash can leave a line without its end; such a line was never acknowledged.
    """
    raw = path.read_bytes() if path.exists() else b""
    whole = raw.rfind(b"\n") + 1
    lines, before = [], START
    for number, line in enumerate(raw[:whole].split(b"\n")[:-1], start=1):
        lines.append(check_line(line, number, before))
        wrong = contradiction(lines[-1], lines[-2] if number > 1 else None)
        if wrong is not None:
            raise LedgerError(
                f"ledger: line {number} contradicts the line before it: {wrong}. A desk does not "
                "write such a line; the file was forged. Restore it from a copy."
            )
        before = lines[-1]["hash"]
    return lines, whole, whole < len(raw)


def erase_references(path: Path, numbers: list[int]) -> None:
    """Drop the references of lines permanently; no hash of the chain changes.

    Close every desk of the ledger first. A replay then needs a checkpoint that was made after these lines.
    """
    ledger = Ledger(path)
    try:
        for number in numbers:
            if not 1 <= number <= len(ledger.lines):
                raise ValueError(
                    f"erase_references: no line {number} in {len(ledger.lines)} lines."
                )
        dropped = [
            {**line, "references": None} if line["sequence"] in numbers else line for line in ledger
        ]
        raw = b"".join(canonical(line) + b"\n" for line in dropped)
        write_whole(path, raw)
    finally:
        ledger.close()


class Ledger:
    """The file of a ledger, locked by one writer until `close`.

    - `lines`: its content.
    - `torn`: whether a torn last line was dropped when it was opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - held until close
        except OSError as error:
            raise LedgerError(f"ledger: cannot open {path}: {in_words(error)}.") from error
        try:
            self._lock()
            self.lines, self._end, self.torn = read_lines(path)
            if self.torn:
                self._cut()
        except BaseException:
            self._file.close()
            raise

    def __iter__(self) -> Iterator[Json]:
        return iter(self.lines)

    @property
    def last_hash(self) -> str:
        return self.lines[-1]["hash"] if self.lines else START

    def check_head(self, head: str) -> None:
        """Raise unless a line has this hash: a ledger that was cut ends before it."""
        wrong = missing_head(head, [line["hash"] for line in self.lines])
        if wrong is not None:
            raise LedgerError(f"ledger: {wrong} ({self.path}). Restore the file from a copy.")

    def append(self, **fields: object) -> Json:
        """Write one line and wait until the disk has it; after a failure the file is unchanged."""
        line = seal_line({**fields, "sequence": len(self.lines) + 1, "before": self.last_hash})
        wrong = contradiction(line, self.lines[-1] if self.lines else None)
        if wrong is not None:
            raise LedgerError(f"ledger: the request was not recorded and not applied: {wrong}.")
        raw = canonical(line) + b"\n"
        try:
            self._write(raw)
        except OSError as error:
            self._cut()
            raise LedgerError(
                f"ledger: the request was not recorded and not applied: {in_words(error)} ({self.path})."
            ) from error
        self._end += len(raw)
        self.lines.append(line)
        return line

    def close(self) -> None:
        """Release the file and its lock."""
        self._file.close()

    def _write(self, raw: bytes) -> None:
        written = 0
        while written < len(raw):
            written += self._file.write(raw[written:]) or 0
        os.fsync(self._file.fileno())

    def _cut(self) -> None:
        """Drop what follows the last whole line."""
        os.ftruncate(self._file.fileno(), self._end)
        os.fsync(self._file.fileno())

    def _lock(self) -> None:
        if fcntl is None:
            raise LedgerError(
                "ledger: this system has no file locks, so two writers cannot be excluded."
            )
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LedgerError(
                f"ledger: {self.path} is in use by another writer. Send requests to that "
                "process, or stop it."
            ) from None
