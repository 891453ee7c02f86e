"""An append-only file of what was asked and answered; every line names the hash of the one before.

A line is one JSON object. Its `hash` is the SHA-256 of its other fields. What refers to persons is in
the field `references`, which the hash covers by a commitment only (`references_hash`), so that references can
be erased or replaced later and the chain stays verifiable.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from .._support.files import FileError, fcntl, in_words, write_atomically

References = Literal["keep", "pseudonymise", "erase"]
"""What becomes of a request's references: kept as salted hashes, replaced by numbers, or dropped."""

START = "0" * 64
"""The hash before the first line."""

FORMAT = "dualfluence-ledger-1"


class LedgerError(FileError):
    """A ledger was changed, is held by another writer, or cannot be written."""


def canonical(value: Any) -> bytes:
    """The one way in which a value is written: keys in order, no spaces, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8")


def digest(*parts: bytes) -> str:
    """SHA-256 of the parts, each with its length, so that none can run into the next."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.hexdigest()


def reference(salt: bytes, name: str) -> str:
    """A person's reference: a keyed hash, useless without the salt."""
    return hmac.new(salt, name.encode("utf-8"), hashlib.sha256).hexdigest()


def seal(fields: dict[str, Any]) -> dict[str, Any]:
    """The line with its hash, which covers every field but the references themselves."""
    covered = {name: value for name, value in fields.items() if name not in ("references", "hash")}
    return {**fields, "hash": hashlib.sha256(canonical(covered)).hexdigest()}


def commit_references(names: list[str], blind: str) -> str:
    """What the chain says of references: a hash that no one can guess them from once `blind` is gone."""
    return digest(blind.encode(), canonical(names))


def check_line(raw: bytes, number: int, before: str) -> dict[str, Any]:
    """One line, or an error that names it."""

    def refuse(why: str) -> LedgerError:
        return LedgerError(
            f"ledger: line {number} was changed: {why}. Restore the file from a copy; nothing after "
            f"line {number - 1} can be trusted."
        )

    try:
        fields = json.loads(raw, object_pairs_hook=_no_doubles)
    except (ValueError, RecursionError) as error:
        raise refuse("it is not JSON") from error
    if not isinstance(fields, dict) or canonical(fields) != raw:
        raise refuse("it is not written the way this file is written")
    if fields.get("sequence") != number or fields.get("before") != before:
        raise refuse("it does not follow from the line before")
    if seal(fields)["hash"] != fields.get("hash"):
        raise refuse("its hash is not that of its fields")
    if fields.get("references") is not None:
        _check_references(fields, refuse)
    return fields


def _check_references(fields: dict[str, Any], refuse: Any) -> None:
    names, blind = fields["references"].get("names"), fields["references"].get("blind")
    known = (
        isinstance(names, list)
        and isinstance(blind, str)
        and set(fields["references"])
        == {
            "names",
            "blind",
        }
    )
    if not known or commit_references(names, blind) != fields.get("references_hash"):
        raise refuse("its references are not those that it was written with")


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field comes twice")
    return found


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int, bool]:
    """All whole lines, the bytes they take, and whether a torn line follows them.

    A line without its end is what a crash leaves; it was never acknowledged.
    """
    raw = path.read_bytes() if path.exists() else b""
    whole = raw.rfind(b"\n") + 1
    lines, before = [], START
    for number, line in enumerate(raw[:whole].split(b"\n")[:-1], start=1):
        lines.append(check_line(line, number, before))
        before = lines[-1]["hash"]
    return lines, whole, whole < len(raw)


def erase_references(path: Path, numbers: list[int]) -> None:
    """Drop the references of lines, for good; every hash of the chain stays as it is.

    No desk may hold the ledger. A replay then needs a checkpoint from after these lines.
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
        write_atomically(path, lambda file: file.write(raw))
    finally:
        ledger.close()


class Ledger:
    """The file, held by one writer until `close`.

    - `lines`: what it says.
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

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.lines)

    @property
    def last_hash(self) -> str:
        return self.lines[-1]["hash"] if self.lines else START

    def append(self, **fields: Any) -> dict[str, Any]:
        """Write one line and wait until the disk has it; after a failure the file is as it was."""
        line = seal({**fields, "sequence": len(self.lines) + 1, "before": self.last_hash})
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
        """Let go of the file and its lock."""
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
                "ledger: this system has no file locks, so that one writer cannot be sure."
            )
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LedgerError(
                f"ledger: {self.path} is held by another writer. Send requests to that one, or stop it."
            ) from None
