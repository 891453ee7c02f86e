"""Writes the tables of the documentation whose numbers come from records.

`python scripts/make_numbers.py` writes every table that stands between `<!-- numbers: NAME -->` and
`<!-- end of numbers -->`. With `--check` it changes nothing and fails where a page differs from its record.
Sentences with numbers are in `numbers_in_sentences.py`; they are checked, not written.
"""

import itertools
import json
import re
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numbers_of_audits as audits
import numbers_of_lds
import numbers_of_paper
from numbers_in_sentences import digits, missing, record
from numbers_in_tables import seconds, table

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = (
    "README.md",
    "docs/methods.md",
    "docs/unlearning.md",
    "docs/howto/choose.md",
    "docs/results.md",
    "docs/howto/trust.md",
    "docs/howto/text.md",
    "docs/howto/clean.md",
)
BLOCK = re.compile(r"(<!-- numbers: ([a-z-]+) -->\n).*?(<!-- end of numbers -->)", re.DOTALL)


def recorded(name: str) -> bool:
    return (ROOT / "benchmarks" / "results" / f"{name}.json").exists()


MACHINES = {"cpu": "2 CPU cores", "h200": "H200"}
"""Machines of records, by the end of their names."""


def percent(share: float) -> str:
    return f"{100 * share:.2f} %" if share >= 1e-4 else f"{100 * share:.3f} %"


def core() -> str:
    names = {
        "ours, one step": ("dualfluence, one step", "certified"),
        "ours, two steps": ("dualfluence, two steps", "certified"),
        "parameter space": ("parameter space, CG to 1e-8", "unknown"),
        "paper's dual form": ("the paper's dual form", "unknown"),
    }
    found = {row["method"]: row for row in record("core_h200")["methods"]}
    rows = [
        [
            name,
            f"{digits(1e3 * found[key]['timing']['repeat'])} ms",
            percent(found[key]["error"]),
            known,
        ]
        for key, (name, known) in names.items()
    ]
    return table(
        "| | repeated request | error, as a share of the change | bound on the distance to retraining |",
        rows,
    )


def steps() -> str:
    machines = [{r["method"]: r for r in record(f"core_{m}")["methods"]} for m in ("cpu", "h200")]

    def cell(row: dict[str, Any]) -> str:
        return f"{percent(row['error'])}, {seconds(row['timing']['repeat'])}"

    rows = [
        [name, *(cell(found[f"ours, {name}"]) for found in machines)]
        for name in ("one step", "two steps")
    ]
    return table("| | 500 points, 2 CPU cores | 2,000 points, H200 |", rows)


def duration(first: float, last: float) -> str:
    """Both times in the unit of the longer one, or one where they are the same."""
    unit, factor = ("s", 1.0) if last >= 0.0995 else ("ms", 1e3)
    both = dict.fromkeys((digits(factor * first), digits(factor * last)))
    return f"{'–'.join(both)} {unit}"


def gigabytes(number: int) -> str:
    return f"{digits(number / 1e9)} GB" if number else "none"


def forms() -> str:
    found = {**record("memory_h200")["memory"], "dense": record("memory_dense_h200")["dense"]}
    asked = {
        "dense": ("dense", '`kernel="dense"`'),
        "matrix-free": ("matrix-free", '`kernel="matrix-free"`'),
        "low-rank": ("low rank", "`dfl.low_rank(...)`"),
        "kronecker": ("Kronecker", "`dfl.infinite`"),
    }

    def row(key: str) -> list[str]:
        form = found[key]
        fast, slow = sorted(form["remove_with_parameters_seconds"])[:2]
        return [
            *asked[key],
            gigabytes(form["kernel_bytes"]),
            seconds(form["build_seconds"]),
            seconds(form["fit_seconds"]),
            duration(fast, slow),
            gigabytes(form["peak_bytes"]),
        ]

    head = "| form | how to ask for it | memory of `K` | build | fit | repeated removal | peak memory |"
    return table(head, [row(key) for key in asked])


def precision() -> str:
    refined = "`kernel=dfl.KernelOptions(refine=True)`"
    asked = {
        "float32": ("float32", "float32 parameters"),
        "refined": ("float32 `K`, the rest in float64", refined),
    }
    machines = [record(f"precision_{name}")["refinement"] for name in ("cpu", "h200")]

    def cell(run: dict[str, Any]) -> str:
        bound = f"{run['relative_bound']:.1e}".replace("e-0", "e-")
        return bound if run["converged"] else f"{bound} (tolerance missed)"

    rows = [[*asked[key], *(cell(found[key]) for found in machines)] for key in asked]
    rows.append(
        ["float64", "`jax_enable_x64` and float64 parameters", *["not recorded at this size"] * 2]
    )
    return table(
        "| arithmetic | how to ask for it | certified, 2 CPU cores | certified, H200 |", rows
    )


