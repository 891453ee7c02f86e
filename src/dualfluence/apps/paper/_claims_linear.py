"""The linear models: claims about exactness and time, and the authors' recorded values beside ours."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from ..compare._names import ITERATED, ONE_STEP, PAPER, PARAMETER, RETRAINED
from . import _published as published
from ._read import series, values
from ._verdicts import OURS, UNKNOWN, Claim, PublishedValue, exactness, span, verdict

EQUAL = "paper, section 3.1, after proposition 3.3"
AUTHORS_PER_CLASS = 5000
EQUAL_LIMIT, EXACT_LIMIT = 1e-4, 1e-5
"""Largest relative distance of two steps that are the same, and of one that is retraining, in float32."""


def linear_comparisons(results: dict[str, Any]) -> list[PublishedValue]:
    """The authors' recorded values beside ours, if sizes are theirs."""
    if results["config"]["data"]["per_class_train"] != AUTHORS_PER_CLASS:
        return []
    distance = lambda name: lambda v: v["distance"]["published"][name]  # noqa: E731
    median = lambda name: lambda v: warm_seconds(results, v, name)  # noqa: E731
    picks = {
        "warm parameter space": median(PARAMETER),
        "warm dual": median(PAPER),
        "distance parameter space": distance(PARAMETER),
        "distance dual": distance(PAPER),
        "forget accuracy": lambda v: v["accuracy"]["published"][RETRAINED]["forgotten"],
    }
    found = []
    for what, numbers in published.AUTHORS_LINEAR.items():
        ours = _by_percentage(results, picks[what])
        for percent, value in published.at_percentages(numbers).items():
            if percent in results["config"]["percentages"]:
                why = _why(results, what)
                found.append(PublishedValue(f"{what}, {percent} %", value, ours.get(percent), why))
    return found


def _why(results: dict[str, Any], what: str) -> str:
    if what.startswith("warm"):
        return f"seconds on {results['environment']['device']} instead of two RTX 3080 Ti, compiled"
    if what.startswith("distance"):
        return "products in full float32 instead of TF32, and another random readout to start from"
    return "other random features and other random points"


def warm_seconds(results: dict[str, Any], v: dict[str, Any], name: str) -> float:
    """Median of the later calls: processor seconds on a CPU, which other programs do not lengthen."""
    on_cpu = results["environment"].get("platform") == "cpu"
    return float(np.median(v["warm_cpu_seconds" if on_cpu else "warm_seconds"][name]))


def _by_percentage(
    results: dict[str, Any], pick: Callable[[dict[str, Any]], Any]
) -> dict[int, Any]:
    pieces = {
        percent: values(results, f"{percent}") for percent in results["config"]["percentages"]
    }
    return {percent: pick(v) for percent, v in pieces.items() if v is not None}


def linear_claims(results: dict[str, Any]) -> list[Claim]:
    """Claims about the authors' linear model."""
    apart = _by_percentage(results, lambda v: v["dual_against_parameter_space"]["exact"])
    retrained = _by_percentage(results, lambda v: v["distance"]["exact"][ONE_STEP])
    resolved = _by_percentage(
        results, lambda v: v["retrained_bound"] + v["details"]["exact"][ITERATED]["bound"]
    )
    same = "Linear model: one dual step equals the step in parameter space, at the optimum."
    exact = (
        f"Linear model: {ONE_STEP} is exact retraining, at the optimum ({EXACT_LIMIT:g}, float32)."
    )
    return [
        _zero(same, EQUAL, apart, EQUAL_LIMIT, resolved, "3.1 equivalence"),
        _zero(exact, OURS, retrained, EXACT_LIMIT, resolved, ""),
        *(_closer(results, name) for name in (PAPER, ONE_STEP)),
        *(_faster(results, name) for name in (PAPER, ONE_STEP)),
        _dual_gets_cheaper(results),
    ]


def _zero(
    text: str,
    source: str,
    found: dict[int, float],
    limit: float,
    resolved: dict[int, float],
    label: str,
) -> Claim:
    if not found:
        return Claim(text, source, UNKNOWN, "", label)
    ok, more = exactness(list(found.values()), limit, list(resolved.values()))
    return Claim(text, source, ok, f"{span(found.values(), '{:.1e}')}{more}", label)


def _closer(results: dict[str, Any], name: str) -> Claim:
    """Parameter space knows the gradient outside of the span of `Jᵀ`, where descent has not ended."""
    text = (
        f"Linear model, trained as published: {name} comes closer to the model retrained as published "
        f"than {PARAMETER}, for every percentage."
    )
    pairs = _by_percentage(
        results, lambda v: [v["distance"]["published"][n] for n in (name, PARAMETER)]
    )
    if not pairs:
        return Claim(text, OURS, UNKNOWN, "")
    ok = all(dual < primal for dual, primal in pairs.values())
    listed = ", ".join(f"{a:.1e} and {b:.1e} ({p} %)" for p, (a, b) in pairs.items())
    return Claim(text, OURS, verdict(ok), listed)


def _faster(results: dict[str, Any], name: str) -> Claim:
    text = f"Linear model, warm: {name} is faster than {PARAMETER}, for every percentage."

    def pick(v: dict[str, Any]) -> float:
        return warm_seconds(results, v, PARAMETER) / warm_seconds(results, v, name)

    ratios = _by_percentage(results, pick)
    if not ratios:
        return Claim(text, OURS, UNKNOWN, "")
    ok = min(ratios.values()) > 1
    return Claim(text, OURS, verdict(ok), f"{span(ratios.values())} times")


def _dual_gets_cheaper(results: dict[str, Any]) -> Claim:
    text = f"Linear model, warm: {PAPER} takes less time the more points are removed."
    source = "paper, section 3.3, property (ii) below equation 12"
    seconds = _by_percentage(results, lambda v: warm_seconds(results, v, PAPER))
    line = list(seconds.values())
    ok = all(a > b for a, b in itertools.pairwise(line)) if len(line) > 1 else None
    listed = ", ".join(f"{t:.3g} s ({p} %)" for p, t in seconds.items())
    return Claim(text, source, verdict(ok), listed, "3.3 (ii)")


def linear_ten_claims(results: dict[str, Any]) -> list[Claim]:
    claims = []
    for loss in ("softmax", "squared"):
        text = f"Ten classes, {loss}: one dual step equals the step in parameter space."
        pick = lambda v: v["dual_against_parameter_space"]  # noqa: E731
        claims += _exact(results, loss, text, EQUAL, pick, EQUAL_LIMIT)
    for loss, name in (("squared", ONE_STEP), ("softmax", ITERATED)):
        text = f"Ten classes, {loss}: {name} is exact retraining ({EXACT_LIMIT:g}, float32)."
        pick = lambda v, n=name: v["distance"][n]  # noqa: E731
        claims += _exact(results, loss, text, OURS, pick, EXACT_LIMIT)
    return claims


def _exact(
    results: dict[str, Any], loss: str, text: str, source: str, pick: Any, limit: float
) -> list[Claim]:
    """A claim that distances are zero, judged by what the certificates resolve."""
    _, found = series(results, loss, pick)
    _, resolved = series(
        results, loss, lambda v: v["retrained_bound"] + v["details"][ITERATED]["bound"]
    )
    if not found:
        return []
    ok, more = exactness(found, limit, resolved)
    label = "3.1 equivalence" if source == EQUAL else ""
    return [Claim(text, source, ok, f"{span(found, '{:.1e}')}{more}", label)]
