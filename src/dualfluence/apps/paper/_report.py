"""One HTML page: figures, published values beside measured ones, a verdict on each claim."""

from html import escape
from pathlib import Path
from typing import Any

from ..page._document import png_image, write_document
from ._claims import CLAIMS, COMPARISONS
from ._config import NAMES, OWN
from ._published import SOURCE
from ._results import read_results
from ._verdicts import FAILS, HOLDS, PARTLY, Claim, PublishedValue

TITLES = {
    "fig1": "Figure 1: unlearning from linearised networks",
    "fig2": "Figure 2: effect of λ on training",
    "fig3": "Figure 3: unlearning from a nonlinear network",
    "fig4": "Figure 4: infinitely wide networks",
    "linear": "The authors' linear model",
    "linear-ten": "A linear model of ten classes",
    OWN: "An experiment of one's own",
}
NOTES = {
    "fig1": (
        "Cold runtime is a method's first call in a new process, compilation and the new "
        "parameters included; starting Python and the device, and loading the trained state "
        "with its kernel, are not included. Compiled code is dropped between methods. Our "
        "methods come first, because the compiler remembers facts that favour the later ones. "
        "Warm runtime is measured on further forget sets of the same size. The published "
        "methods come twice: compiled once and reused (our implementation of their equations), "
        "and “as released”: our rewrite that runs as theirs does, eager and with JAX's own conjugate "
        "gradients, which compile again at every call. Their code also copies slices of K from the host "
        "and runs a forward pass at every call; the rewrite does neither, so its seconds are too few. "
        "Our forms use the preconditioner that was built once with the trained state; “J held” also "
        "uses its stored Jacobian. Solid "
        "lines: trained and retrained by gradient descent as published; dashed: both to the "
        "exact optimum."
    ),
    "fig2": "Gradient descent on the network itself; its linearisation by the same descent in data space.",
    "fig3": (
        "Distances are to a network retrained by gradient descent from the same initialisation. "
        "“Tangent at θ*” is our iterated form with the kernel at the trained parameters."
    ),
    "fig4": (
        "Changes at random test points after removing half of each class. R² refers to the "
        "diagonal, not to a fitted line."
    ),
    "linear": (
        "This model is in the authors' repository, not in the paper: digits 3 and 8, targets ±1, squared "
        "error, a readout of random ReLU features with its bias, full-batch gradient descent from a random "
        "readout, a ridge on ‖θ‖². Published values are those of their results file. Descent still holds a "
        "share (1 − ηλ)^epochs of the random readout; both forms in data space keep it, parameter space "
        "does not know it from the rest. First calls are in this process, with compiled code dropped."
    ),
    "linear-ten": (
        "Our addition: ten classes, trained to the optimum. Ridge on ‖θ‖²; one step is the influence "
        "function, exact for squared error."
    ),
    OWN: (
        "Distances are to a model that was trained by the same descent without the forgotten points. The "
        "Hessian of all points is the approximation that the paper names for small removals."
    ),
}
MARKS = {HOLDS: ("✓", "#00694d"), FAILS: ("✗", "#a34700"), PARTLY: ("(✓)", "#555")}
STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 2rem auto;
  max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { margin-top: 3rem; border-top: 1px solid #ccc; padding-top: 1rem; }
img { max-width: 100%; height: auto; border: 1px solid #e3e3e3; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.92rem; width: 100%; }
th, td { border-bottom: 1px solid #ddd; padding: 0.3rem 0.6rem; text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.verdict { white-space: nowrap; font-weight: 600; }
.warning { background: #fff4e0; border-left: 4px solid #e69f00; padding: 0.6rem 1rem; }
.facts { color: #555; font-size: 0.9rem; } .scroll { overflow-x: auto; }
"""


def write_report(folder: Path) -> Path:
    """Write `report.html` about every results file in `folder`."""
    found = {name: read_results(folder, name) for name in (*NAMES, OWN)}
    present = {name: results for name, results in found.items() if results is not None}
    sections = [_summary(present)]
    sections += [_section(folder, name, results) for name, results in present.items()]
    heading = "<h1>Extending Kernel Trick to Influence Functions: published and measured</h1>"
    path = folder / "report.html"
    write_document(path, "Paper and measurement", heading + "".join(sections), STYLE)
    return path


def _summary(present: dict[str, dict[str, Any]]) -> str:
    parts = [f"<p>Published values: {escape(SOURCE)}, read off its figures.</p>"]
    missing = [name for name in NAMES if name not in present and set(present) != {OWN}]
    if missing:
        parts.append(f"<p class='warning'>Not run: {', '.join(missing)}.</p>")
    if any(r["scale"] == "smoke" for r in present.values()):
        parts.append(
            "<p class='warning'>Smoke scale: smaller networks, fewer points and epochs than "
            "published. The numbers show that everything runs, but do not test the paper.</p>"
        )
    claims = [claim for name, results in present.items() for claim in CLAIMS[name](results)]
    counts = {v: sum(c.verdict == v for c in claims) for v in (HOLDS, FAILS)}
    parts.append(
        f"<p><strong>{counts[HOLDS]} claims hold, {counts[FAILS]} do not</strong>, "
        f"{len(claims) - sum(counts.values())} could not be measured or decided here, at least "
        "in part.</p>"
    )
    return "".join(parts)


def _section(folder: Path, name: str, results: dict[str, Any]) -> str:
    image = folder / f"{name}.png"
    parts = [f"<h2 id='{name}'>{escape(TITLES[name])}</h2>"]
    if not results["complete"]:
        parts.append("<p class='warning'>Incomplete: run again with --resume.</p>")
    if results.get("left_out"):
        listed = "; ".join(results["left_out"])
        parts.append(f"<p class='warning'>Left out: {escape(listed)}.</p>")
    if image.exists():
        parts.append(png_image(image.read_bytes(), TITLES[name]))
    parts.append(f"<p>{escape(NOTES[name])}</p>")
    if claims := CLAIMS[name](results):
        parts.append(_claims(claims))
    comparisons = COMPARISONS[name](results)
    if comparisons:
        parts.append(_comparisons(comparisons, results["scale"] == "smoke"))
    parts.append(_facts(results))
    return "".join(parts)


def _claims(claims: list[Claim]) -> str:
    rows = []
    for claim in claims:
        mark, colour = MARKS.get(claim.verdict, ("–", "#555"))
        rows.append(
            f"<tr><td class='verdict' style='color:{colour}'>{mark} {escape(claim.verdict)}</td>"
            f"<td>{escape(claim.text)}</td><td>{escape(claim.evidence)}</td>"
            f"<td>{escape(claim.source)}</td></tr>"
        )
    head = "<tr><th>Verdict</th><th>Claim</th><th>Measured</th><th>Whose</th></tr>"
    return f"<div class='scroll'><table>{head}{''.join(rows)}</table></div>"


def _comparisons(comparisons: list[PublishedValue], smoke: bool) -> str:
    rows = []
    for item in comparisons:
        ratio = "" if item.ratio is None else f"{item.ratio:.2g}"
        measured = "–" if item.measured is None else f"{item.measured:.3g}"
        why = ""
        if item.differs:
            why = "smoke scale, not comparable" if smoke else item.why
        rows.append(
            f"<tr><td>{escape(item.what)}</td><td class='number'>{item.published:.3g}</td>"
            f"<td class='number'>{measured}</td><td class='number'>{ratio}</td>"
            f"<td>{escape(why)}</td></tr>"
        )
    head = (
        "<tr><th>Quantity</th><th class='number'>Published</th><th class='number'>Measured</th>"
        "<th class='number'>Ratio</th><th>Why they differ by more than a factor of two</th></tr>"
    )
    return f"<div class='scroll'><table>{head}{''.join(rows)}</table></div>"


def _facts(results: dict[str, Any]) -> str:
    env = results["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in env["versions"].items() if v)
    seconds = sum(piece["seconds"] for piece in results["pieces"].values())
    return (
        f"<p class='facts'>{escape(results['scale'])} scale, seed {results['seed']}, "
        f"{escape(env['device'])} ({env['num_devices']}), {seconds:.0f} s, commit "
        f"{escape(env['commit'] or 'unknown')}, {escape(env['finished'])}. {escape(versions)}. "
        f"All numbers: {results['experiment']}.json.</p>"
    )
