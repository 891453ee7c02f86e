"""The result of an audit: findings in words, and the numbers behind them for every point."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any

import numpy as np
from jaxtyping import Float

from .._support.checks import as_array, check_finite, check_rows
from .._support.options import check_choice, check_count
from .._support.show import Shown, Table, count, html_table
from .._support.types import Json, Numbers

KINDS = ("label", "conflict", "leak", "leverage", "redundant")
"""In the order in which they are listed."""

TITLES = {
    "label": "wrong labels",
    "conflict": "near duplicates that disagree",
    "leak": "test points that are in the training set",
    "leverage": "points that carry their prediction alone",
    "redundant": "points without which nothing changes",
}

SHOWN = 5
"""Findings in the text of a record."""


@dataclass(frozen=True)
class Finding:
    """One thing to look at.

    - `kind`: `"label"`, `"conflict"`, `"leak"`, `"leverage"` or `"redundant"`.
    - `split`, `index`: the point: `"train"` or `"test"`, and its position there.
    - `reason`: in words, why the point was found.
    - `given`, `suggested`: the point's target, and a target that fits better, if there is one.
    - `score`: larger is more serious; comparable within a kind.
    - `probability`: that the target is wrong, for the kind `"label"`.
    - `partner`: position of the training point that the finding compares this point with.
    """

    kind: str
    split: str
    index: int
    reason: str
    given: object = None
    suggested: object = None
    score: float = 0.0
    probability: float | None = None
    partner: int | None = None


FIELDS = [f.name for f in fields(Finding)]
"""Columns of the long form."""


@dataclass(frozen=True, eq=False, repr=False)
class Audit(Shown):
    """What `dualfluence.audit` found in a training set.

    - `findings`: all of them, by kind and then the most serious first.
    - `task`: `"classification"` or `"regression"`.
    - `classes`: the label of each class number; `None` if targets are numbers.
    - `labels`: what each point was given: numbers of classes `(n,)`, or values `(n, c)`.
    - `wrong`: probability that each label is wrong, `(n,)`; the sum over a set is the number of wrong
      labels to expect in it.
    - `suspicion`: the same as log odds, to rank by.
    - `suggested`: the target that fits better than the given one, in the form of `labels`.
    - `probabilities`: calibrated probabilities of every label at every point, from the model trained
      without that point, `(n, c)`; `None` if targets are numbers.
    - `left_out`: outputs at each point of the model that was trained without this point, `(n, c)`.
    - `leverage`: share of each point's prediction that its own target makes up, `(n,)`.
    - `effect`: how far all predictions move without the point, `(n,)`; for a `Fitted`, how far the
      losses move.
    - `neighbour`, `distance`: the nearest other training point, and how far it is; 1 is the median.
    - `test_wrong`: probability that each test label is wrong, where these were given.
    - `notes`: how the findings were made and what they leave out.
    """

    findings: tuple[Finding, ...]
    task: str
    classes: np.ndarray | None
    labels: np.ndarray
    wrong: Float[np.ndarray, " n"]
    suspicion: Float[np.ndarray, " n"]
    suggested: np.ndarray
    probabilities: Float[np.ndarray, "n c"] | None
    left_out: Float[np.ndarray, "n c"]
    leverage: Float[np.ndarray, " n"]
    effect: Float[np.ndarray, " n"]
    neighbour: np.ndarray
    distance: Float[np.ndarray, " n"]
    test_wrong: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    stats: Json = field(default_factory=dict)

    @property
    def num_points(self) -> int:
        return len(self.wrong)

    @property
    def counts(self) -> dict[str, int]:
        """Number of findings by kind."""
        return {kind: sum(f.kind == kind for f in self.findings) for kind in KINDS}

    @property
    def flagged(self) -> np.ndarray:
        """Positions of training points whose label is called wrong, the surest first."""
        own = (f for f in self.findings if f.kind == "label" and f.split == "train")
        return np.array([f.index for f in own], int)

    @property
    def expected_precision(self) -> float:
        """Share of the flagged labels that should truly be wrong; NaN if none is flagged."""
        return float(np.mean(self.wrong[self.flagged])) if len(self.flagged) else float("nan")

    @property
    def label_quality(self) -> np.ndarray:
        """One number per point, small where the label is doubtful: `1 − wrong`."""
        return 1 - self.wrong

    @property
    def mended(self) -> np.ndarray:
        """The targets, in the form that was given, with the suggestion in place of each flagged one."""
        changed = np.array(self.labels)
        changed[self.flagged] = self.suggested[self.flagged]
        if self.classes is not None:
            return self.classes[changed]
        return changed[:, 0] if changed.shape[1] == 1 else changed

    def top(self, k: int = 10, kind: str | None = None) -> tuple[Finding, ...]:
        """The first `k` findings, of one kind if it is named."""
        k = check_count("top: k", k)
        if kind is not None:
            check_choice("top: kind", kind, KINDS)
        return tuple(f for f in self.findings if kind in (None, f.kind))[:k]

    def scores(self, **others: Numbers) -> dict[str, np.ndarray]:
        """One row per training point: what was found here, and scores of other tools beside it.

        **Arguments:**

        - `others`: columns by name, one number per training point.
        """
        columns = {
            "index": np.arange(self.num_points),
            "wrong": self.wrong,
            "suspicion": self.suspicion,
            "leverage": self.leverage,
            "effect": self.effect,
            "neighbour": self.neighbour,
            "distance": self.distance,
        }
        for name, values in others.items():
            array = np.asarray(as_array(f"scores: {name}", values))
            check_rows(f"scores: {name}", array, self.num_points, "training point")
            if array.ndim != 1:
                raise ValueError(f"scores: {name} must be one number per point, got {array.shape}.")
            if name in columns:
                raise ValueError(f"scores: {name} is a column already. Give it another name.")
            check_finite(f"scores: {name}", array)
            columns[name] = array
        return columns

    def to_pandas(self, **others: Numbers) -> Any:
        """A `pandas.DataFrame` in long form: one row per finding.

        With scores of other tools by name, one row per training point instead: `scores(**others)`.
        """
        pd = _pandas("to_pandas")
        if others:
            return pd.DataFrame(self.scores(**others)).set_index("index")
        return pd.DataFrame(list(self.rows()), columns=FIELDS)

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Findings as rows of plain values."""
        return (tuple(_plain(getattr(f, name)) for name in FIELDS) for f in self.findings)

    def _table(self) -> Table:
        points = count(self.num_points, "training point")
        kinds = (
            "" if self.classes is None else f" of {count(len(self.classes), 'class', 'classes')}"
        )
        rows = [(TITLES[kind], str(number)) for kind, number in self.counts.items() if number]
        if len(self.flagged):
            expected = f"about {self.expected_precision * len(self.flagged):.0f} of them truly"
            rows[0] = (rows[0][0], f"{rows[0][1]}, {expected}")
        firsts = [
            (f"{f.kind} {'' if f.split == 'train' else 'test '}{f.index}", f.reason)
            for f in self.findings[:SHOWN]
        ]
        found = rows or [("nothing", "no finding")]
        return f"Audit of {points}{kinds}", [*found, *firsts]

    def _repr_html_(self) -> str:
        return html_table(*self._table())


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value


def _pandas(call: str) -> Any:
    try:
        return import_module("pandas")  # the user's own: nothing here depends on it
    except ImportError as error:
        raise ImportError(f"{call}: pandas is not installed; pip install pandas.") from error
