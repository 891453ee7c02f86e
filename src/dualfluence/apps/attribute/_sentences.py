"""The body of `dualfluence attribute` for a table of texts: the sentences behind each answer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...adapters import HashedText
from ...attribution import Attribution
from ...fitted._fit import fit
from ...infinite import Dense, serial
from ...losses import SquaredError
from ._page import write_csv
from ._table import is_table_file, read_table


def explain_texts(
    path: Path | None,
    *,
    text: str | None,
    label: str,
    prompts: list[str],
    out: Path,
    points: int | None,
    queries: int,
    ridge: float,
    k: int,
    report: Callable[[str], None],
) -> tuple[Attribution, list[Path]]:
    """The effect of every sentence on the answers, and the page and table that were written.

    The model is a linear one on hashed words, with squared error, for which leaving a sentence out is
    exact. A prompt is asked for the class that the model answers; without prompts the last rows of the
    table are left out of training and asked for their own labels.
    """
    if path is None or not is_table_file(path):
        raise ValueError(
            "attribute: --text and --prompt need a table, --data FILE.csv or .tsv, perhaps .gz."
        )
    if text is None:
        raise ValueError("attribute: a table needs --text, the name of the column of texts.")
    rows = read_table(path, label, text, points)
    held = 0 if prompts else min(queries, len(rows.y) - 2)
    n = len(rows.y) - held
    names, classes = np.unique(rows.y[:n], return_inverse=True)
    if (held < 1 and not prompts) or len(names) < 2:
        raise ValueError(
            f"attribute: expected at least two labels and a query, got {len(names)} labels in {n} rows."
        )
    texts, asked = rows.x[:n], prompts or rows.x[n:]
    encoder = HashedText()
    x, xq = encoder(texts), encoder(asked)
    report(f"fitting {n} sentences")
    # A linear model: its kernel is that of one layer. Rows have length 1.
    model = serial(Dense(W_std=float(encoder.size) ** 0.5, b_std=0.1))
    fitted = fit(
        model, x, np.eye(len(names))[classes], loss=SquaredError(), ridge=ridge, progress=False
    )
    answers = np.asarray(fitted.predict(xq)).argmax(axis=1)
    own = {name: i for i, name in enumerate(names.tolist())}
    wanted = answers if prompts else [own.get(v, -1) for v in rows.y[n:].tolist()]
    if -1 in wanted:
        raise ValueError(
            f"attribute: no training row has the label {rows.y[n:][list(wanted).index(-1)]!r} of a query."
        )
    report(f"leaving out each of {n} sentences")
    found = fitted.attribute(xq, np.eye(len(names))[wanted], progress=False)
    shown = [
        f"{query} → {names[answer]}" + ("" if answer == target else f" (labelled {names[target]})")
        for query, answer, target in zip(asked, answers, wanted, strict=True)
    ]
    labelled = [f"{sentence} → {names[c]}" for sentence, c in zip(texts, classes, strict=True)]
    page, table = out / "attribution.html", out / "attribution.csv"
    found.to_html(page, texts=labelled, queries=shown, k=k)
    write_csv(table, _rows(found, asked, texts, names[classes], min(k, n)))
    return found, [page, table]


def _rows(found: Attribution, asked: Any, texts: Any, labels: Any, k: int) -> list[tuple[Any, ...]]:
    top = found.top(k)
    rows: list[tuple[Any, ...]] = [
        ("query", "asked", "kind", "rank", "train", "label", "text", "effect")
    ]
    for q in range(found.num_queries):
        for kind in ("helpful", "harmful"):
            side = getattr(top, kind)
            for r, (i, v) in enumerate(zip(side.indices[q], side.values[q], strict=True)):
                rows.append((q, asked[q], kind, r + 1, int(i), labels[i], texts[i], f"{v:.8g}"))
    return rows
