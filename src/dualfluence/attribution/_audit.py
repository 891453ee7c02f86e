"""From predictions with and without each point to findings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._audit_record import KINDS, Audit, Finding
from ._label_noise import Noise, label_noise, target_noise
from ._near import Distances, Nearest, nearest

CARRIED = 0.5
"""Share of its own prediction from which a point carries it alone."""

MOST_CARRIED = 0.05
"""Largest share of the points that can stand out so; in a model that remembers all of them none does."""

CHANGED = 1e-3
"""Share of all predictions that may change without the redundant points; of numbers, of their spread."""

MOST_REDUNDANT = 0.5
"""Largest share of the points that is tried."""

TRIES = 6
"""Groups that are left out to find how many points are redundant; each halves what is not known."""

APART = 3.0
"""Typical errors between the numbers of two near duplicates from which they disagree."""

SAME = 1e-6
"""Distance over the size of a point that counts as none, where half of all points have a copy."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What an audit looks at, whatever the model.

    - `classes`: names of the classes; `None` for numbers.
    - `targets`: numbers of classes `(n,)`, or values `(n, c)`; `test_targets` likewise or `None`.
    - `outputs`, `left_out`: outputs at the training points, of the model with and without each point,
      `(n, c)`.
    - `test_outputs`: `(q, c)` or `None`.
    - `on_scale`: outputs in the form in which they are compared with targets: probabilities, or the
      outputs themselves.
    - `effect`: how far predictions move without each point.
    - `near`, `test_near`: kernel distances.
    - `active`: points with a weight.
    - `without`: outputs at training and test points, one after the other, once a set of points is left out.
    """

    classes: np.ndarray | None
    targets: np.ndarray
    outputs: np.ndarray
    left_out: np.ndarray
    effect: np.ndarray
    near: Distances
    active: np.ndarray
    without: Callable[[np.ndarray], np.ndarray]
    on_scale: Callable[[np.ndarray], np.ndarray] = np.asarray
    test_targets: np.ndarray | None = None
    test_outputs: np.ndarray | None = None
    test_near: Distances | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_classes(self) -> bool:
        return self.classes is not None

    @property
    def wanted(self) -> np.ndarray:
        """Targets as outputs should be."""
        return np.eye(self.outputs.shape[1])[self.targets] if self.is_classes else self.targets

    def name(self, target: Any) -> Any:
        """A target under the name that the user gave it."""
        if self.classes is not None:
            return self.classes[target]
        return float(target[0]) if len(target) == 1 else target


def examine(e: Evidence, *, threshold: float, near: float) -> Audit:
    """The findings, most serious first within each kind.

    **Arguments:**

    - `threshold`: probability from which a label is called wrong.
    - `near`: the distance below which points are near duplicates. The unit is the median distance of a
      point to its nearest neighbour.
    """
    noise, test_noise = _noise(e)
    leverage = _leverage(e)
    beside = nearest(e.near, _disagreement(e, e.targets, noise), e.active)
    unit = _unit(e, beside)
    limit = near * unit
    findings = [
        *_wrong_labels(e, noise, threshold),
        *_wrong_test_labels(e, test_noise, threshold),
        *_conflicts(e, beside, limit, unit),
        *_leaks(e, noise, limit, unit),
        *_carried(e, noise, leverage, threshold),
        *_redundant(e, noise, threshold),
    ]
    order = {kind: place for place, kind in enumerate(KINDS)}
    return Audit(
        findings=tuple(sorted(findings, key=lambda f: (order[f.kind], -f.score))),
        task="classification" if e.is_classes else "regression",
        classes=e.classes,
        labels=e.targets,
        wrong=np.where(e.active, noise.wrong, 0),
        suspicion=noise.log_odds,
        suggested=noise.suggested,
        probabilities=noise.probabilities,
        left_out=e.left_out,
        leverage=leverage,
        effect=e.effect,
        neighbour=beside.at,
        distance=beside.distance / unit,
        test_wrong=None if test_noise is None else test_noise.wrong,
        notes=e.notes,
    )


def _noise(e: Evidence) -> tuple[Noise, Noise | None]:
    """The noise of labels of training points, and of test points if these have targets."""
    asked, targets = e.test_outputs, e.test_targets
    if e.is_classes:
        noise = label_noise(e.left_out, e.targets)
        if asked is None or targets is None:
            return noise, None
        return noise, noise.of_queries(asked, targets)
    if asked is None or targets is None:
        return target_noise(e.left_out, e.targets), None
    both = target_noise(np.concatenate([e.left_out, asked]), np.concatenate([e.targets, targets]))

    def part(where: slice) -> Noise:
        rows = (both.wrong[where], both.log_odds[where], both.suggested[where])
        return Noise(*rows, None, both.scale, None, None)

    return part(slice(len(e.targets))), part(slice(len(e.targets), None))


def _leverage(e: Evidence) -> np.ndarray:
    """`1 − ‖y − f‖/‖y − f₋‖`, for squared error exactly the diagonal of the smoother."""
    with_it = np.linalg.norm(e.wanted - e.on_scale(e.outputs), axis=1)
    alone = np.linalg.norm(e.wanted - e.on_scale(e.left_out), axis=1)
    known = alone > 1e-12 * max(float(np.max(alone)), np.finfo(float).tiny)
    return np.where(known, np.clip(1 - with_it / np.where(known, alone, 1), 0, 1), 0)


def _disagreement(e: Evidence, targets: np.ndarray, noise: Noise) -> Callable[[slice], np.ndarray]:
    if e.is_classes:
        return lambda rows: targets[rows][:, None] != e.targets[None]
    limit = APART * noise.scale
    return lambda rows: np.linalg.norm(targets[rows][:, None] - e.targets[None], axis=2) > limit


def _nowhere(e: Evidence) -> Callable[[slice], np.ndarray]:
    return lambda rows: np.zeros((rows.stop - rows.start, len(e.targets)), bool)


def _unit(e: Evidence, beside: Nearest) -> float:
    """The median distance to the nearest neighbour; if half of all points have a copy, the rounding of a
    distance."""
    found = beside.distance[e.active & np.isfinite(beside.distance)]
    size = float(np.sqrt(np.mean(e.near.train[e.active])))
    return max(float(np.median(found)) if found.size else 0.0, SAME * size, np.finfo(float).tiny)


def _wrong_labels(e: Evidence, noise: Noise, threshold: float) -> list[Finding]:
    at = np.flatnonzero(e.active & (noise.wrong >= threshold))
    return [_label(e, noise, "train", int(i), e.targets[i], "without it") for i in at]


def _wrong_test_labels(e: Evidence, noise: Noise | None, threshold: float) -> list[Finding]:
    if noise is None or e.test_targets is None:
        return []
    at = np.flatnonzero(noise.wrong >= threshold)
    targets = e.test_targets
    return [_label(e, noise, "test", int(i), targets[i], "trained without it") for i in at]


def _label(e: Evidence, noise: Noise, split: str, i: int, target: Any, how: str) -> Finding:
    given, better = e.name(target), e.name(noise.suggested[i])
    p = float(noise.wrong[i])
    if e.is_classes:
        reason = f"labelled {given}, but the model {how} says {better}; wrong with probability {_share(p)}"
    else:
        off = np.linalg.norm(target - noise.suggested[i]) / max(noise.scale, np.finfo(float).tiny)
        reason = (
            f"given as {_short(given)}, but the model {how} says {_short(better)}, {off:.1f} typical errors "
            f"away; wrong with probability {_share(p)}"
        )
    return Finding("label", split, i, reason, given, better, float(noise.log_odds[i]), p)


def _conflicts(e: Evidence, beside: Nearest, limit: float, unit: float) -> list[Finding]:
    """Pairs of near duplicates with different targets, each once."""
    close = np.flatnonzero(e.active & (beside.other_distance <= limit))
    pairs = {tuple(sorted((int(i), int(beside.other_at[i])))) for i in close}
    found = []
    for i, j in sorted(pairs):
        d = float(min(beside.other_distance[i], beside.other_distance[j]) / unit)
        one, two = e.name(e.targets[i]), e.name(e.targets[j])
        reason = f"{_alike(d)} training point {j}{_agreement(_short(one), _short(two))}"
        found.append(Finding("conflict", "train", i, reason, one, two, 1 - d, None, j))
    return found


def _leaks(e: Evidence, noise: Noise, limit: float, unit: float) -> list[Finding]:
    if e.test_near is None:
        return []
    targets = e.test_targets
    found = []
    differs = _nowhere(e) if targets is None else _disagreement(e, targets, noise)
    beside = nearest(e.test_near, differs, e.active)
    for q in np.flatnonzero(beside.distance <= limit):
        at, d = int(beside.at[q]), float(beside.distance[q] / unit)
        own = None if targets is None else e.name(targets[q])
        told = "" if own is None else _agreement(_short(own), _short(e.name(e.targets[at])))
        reason = f"{_alike(d)} training point {at}{told}"
        found.append(Finding("leak", "test", int(q), reason, own, None, 1 - d, None, at))
    return found


def _agreement(one: str, other: str) -> str:
    if one == other:
        return f", which has {one} too"
    return f", which has {other} where this one has {one}"


def _carried(e: Evidence, noise: Noise, leverage: np.ndarray, threshold: float) -> list[Finding]:
    """Points that the model gets right because of their own target alone, unlike most others."""
    usual = float(np.quantile(leverage[e.active], 1 - MOST_CARRIED))
    own = e.active & (leverage >= max(CARRIED, usual)) & (noise.wrong < threshold)
    if e.is_classes:
        said, before = e.outputs.argmax(axis=1), e.left_out.argmax(axis=1)
        own &= (said == e.targets) & (before != e.targets)
    else:
        off = np.linalg.norm(e.targets - e.left_out, axis=1)
        own &= off > 2 * noise.scale
    found = []
    for i in np.flatnonzero(own):
        alone = e.left_out[i].argmax() if e.is_classes else e.left_out[i]
        reason = (
            f"its own target makes up {leverage[i]:.0%} of its prediction; the model without it says "
            f"{_short(e.name(alone))} instead of {_short(e.name(e.targets[i]))}"
        )
        score = float(leverage[i])
        found.append(
            Finding("leverage", "train", int(i), reason, e.name(e.targets[i]), None, score)
        )
    return found


def _redundant(e: Evidence, noise: Noise, threshold: float) -> list[Finding]:
    """The largest set of points of least effect without which, all together, hardly a prediction changes."""
    order = np.argsort(e.effect, kind="stable")
    order = order[e.active[order] & (noise.wrong[order] < threshold)]
    most = int(min(MOST_REDUNDANT * e.active.sum(), len(order)))
    before = e.outputs if e.test_outputs is None else np.concatenate([e.outputs, e.test_outputs])
    good, bad, words = 0, most + 1, ""
    for _ in range(TRIES):
        size = most if bad == most + 1 else (good + bad) // 2
        if size <= good or size < 1:
            break
        share, told = _change(e, before, e.without(order[:size]))
        if share <= CHANGED:
            good, words = size, told
        else:
            bad = size
        if good == most:
            break
    reason = f"one of {good} points without which, all together, {words}"
    return [
        Finding(
            "redundant", "train", int(i), reason, e.name(e.targets[i]), None, -float(e.effect[i])
        )
        for i in order[:good]
    ]


def _change(e: Evidence, before: np.ndarray, after: np.ndarray) -> tuple[float, str]:
    if e.is_classes:
        moved = int(np.sum(before.argmax(axis=1) != after.argmax(axis=1)))
        return moved / len(before), f"{moved} of {len(before):,} predictions change"
    spread = max(float(np.std(before)), np.finfo(float).tiny)
    share = float(np.sqrt(np.mean((after - before) ** 2)) / spread)
    return share, f"predictions move by {share:.1g} of their spread"


def _alike(d: float) -> str:
    if d < 1e-3:
        return "the same as"
    return f"nearly the same as ({d:.2f} of the usual distance to a neighbour)"


def _share(p: float) -> str:
    """No label is called certainly wrong because of rounding."""
    return f"{p:.2f}" if p < 0.995 else "over 0.99"


def _short(value: object) -> str:
    if isinstance(value, (float, np.floating)):
        return f"{value:.4g}"
    return np.array2string(value, precision=3) if isinstance(value, np.ndarray) else str(value)
