"""Plots of `benchmarks/audit.py`, from its record alone."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from .methods import KNN, LOSS, MARGIN, OURS, SAME, STIFF, STRONG

LOOK = {
    OURS: ("#0b5fa5", "o"),
    STIFF: ("#56B4E9", "P"),
    SAME: ("#D55E00", "s"),
    STRONG: ("#E69F00", "D"),
    KNN: ("#009E73", "^"),
    LOSS: ("#777777", "v"),
    MARGIN: ("#CC79A7", "x"),
}
KINDS = {"uniform": "o", "by class pair": "s", "by neighbourhood": "^"}
FEWEST = 20
"""Points of a bin below which its share is not drawn: it would be chance."""


def save(fig, path):
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


def draw_ranking(record, path):
    """Area under the ROC curve of every method, one row for each data set and kind of error."""
    keys = [key for key, case in record["table"].items() if "wrong" in case]
    keys.sort(key=lambda key: (list(KINDS).index(key.split(": ")[1]), -worst(record, key)))
    fig, axis = plt.subplots(figsize=(8, 1.4 + 0.36 * len(keys)), layout="constrained")
    for place, key in enumerate(keys):
        rows = record["table"][key]["rows"]
        for number, (name, row) in enumerate(rows.items()):
            colour, mark = LOOK[name]
            mean, low, high = row["auc"]
            at = place + 0.1 * (number - (len(rows) - 1) / 2)
            axis.plot([low, min(high, 1)], [at, at], color=colour, linewidth=1, alpha=0.6)
            label = name if place == 0 else None
            axis.plot(mean, at, mark, color=colour, markersize=4, label=label)
    ends = [i for i in range(1, len(keys)) if keys[i].split(": ")[1] != keys[i - 1].split(": ")[1]]
    for end in ends:
        axis.axhline(end - 0.5, color="0.6", linewidth=0.8)
    axis.set_yticks(range(len(keys)), keys)
    axis.set_ylim(len(keys) - 0.4, -0.6)
    axis.set_xlim(0.45, 1.005)
    axis.grid(axis="x", alpha=0.3)
    axis.set_xlabel("area under the ROC curve: mean and 95 % interval over seeds")
    fig.legend(fontsize=8, loc="outside upper center", ncols=3)
    save(fig, path)


def worst(record, key):
    return np.mean([row["auc"][0] for row in record["table"][key]["rows"].values()])


def draw_calibration(record, path):
    """Stated probabilities against shares of true errors: of all points, and of what each run flags."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 4.3), layout="constrained")
    ours, same = (record["calibration_classes"][name] for name in (OURS, SAME))
    for kind, mark in KINDS.items():
        count, expected, wrong = np.array(ours[kind]["bins"])
        shown = count >= FEWEST
        share, n = wrong[shown] / count[shown], count[shown]
        half = 1.96 * np.sqrt(share * (1 - share) / n)
        stated = expected[shown] / n
        left.errorbar(stated, share, yerr=half, fmt=f"{mark}-", markersize=4, label=kind)
        runs = [run for run in ours[kind]["runs"] if run[1]]
        right.plot(*shares(runs), mark, color=LOOK[OURS][0], markersize=4, alpha=0.8, label=kind)
        runs = [run for run in same[kind]["runs"] if run[1]]
        right.plot(*shares(runs), mark, color=LOOK[SAME][0], markersize=4, alpha=0.8, mfc="none")
    left.set(xlabel="stated probability that the label is wrong", ylabel="share that is wrong")
    left.set_title("all points, audit", fontsize=10)
    right.set(xlabel="expected share of errors", ylabel="share that is wrong")
    right.set_title("flagged points, one mark per run", fontsize=10)
    right.plot([], [], "o", color=LOOK[SAME][0], mfc="none", label=SAME)
    for axis in (left, right):
        axis.plot([0, 1], [0, 1], color="0.5", linestyle="--", linewidth=1)
        axis.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="lower right" if axis is left else "upper left")
    save(fig, path)


def shares(runs):
    """Expected and true, of flagged points."""
    return [r[2] / r[1] for r in runs], [r[3] / r[1] for r in runs]


def draw(record, path):
    """Both, beside the record."""
    draw_ranking(record, path)
    draw_calibration(
        record, path.with_name(path.stem.replace("audit", "audit_calibration") + ".svg")
    )
