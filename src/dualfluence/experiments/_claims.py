"""Published against measured values, and a verdict on each claim; all from the JSON files."""

from collections.abc import Callable
from typing import Any

import numpy as np

from . import _published as published
from ._claims_fig1 import fig1_claims, fig1_comparisons
from ._methods import ITERATED, ONE_STEP, PAPER, PARAMETER
from ._plots import ROW_TITLES, r_squared, series, values
from ._verdicts import Claim, Comparison, span, verdict

R_SQUARED = 0.999
FALLEN = 0.01


def _last(results: dict[str, Any], key: str) -> dict[float, float]:
    found = {r: values(results, f"ridge/{r:g}") for r in results["config"]["ridges"]}
    return {ridge: v[key][-1] for ridge, v in found.items() if v is not None}


def fig2_comparisons(results: dict[str, Any]) -> list[Comparison]:
    found = []
    norms = _last(results, "gradient_network")
    for key, field in (("distance", "distance"), ("accuracy", "accuracy_network")):
        ours = _last(results, field)
        for ridge, value in published.FIG2[key].items():
            why = ""
            if ridge in norms:
                seeds = "another initialisation"
                if ridge == max(results["config"]["ridges"]):
                    seeds = _over_seeds(results, field, value)
                why = f"{seeds}; ‖∇L‖ is {norms[ridge]:.2g} at the last epoch"
            found.append(Comparison(f"λ = {ridge:g}, final {key}", value, ours.get(ridge), why))
    return found


def _over_seeds(results: dict[str, Any], field: str, value: float) -> str:
    """What other initialisations give at the largest ridge, and how near they come to `value`."""
    found = [values(results, f"seed/{seed}") for seed in results["config"].get("seeds", ())]
    ends = [v[field] for v in found if v is not None]
    if not ends:
        return "other initialisations were not measured"
    factor = min(max(end / value, value / end) for end in ends)
    return (
        f"the initialisation, in part: {len(ends)} seeds end at {span(ends)}, the nearest within a "
        f"factor of {factor:.2g}; a value read off a logarithmic axis is good to some 20 %"
    )


def _ordered(numbers: dict[float, float], *, rising: bool) -> bool | None:
    """Whether values rise (or fall) with the ridge."""
    if len(numbers) < 2:
        return None
    line = [numbers[r] for r in sorted(numbers)]
    steps = np.diff(line)
    return bool((steps >= 0).all() if rising else (steps <= 0).all())


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


def fig3_comparisons(results: dict[str, Any]) -> list[Comparison]:
    found = []
    for ridge, ends in published.FIG3.items():
        prefix = f"ridge/{ridge:g}"
        ours = dict(zip(*series(results, prefix, lambda v: v["distance"][PAPER]), strict=True))
        training = values(results, f"{prefix}/training")
        why = ""
        if training is not None:
            why = (
                f"‖∇L‖ = {training['gradient_norm']:.2g} after training and the network's change "
                f"differs from Jᵀα by {training['parameter_gap']:.2g} of it; both enter the distance"
            )
        for percent, value in published.at_percentages(ends).items():
            if percent in results["config"]["percentages"]:
                label = f"λ = {ridge:g}, distance of the dual form, {percent} %"
                found.append(Comparison(label, value, ours.get(percent), why))
    return found


def fig3_claims(results: dict[str, Any]) -> list[Claim]:
    source = "paper, section 4.3"
    worst: dict[str, dict[float, list[float]]] = {}
    for name in (PARAMETER, PAPER, ITERATED):
        worst[name] = {
            ridge: series(results, f"ridge/{ridge:g}", lambda v, n=name: v["distance"].get(n))[1]
            for ridge in results["config"]["ridges"]
        }
    claims = []
    for name, found in worst.items():
        text = f"{name}: unlearning is closer to retraining at the larger λ, for every percentage."
        lists = [found[ridge] for ridge in sorted(found)]
        pairs = list(zip(*lists, strict=False))
        ok = all(p[0] > p[-1] for p in pairs) if pairs and len(lists) > 1 else None
        evidence = "; ".join(f"λ = {r:g}: {span(d, '{:.1e}')}" for r, d in found.items() if d)
        claims.append(Claim(text, source, verdict(ok), evidence))
    low = min(results["config"]["ridges"])
    for name in (PARAMETER, PAPER):
        pick = lambda v, n=name: v["distance"][n] / v["change"]  # noqa: E731
        _, ratios = series(results, f"ridge/{low:g}", pick)
        text = (
            f"{name} fails at λ = {low:g}: no closer to retraining than the model it started from."
        )
        ok = max(ratios) >= 1 if ratios else None
        evidence = f"distance over the change to be made: {span(ratios)}" if ratios else ""
        claims.append(Claim(text, source, verdict(ok), evidence))
    return claims


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
            loss = {
                key: r_squared(found["actual_loss"], step[key])
                for key in ("loss_with_ridge", "loss_without_ridge", "loss_evaluated")
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
                    "ridge term, which the estimate (eq. 9) counts and the actual change does not.",
                    "this library",
                    verdict(loss["loss_without_ridge"] >= loss["loss_with_ridge"]),
                    f"ridge term {step['ridge_term']:.3g} for every query; R² with it "
                    f"{loss['loss_with_ridge']:.4f}, without {loss['loss_without_ridge']:.4f}, "
                    f"loss evaluated instead of first order {loss['loss_evaluated']:.4f}",
                )
            )
    return claims


def linear_claims(results: dict[str, Any]) -> list[Claim]:
    claims = []
    for loss in ("softmax", "squared"):
        _, apart = series(results, loss, lambda v: v["dual_against_parameter_space"])
        text = f"Linear model, {loss}: one dual step equals the step in parameter space."
        if apart:
            ok = max(apart) <= 1e-4
            claims.append(
                Claim(text, "paper, section 3", verdict(ok), f"apart by {span(apart, '{:.1e}')}")
            )
    for loss, name in (("squared", ONE_STEP), ("softmax", ITERATED)):
        _, found = series(results, loss, lambda v, n=name: v["distance"][n])
        text = f"Linear model, {loss}: {name} is exact retraining (1e-5, float32)."
        if found:
            ok = max(found) <= 1e-5
            claims.append(Claim(text, "this library", verdict(ok), span(found, "{:.1e}")))
    return claims


def none(results: dict[str, Any]) -> list[Comparison]:
    return []


COMPARISONS: dict[str, Callable[[dict[str, Any]], list[Comparison]]] = {
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
