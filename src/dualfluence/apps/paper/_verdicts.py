"""A published value beside ours; a claim, and whether the numbers support it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "not measured"
PARTLY = "holds where measured"
UNDECIDED = "not decided at this precision"
OURS = "this library"
FACTOR = 2.0
"""Published and measured values whose ratio is larger than this are explained."""


@dataclass(frozen=True)
class PublishedValue:
    """One published value beside ours.

    - `what`: the quantity.
    - `published`, `measured`: the two values; `None` if ours was not measured.
    - `why`: the reason if they differ.
    """

    what: str
    published: float
    measured: float | None
    why: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.measured is None else self.measured / self.published

    @property
    def differs(self) -> bool:
        """Whether they differ by more than a factor of two."""
        return self.ratio is not None and not 1 / FACTOR <= self.ratio <= FACTOR


@dataclass(frozen=True)
class Claim:
    """A claim, and whether the numbers support it.

    - `text`: the claim.
    - `source`: the place in the paper, or this library.
    - `verdict`: one of `HOLDS`, `FAILS`, `PARTLY`, `UNDECIDED`, `UNKNOWN`.
    - `evidence`: the numbers.
    - `label`: the item of the paper that it judges, as the table of the results page names it.
    """

    text: str
    source: str
    verdict: str
    evidence: str
    label: str = ""


def verdict(ok: bool | None) -> str:
    return UNKNOWN if ok is None else HOLDS if ok else FAILS


def exactness(found: Sequence[float], limit: float, resolved: Sequence[float]) -> tuple[str, str]:
    """A verdict on distances that should be zero, with a remark.

    `resolved` is the distance to which each pair is certified, rounding included: a smaller distance
    decides nothing, even if it is larger than `limit`.
    """
    over = [(d, r) for d, r in zip(found, resolved, strict=True) if d > limit]
    if not over:
        return HOLDS, ""
    if any(d > r for d, r in over):
        return FAILS, ""
    worst = max(r for _, r in over)
    return UNDECIDED, f"; this precision certifies parameters to {worst:.1e} only"


def span(numbers: Any, form: str = "{:.3g}") -> str:
    """Smallest and largest value in words."""
    low, high = form.format(min(numbers)), form.format(max(numbers))
    return low if low == high else f"{low} to {high}"
