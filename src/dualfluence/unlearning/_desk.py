"""A desk answers requests as if it had retrained after each one, and records them."""

import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._support.options import check_flag, check_path
from .._support.show import Shown
from .._support.types import AnyPath, Inputs, Json, Numbers
from .._version import __version__
from ..fitted._fitted import Fitted
from ..problem._certificate import Certificate
from ..problem._edits import AbstractEdit
from ._engine import Engine, Work
from ._ids import Ids, as_names, read_salt
from ._ledger import CHANGE_ROWS, FORMAT, Ledger, LedgerError, References, commit_references
from ._payload import digest_of_model, edits_of, read_payload, write_payload
from ._points import Commitments, read_commitments

MODES = ("keep", "pseudonymise", "erase")


@dataclass(frozen=True, eq=False, repr=False)
class Answer(Shown):
    """The answer to a request.

    - `sequence`: number of the answer's line in the ledger, or `None` for a preview.
    - `certificate`: how far the model can be from retraining on the remaining points.
    - `how`: closed form, further steps, or `edit`.
    - `model`: the model after the request; parameters and predictions are computed when you ask for them.
    - `model_digest`: the SHA-256 of the model.
    - `seconds`: time from request to answer, including the disk.
    """

    sequence: int | None
    certificate: Certificate
    how: str
    model: Fitted
    model_digest: str
    seconds: float

    def params(self) -> PyTree:
        """`θ₀ + Jᵀα` after the request."""
        return self.model.params()

    def predict(self, xq: Inputs) -> Float[Array, "q c"]:
        """Outputs at query points after the request."""
        return self.model.predict(xq)


def open(
    path: AnyPath,
    fitted: Fitted,
    *,
    ids: Iterable[str | int] | None = None,
    references: References = "keep",
    drift: float = 1e-2,
    head: str | None = None,
    clock: Callable[[], float] = time.time,
) -> "Desk":
    """Open the desk of a model in a folder, and repeat the requests of its ledger.

    **Arguments:**

    - `path`: folder of the ledger; made if it does not exist. Only one desk at a time can hold it.
    - `fitted`: the first model of the ledger, or one of its checkpoints.
    - `ids`: one name per training point, by default its position as text. A name is never used twice.
    - `references`: how lines identify the points of a request: by salted hashes (`"keep"`), row numbers
      (`"pseudonymise"`), or not at all (`"erase"`).
    - `drift`: the distance, as a share of `‖θ − θ₀‖`, to which requests without `until` are answered.
    - `head`: an earlier `desk.head` that you kept somewhere else. A ledger without that line, for
      example because its end was deleted, is refused.
    """
    return Desk(check_path("open", path), fitted, ids, references, drift, head, clock)


