"""One self-contained HTML page and a CSV for each command."""

import csv
import html
import io
from pathlib import Path
from typing import Any

import numpy as np

from ..._support.files import write_whole
from ...attribution._attribution_plot import label
from ..page._document import card, strip, write_document
from ..page._scene import Scene
from ..page._view import action_of, document_of, groups_of, scores_of, state_of, what_stays
from ..page._write import one_file

SHOWN = 60
"""Number of queries on the page of an audit; scores use all queries."""


def write_queries(result: dict[str, Any], page: Path, table: Path, *, shown: int = 12) -> None:
    """The page of `explain`: every query with its strip, and all pairs in the CSV."""
    data, top = result["data"], result["top"]
    strips = "\n".join(_strip(result, q) for q in range(min(shown, len(data.xq))))
    text = f"""
<h1>Which training points made these predictions?</h1>
<p>A model was trained on {len(data.x)} examples ({html.escape(data.name)}). For each question below, the
numbers say what would have happened if an example had been left out. <b>Helpful</b> examples (blue) made the
answer better: without them the error rises. <b>Harmful</b> ones (orange) made it worse: without them
the error falls. The number is the change of the error (loss) without the example.</p>
{strips}
<p class="note">{_notes(result)}</p>"""
    write_document(page, "Attribution", text)
    rows: list[tuple[Any, ...]] = [("query", "kind", "rank", "train", "train_target", "effect")]
    for kind in ("helpful", "harmful"):
        ranked = getattr(top, kind)
        for q in range(len(data.xq)):
            for r, (i, v) in enumerate(zip(ranked.indices[q], ranked.values[q], strict=True)):
                rows.append((q, kind, r + 1, int(i), label(data.y, int(i)), f"{v:.8g}"))
    write_csv(table, rows)


def write_audit(result: dict[str, Any], page: Path, table: Path) -> None:
    """The page of `audit`, that of `explore` in one file, and one CSV row for each training point."""
    data, predicted = result["data"], result["predicted"]
    suspicion, harm, alone = result["suspicion"], result["harm"], result["isolation"]
    write_whole(page, one_file(_content(result)))
    place = np.empty(len(data.x), int)
    place[_order(suspicion)] = np.arange(1, len(data.x) + 1)
    rows: list[tuple[Any, ...]] = [
        ("train", "target", "predicted_without", "suspicion", "suspicion_rank", "harm", "isolation")
    ]
    for i in range(len(data.x)):
        other = "" if predicted is None else int(predicted[i])
        numbers = (f"{suspicion[i]:.8g}", place[i], f"{harm[i]:.8g}", f"{alone[i]:.8g}")
        rows.append((i, label(data.y, i), other, *numbers))
    write_csv(table, rows)


def _content(result: dict[str, Any]) -> dict[str, Any]:
    """The content of the page: effects on the first `SHOWN` queries, everything else for all queries."""
    data, fitted = result["data"], result["fitted"]
    groups = np.empty(len(data.x), object)
    for name, points in result["members"].items():
        groups[points] = name
    scene = Scene(
        fitted,
        data.xq[:SHOWN],
        data.yq[:SHOWN],
        data.name,
        "A model",
        groups=groups,
        notes=(_skill(result),),
        heading="Audit of a training set",
    )
    history = [action_of("fit", fitted)]
    outputs = fitted.predict(scene.xq)
    state = {"version": 1, "history": history, **state_of(scene, fitted, outputs)}
    return {
        "start": what_stays(scene, result["isolation"]),
        "first": state,
        "state": state,
        "scores": scores_of(scene, fitted, result["attribution"]),
        "groups": groups_of(result["groups"]),
        "certificate": document_of(scene, fitted, history),
    }


def _skill(result: dict[str, Any]) -> str:
    count, loss, right = len(result["data"].xq), result["query_loss"], result["accuracy"]
    answers = "" if right is None else f"{100 * right:.1f} % of them right, "
    all_of_them = (
        f"Of all {count} queries: {answers}mean loss {loss:.3f}. " if count > SHOWN else ""
    )
    return f"{all_of_them}It took {result['seconds']:.1f} s."


def _order(values: np.ndarray) -> np.ndarray:
    return np.argsort(-np.asarray(values), kind="stable")


def _strip(result: dict[str, Any], q: int) -> str:
    data, top = result["data"], result["top"]
    said = result["predictions"][q]
    answer = str(int(said)) if data.is_classes else np.array2string(np.asarray(said), precision=3)
    right = "" if not data.is_classes else (" ✓" if int(said) == int(data.yq[q]) else " ✗")
    caption = (
        f"truth {html.escape(label(data.yq, q))}<br>model: <b>{html.escape(answer)}{right}</b>"
    )

    def cards(kind: str) -> str:
        ranked = getattr(top, kind)
        return "".join(
            card(
                data.x[i], f"{html.escape(label(data.y, int(i)))}<br><b>{v:+.2g}</b>", kind, f"#{i}"
            )
            for i, v in zip(ranked.indices[q], ranked.values[q], strict=True)
        )

    query = card(data.xq[q], caption, "query", f"question {q}")
    return strip(query, cards("helpful"), cards("harmful"))


def _notes(result: dict[str, Any]) -> str:
    notes = "; ".join(result["notes"])
    return html.escape(f"Ridge {result['ridge']:g}; {notes}; {result['seconds']:.1f} s in all.")


def write_csv(path: Path, rows: list[tuple[Any, ...]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    write_whole(path, text.getvalue())
