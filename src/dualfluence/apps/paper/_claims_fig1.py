"""Fig. 1: published values beside measured ones, and claims about runtime and distance."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..compare._names import (
    HELD,
    ITERATED,
    ONE_STEP,
    PAPER,
    PAPER_RELEASED,
    PARAMETER,
    PARAMETER_RELEASED,
    RELEASED,
    RETRAINED,
    SHARDED,
)
from . import _published as published
from ._methods import RELEASED_PRECISION
from ._read import ROW_TITLES, series, values
from ._verdicts import HOLDS, OURS, PARTLY, UNKNOWN, Claim, PublishedValue, span, verdict

WARM_FACTOR, COLD_FACTOR = 50.0, 3.0
"""Speedups that this library claims."""

CNN_DISTANCE = 1e-6
"""Distance to exact retraining that this library claims for the CNN."""

ACCURACY_SLACK = 0.02
"""Accuracies closer than this count as equal; a larger value would make the paper's claim easier."""

SMALL_SHARE, COMPARABLE_FACTOR = 0.2, 2.0
"""A distance is small up to this share of the change that the removal makes; two distances are comparable
up to this factor. With twice these values, a method that leaves 40 % of the change would do."""

ROUNDING_DISTANCE = 1e-6
"""Distances below this are float32 rounding and count as equal."""


def fig1_comparisons(results: dict[str, Any]) -> list[PublishedValue]:
    found = []
    median = lambda name: lambda v: _median(v["warm_seconds"].get(name))  # noqa: E731
    picks: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
        "warm parameter space": (median(PARAMETER_RELEASED), ""),
        "warm dual": (median(PAPER_RELEASED), ""),
        "cold dual": (lambda v: v["cold_seconds"].get(PAPER_RELEASED), "/cold"),
        "distance dual": (lambda v: v["distance"]["published"]["published"][PAPER], ""),
        "distance parameter space": (
            lambda v: v["distance"]["published"]["published"][PARAMETER],
            "",
        ),
        "forget accuracy": (lambda v: v["accuracy"]["published"][RETRAINED]["forgotten"], ""),
    }
    for row, table in published.FIG1.items():
        for what, numbers in table.items():
            pick, suffix = picks[what]
            ours = dict(zip(*series(results, row, pick, suffix), strict=True))
            for percent, value in published.at_percentages(numbers).items():
                if percent in results["config"]["percentages"]:
                    label = f"{ROW_TITLES[row].split(',')[0]}, {what}, {percent} %"
                    why = _why_fig1(results, row, what, percent)
                    found.append(PublishedValue(label, value, ours.get(percent), why))
    return found


def _why_fig1(results: dict[str, Any], row: str, what: str, percent: int) -> str:
    if what.startswith(("warm", "cold")):
        return _why_seconds(results, row, what, percent)
    if not what.startswith("distance"):
        return "other random initialisation and other random points"
    training, here = values(results, f"{row}/training"), values(results, f"{row}/{percent}")
    if training is None or here is None:
        return ""
    name, released = (PAPER, PAPER_RELEASED) if "dual" in what else (PARAMETER, PARAMETER_RELEASED)
    measured, exact = (here["distance"][base][base][name] for base in ("published", "exact"))
    descent = max(training["descent_to_optimum"], here["retrained_apart"])
    sets = "the method itself" if exact > measured / 2 else "gradient descent"
    default = _at_default(results, row, percent, released)
    tf32 = "not measured here" if default is None else f"as released it ends at {default:.2g}"
    return (
        f"in full float32, {sets} determines this number: between two optima it is {exact:.2g}, "
        f"and gradient descent ends up to {descent:.2g} from an optimum. With TF32, JAX's "
        f"default on the published GPUs, which rounds operands to 5e-4: {tf32}"
    )


def _why_seconds(results: dict[str, Any], row: str, what: str, percent: int) -> str:
    device = results["environment"]["device"]
    why = f"seconds on {device} instead of two RTX 3080 Ti, and our implementation of the method"
    if what.startswith("cold"):
        why += ", whose first calls include XLA's search over Triton kernels"
        cold = _seconds(results, row, "cold", PAPER).get(percent)
        if cold is not None:
            why += f" (our compiled version, without that search: {cold:.2g} s)"
    return why


def _at_default(results: dict[str, Any], row: str, percent: int, method: str) -> float | None:
    """Distance that a method as released leaves with matrix products at JAX's default precision."""
    here = values(results, f"{row}/{percent}")
    if here is not None and here.get("released_precision") == RELEASED_PRECISION:
        return here["distance"]["published"]["published"][method]
    apart = values(results, f"{row}/{percent}/default_precision")
    return None if apart is None else apart["distance"]["published"][method]


