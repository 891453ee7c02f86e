"""Fig. 3: published values beside measured ones, and claims about a nonlinear network."""

from typing import Any

from ..compare._names import ITERATED, PAPER, PARAMETER
from . import _published as published
from ._read import series, values
from ._verdicts import OURS, UNKNOWN, Claim, PublishedValue, span, verdict


def fig3_comparisons(results: dict[str, Any]) -> list[PublishedValue]:
    found = []
    for ridge, ends in published.FIG3.items():
        prefix = f"ridge/{ridge:g}"
        ours = dict(zip(*series(results, prefix, lambda v: v["distance"][PAPER]), strict=True))
        training = values(results, f"{prefix}/training")
        why = ""
        if training is not None:
            why = (
                f"‖∇L‖ = {training['gradient_norm']:.2g} after training and the network's change "
                f"differs from Jᵀα by {training['parameter_gap']:.2g} of it; both are part of "
                "the distance"
            )
        for percent, value in published.at_percentages(ends).items():
            if percent in results["config"]["percentages"]:
                label = f"λ = {ridge:g}, distance of the dual form, {percent} %"
                found.append(PublishedValue(label, value, ours.get(percent), why))
    return found


FAITHFUL = "paper, section 4.3, paragraph 4, last sentence; figure 3"


def fig3_claims(results: dict[str, Any]) -> list[Claim]:
    ridges = sorted(results["config"]["ridges"])
    claims = []
    for name in (PARAMETER, PAPER, ITERATED):
        found = {ridge: _fig3_distances(results, ridge, name) for ridge in ridges}
        low, high = found[ridges[0]], found[ridges[-1]]
        both = low.keys() & high.keys()
        ok = all(low[p] > high[p] for p in both) if both and len(ridges) > 1 else None
        text = f"{name}: unlearning is closer to retraining at the larger λ, for every percentage."
        lists = {r: d.values() for r, d in found.items() if d}
        evidence = "; ".join(f"λ = {r:g}: {span(d, '{:.1e}')}" for r, d in lists.items())
        whose, label = (OURS, "") if name == ITERATED else (FAITHFUL, "4.3 unlearning")
        claims.append(Claim(text, whose, verdict(ok), evidence, label))
    claims += [_fails(results, ridges[0], name) for name in (PARAMETER, PAPER, ITERATED)]
    claims.append(_closer_than_parameter_space(results, ridges[-1]))
    return claims


def _fig3_distances(results: dict[str, Any], ridge: float, name: str) -> dict[int, float]:
    pick = lambda v: v["distance"].get(name)  # noqa: E731
    return dict(zip(*series(results, f"ridge/{ridge:g}", pick), strict=True))


def _fails(results: dict[str, Any], ridge: float, name: str) -> Claim:
    """Whether a method is no better than doing nothing, for every percentage."""
    pick = lambda v: v["distance"][name] / v["change"]  # noqa: E731
    _, ratios = series(results, f"ridge/{ridge:g}", pick)
    text = (
        f"{name} fails at λ = {ridge:g}: it is no closer to retraining than the model before the "
        "removal, for every percentage."
    )
    if not ratios:
        return Claim(text, OURS, UNKNOWN, "")
    evidence = f"distance over the change to be made: {span(ratios)}"
    _, details = series(results, f"ridge/{ridge:g}", lambda v: v["details"].get(name))
    early = lambda d: any(note.startswith("indefinite Hessian") for note in d["notes"])  # noqa: E731
    stopped = [d["iterations"] for d in details if early(d)]
    if stopped:
        evidence += (
            f"; the Hessian is indefinite there, so our conjugate gradients stop, after "
            f"{span(stopped)} iterations, where JAX's go on"
        )
    return Claim(text, OURS, verdict(min(ratios) >= 1), evidence)


def _closer_than_parameter_space(results: dict[str, Any], ridge: float) -> Claim:
    """Our form knows the network's linearisation only; parameter space its own Hessian."""
    ours, theirs = (_fig3_distances(results, ridge, n) for n in (ITERATED, PARAMETER))
    text = (
        f"{ITERATED} comes at least as close to the retrained network as {PARAMETER} at λ = {ridge:g}, "
        "for every percentage."
    )
    ratios = {p: ours[p] / theirs[p] for p in ours if p in theirs}
    ok = max(ratios.values()) <= 1 if ratios else None
    evidence = ", ".join(f"{r:.2g} ({p} %)" for p, r in ratios.items())
    return Claim(text, OURS, verdict(ok), f"distance over theirs: {evidence}")
