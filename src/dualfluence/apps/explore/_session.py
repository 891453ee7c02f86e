"""The session of one reader: a model, its edits, and the way back."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...fitted._fitted import Fitted
from ...fitted._update import Update
from ...problem._certificate import OnFailure
from ...problem._edits import AbstractEdit, Relabel, Remove
from ..attribute._audit import isolation
from ..page._scene import Scene
from ..page._view import (
    action_of,
    answers_of,
    certificate_of,
    document_of,
    groups_of,
    scores_of,
    state_of,
    stats_of,
    what_stays,
)

MAX_EDITS = 1000
"""Number of edits that can be undone, if there is memory for them."""

FEWEST_EDITS = 20
"""Number of edits that can always be undone."""

HELD_BYTES = 32 * 2**20
"""Memory of one reader's edits. Each holds a few `(n, c)` arrays, not a kernel."""

ARRAYS_HELD = 4
"""Of the size `(n, c)` in one edit: dual variables, their products with `K`, targets, curvature."""

BLOCK = 64
"""Points left out at a time. The number is fixed, because another number would compile again after
every removal."""

KEPT = 3
"""Last models whose scores are kept, beside those of the first; `q·n` numbers each."""

RIDGES = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
"""Ridges to choose from, in units of that of the fit. There are only a few, so that the cost of each is
known."""

DRIFT = 1e-2
"""Relative bound above which an edit takes further steps, as at a desk of requests."""

SETTLED = 1e-6
"""Relative bound up to which scores are computed. Leaving a point out is one step; farther from the
optimum, most of that step would be the error that earlier edits left."""


@dataclass(eq=False)
class Version:
    """The model after one action.

    - `version`: a number that is used once, so that every answer names its model.
    - `action`: the edit, for the history.
    - `outputs`: at the queries.
    - `kept`: scores, once they have been computed.
    - `turn`: a lock, so that scores are not computed twice at the same time.
    """

    version: int
    fitted: Fitted
    action: dict[str, Any]
    outputs: np.ndarray
    kept: dict[str, Any] = field(default_factory=dict)
    turn: threading.Lock = field(default_factory=threading.Lock)


class Stale(Exception):
    """The request is about a model that was undone."""