def _median(seconds: list[float] | None) -> float | None:
    return None if seconds is None else float(np.median(seconds))


def _seconds(results: dict[str, Any], row: str, kind: str, name: str) -> dict[int, float]:
    """By percentage; of repeated calls the median, which one slow call does not move."""
    if kind == "warm":
        pick = lambda v: _median(v["warm_seconds"].get(name))  # noqa: E731
        return dict(zip(*series(results, row, pick), strict=True))
    return dict(
        zip(*series(results, row, lambda v: v["cold_seconds"].get(name), "/cold"), strict=True)
    )


def _speedup(
    results: dict[str, Any], row: str, kind: str, slow: str, fast: str
) -> dict[int, float]:
    """Seconds of `slow` over those of `fast`, by percentage."""
    a, b = _seconds(results, row, kind, slow), _seconds(results, row, kind, fast)
    return {p: a[p] / b[p] for p in a if p in b}


RUNTIME = "paper, section 4.2, paragraph 3, sentence 1"
SHARDING = "paper, section 4.2, paragraph 3, sentence 2"
DISTANCE = "paper, section 4.2, paragraph 3, last sentence"
SHRINKING = "paper, section 3.3, property (ii) below equation 12"


def fig1_claims(results: dict[str, Any]) -> list[Claim]:
    claims = []
    for row in (r["name"] for r in results["config"]["rows"]):
        title = ROW_TITLES[row].split(",")[0]
        claims += [
            replace(
                _faster(results, row, title, kind, slow, fast, 1.0, RUNTIME), label="4.2 runtime"
            )
            for slow, fast in ((PARAMETER_RELEASED, PAPER_RELEASED), (PARAMETER, PAPER))
            for kind in ("warm", "cold")
        ]
        claims += [_cheaper(results, row, title, name) for name in (PAPER_RELEASED, PAPER)]
        held = [HELD] if _seconds(results, row, "warm", HELD) else []
        claims += [
            _faster(results, row, title, kind, slow, fast, limit, whose)
            for slows, whose in (
                ((PAPER_RELEASED, PARAMETER_RELEASED), OURS),
                ((PAPER, PARAMETER), f"{OURS}, against its own compiled rewrite"),
            )
            for kind, limit, fasts in (
                ("warm", WARM_FACTOR, (ONE_STEP, *held)),
                ("cold", COLD_FACTOR, (ONE_STEP,)),
            )
            for slow in slows
            for fast in fasts
        ]
        claims += [_sharded(results, row, title), _comparable(results, row, title)]
        claims.append(_comparable_distance(results, row, title))
        claims += [
            _as_close(results, row, title, "exact"),
            _as_close(results, row, title, "published"),
        ]
        if row == "cnn":
            claims.append(_cnn_distance(results, row))
    return claims


def _faster(
    results: dict[str, Any], row: str, title: str, kind: str, slow: str, fast: str, limit: float,
    source: str,
) -> Claim:  # fmt: skip
    ratios = _speedup(results, row, kind, slow, fast)
    times = "faster" if limit == 1 else f"at least {limit:g} times faster"
    text = f"{title}, {kind}: {fast} is {times} than {slow}, for every percentage."
    if not ratios:
        return Claim(text, source, UNKNOWN, "")
    evidence = f"{span(ratios.values())} times"
    ok = verdict(min(ratios.values()) >= limit)
    if len(ratios) < len(results["config"]["percentages"]):
        evidence += f", measured at {_percents(ratios)} only"
        ok = PARTLY if ok == HOLDS else ok
    if slow in RELEASED and not _at_default_precision(results, row):
        evidence += "; as released, but with products in full float32"
    return Claim(text, source, ok, evidence)


def _cheaper(results: dict[str, Any], row: str, title: str, name: str) -> Claim:
    """Whether a warm removal gets cheaper with every step in the number of removed points."""
    text = f"{title}, warm: {name} takes less time the more points are removed."
    seconds = _seconds(results, row, "warm", name)
    ok = None
    if len(seconds) > 1:
        line = [seconds[percent] for percent in sorted(seconds)]
        ok = all(a > b for a, b in itertools.pairwise(line))
    evidence = ", ".join(f"{t:.3g} s ({p} %)" for p, t in seconds.items())
    return Claim(text, SHRINKING, verdict(ok), evidence, "3.3 (ii)")


def _at_default_precision(results: dict[str, Any], row: str) -> bool:
    _, found = series(results, row, lambda v: v.get("released_precision"))
    return bool(found) and set(found) == {RELEASED_PRECISION}


def _percents(numbers: Any) -> str:
    return ", ".join(map(str, numbers)) + " %"


