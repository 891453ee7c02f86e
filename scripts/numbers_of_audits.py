"""Tables of `docs/howto/clean.md`, from the record of `benchmarks/audit.py`."""

from typing import Any

from numbers_in_sentences import record
from numbers_in_tables import seconds, table

AUDITORS = {
    "dualfluence.audit": "`audit`",
    "dualfluence.audit, stiff model": "`audit`, stiff model",
    "confident learning, linear": "confident learning, linear",
    "confident learning, strong": "confident learning, strong",
    "nearest neighbours": "nearest neighbours",
    "loss of one fit": "loss of one fit",
    "margin of one fit": "margin of one fit",
}
"""Name in the record and in the page."""


def between(interval: list[float], places: int = 3) -> str:
    """Mean and half of the interval; one seed has none."""
    mean, low, high = interval
    if low == high:
        return f"{mean:.{places}f}"
    return f"{mean:.{places}f} ± {(high - low) / 2:.{places}f}"


def planted() -> dict[str, Any]:
    """Cases with planted errors, by kind of error."""
    found = {key: case for key, case in record("audit_cpu")["table"].items() if "wrong" in case}
    kinds = list(dict.fromkeys(key.split(": ")[1] for key in found))
    return {key: found[key] for kind in kinds for key in found if key.endswith(f": {kind}")}


def audit_table(what: str, ends: dict[str, str] | None = None) -> str:
    """One row for each data set and kind of error, the best method in bold."""
    rows = []
    for key, case in planted().items():
        found = {name: row[what] for name, row in case["rows"].items()}
        best = max(mean for mean, _, _ in found.values())
        cells = []
        for name in AUDITORS:
            cell = between(found[name]) if name in found else "–"
            cells.append(f"**{cell}**" if name in found and found[name][0] == best else cell)
        outside = [f"{case[end][0]:.3f}" for end in ends or ()]
        rows.append([key.replace(": ", ", "), str(case["seeds"]), *outside, *cells])
    head = ["data, errors", "seeds", *(ends or {}).values(), *AUDITORS.values()]
    return table(f"| {' | '.join(head)} |", rows)


def audit_ranking() -> str:
    return audit_table("auc")


def audit_precision() -> str:
    return audit_table("precision")


def audit_cleaned() -> str:
    ends = {"nothing removed": "nothing removed", "the planted removed": "exactly the errors"}
    return audit_table("cleaned", ends)


def audit_losses() -> str:
    """Rows in which another method has the larger mean area, and by how much, seed by seed."""
    rows = []
    for key, case in planted().items():
        ours = case["rows"]["dualfluence.audit"]["auc"][0]
        others = {n: r for n, r in case["rows"].items() if not n.startswith("dualfluence.audit")}
        stiff = case["rows"]["dualfluence.audit, stiff model"]["auc"]
        best = max(others, key=lambda name: others[name]["auc"][0])
        if others[best]["auc"][0] > ours:
            mean, low, high = others[best]["ours_minus_this_auc"]
            gap = f"{-mean:.3f}" + (f" [{-high:.3f}, {-low:.3f}]" if case["seeds"] > 1 else "")
            area = between(others[best]["auc"])
            rows.append([key.replace(": ", ", "), AUDITORS[best], gap, area, between(stiff)])
    return table("| data, errors | ahead of `audit` | by | its area | `audit`, stiff model |", rows)


def audit_calibration() -> str:
    found = record("audit_cpu")
    rows = []
    for name in ("dualfluence.audit", "confident learning, linear", "confident learning, strong"):
        for part in ("classes", "numbers"):
            for kind, sums in found[f"calibration_{part}"].get(name, {}).items():
                if sums["flagged"]:
                    expected, wrong = (sums[k] / sums["flagged"] for k in ("expected", "wrong"))
                    cells = [f"{sums['flagged']:,}", f"{expected:.0%}", f"{wrong:.0%}"]
                    rows.append([AUDITORS[name], f"{part}, {kind}", *cells])
    return table("| method | errors | flagged | expected to be wrong | wrong |", rows)


def audit_own() -> str:
    """The texts with their own errors alone."""
    case = record("audit_cpu")["table"]["descriptions: own noise"]
    ends = {"nothing removed": "nothing removed", "as many at random": "as many at random"}
    rows = [[name, between(case[end]), "–"] for end, name in ends.items()]
    for name, row in case["rows"].items():
        gap = row.get("ours_minus_this_cleaned")
        rows.append([AUDITORS[name], between(row["cleaned"]), between(gap) if gap else "–"])
    return table("| removed | test accuracy | `audit` minus this |", rows)


def audit_seconds() -> str:
    names = ["digits", "mnist", "breast cancer", "diabetes", "descriptions"]
    cases = [record("audit_cpu")["table"][f"{name}: uniform"] for name in names]
    rows = [
        [
            title,
            *(seconds(c["rows"][n]["cpu_seconds"][0]) if n in c["rows"] else "–" for c in cases),
        ]
        for n, title in AUDITORS.items()
    ]
    head = [f"{name}, {case['points']}" for name, case in zip(names, cases, strict=True)]
    return table(f"| CPU time | {' | '.join(head)} |", rows)


def audit_stiff() -> str:
    """How the penalty of the stiff model was chosen."""
    chosen = record("audit_cpu")["stiff"]
    head = [f"{float(alpha):,.0f}" for alpha in chosen["classes"]["auc"]]
    rows = []
    for part, found in chosen.items():
        cells = [f"{mean:.3f}" for mean in found["auc"].values()]
        best = list(found["auc"].values()).index(max(found["auc"].values()))
        cells[best] = f"**{cells[best]}**"
        rows.append([part, *cells])
    return table(f"| `alpha` | {' | '.join(head)} |", rows)


def audit_texts() -> str:
    found = record("audit_cpu")["texts"]
    wall, cpu = seconds(found["seconds"]), seconds(found["cpu_seconds"])
    return (
        f"{found['texts']:,} one-line texts took {wall} from strings to findings, and {cpu} of processor "
        f"time, on two cores that other programs used too (load average {found['load']:.0f}).\n"
    )