class Session:
    """The present model, and every model before it.

    One thread may edit while another computes scores, because the scores belong to a model that never
    changes. A session that begins like another one, `first`, shares its model, its kernel, the map and
    the first scores. It holds only its edits.
    """

    def __init__(self, scene: Scene, first: "Session | None" = None) -> None:
        self.scene, self._made = scene, 0
        if first is None:
            alone = isolation(scene.fitted.without_spare_rows())
            self.start = {**what_stays(scene, alone), "ridges": _ridges(scene.fitted)}
            self.moments = [self._moment(scene.fitted, {"what": "fit"})]
        else:
            self.start, self.moments, self._made = first.start, first.moments[:1], 1

    def another(self) -> "Session":
        """A session of another reader, at the beginning."""
        return Session(self.scene, self)

    @property
    def now(self) -> Version:
        return self.moments[-1]

    @property
    def fitted(self) -> Fitted:
        """The present model."""
        return self.now.fitted

    def warm_up(self) -> None:
        """Compile the programs for the first edit. Nothing changes."""
        there = np.flatnonzero(self.fitted.data.sample_weights > 0)
        if there.size > 1:
            # One step, then as many as it takes: both are programs of their own.
            update = _edit(self.fitted, [Remove(there[:1])], SETTLED, failing="report")
            update.predict(self.scene.xq)

    def remove(self, points: list[int]) -> dict[str, Any]:
        """Leave points out, in one step, or in more if the bound would exceed `DRIFT`."""
        return self._edited([Remove(points)], {"what": "remove", "points": points})

    def relabel(self, points: list[int], label: int | float) -> dict[str, Any]:
        """Give points one new label, with as many steps as a removal takes."""
        edit = Relabel(points, self._targets(len(points), label))
        return self._edited([edit], {"what": "relabel", "points": points, "label": label})

    def refine(self) -> dict[str, Any]:
        """One more Newton step on the present training set."""
        return self._edited([], {"what": "step"})

    def change_ridge(self, ridge: float) -> dict[str, Any]:
        """Fit the model with another ridge to the present training set, starting from the present model."""
        if ridge not in self.start["ridges"]:
            offered = ", ".join(f"{value:g}" for value in self.start["ridges"]) or "none"
            raise ValueError(f"ridge: expected one of ({offered}), got {ridge:g}.")
        self._check_room("ridge")
        # Neither the kernel nor its preconditioner knows the ridge; the parameters are as they were.
        changed = replace(self.fitted, ridge=ridge)
        update = changed.edit([], drift=SETTLED, progress=False)
        return self._kept(update.commit(), {"what": "ridge", "ridge": ridge})

    def undo(self) -> dict[str, Any]:
        """Return to the model before the last action, which was kept."""
        if len(self.moments) == 1:
            raise ValueError("undo: nothing was done yet.")
        self.moments.pop()
        return self.state()

    def reset(self) -> dict[str, Any]:
        """Return to the first model of the session."""
        del self.moments[1:]
        return self.state()

    def preview(self, points: list[int]) -> dict[str, Any]:
        """The effect that leaving points out would have. Nothing changes."""
        start = time.perf_counter()
        update = _edit(self.fitted, [Remove(points)], DRIFT)
        outputs = np.asarray(update.predict(self.scene.xq))
        return {
            "version": self.now.version,
            **answers_of(self.scene, outputs),
            "certificate": certificate_of(update),
            "stats": {**stats_of(update), "seconds": time.perf_counter() - start},
        }

    def state(self) -> dict[str, Any]:
        """The data of the present model for the page."""
        return self.state_at(len(self.moments) - 1)

    def state_at(self, place: int) -> dict[str, Any]:
        """The same of an earlier model; 0 is the first."""
        moment = self.moments[place]
        return {
            "version": moment.version,
            "history": self._history(place + 1),
            **state_of(self.scene, moment.fitted, moment.outputs),
        }

    def scores(self, version: int | None = None) -> dict[str, Any]:
        """Effects of leaving out each point, for the model of this version."""
        scene = self.scene

        def compute(fitted: Fitted) -> dict[str, Any]:
            result = fitted.attribute(scene.xq, scene.yq, block_size=BLOCK, progress=False)
            return scores_of(scene, fitted, result)

        return self._once("scores", version, compute)

    def groups(self, version: int | None = None) -> dict[str, Any]:
        """Effects of leaving out each group, without the points of it that were removed already."""
        scene = self.scene

        def compute(fitted: Fitted) -> dict[str, Any]:
            there = fitted.data.sample_weights > 0
            left = {k: v[there[v]] for k, v in scene.named_groups.items()}
            # A group that is all there is cannot be left out.
            left = {k: v for k, v in left.items() if 0 < v.size < there.sum()}
            if not left:
                return {"names": [], "sizes": [], "mean": [], "sums": [], "effects": []}
            return groups_of(fitted.attribute_groups(left, scene.xq, scene.yq, progress=False))

        return self._once("groups", version, compute)

    def certificate(self) -> dict[str, Any]:
        """The certificate of the present model as a separate document."""
        return document_of(self.scene, self.fitted, self._history(len(self.moments)))

    def content(self) -> dict[str, Any]:
        """Everything that a saved page holds."""
        return {
            "start": self.start,
            "first": self.state_at(0),
            "state": self.state(),
            "scores": self.scores(),
            "groups": self.groups(),
            "certificate": self.certificate(),
        }

    def _history(self, length: int) -> list[dict[str, Any]]:
        return [moment.action for moment in self.moments[:length]]

    @property
    def most_edits(self) -> int:
        """Edits that this session may hold."""
        each = ARRAYS_HELD * self.scene.fitted.state.alpha.nbytes
        return max(FEWEST_EDITS, min(MAX_EDITS, HELD_BYTES // each))

    def _edited(self, edits: list[AbstractEdit], action: dict[str, Any]) -> dict[str, Any]:
        self._check_room(action["what"])
        return self._kept(_edit(self.fitted, edits, DRIFT if edits else None).commit(), action)

    def _kept(self, fitted: Fitted, action: dict[str, Any]) -> dict[str, Any]:
        self.moments.append(self._moment(fitted, action))
        for moment in self.moments[1:-KEPT]:
            moment.kept.clear()
        return self.state()

    def _check_room(self, what: str) -> None:
        if len(self.moments) > self.most_edits:
            raise ValueError(
                f"{what}: the limit of {self.most_edits} edits is reached. Undo some, or reset."
            )

    def _moment(self, fitted: Fitted, action: dict[str, Any]) -> Version:
        outputs = np.asarray(fitted.predict(self.scene.xq))
        self._made += 1
        return Version(self._made, fitted, action_of(fitted=fitted, **action), outputs)

    def _targets(self, count: int, label: int | float) -> np.ndarray:
        classes = self.scene.num_classes
        if classes and not (label == int(label) and 0 <= label < classes):
            raise ValueError(f"relabel: expected a class from 0 to {classes - 1}, got {label:g}.")
        if self.scene.kind == "softmax":
            return np.full(count, int(label))
        if self.fitted.num_outputs != 1:
            raise ValueError("relabel: targets of several numbers cannot be changed here.")
        return np.full((count, 1), float(label))

    def _once(
        self, name: str, version: int | None, compute: Callable[[Fitted], dict[str, Any]]
    ) -> dict[str, Any]:
        moments = self.moments[:]
        found = [m for m in moments if version is None or m.version == version]
        if not found:
            raise Stale(f"{name}: version {version} was undone.")
        moment = found[-1]
        with moment.turn:
            kept = moment.kept.get(name)
            if kept is None:
                settled = _settled(moment.fitted)
                kept = {"version": moment.version, **compute(settled)}
                moment.kept[name] = kept
        return kept


def _edit(
    fitted: Fitted, edits: list[AbstractEdit], drift: float | None, *, failing: OnFailure = "raise"
) -> Update[Fitted]:
    drift = drift if fitted.certificate.certified else None
    return fitted.edit(edits, drift=drift, on_failure=failing, progress=False)


def _ridges(fitted: Fitted) -> list[float]:
    """Ridges that the page offers; none for a network trained elsewhere, whose ridge cannot be
    changed."""
    if fitted.reference is not None:
        return []
    return [
        fitted.ridge if share == 1 else float(f"{share * fitted.ridge:.12g}") for share in RIDGES
    ]


def _settled(fitted: Fitted) -> Fitted:
    """The same model at its optimum, or as near to it as rounding lets it come."""
    cert = fitted.certificate
    if not cert.certified or cert.relative_bound <= SETTLED or cert.at_floor:
        return fitted
    return _edit(fitted, [], SETTLED, failing="report").commit()
