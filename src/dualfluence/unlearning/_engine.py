"""Turns requests into states: by the inverse of the anchor if it is accurate enough, else by `edit`.

The rule depends only on the requests, never on time, so that a replay decides in the same way:

- A removal of up to `MAX_BATCH` points takes the closed form from the inverse of the anchor.
- If its certificate exceeds the limit, steps with the same inverse follow as long as each halves the
  bound. Then true products with `K` replace estimates. Then `edit` answers, and the inverse is computed
  again.
- The inverse is also computed again after `MAX_GONE` points.
- Every other request goes through `edit`. The inverse is then no longer valid. The next `REFRESH_AFTER`
  removals go through `edit` too, and the one after them makes a new inverse.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .._support.compile import double
from .._support.types import Json
from ..dual._newton import op_mv
from ..fitted._fitted import Fitted
from ..problem._certificate import Certificate
from ..problem._edits import AbstractEdit, Remove, apply_edits
from ..problem._objective import State, TrainingSet
from ._anchor import Anchor, can_anchor, make_anchor
from ._programs import Found, Programs
from ._quick import Gone, committed, nothing_gone

MAX_BATCH = 16
"""Requests with at most this number of points leave out each point separately. With twice this value,
larger requests avoid `edit`."""

MAX_GONE = 256
"""Largest number of points left out since the last factorisation. With twice this value, the last
removals read twice as much."""

MAX_POLISH = 6
"""Steps with the old inverse before a new one is made."""

REFRESH_AFTER = 8
"""Number of removals by `edit` that cost about as much as an inverse."""


class Work(NamedTuple):
    """Everything that a request may change.

    - `fitted`: the present model.
    - `anchor`, `gone`: the inverse, and the points eliminated from it; `None` where there is none.
    - `programs`: the compiled programs of the anchor.
    - `shares`: weights at the anchor, which sum to one.
    - `edits`: number of removals by `edit` since the inverse became invalid.
    - `how`: how the last request was answered.
    """

    fitted: Fitted
    anchor: Anchor | None
    gone: Gone | None
    programs: Programs | None
    shares: np.ndarray | None
    edits: int
    how: str


class Engine:
    """A model that answers requests; `propose` computes an answer, `accept` makes it the state."""

    def __init__(self, fitted: Fitted, *, drift: float = 1e-2) -> None:
        self.drift = drift
        self.work = anchored(fitted) if can_anchor(fitted) else _without_inverse(fitted, 0, "fit")

    @property
    def _scope(self) -> AbstractContextManager[object]:
        """64-bit types where the model keeps its dual variables in float64."""
        return double(self.fitted.is_wide)

    @property
    def fitted(self) -> Fitted:
        return self.work.fitted

    def propose(self, edits: Sequence[AbstractEdit], until: float | None = None) -> Work:
        """The state after the edits; nothing changes until it is accepted.

        Proposals share scratch memory: if there are several from one state, only the
        last can be accepted.
        """
        with self._scope:
            return self._proposed(edits, until)

    def _proposed(self, edits: Sequence[AbstractEdit], until: float | None) -> Work:
        points, work = _removed(edits), self.work
        if points is None or len(points) > MAX_BATCH:
            return self._edited(edits, until)
        if work.anchor is None:
            if work.edits < REFRESH_AFTER or not can_anchor(work.fitted):
                return self._edited(edits, until)
            self._applied(edits)  # what cannot be done is refused before a factorisation
            work = anchored(work.fitted)
        elif work.gone is not None and work.gone.count + len(points) > MAX_GONE:
            self._applied(edits)
            work = anchored(work.fitted, work.anchor)
        elif not all(0 <= point < work.fitted.data.num_points for point in points):
            self._applied(edits)  # raises
        return self._left_out(work, points, edits, until)

    def retrained(self) -> Work:
        """The model trained from scratch on the remaining points. It has no explicit inverse; a later removal
        makes one."""
        with self._scope:
            fitted = self.fitted.retrain([], progress=False).commit()
        return _without_inverse(fitted, 0, "retraining")

    def accept(self, work: Work) -> None:
        """Make a proposal the state."""
        if work.gone is not None and not work.gone.stands:
            raise RuntimeError(
                "accept: another request was proposed after this one and has written over what it needs. "
                "Propose it again."
            )
        self.work = work

    def _applied(self, edits: Sequence[AbstractEdit]) -> TrainingSet:
        """The training set after the edits, which are checked."""
        fitted = self.fitted
        return apply_edits(list(edits), fitted.data, fitted.loss, fitted.num_outputs)

    def _left_out(
        self, work: Work, points: list[int], edits: Sequence[AbstractEdit], until: float | None
    ) -> Work:
        gone, programs, shares = work.gone, work.programs, work.shares
        assert gone is not None
        assert programs is not None
        assert shares is not None
        fitted = work.fitted
        data = self._applied(edits) if gone.on_host else None
        weights = fitted.data.sample_weights
        after, found = programs.leave_out(gone, fitted.state, points, shares, weights)
        if data is None:
            # While the device is at work. If the edits are refused here, nothing has happened.
            data = self._applied(edits)
        work = work._replace(gone=after)
        certificate = found.certificate(fitted.ridge)
        limit = self._limit(certificate, until)
        if certificate.distance_bound <= limit:
            return _settled(work, data, found.state, certificate, "closed form")
        return self._polished(work, data, found, limit, until)

    def _polished(
        self, work: Work, data: TrainingSet, found: Found, limit: float, until: float | None
    ) -> Work:
        """Further steps with the same inverse; if they no longer help, a new start."""
        gone, programs, shares, ridge = work.gone, work.programs, work.shares, work.fitted.ridge
        assert gone is not None
        assert programs is not None
        assert shares is not None
        left, last, step = np.where(data.sample_weights > 0, shares, 0), np.inf, 0
        for step in range(1, MAX_POLISH + 1):
            found = programs.polish(gone, found, left)
            certificate = found.certificate(ridge)
            if certificate.distance_bound <= limit:
                how = f"closed form, {step} steps more"
                return _settled(work, data, found.state, certificate, how)
            if not certificate.distance_bound <= 0.5 * last:
                break
            last = certificate.distance_bound
        weights = work.fitted.layout.expand(data.weights, "zero")
        found = programs.measure(found.state.alpha, weights)
        certificate = found.certificate(ridge)
        if certificate.distance_bound <= limit:
            how = f"closed form, {step} more steps, true products"
            return _settled(work, data, found.state, certificate, how)
        # Where the steps failed altogether, from where they began.
        good = np.isfinite(certificate.distance_bound)
        rough = _settled(work, data, found.state if good else work.fitted.state, certificate, "")
        fitted = _edit(rough.fitted, [], until, self.drift)
        return anchored(fitted, work.anchor)._replace(how="edit, and a new factorisation")

    def _edited(self, edits: Sequence[AbstractEdit], until: float | None) -> Work:
        fitted = _edit(self.fitted, edits, until, self.drift)
        return _without_inverse(fitted, self.work.edits + 1, "edit")

    def _limit(self, certificate: Certificate, until: float | None) -> float:
        """The limit for the bound of the dual variables: `until` less the gap, or the allowed drift."""
        if until is None:
            return self.drift * certificate.parameter_norm
        left = self.fitted._remaining(until)
        assert left is not None
        return left


def anchored(fitted: Fitted, last: Anchor | None = None) -> Work:
    """A new inverse at the state of `fitted`, with the dual variables of removed points exactly zero.

    If `K` is the same, it keeps the bound of `K` of the last anchor.
    """
    with double(fitted.is_wide):
        return _anchored(fitted.without_spare_rows(), last)


def _anchored(fitted: Fitted, last: Anchor | None) -> Work:
    kept = (fitted.data.sample_weights > 0).astype(fitted.offset.dtype)
    alpha = fitted.state.alpha * fitted.layout.place(kept)[:, None]
    drift = fitted.layout.scalar(0.0, alpha.dtype)
    fitted = replace(fitted, state=State(alpha, op_mv(fitted.kernel_op, alpha), drift))
    same = last is not None and last.op is fitted.kernel_op
    anchor = make_anchor(fitted, last.majorant if last is not None and same else None)
    shares = fitted.data.weights
    gone = nothing_gone(anchor, shares, max(MAX_GONE, MAX_BATCH))
    if not gone.on_host and fitted.layout.sharding is None:
        fitted = replace(fitted, state=committed(fitted.state, alpha))
    return Work(fitted, anchor, gone, Programs(anchor), shares, 0, "factorisation")


def _without_inverse(fitted: Fitted, edits: int, how: str) -> Work:
    return Work(fitted, None, None, None, None, edits, how)


def _edit(
    fitted: Fitted, edits: Sequence[AbstractEdit], until: float | None, drift: float
) -> Fitted:
    options: Json = {"progress": False}
    if until is not None:
        options["until"] = until
    elif fitted.certificate.certified:
        options["drift"] = drift
    return fitted.edit(list(edits), **options).commit()


def _settled(
    work: Work,
    data: TrainingSet,
    state: State,
    certificate: Certificate,
    how: str,
) -> Work:
    """The work with a state. Its certificate is the certificate of the dual variables, widened by the
    gap."""
    fitted, old = work.fitted, work.fitted.certificate
    reading = fitted._reading(certificate.parameter_norm)
    certificate = replace(certificate, gap=old.gap, certified=old.certified, reading=reading)
    stats = fitted.stats._replace(edits=fitted.stats.edits + 1)
    model = replace(fitted, data=data, state=state, certificate=certificate, stats=stats)
    return work._replace(fitted=model, how=how)


def _removed(edits: Sequence[AbstractEdit]) -> list[int] | None:
    """Positions, if the request only removes."""
    if not edits or not all(isinstance(edit, Remove) for edit in edits):
        return None
    return [point for edit in edits if isinstance(edit, Remove) for point in edit.indices.tolist()]