def by_agreement(machine: str) -> dict[str, Any]:
    """Rows of the record, the best agreement on the CPU first."""
    order = {r["method"]: -r["lds"] for r in record("attribution_cpu")["methods"]}
    rows = record(f"attribution_{machine}")["methods"]
    return {row["method"]: row for row in sorted(rows, key=lambda row: order[row["method"]])}


def agreement() -> str:
    rows = []
    for name, row in by_agreement("cpu").items():
        low, high = row["lds_interval"]
        lds = f"{row['lds']:.3f} [{low:.2f}, {high:.2f}]"
        rows.append([name, row["setting"] or "–", lds, f"{row['loo_correlation']:.2f}"])
    return table("| method | damping | LDS | leave-one-out |", rows)


def costs() -> str:
    cpu, gpu = by_agreement("cpu"), by_agreement("h200")

    def cells(row: dict[str, Any]) -> list[str]:
        memory = f"{max(1, round(row['peak_bytes'] / 2**20))} MiB"
        return [seconds(row["seconds_first"]), seconds(row["seconds_repeat"]), memory]

    rows = [[name, *cells(cpu[name]), *cells(gpu[name])] for name in cpu]
    head = "| method | CPU, first | CPU, repeated | CPU, memory | H200, first |"
    return table(f"{head} H200, repeated | H200, memory |", rows)


LDS = [
    ("ours, chosen: epochs all, kappa 3, shrunk (5 runs)", "ours, trajectory", "5"),
    ("ours, chosen: epochs all, kappa 3, shrunk (1 run)", "ours, trajectory", "1"),
    (
        "ours, reference: epochs sketch, kappa 3, mean (1 run)",
        "ours, mean of eight checkpoints",
        "1",
    ),
    ("TRAK, exact kernel (50 halves)", "TRAK, exact kernel", "50 halves"),
    ("TRAK, exact kernel (10 halves)", "TRAK, exact kernel", "10 halves"),
    ("CG (1 run)", "CG", "1"),
    ("influence, last checkpoint (1 run)", "influence, last checkpoint", "1"),
    ("LiSSA (1 run)", "LiSSA, depth 100", "1"),
    ("K-FAC (1 run)", "K-FAC", "1"),
    ("EK-FAC (1 run)", "EK-FAC", "1"),
    ("TRAK, exact kernel (1 halves)", "TRAK, exact kernel", "1 half"),
    ("Nyström (1 run)", "Nyström, rank 100", "1"),
    ("Arnoldi (1 run)", "Arnoldi, rank 100", "1"),
    ("TracIn (1 run)", "TracIn", "1"),
    ("gradient cosine (1 run)", "gradient cosine", "1"),
    ("gradient dot (1 run)", "gradient dot", "1"),
]
"""Start of the name in the record, name and models trained in the page."""


def lds() -> str:
    recipes = record("attribution_lds_h200")["recipes"]

    def cell(recipe: str, start: str) -> str:
        for name, row in recipes[recipe]["table"].items():
            if name.startswith(start):
                low, high = row["interval"]
                return f"{row['lds']:.3f} [{low:.3f}, {high:.3f}]"
        return "–"

    rows = [
        [name, models, cell("mlp", start), cell("logistic", start)] for start, name, models in LDS
    ]
    ceilings = [f"{recipes[r]['ceiling']['value']:.3f}" for r in ("mlp", "logistic")]
    rows.append(["noise ceiling", "–", *ceilings])
    return table("| method | models trained | LDS, network | LDS, logistic |", rows)


def forgetting(part: str, names: dict[str, str]) -> str:
    measures = ("klom_forgotten", "klom_retained", "klom_test")
    rows = []
    for row in record("unlearning_metrics_cpu")[part]["table"]:
        pairs = [f"{digits(low)}, {digits(high)}" for low, high in (row[m] for m in measures)]
        last = [f"{row['membership_auc']:.3f}", digits(row["distance"])]
        rows.append([names.get(row["method"], row["method"]), *pairs, *last])
    head = "| method | KLOM forgotten | KLOM retained | KLOM test | membership AUC | distance |"
    return table(head, rows)


def forgetting_linearised() -> str:
    ascent = {
        "gradient ascent": "gradient ascent, 10 steps",
        "fine-tuning": "fine-tuning, 50 steps",
    }
    return forgetting("linearised", {"retraining": "retraining (floor)", **ascent})


