"""The table of LDS for two questions: the mean over seeds, and one run with its randomness fixed."""

from numbers_in_sentences import record
from numbers_in_tables import table

QUESTIONS = ("mean", "run")


def lds_adamw() -> str:
    return both("attribution_lds_adamw_cpu", "adamw")


def lds_cnn() -> str:
    return both("attribution_lds_cnn_cpu", "cnn")


def both(name: str, recipe: str) -> str:
    """Rows by their LDS for the mean; constants that were chosen stand below."""
    found = record(name)["recipes"][recipe]
    rows = sorted(found["table"].items(), key=lambda row: -row[1]["mean"]["lds"])
    cells = [
        [label, f"{row['models']:,}", *(_cell(row.get(question)) for question in QUESTIONS)]
        for label, row in rows
    ]
    ceilings = [found["ceiling"][q] for q in QUESTIONS]
    cells.append(["noise ceiling", "–", *(_interval(c["value"], c["interval"]) for c in ceilings)])
    head = "| method | models trained | LDS, mean over seeds | LDS, one run |"
    return table(head, cells) + f"\n{_chosen(found['table'])}\n"


def _cell(row: dict | None) -> str:
    return "–" if row is None else _interval(row["lds"], row["interval"])


def _interval(value: float, interval: list[float]) -> str:
    low, high = interval
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _chosen(rows: dict) -> str:
    """What was chosen, for the mean and for the run."""
    said = []
    for label, row in rows.items():
        settings = [row[q].get("setting") for q in QUESTIONS if q in row]
        if any(settings) and len(settings) == 2:
            said.append(f"- {label}, mean: {settings[0]}; run: {settings[1]}.")
    head = "Constants that were chosen, and what a datamodel explains of the variance in cross-validation:"
    return "\n".join([head, "", *said])
