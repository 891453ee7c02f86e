"""A published value beside ours; a claim and whether the numbers bear it out."""

from dataclasses import dataclass
from typing import Any

HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "not measured"
PARTLY = "holds where measured"
FACTOR = 2.0
"""Published and measured values further apart than this are explained; doubled, fewer are."""


@dataclass(frozen=True)
class PublishedValue:
    """One published value beside ours.

    - `what`: the quantity.
    - `published`, `measured`: the two values; `None` where ours was not measured.
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
        """By more than a factor of two."""
        return self.ratio is not None and not 1 / FACTOR <= self.ratio <= FACTOR


@dataclass(frozen=True)
class Claim:
    """A claim and whether the numbers bear it out.

    - `text`: the claim.
    - `source`: who makes it.
    - `verdict`: one of `HOLDS`, `FAILS`, `PARTLY`, `UNKNOWN`.
    - `evidence`: the numbers.
    """

    text: str
    source: str
    verdict: str
    evidence: str


def verdict(ok: bool | None) -> str:
    return UNKNOWN if ok is None else HOLDS if ok else FAILS


def span(numbers: Any, form: str = "{:.3g}") -> str:
    """Smallest to largest."""
    low, high = form.format(min(numbers)), form.format(max(numbers))
    return low if low == high else f"{low} to {high}"
