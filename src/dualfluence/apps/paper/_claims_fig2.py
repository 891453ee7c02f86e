"""Fig. 2: published values beside measured ones, and claims about training with a ridge."""

from typing import Any

import numpy as np

from . import _published as published
from ._read import values
from ._verdicts import Claim, PublishedValue, span, verdict

FALLEN = 0.01
"""A gradient must fall to this share of its first value; with twice this value, slow trainings would
count as faster."""


TIE = 0.01
"""Values closer than this share count as equal before the last epoch: the first epochs hardly depend on λ,
whose gradient is zero at the start. With twice this value, a real difference of 2 % would not count."""


def _last(results: dict[str, Any], key: str) -> dict[float, float]:
    found = {r: values(results, f"ridge/{r:g}") for r in results["config"]["ridges"]}
    return {ridge: v[key][-1] for ridge, v in found.items() if v is not None}


def fig2_comparisons(results: dict[str, Any]) -> list[PublishedValue]:
    found = []
    for key, field in (("distance", "distance"), ("accuracy", "accuracy_network")):
        ours = _last(results, field)
        for ridge, value in published.FIG2[key].items():
            why = "another initialisation"
            if ridge == max(results["config"]["ridges"]):
                why = _over_seeds(results, field, value)
            found.append(PublishedValue(f"λ = {ridge:g}, final {key}", value, ours.get(ridge), why))
    return found


def _over_seeds(results: dict[str, Any], field: str, value: float) -> str:
    """The results of other initialisations at the largest ridge, and their distance to `value`."""
    found = [values(results, f"seed/{seed}") for seed in results["config"].get("seeds", ())]
    ends = [v[field] for v in found if v is not None]
    if not ends:
        return "other initialisations were not measured"
    factor = min(max(end / value, value / end) for end in ends)
    return (
        f"partly the initialisation: {len(ends)} seeds end at {span(ends)}, the nearest within a "
        f"factor of {factor:.2g}; the rest is not explained"
    )


def _ordered(numbers: dict[float, float], *, rising: bool) -> bool | None:
    """Whether values rise (or fall) with the ridge."""
    if len(numbers) < 2:
        return None
    line = [numbers[r] for r in sorted(numbers)]
    steps = np.diff(line)
    return bool((steps > 0).all() if rising else (steps < 0).all())


def _listed(numbers: dict[float, float]) -> str:
    return ", ".join(f"{v:.3g} (λ = {r:g})" for r, v in numbers.items())


CLOSER = "paper, section 4.3, paragraph 3, sentence 1; figure 2"
FASTER = "paper, section 4.3, paragraph 3, sentence 2; figure 2"
COST = "paper, section 4.3, paragraph 3, sentence 3; figure 2"


def fig2_claims(results: dict[str, Any]) -> list[Claim]:
    accuracy = _last(results, "accuracy_network")
    return [
        _throughout(
            results, "distance", "A larger λ keeps the network closer to its linearisation"
        ),
        _throughout(results, "rmse", "A larger λ keeps their test outputs closer"),
        *(_gradient_falls(results, which) for which in ("network", "linear")),
        Claim(
            "A larger λ costs test accuracy.",
            COST,
            verdict(_ordered(accuracy, rising=False)),
            _listed(accuracy),
            "4.3 accuracy",
        ),
    ]


def _throughout(results: dict[str, Any], key: str, text: str) -> Claim:
    """At every recorded epoch, and not at the last one alone.

    The start and the first epoch do not count: the first step is the same for both models and every λ.
    """
    found = {r: values(results, f"ridge/{r:g}") for r in results["config"]["ridges"]}
    lines = {
        r: np.asarray(v[key])[np.asarray(v["epoch"]) > 1] for r, v in found.items() if v is not None
    }
    ok, evidence = None, ""
    if len(lines) > 1:
        stack = np.stack([lines[r] for r in sorted(lines)])
        ordered = (stack[1:] <= (1 + TIE) * stack[:-1]).all(axis=0)
        ok = bool(ordered.all() and (stack[1:, -1] < stack[:-1, -1]).all())
        evidence = (
            f"at {int(ordered.sum())} of {ordered.size} recorded epochs; at the last "
            f"{_listed({r: v[-1] for r, v in lines.items()})}"
        )
    what = "4.3 parameters" if key == "distance" else "4.3 outputs"
    return Claim(f"{text}, throughout the training.", CLOSER, verdict(ok), evidence, what)


def _gradient_falls(results: dict[str, Any], which: str) -> Claim:
    """By epochs, not by the last value: that is float32 rounding where λ is large."""
    model = {"network": "network", "linear": "linearisation"}[which]
    text = f"A larger λ brings the gradient of the {model} down faster (epochs to {FALLEN:g} of its start)."
    epochs: dict[float, float] = {}
    for ridge in results["config"]["ridges"]:
        found = values(results, f"ridge/{ridge:g}")
        if found is not None:
            norms = np.asarray(found[f"gradient_{which}"])
            low = np.flatnonzero(norms <= FALLEN * norms[0])
            epochs[ridge] = float(found["epoch"][low[0]]) if low.size else np.inf
    reached = {ridge: count for ridge, count in epochs.items() if np.isfinite(count)}
    ok = _ordered(reached, rising=False)
    if ok and len(reached) < len(epochs):
        ok = min(reached) > max(set(epochs) - set(reached))
    never = [
        f"not in {results['config']['epochs']} (λ = {r:g})" for r in epochs if r not in reached
    ]
    evidence = ", ".join(part for part in (_listed(reached), *never) if part)
    return Claim(text, FASTER, verdict(ok), evidence, "4.3 convergence")