def forgetting_network() -> str:
    names = {
        "retraining": "retraining (floor)",
        "parameter space": "parameter space, Gauss-Newton",
        "parameter space, exact Hessian": "parameter space, exact Hessian, damped",
        "gradient ascent": "gradient ascent, 10 steps",
        "fine-tuning": "fine-tuning, 60 epochs",
    }
    return forgetting("network", names)


def paper() -> str:
    """Every item of the paper, where it is here, and its verdict."""
    rows = [
        [item["label"], item["what"], item["here"], verdict_of(item), item.get("differs", "")]
        for item in paper_items()
    ]
    return table("| paper | what it says | here | verdict | what differs, and why |", rows)


def paper_items() -> list[dict[str, Any]]:
    return tomllib.loads((RESULTS / "paper.toml").read_text())["item"]


def verdict_of(item: dict[str, Any]) -> str:
    """From the tests it names, the settings of a record, or the verdicts of claims on records."""
    if "tests" in item:
        return "tested"
    if "record" in item:
        found = json.loads((RESULTS / f"{item['record']}.json").read_text())
        if differing(found, item["equals"]):
            return "differs"
        return "recorded" if item["equals"] == {"complete": True} else "as published"
    verdicts = [c.verdict for c in all_claims() if c.label in item["claims"]]
    counted = [f"{v}: {verdicts.count(v)}" for v in dict.fromkeys(verdicts)]
    return ", ".join(counted) if len(counted) > 1 else verdicts[0] if verdicts else "not measured"


def differing(found: Any, equals: dict[str, Any]) -> list[str]:
    """The settings of a record, by path, that are not as they should be."""
    wrong = []
    for path, want in equals.items():
        value = found
        for part in path.split("."):
            value = value[int(part) if isinstance(value, list) else part]
        if value != want:
            wrong.append(path)
    return wrong


@cache
def all_claims() -> list[Any]:
    """The claims on every record in `docs/results`, and on those of `benchmarks/crossover.py`."""
    from dualfluence.apps.paper._claims import CLAIMS
    from dualfluence.apps.paper._claims_crossover import crossover_claims

    found = []
    for name, judge in CLAIMS.items():
        path = RESULTS / f"{name}.json"
        found += judge(json.loads(path.read_text())) if path.exists() else []
    for machine, words in MACHINES.items():
        if recorded(f"crossover_{machine}"):
            found += crossover_claims(record(f"crossover_{machine}"), words)
    return found


def crossover() -> str:
    """Where the costs cross on each machine."""

    rows = []
    for machine, words in MACHINES.items():
        if recorded(f"crossover_{machine}"):
            found = record(f"crossover_{machine}")
            low, high = (found["rows"][i]["p_over_nc"] for i in (0, -1))
            places = [
                "nowhere" if place is None else digits(place) if place else f"below {digits(low)}"
                for place in (found["crossing"][kind] for kind in ("measured", "per step", "plan"))
            ]
            points = f"{found['settings']['points']:,}"
            rows.append([words, points, f"{digits(low)} to {digits(high)}", *places])
    head = "| machine | points | measured range | removals cross at | steps cross at |"
    return table(f"{head} `plan` predicts for steps |", rows)


def linearisable() -> str:
    """From which λ on neither gap of `fidelity` is above its limit, and what a gap means for an edit."""
    found = record("linearisable_cpu")
    cells = {(t["width"], t["depth"]): ridge_in_words(t["ridges"]) for t in found["thresholds"]}
    widths, depths = (sorted({key[i] for key in cells}) for i in (0, 1))
    rows = [[str(width), *(cells[width, depth] for depth in depths)] for width in widths]
    heads = [f"{depth} hidden layer{'s' * (depth > 1)}" for depth in depths]
    return table(f"| width | {' | '.join(heads)} |", rows)


def ridge_in_words(ridges: list[float | None]) -> str:
    """Geometric mean and range over seeds, unless a seed needs more or less than what was measured."""
    ends = [row["ridge"] for row in record("linearisable_cpu")["rows"]]
    inside = [ridge for ridge in ridges if ridge]
    if len(inside) == len(ridges):
        return f"{geometric_mean(inside):.2g} ({min(inside):.2g} to {max(inside):.2g})"
    low = f"below {min(ends):g}" if 0.0 in ridges else f"{min(inside, default=max(ends)):.2g}"
    high = f"above {max(ends):g}" if None in ridges else f"{max(inside, default=min(ends)):.2g}"
    return low if not inside and None not in ridges else f"{low} to {high}" if inside else high


GAPS = (0.0, 0.03, 0.1, 0.3, float("inf"))
"""Classes of the larger gap in the table of errors."""