class Desk:
    """Requests to one model, in order; see `open`."""

    def __init__(
        self,
        path: Path,
        fitted: Fitted,
        ids: Iterable[str | int] | None,
        references: str,
        drift: float,
        head: str | None,
        clock: Callable[[], float],
    ) -> None:
        if references not in MODES:
            raise ValueError(f"open: references must be one of {MODES}, got {references!r}.")
        if not 0 < drift < np.inf:
            raise ValueError(f"open: drift must be a positive share of ‖θ − θ₀‖, got {drift}.")
        self.path, self.references, self._clock = path, references, clock
        self.ledger, self.notes = Ledger(path / "ledger.jsonl"), []
        self._turn = threading.RLock()
        try:
            if head is not None:
                self.ledger.check_head(head)
            names = as_names(fitted.data.num_points, ids)
            salt = read_salt(path / "salt", new=not self.ledger.lines)
            self.ids = Ids(names, salt, fitted.data.sample_weights)
            if self.ledger.torn:
                self.notes.append(
                    "a torn last line was dropped: its request was never acknowledged"
                )
            self.points, self.model_digest, first = self._start(salt, fitted)
            self.engine = Engine(fitted, drift=drift)
            if first == 0:
                own, certificate = self.model_digest, fitted.certificate
                self._record("open", [], 0, own, certificate, "fit", None, None)
            for line in self.ledger.lines[max(first, 1) :]:
                self._replay(line)
        except BaseException:
            self.ledger.close()
            raise

    def __enter__(self) -> "Desk":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the ledger."""
        self.ledger.close()

    @property
    def model(self) -> Fitted:
        """The present model."""
        return self.engine.fitted

    @property
    def certificate(self) -> Certificate:
        """How far the model can be from retraining."""
        return self.model.certificate

    @property
    def head(self) -> str:
        """Hash of the last line. Keep it somewhere else; later it shows whether the ledger was cut."""
        return self.ledger.last_hash

    def remove(self, ids: object, *, until: float | None = None) -> Answer:
        """Remove points permanently, with a certified distance to retraining of at most `until`."""
        return self._answer("remove", _listed(ids), {}, until)

    def relabel(self, ids: object, targets: Numbers, *, until: float | None = None) -> Answer:
        """Give points new targets."""
        return self._answer("relabel", _listed(ids), {"targets": np.asarray(targets)}, until)

    def correct(
        self, ids: object, x: Inputs, targets: Numbers | None = None, *, until: float | None = None
    ) -> Answer:
        """Give points new features, and targets if given (feature unlearning, Warnecke et al., 2023)."""
        arrays = {"x": self._rows(x)}
        if targets is not None:
            arrays["targets"] = np.asarray(targets)
        return self._answer("correct", _listed(ids), arrays, until)

    def add(
        self, ids: object, x: Inputs, targets: Numbers, *, until: float | None = None
    ) -> Answer:
        """Add points under names that were never used."""
        arrays = {"x": self._rows(x), "targets": np.asarray(targets)}
        return self._answer("add", _listed(ids), arrays, until)

    def _rows(self, x: Inputs) -> np.ndarray:
        """Features of a request as rows; a tree of arrays is packed, as in the model."""
        form = self.model.data.form
        return np.asarray(x) if form is None else np.asarray(form.pack("request x", x))

    def preview(
        self, ids: object, *, kind: str = "remove", until: float | None = None, **arrays: Numbers
    ) -> Answer:
        """The answer that a request would get. Nothing is written, nothing changes."""
        start = time.perf_counter()
        given = {
            name: self._rows(value) if name == "x" else np.asarray(value)
            for name, value in arrays.items()
        }
        with self._turn:
            edits, rows = self._edits(kind, _listed(ids), given)
            work = self.engine.propose(edits, until)
            _, after = self._after(kind, rows, work)
        return _answered(None, work, after, start)

    def checkpoint(self, path: AnyPath, *, include_kernel: bool = False) -> Path:
        """Save the model without the rows of removed points, and let the desk start from that file later.

        The contents of earlier requests (new features and labels) are deleted from the desk's folder.
        """
        with self._turn:
            fitted, after = self._purged()
            path = check_path("checkpoint", path)
            check_flag("checkpoint: include_kernel", include_kernel)
            fitted._save(path, include_kernel, self.points.witnesses(fitted.data))
            own = self.points.write(self.path)
            self._record("checkpoint", [], 0, after, fitted.certificate, "saved", None, None)
            self._restart(fitted, after)
            others = set(self.path.glob("points-*.npz")) - {own}
            for file in (*self.path.glob("request-*.npz"), *others):
                file.unlink()
        return path

    def retrain(self) -> Answer:
        """Train from scratch on the remaining points, as accurately as the dtype allows."""
        start = time.perf_counter()
        with self._turn:
            work = self.engine.retrained()
            points, after = self._after("retrain", [], work)
            number = len(self.ledger.lines) + 1
            self._record("retrain", [], 0, after, work.fitted.certificate, work.how, None, None)
            self._apply("retrain", [], [], work, points, after)
        return _answered(number, work, after, start)

    def record_publication(self, fields: Json) -> Json:
        """Record the cost of a publication of perturbed parameters."""
        with self._turn:
            certificate = self.certificate
            return self._record(
                "publish", [], 0, self.model_digest, certificate, "perturbed", None, None, fields
            )

    def _answer(
        self, kind: str, ids: list[object], arrays: dict[str, np.ndarray], until: float | None
    ) -> Answer:
        start = time.perf_counter()
        with self._turn:
            edits, rows = self._edits(kind, ids, arrays)
            work = self.engine.propose(edits, until)
            points, after = self._after(kind, rows, work)
            stored, number = None, len(self.ledger.lines) + 1
            if arrays or self.references == "erase":
                names = [self.ids.reference(name) for name in ids] if kind == "add" else []
                stored = write_payload(self._file_of(number), rows, names, arrays)
            certificate, left = work.fitted.certificate, _retained(work.fitted)
            self._record(
                kind,
                self._references(kind, ids, rows),
                len(ids),
                after,
                certificate,
                work.how,
                until,
                stored,
                root=points.root,
                retained=left,
            )
            self._apply(kind, ids, rows, work, points, after)
        return _answered(number, work, after, start)

    def _edits(
        self, kind: str, ids: list[object], arrays: dict[str, np.ndarray]
    ) -> tuple[list[AbstractEdit], list[int]]:
        if kind not in ("remove", "relabel", "correct", "add"):
            raise ValueError(
                f"preview: kind must be remove, relabel, correct or add, got {kind!r}."
            )
        if kind == "add":
            self.ids.check_new(ids)
            return edits_of(kind, [], arrays), []
        rows = self.ids.rows(ids)
        return edits_of(kind, rows, arrays), rows

    def _after(self, kind: str, rows: list[int], work: Work) -> tuple[Commitments, str]:
        """The commitments and the digest of the model after a request."""
        points, data = self.points, work.fitted.data
        if kind in CHANGE_ROWS:
            new = range(self.model.data.num_points, data.num_points)
            points = points.after(data, rows if kind == "relabel" else new)
        return points, digest_of_model(work.fitted, points.root)

    def _purged(self) -> tuple[Fitted, str]:
        """The model that a checkpoint saves, and its digest."""
        fitted = self.model.without_spare_rows()
        gone = (fitted.data.sample_weights == 0).any()
        fitted = fitted.purge() if gone else fitted
        return fitted, digest_of_model(fitted, self.points.root)

    def _restart(self, fitted: Fitted, after: str) -> None:
        self.engine, self.model_digest = Engine(fitted, drift=self.engine.drift), after

    def _apply(
        self,
        kind: str,
        names: list[object],
        rows: list[int],
        work: Work,
        points: Commitments,
        after: str,
    ) -> None:
        """Make an answer the state; nothing in here can fail."""
        before = self.model.data.num_points
        self.engine.accept(work)
        self.points, self.model_digest = points, after
        if kind == "remove":
            self.ids.remove(rows)
        elif kind == "add":
            self.ids.add(names, before)
        elif kind == "correct":
            self.ids.move(rows, before)

    def _references(self, kind: str, ids: list[object], rows: list[int]) -> list[str] | None:
        if self.references == "erase":
            return None
        if self.references == "pseudonymise":
            first = self.model.data.num_points
            return [str(row) for row in (rows or range(first, first + len(ids)))]
        return [self.ids.reference(name) for name in ids]

    def _record(
        self,
        kind: str,
        references: list[str] | None,
        count: int,
        after: str,
        certificate: Certificate,
        how: str,
        until: float | None,
        payload: str | None,
        removal: Json | None = None,
        *,
        root: str | None = None,
        retained: int | None = None,
    ) -> Json:
        """Write a line; `root` and `retained` come from the state unless the request changes them."""
        blind = secrets.token_hex(16)
        names = references or []
        return self.ledger.append(
            format=FORMAT,
            kind=kind,
            count=count,
            time=_stamp(self._clock()),
            until=until,
            model_before=self.model_digest,
            model_after=after,
            points=self.points.root if root is None else root,
            retained=_retained(self.model) if retained is None else retained,
            certificate=plain_certificate(certificate),
            how=how,
            payload=payload,
            removal=removal,
            software=_software(),
            device=_device(),
            references_mode=self.references,
            references=None if references is None else {"names": names, "blind": blind},
            references_hash=None if references is None else commit_references(names, blind),
        )

    def _start(self, salt: bytes, fitted: Fitted) -> tuple[Commitments, str, int]:
        """Commitments, digest, and the line of the ledger to which this model belongs; replay starts
        after this line. In a checkpoint, the rows of purged points are copies of other points, so the
        commitments of purged points are read from the folder.
        """
        points = Commitments.of(salt, fitted.data)
        if not self.ledger.lines:
            return points, digest_of_model(fitted, points.root), 0
        for line in reversed(self.ledger.lines):
            if line["kind"] not in ("open", "checkpoint"):
                continue
            if fitted.data.purged is not None:
                stored = read_commitments(self.path, line["points"])
                points = Commitments.of(salt, fitted.data, stored)
            own = digest_of_model(fitted, points.root)
            if (points.root, own) == (line["points"], line["model_after"]):
                return points, own, line["sequence"]
        raise LedgerError(
            f"ledger: {self.ledger.path} is about another model or other data: neither its first "
            "line nor a checkpoint has the digest of this model. Give its first model, or its "
            "last checkpoint; for a checkpoint the folder must have the file points-….npz that "
            "was made with it."
        )

    def _replay(self, line: Json) -> None:
        kind, number = line["kind"], line["sequence"]
        if kind in ("open", "publish"):
            return
        if kind == "checkpoint":
            fitted, after = self._purged()
            self._compare(line, fitted, self.points, after)
            return self._restart(fitted, line["model_after"])
        stored = read_payload(self._file_of(number), line["payload"], number)
        if stored is None and line["references"] is None:
            raise LedgerError(
                f"ledger: the references of line {number} were erased. Open the desk with a checkpoint "
                "that was made after it."
            )
        names = line["references"] and line["references"]["names"]
        if stored is not None:
            rows, added, arrays = stored
        else:
            added, arrays = [], {}
            pseudonyms = line["references_mode"] == "pseudonymise"
            rows = [int(name) for name in names] if pseudonyms else self.ids.rows_of(names)
        if kind == "retrain":
            work = self.engine.retrained()
        else:
            work = self.engine.propose(edits_of(kind, rows, arrays), line["until"])
        points, after = self._after(kind, rows, work)
        self._compare(line, work.fitted, points, after)
        self._apply(kind, [], rows, work, points, line["model_after"])
        if kind == "add":
            self.ids.add_references(added, work.fitted.data.num_points - len(added))

    def _compare(self, line: Json, fitted: Fitted, points: Commitments, after: str) -> None:
        """Raise if the rows or the model differ from the line of the ledger; a difference by rounding is
        noted."""
        number, retained = line["sequence"], _retained(fitted)
        if (points.root, retained) != (line["points"], line["retained"]):
            raise LedgerError(
                f"ledger: replaying line {number} gives other data than the line records: "
                f"{retained} points where it has {line['retained']}, or other features or "
                "targets. Was another model given to open?"
            )
        if after == line["model_after"]:
            return
        claimed, own = line["certificate"]["parameter_norm"], fitted.certificate.parameter_norm
        slack = float(np.sqrt(np.finfo(fitted.offset.dtype).eps))
        if not abs(own - claimed) <= slack * abs(claimed):
            raise LedgerError(
                f"ledger: replaying line {number} gives another model than the line records: a "
                f"norm of {own:.9g} instead of {claimed:.9g}. Were other data or settings given "
                "to open?"
            )
        self.notes.append(
            f"line {number} was made by other software, on another device or with another number "
            "of threads; its result here differs in rounding"
        )

    def _file_of(self, number: int) -> Path:
        return self.path / f"request-{number:08d}.npz"


def plain_certificate(certificate: Certificate) -> Json:
    """The certificate's numbers for JSON; a missing bound is `null`."""
    bound = certificate.distance_bound
    return {
        "distance_bound": bound if np.isfinite(bound) else None,
        "gradient_norm": certificate.gradient_norm,
        "rounding": certificate.rounding,
        "parameter_norm": certificate.parameter_norm,
        "ridge": certificate.ridge,
        "gap": certificate.gap,
        "certified": certificate.certified,
    }


def _answered(sequence: int | None, work: Work, after: str, start: float) -> Answer:
    certificate = work.fitted.certificate
    seconds = time.perf_counter() - start
    return Answer(sequence, certificate, work.how, work.fitted, after, seconds)


def _retained(fitted: Fitted) -> int:
    """Points with a weight."""
    return int(np.count_nonzero(fitted.data.sample_weights))


def _listed(ids: Any) -> list[object]:
    """One name or several, as a list."""
    if isinstance(ids, (str, int, np.integer)):
        return [ids]
    return list(ids)


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


@lru_cache(maxsize=1)
def _software() -> dict[str, str]:
    return {"dualfluence": __version__, "jax": jax.__version__, "numpy": np.__version__}


@lru_cache(maxsize=1)
def _device() -> str:
    device = jax.devices()[0]
    return f"{device.platform} {device.device_kind}"


__all__ = ["Answer", "Desk", "open", "plain_certificate"]