def _sharded(results: dict[str, Any], row: str, title: str) -> Claim:
    text = f"{title}: sharding is faster cold and slower warm than one device."
    training = values(results, f"{row}/training")
    devices = training["num_devices"] if training else 1
    ratios = _speedup(results, row, "warm", SHARDED, PAPER).values()
    measured = f"warm, sharded over unsharded: {span(ratios)}" if ratios else ""
    if devices == 1:
        note = "one device here, so the mesh has one place and both run the same program"
        return Claim(text, SHARDING, UNKNOWN, f"{note}; {measured}", "4.2 sharding")
    cold = _speedup(results, row, "cold", PAPER, SHARDED).values()
    if not cold or not ratios:
        return Claim(text, SHARDING, UNKNOWN, measured, "4.2 sharding")
    ok = min(cold) > 1 and min(ratios) > 1
    return Claim(text, SHARDING, verdict(ok), measured, "4.2 sharding")


def _comparable(results: dict[str, Any], row: str, title: str) -> Claim:
    text = (
        f"{title}: both influence methods match retraining on the forgotten points "
        f"(accuracy within {ACCURACY_SLACK})."
    )

    def gaps(v: dict[str, Any]) -> float:
        found = v["accuracy"]["published"]
        want = found[RETRAINED]["forgotten"]
        return max(abs(found[name]["forgotten"] - want) for name in (PARAMETER, PAPER))

    _, worst = series(results, row, gaps)
    if not worst:
        return Claim(text, DISTANCE, UNKNOWN, "", "4.2 accuracy")
    ok = max(worst) <= ACCURACY_SLACK
    return Claim(text, DISTANCE, verdict(ok), f"differences of {span(worst)}", "4.2 accuracy")


def _comparable_distance(results: dict[str, Any], row: str, title: str) -> Claim:
    text = (
        f"{title}: both influence methods end close to retraining (within {SMALL_SHARE:g} of the change "
        f"by the removal) and comparably close (within a factor of {COMPARABLE_FACTOR:g})."
    )

    def pick(v: dict[str, Any]) -> tuple[float, float]:
        found = v["distance"]["published"]["published"]
        return found[PARAMETER], found[PAPER]

    _, pairs = series(results, row, pick)
    _, changes = series(results, row, lambda v: v.get("change"))
    if not pairs or len(changes) != len(pairs):
        return Claim(text, DISTANCE, UNKNOWN, "", "4.2 distance")
    shares = [max(pair) / change for pair, change in zip(pairs, changes, strict=True)]
    ratios = [dual / primal for primal, dual in pairs]
    far = max(max(r, 1 / r) for r in ratios)
    ok = max(shares) <= SMALL_SHARE and far <= COMPARABLE_FACTOR
    evidence = (
        f"parameter space {span([a for a, _ in pairs], '{:.1e}')}, the dual form "
        f"{span([b for _, b in pairs], '{:.1e}')}, {span(ratios)} times as far; the larger of the two "
        f"is {span(shares, '{:.2g}')} of the change"
    )
    return Claim(text, DISTANCE, verdict(ok), evidence, "4.2 distance")


def _as_close(results: dict[str, Any], row: str, title: str, training: str) -> Claim:
    words = "to the optimum" if training == "exact" else "as published"
    text = (
        f"{title}, trained {words}: our forms come at least as close to exact retraining as "
        "parameter space and the paper's dual form (to 10 %, or to float32 rounding)."
    )

    def excess(v: dict[str, Any]) -> float:
        found = v["distance"][training]["exact"]
        best = min(found[PARAMETER], found[PAPER])
        return max(max(found[n] / max(best, ROUNDING_DISTANCE) for n in (ONE_STEP, ITERATED)), 0)

    xs, worst = series(results, row, excess)
    if not xs:
        return Claim(text, OURS, UNKNOWN, "")
    lists = {
        n: series(results, row, lambda v, n=n: v["distance"][training]["exact"][n])[1]
        for n in (PARAMETER, PAPER, ONE_STEP, ITERATED)
    }
    evidence = "; ".join(f"{n} {span(d, '{:.1e}')}" for n, d in lists.items())
    return Claim(text, OURS, verdict(max(worst) <= 1.1), evidence)


def _cnn_distance(results: dict[str, Any], row: str) -> Claim:
    text = f"CNN: our distance to exact retraining is at most {CNN_DISTANCE:g}, every percentage."
    pick = lambda v: v["distance"]["exact"]["exact"][ONE_STEP]  # noqa: E731
    _, found = series(results, row, pick)
    if not found:
        return Claim(text, OURS, UNKNOWN, "")
    ok = max(found) <= CNN_DISTANCE
    return Claim(text, OURS, verdict(ok), f"one step: {span(found, '{:.1e}')}")
