r"""Many edits of one step in a row: how far they may have drifted, and a limit on it.

One step leaves an error that is quadratic in the change. A later step starts from there, so a chain of
small edits mostly heals itself, and a chain of large ones does not. The certificate of the last
answer bounds the whole chain, because it is about the edited objective and not about the step.
"""

import sys
from typing import Any, NamedTuple

from .._support.options import check_positive, maybe
from ..problem._certificate import Certificate, Stats

NOTABLE = 1e-2
"""Relative bound above which a note reports the drift of a chain of edits."""


class Chain(NamedTuple):
    """Edits in a row since the last answer that met a tolerance, and a note if they drifted."""

    edits: int
    notes: tuple[str, ...]


def check_drift(drift: Any) -> None:
    """Raise unless `drift` is `None` or a positive relative distance."""
    what = "share of ‖θ − θ₀‖, such as 0.01"
    try:
        maybe(check_positive, "edit: drift", drift, what=what)
    except TypeError as error:
        raise ValueError(f"edit: drift must be a positive {what}, got {drift!r}.") from error


def exceeds(certificate: Certificate, drift: float | None) -> bool:
    """Whether an answer may be farther from retraining than `drift` allows; also if nobody knows."""
    return drift is not None and not certificate.relative_bound <= drift


def follow(before: Stats, certificate: Certificate, *, met: bool) -> Chain:
    """The chain that an edit continues, or ends if it met `until` or `drift`.

    **Arguments:**

    - `before`: stats of the model that was edited.
    - `certificate`: of the answer.
    - `met`: whether a tolerance on the distance was asked for and met.
    """
    if met:
        return Chain(0, ())
    edits = before.edits + 1
    bound = certificate.relative_bound
    if edits == 1 or not certificate.certified or not bound > NOTABLE:
        return Chain(edits, ())
    note = (
        f"after {edits} edits in a row the certified distance is {100 * bound:.2g} % of ‖θ − "
        "θ₀‖; edit(..., drift=0.01) takes further steps if it exceeds 1 %"
    )
    return Chain(edits, (note,))


def told(stats: Stats, chain: Chain) -> Stats:
    """`stats` with the chain's length and note."""
    return stats._replace(edits=chain.edits, notes=(*stats.notes, *chain.notes))


def distance_limit(certificate: Certificate, drift: float) -> float:
    """`drift` as a distance to go on `until`.

    `‖θ − θ₀‖` moves a little in the steps to come: a tenth is kept in hand for that.
    """
    if not certificate.certified:
        raise ValueError(
            "edit: drift limits a certified distance, but a network that is not linear in its "
            "parameters has no certificate. Use steps=... to iterate on its linearisation."
        )
    return 0.9 * drift * max(certificate.parameter_norm - certificate.gap, sys.float_info.min)
