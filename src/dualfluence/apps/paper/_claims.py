"""Published values beside measured ones, and a verdict on each claim; all from the JSON files."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..compare._names import ITERATED, ONE_STEP, PAPER, PARAMETER
from . import _published as published
from ._claims_fig1 import fig1_claims, fig1_comparisons
from ._read import ROW_TITLES, r_squared, series, values
from ._verdicts import UNKNOWN, Claim, PublishedValue, exactness, span, verdict

R_SQUARED = 0.999
"""Points count as lying on the diagonal above this R²; a threshold twice as far from 1 would accept a
visible spread."""

FALLEN = 0.01
"""A gradient must fall to this share of its first value; with twice this value, slow trainings would
count as faster."""


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


def fig2_claims(results: dict[str, Any]) -> list[Claim]:
    source = "paper, section 4.3"
    table = (
        ("A larger λ keeps the network closer to its linearisation.", "distance", False),
        ("A larger λ keeps their test outputs closer.", "rmse", False),
        ("A larger λ costs test accuracy.", "accuracy_network", False),
    )
    claims = [_gradient_falls(results, source)]
    for text, key, rising in table:
        found = _last(results, key)
        claims.append(Claim(text, source, verdict(_ordered(found, rising=rising)), _listed(found)))
    return claims


def _gradient_falls(results: dict[str, Any], source: str) -> Claim:
    """By epochs, not by the last value: that is float32 rounding where λ is large."""
    text = f"A larger λ brings the gradient down faster (epochs to {FALLEN:g} of its start)."
    epochs: dict[float, float] = {}
    for ridge in results["config"]["ridges"]:
        found = values(results, f"ridge/{ridge:g}")
        if found is not None:
            norms = np.asarray(found["gradient_network"])
            low = np.flatnonzero(norms <= FALLEN * norms[0])
            epochs[ridge] = found["epoch"][low[0]] if low.size else np.inf
    reached = {ridge: count for ridge, count in epochs.items() if np.isfinite(count)}
    ok = _ordered(reached, rising=False)
    if ok and len(reached) < len(epochs):
        ok = min(reached) > max(set(epochs) - set(reached))
    never = [
        f"not in {results['config']['epochs']} (λ = {r:g})" for r in epochs if r not in reached
    ]
    evidence = ", ".join(part for part in (_listed(reached), *never) if part)
    return Claim(text, source, verdict(ok), evidence)


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


def fig3_claims(results: dict[str, Any]) -> list[Claim]:
    source, ridges = "paper, section 4.3", sorted(results["config"]["ridges"])
    claims = []
    for name in (PARAMETER, PAPER, ITERATED):
        found = {ridge: _fig3_distances(results, ridge, name) for ridge in ridges}
        low, high = found[ridges[0]], found[ridges[-1]]
        both = low.keys() & high.keys()
        ok = all(low[p] > high[p] for p in both) if both and len(ridges) > 1 else None
        text = f"{name}: unlearning is closer to retraining at the larger λ, for every percentage."
        lists = {r: d.values() for r, d in found.items() if d}
        evidence = "; ".join(f"λ = {r:g}: {span(d, '{:.1e}')}" for r, d in lists.items())
        claims.append(Claim(text, source, verdict(ok), evidence))
    for name in (PARAMETER, PAPER):
        claims.append(_fails(results, ridges[0], name, source))
    claims.append(_fails(results, ridges[0], ITERATED, "this library"))
    claims.append(_closer_than_parameter_space(results, ridges[-1]))
    return claims


def _fig3_distances(results: dict[str, Any], ridge: float, name: str) -> dict[int, float]:
    pick = lambda v: v["distance"].get(name)  # noqa: E731
    return dict(zip(*series(results, f"ridge/{ridge:g}", pick), strict=True))


def _fails(results: dict[str, Any], ridge: float, name: str, source: str) -> Claim:
    """Whether a method is no better than doing nothing, for every percentage."""
    pick = lambda v: v["distance"][name] / v["change"]  # noqa: E731
    _, ratios = series(results, f"ridge/{ridge:g}", pick)
    text = (
        f"{name} fails at λ = {ridge:g}: it is no closer to retraining than the model before the "
        "removal, for every percentage."
    )
    if not ratios:
        return Claim(text, source, UNKNOWN, "")
    evidence = f"distance over the change to be made: {span(ratios)}"
    _, details = series(results, f"ridge/{ridge:g}", lambda v: v["details"].get(name))
    early = lambda d: any(note.startswith("indefinite Hessian") for note in d["notes"])  # noqa: E731
    stopped = [d["iterations"] for d in details if early(d)]
    if stopped:
        evidence += (
            f"; the Hessian is indefinite there, so our conjugate gradients stop, after "
            f"{span(stopped)} iterations, where JAX's go on"
        )
    return Claim(text, source, verdict(min(ratios) >= 1), evidence)


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
    return Claim(text, "this library", verdict(ok), f"distance over theirs: {evidence}")


def fig4_claims(results: dict[str, Any]) -> list[Claim]:
    claims = []
    for row in (r["name"] for r in results["config"]["rows"]):
        title = f"Infinitely wide {ROW_TITLES[row].split(',')[0]}"
        for training, words in (("published", "as published"), ("exact", "to the optimum")):
            found = values(results, f"{row}/{training}")
            if found is None:
                continue
            step = found["estimates"][ONE_STEP]
            outputs = r_squared(found["actual_outputs"], step["outputs"])
            actual, evaluated = found["actual_loss"], np.ravel(step["loss_evaluated"])
            alone, with_ridge = (
                r_squared(actual, evaluated + extra) for extra in (0.0, step["ridge_term"])
            )
            first_order = {
                key: r_squared(actual, step[key])
                for key in ("loss_with_ridge", "loss_without_ridge")
            }
            claims.append(
                Claim(
                    f"{title}, trained {words}: estimated changes of outputs lie on the diagonal "
                    f"(R² at least {R_SQUARED}).",
                    "paper, section 4.4",
                    verdict(outputs >= R_SQUARED),
                    f"R² = {outputs:.6f}; iterated "
                    f"{r_squared(found['actual_outputs'], found['estimates'][ITERATED]['outputs']):.6f}",
                )
            )
            claims.append(
                Claim(
                    f"{title}, trained {words}: the small offset of the estimated losses is the "
                    "ridge term, which is part of the estimate (eq. 9) but not of the actual "
                    "change.",
                    "this library",
                    verdict(alone >= with_ridge),
                    f"ridge term {step['ridge_term']:.3g} for every query; R² with the loss evaluated "
                    f"at the estimated outputs {alone:.4f}, with the ridge term added "
                    f"{with_ridge:.4f}; to first order, where curvature is missing too, "
                    f"{first_order['loss_without_ridge']:.4f} and "
                    f"{first_order['loss_with_ridge']:.4f}",
                )
            )
    return claims


def linear_claims(results: dict[str, Any]) -> list[Claim]:
    claims = []
    for loss in ("softmax", "squared"):
        text = f"Linear model, {loss}: one dual step equals the step in parameter space."
        pick = lambda v: v["dual_against_parameter_space"]  # noqa: E731
        claims += _exact(results, loss, text, "paper, section 3", pick, 1e-4)
    for loss, name in (("squared", ONE_STEP), ("softmax", ITERATED)):
        text = f"Linear model, {loss}: {name} is exact retraining (1e-5, float32)."
        pick = lambda v, n=name: v["distance"][n]  # noqa: E731
        claims += _exact(results, loss, text, "this library", pick, 1e-5)
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
    return [Claim(text, source, ok, f"{span(found, '{:.1e}')}{more}")]


def none(results: dict[str, Any]) -> list[PublishedValue]:
    return []


COMPARISONS: dict[str, Callable[[dict[str, Any]], list[PublishedValue]]] = {
    "fig1": fig1_comparisons,
    "fig2": fig2_comparisons,
    "fig3": fig3_comparisons,
    "fig4": none,
    "linear": none,
}
CLAIMS: dict[str, Callable[[dict[str, Any]], list[Claim]]] = {
    "fig1": fig1_claims,
    "fig2": fig2_claims,
    "fig3": fig3_claims,
    "fig4": fig4_claims,
    "linear": linear_claims,
}
