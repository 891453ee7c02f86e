"""Tables of `docs/results.md` of what the paper leaves open: the Hessian of all points, and many classes."""

from statistics import median

from numbers_in_sentences import record
from numbers_in_tables import seconds, table


def full_hessian() -> str:
    """Error of one step with either Hessian, as a share of the change."""
    found = record("full_hessian_cpu")
    rows = []
    for row in found["rows"]:
        cells = []
        for name in ("paper's dual form", "dual form, Hessian of all points"):
            low, high = min(row["error"][name]), max(row["error"][name])
            cells.append(f"{low:.2g} to {high:.2g}")
        rows.append([row["loss"], f"{row['percent']} %", *cells])
    return table(
        "| loss | removed | Hessian of the retained points | Hessian of all points |", rows
    )


def classes() -> str:
    """Removals with many classes: seconds of a repeated call, and distance as a share of the change."""
    found = record("classes_cpu")
    rows = []
    for row in found["rows"]:
        cells = []
        for name in ("parameter space", "paper's dual form", "ours, one step"):
            done = row["methods"].get(name)
            if done is None:
                cells += [f"K takes {row['entries_bytes'] / 1e9:.0f} GB", "–"]
            else:
                share = done["distance"] / row["change"]
                cells += [seconds(float(median(done["seconds"]))), f"{100 * share:.2g} %"]
        size = f"{row['num_params']:,} / {row['unknowns']:,}"
        rows.append([row["model"], f"{row['classes']:,}", size, *cells])
    heads = ["parameter space", "error", "paper's dual form", "error", "ours, one step", "error"]
    return table(f"| model | classes | parameters / unknowns | {' | '.join(heads)} |", rows)
