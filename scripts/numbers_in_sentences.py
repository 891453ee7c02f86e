"""Sentences of the pages whose numbers come from records; `make_numbers.py --check` looks for them.

A number that is stated on two pages stands here for both, with one record behind it.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


@cache
def record(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def digits(value: float, count: int = 2) -> str:
    """That many significant digits, whole numbers in full."""
    if value == 0:
        return "0"
    whole = value >= 10 ** (count - 1)
    return f"{value:.0f}" if whole else f"{float(f'{value:.{count}g}'):#.{count}g}".rstrip(".")


def ms(seconds: float, count: int = 2) -> str:
    return digits(1e3 * seconds, count)


def requests() -> Iterator[tuple[str, str]]:
    found = record("requests_cpu")
    most, held = found["removals"]["90 %"], found["read-outs"]
    whole, block = most["whole, seconds"], most["block, seconds"]
    choose = "docs/howto/choose.md"
    yield choose, f"with 90 % removed {block:.3f} s instead of {whole:.3f} s"
    yield (
        choose,
        f"({held['parameters']:,} parameters, {found['images']} images) the new parameters then take "
        f"{ms(held['J held, seconds'])} ms instead of {ms(held['through the network, seconds'], 3)} ms, "
        f"after {digits(held['jacobian_seconds'])} s to build `J`",
    )


def preconditioners() -> Iterator[tuple[str, str]]:
    cpu, gpu = (record(f"precision_{name}")["preconditioner"] for name in ("cpu", "h200"))
    fit, remove = "fit, iterations: fewer by", "remove, iterations: fewer by"
    least, most = (gpu[f"rank {rank}"]["remove"]["iterations"] for rank in (400, 0))
    yield (
        "docs/howto/choose.md",
        f"it reduced the iterations {cpu[fit]:.1f} times in the fit and {cpu[remove]:.1f} times in a "
        f"removal on 2 CPU cores, and {gpu[fit]:.1f} and {gpu[remove]:.1f} times on an H200 "
        f"(`precision_cpu.json`, `precision_h200.json`). A removal was "
        f"{cpu['remove, seconds: fewer by']:.1f} times faster on the CPU and no faster on the H200, where "
        f"{least} iterations took as long as {most} without the sketch.",
    )


def memory() -> Iterator[tuple[str, str]]:
    dense, before = record("memory_dense_h200")["dense"], record("memory_h200")["memory"]["dense"]
    peak, step = f"{dense['peak_over_kernel']:.2f}", f"{dense['removal_step_over_kernel']:.3f}"
    fast, slow = sorted(dense["remove_with_parameters_seconds"])[:2]
    old = min(before["remove_with_parameters_seconds"])
    yield "docs/howto/choose.md", f"need at most {peak} times the memory of the kernel"
    yield (
        "benchmarks/README.md",
        f"where a fit needed at most {before['peak_over_kernel']:.1f} times the memory of the kernel",
    )
    yield (
        "benchmarks/README.md",
        f"the fit needs {peak} times the kernel and a removal {step} times. The removal takes {ms(fast)} to "
        f"{ms(slow)} ms with its parameters instead of {ms(old)}.",
    )


def deletions() -> Iterator[tuple[str, str]]:
    found = record("unlearning_h200")
    one, desk = ms(found["median_seconds"]), ms(found["desk_median_seconds"])
    edit, mean = ms(found["edit_median_seconds"]), ms(found["mean_seconds"])
    size = f"{found['points']:,}"
    yield (
        "docs/howto/choose.md",
        f"A deletion of one of {size} points takes {one} ms (median of {found['deletions']:,}, H200, "
        f"float64), {desk} ms with the ledger, and {edit} ms by `edit`",
    )
    yield "benchmarks/README.md", f"takes {one} ms (median), or {desk} ms with the ledger"
    yield "benchmarks/README.md", f"The mean is {mean} ms"
    yield "CHANGELOG.md", f"takes {one} ms instead of 1.5 ms on an H200 ({size} points)"


def attributions() -> Iterator[tuple[str, str]]:
    cpu, gpu = record("attribution_speed_cpu"), record("attribution_speed_h200")
    first, single = (digits(cpu[k]["over_cholesky"]) for k in ("first order", "leave-one-out"))
    yield "benchmarks/README.md", f"first-order effects take {first} times as long as one Cholesky"
    yield "benchmarks/README.md", f"exact differences of losses takes {single} times as long"
    yield (
        "benchmarks/README.md",
        f"the two take {digits(gpu['first order']['seconds'])} and "
        f"{digits(gpu['leave-one-out']['seconds'])} s",
    )
    yield "CHANGELOG.md", f"first order takes as long as {first} Cholesky factorisations"
    yield "CHANGELOG.md", f"leave-one-out as long as {single} (before: 6.0)"


def agreements() -> Iterator[tuple[str, str]]:
    rows = {row["method"]: row for row in record("attribution_cpu")["methods"]}
    ours, last, cg = (rows[m] for m in ("ours, trajectory", "ours, last checkpoint", "CG"))
    whole, probes = record("single_points_cpu")["methods"][:2]
    methods = "docs/methods.md"
    yield methods, f"our scores and those of `CG` are the same ({last['lds']:.3f})."
    yield (
        methods,
        f"the correlation is {ours['loo_correlation']:.2f} for the sum over checkpoints, "
        f"{last['loo_correlation']:.2f} for the last checkpoint alone with damping `λ`, and "
        f"{cg['loo_correlation']:.2f} for `CG` with `3·λ`",
    )
    yield (
        methods,
        f"Its correlation is {whole['loo_correlation']:.3f}, and {probes['loo_correlation']:.3f} with three "
        "probes",
    )
    yield methods, f"gives `CG` an LDS of {cg['lds']:.3f}; our rule gives {last['lds']:.3f}."


def certificates() -> Iterator[tuple[str, str]]:
    found = record("fuzz_5000")
    trust = "docs/howto/trust.md"
    count, problems = f"{found['certificates']:,}", f"{found['problems']:,}"
    yield trust, f"We tested {count} certificates of {problems} random problems"
    yield (
        trust,
        f"For {found['undecided']} certificates the arithmetic of the check was not precise enough to "
        f"decide, and {found['refusals']:,} calls raised an error instead of an answer",
    )
    yield "benchmarks/README.md", f"{problems} random problems and {count} certificates against"


SOURCES = (requests, preconditioners, memory, deletions, attributions, agreements, certificates)


def words(text: str) -> str:
    """The text in one line, as a search for a sentence needs it."""
    return " ".join(text.split())


def missing(pages: dict[str, str] | None = None) -> list[str]:
    """Sentences that their pages do not have with the numbers of the records."""
    given = pages or {}

    def text(page: str) -> str:
        return words(given.get(page) or (ROOT / page).read_text())

    told = [pair for source in SOURCES for pair in source()]
    return [f"{page}: {sentence}" for page, sentence in told if words(sentence) not in text(page)]
