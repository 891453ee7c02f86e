"""Claims about cost against the number of parameters, from the records of `benchmarks/crossover.py`."""

from typing import Any

from ..compare._names import PAPER, PARAMETER
from ._verdicts import UNKNOWN, Claim, span, verdict

LARGE = 10.0
"""A network counts as large for its data from this many parameters per unknown. The abstract gives no number;
with twice this value, fewer networks of the record count."""

STEADY = 2.0
"""Factor by which the seconds of a step may vary and still count as independent of the parameters."""


def crossover_claims(found: dict[str, Any], machine: str) -> list[Claim]:
    """The claims on one record; `machine` is where it was made, in words."""
    return [_efficient(found, machine), _independent(found, machine)]


def _efficient(found: dict[str, Any], machine: str) -> Claim:
    text = f"{machine}: {PAPER} is faster than {PARAMETER} from {LARGE:g} parameters per unknown."
    source = "paper, section 1, paragraph 3; abstract"
    large = [row for row in found["rows"] if row["p_over_nc"] >= LARGE]
    if not large:
        return Claim(text, source, UNKNOWN, "", "abstract")
    lead = [
        min(row["methods"][PARAMETER]["seconds"]) / min(row["methods"][PAPER]["seconds"])
        for row in large
    ]
    place = found["crossing"]["measured"]
    where = f"at {place:.2g} parameters per unknown" if place else "nowhere in this range"
    evidence = f"{span(lead)} times as fast there; they cross {where}"
    return Claim(text, source, verdict(min(lead) > 1), evidence, "abstract")


def _independent(found: dict[str, Any], machine: str) -> Claim:
    text = f"{machine}: a step of {PAPER} takes as long for a large network as for a small one."
    steps = {
        name: [
            row["methods"][name]["solve_seconds"] / row["methods"][name]["iterations"]
            for row in found["rows"]
        ]
        for name in (PAPER, PARAMETER)
    }
    factor = {name: max(found) / min(found) for name, found in steps.items()}
    evidence = (
        f"varies by a factor of {factor[PAPER]:.2g}, a step of {PARAMETER} by "
        f"{factor[PARAMETER]:.2g}"
    )
    place = "paper, section 3.3, property (i) below equation 12"
    return Claim(text, place, verdict(factor[PAPER] <= STEADY), evidence, "3.3 (i)")
