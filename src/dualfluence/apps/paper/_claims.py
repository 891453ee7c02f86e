"""Published values beside measured ones, and a verdict on each claim; all from the JSON files."""

from collections.abc import Callable
from typing import Any

from ._claims_fig1 import fig1_claims, fig1_comparisons
from ._claims_fig2 import fig2_claims, fig2_comparisons
from ._claims_fig3 import fig3_claims, fig3_comparisons
from ._claims_fig4 import fig4_claims
from ._claims_linear import linear_claims, linear_comparisons, linear_ten_claims
from ._config import OWN
from ._verdicts import Claim, PublishedValue


def none(results: dict[str, Any]) -> list[PublishedValue]:
    return []


COMPARISONS: dict[str, Callable[[dict[str, Any]], list[PublishedValue]]] = {
    "fig1": fig1_comparisons,
    "fig2": fig2_comparisons,
    "fig3": fig3_comparisons,
    "fig4": none,
    "linear": linear_comparisons,
    "linear-ten": none,
    OWN: none,
}


def no_claims(results: dict[str, Any]) -> list[Claim]:
    return []


CLAIMS: dict[str, Callable[[dict[str, Any]], list[Claim]]] = {
    "fig1": fig1_claims,
    "fig2": fig2_claims,
    "fig3": fig3_claims,
    "fig4": fig4_claims,
    "linear": linear_claims,
    "linear-ten": linear_ten_claims,
    OWN: no_claims,
}