def linearisable_edits() -> str:
    """Error of a removal of 10 % by the larger gap: median and range, as a share of the change."""
    rows = []
    for low, high in itertools.pairwise(GAPS):
        own = [
            row
            for row in record("linearisable_cpu")["rows"]
            if low < max(row["output_gap"], row["parameter_gap"]) <= high
        ]
        if not own:
            continue
        cells = []
        for tangent in ("initial", "trained"):
            errors = [row[f"error_{tangent}"] for row in own]
            cells.append(f"{median(errors):.2f} ({min(errors):.2f} to {max(errors):.2f})")
        words = f"above {low:g}" if high == float("inf") else f"{low:g} to {high:g}"
        rows.append([words, str(len(own)), *cells])
    return table('| larger gap | models | `tangent="initial"` | `tangent="trained"` |', rows)


def authors() -> str:
    """The authors' code beside ours, once it has been run."""
    if not recorded("authors_h200"):
        return "No run on a GPU is recorded yet.\n"
    found = record("authors_h200")
    names = dict.fromkeys(name for row in found["rows"] for name in row["methods"])

    def cells(row: dict[str, Any], name: str) -> list[str]:
        if name not in row["methods"]:
            return ["–"] * 3
        done = row["methods"][name]
        later = seconds(float(median(done["repeat"])))
        return [seconds(done["first"]), later, f"{done['distance']:.1e}"]

    rows = [[name, *(cell for row in found["rows"] for cell in cells(row, name))] for name in names]
    heads = [
        f"{what}, {row['percent']} %"
        for row in found["rows"]
        for what in ("first call", "later calls", "distance")
    ]
    changes = [f"`{c['old']}` is `{c['new']}`, because {c['why']}" for c in found["changes"]]
    moved = " and ".join(f"{row['change']:.1e} ({row['percent']} %)" for row in found["rows"])
    said = (
        f"\nThe removals move the parameters by {moved}. Changed in their text: "
        f"{'; '.join(changes) if changes else 'nothing'}.\n"
    )
    return table(f"| | {' | '.join(heads)} |", rows) + said


def text_certified() -> str:
    found = record("text_certified_cpu")
    rows = [
        [
            f"{row['removed']}",
            digits(row["moved"]),
            f"{row['bound']:.1e}",
            f"{row['distance_to_retraining']:.1e}",
        ]
        for row in found["removals"]
    ]
    fitted = found["fit"]
    head = "| sentences removed | the head moves by | certified distance | to training again in float32 |"
    bound = fitted["relative_bound"] * fitted["parameter_norm"]
    said = (
        f"\nThe head, of norm {digits(fitted['parameter_norm'])}, was trained on "
        f"{found['sentences']:,} sentences. It predicts the right section for "
        f"{100 * fitted['accuracy']:.1f} % of the test sentences.\nThe original fit is certified to "
        f"{bound:.1e}, and retraining stops at the same tolerance.\nThe last column contains the errors of "
        "the removal and of retraining, so it may exceed the bound of the removal.\n"
    )
    return table(head, rows) + said


TABLES: dict[str, Callable[[], str]] = {
    "core": core,
    "steps": steps,
    "forms": forms,
    "precision": precision,
    "agreement": agreement,
    "costs": costs,
    "lds": lds,
    "lds-adamw": numbers_of_lds.lds_adamw,
    "lds-cnn": numbers_of_lds.lds_cnn,
    "forgetting-linearised": forgetting_linearised,
    "forgetting-network": forgetting_network,
    "paper": paper,
    "crossover": crossover,
    "linearisable": linearisable,
    "linearisable-edits": linearisable_edits,
    "full-hessian": numbers_of_paper.full_hessian,
    "classes": numbers_of_paper.classes,
    "authors": authors,
    "text-certified": text_certified,
    "audit-ranking": audits.audit_ranking,
    "audit-losses": audits.audit_losses,
    "audit-stiff": audits.audit_stiff,
    "audit-precision": audits.audit_precision,
    "audit-calibration": audits.audit_calibration,
    "audit-cleaned": audits.audit_cleaned,
    "audit-own": audits.audit_own,
    "audit-seconds": audits.audit_seconds,
    "audit-texts": audits.audit_texts,
}


def renewed(text: str) -> str:
    """The page with every table as its record has it."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def main(arguments: list[str]) -> int:
    differing = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        if (new := renewed(text)) != text:
            differing.append(page)
            if "--check" not in arguments:
                (ROOT / page).write_text(new)
    if differing:
        print("differ from their records:", ", ".join(differing))
    for sentence in (absent := missing()):
        print("not in its page:", sentence)
    return int(bool(absent) or (bool(differing) and "--check" in arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
