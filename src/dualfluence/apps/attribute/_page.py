"""One self-contained HTML page and a CSV for each command."""

import base64
import csv
import html
import io
from pathlib import Path
from typing import Any

import numpy as np

from ..._support.files import write_atomically
from ...dual._attribution_plot import as_picture, label
from ._data import Data

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem}
body{color:#111;background:#fff}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2.2rem}.note{color:#444;font-size:.9rem}
.row{display:flex;flex-wrap:wrap;gap:.5rem;align-items:flex-start;margin:.4rem 0}
.card{width:6rem;box-sizing:border-box;text-align:center;font-size:.8rem;line-height:1.25}
.card{border:2px solid #ddd;border-radius:.4rem;padding:.3rem}
.card img{width:100%;image-rendering:pixelated}.card b{font-size:.9rem}
.helpful{border-color:#0072B2}.harmful{border-color:#D55E00}.query{border-color:#111}
.strip{display:grid;grid-template-columns:7rem 1fr;gap:.8rem;border-bottom:1px solid #ddd;padding:.8rem 0}
.kind{font-size:.85rem;font-weight:600}.kind.helpful{color:#0072B2}.kind.harmful{color:#B34700}
table{border-collapse:collapse;font-size:.9rem}
th,td{padding:.3rem .8rem;text-align:right;border-bottom:1px solid #ddd}
th:first-child,td:first-child{text-align:left}
.bar{display:inline-block;height:.8rem;background:#0072B2;vertical-align:middle}.bar.down{background:#D55E00}
"""


def write_queries(result: dict[str, Any], page: Path, table: Path, *, shown: int = 12) -> None:
    """The page of `explain`: every query with its strip, and all pairs in the CSV."""
    data, top = result["data"], result["top"]
    strips = "\n".join(_strip(result, q) for q in range(min(shown, len(data.xq))))
    text = f"""
<h1>Which training points made these predictions?</h1>
<p>A model was trained on {len(data.x)} examples ({html.escape(data.name)}). For each question below, we
asked what would have happened had each example been left out. <b>Helpful</b> examples (blue) made the
answer better: without them the error rises. <b>Harmful</b> ones (orange) made it worse: without them
the error falls. The number is the change of the error (loss) without the example.</p>
{strips}
<p class="note">{_notes(result)}</p>"""
    _write(page, "Attribution", text)
    rows: list[tuple[Any, ...]] = [("query", "kind", "rank", "train", "train_target", "effect")]
    for kind in ("helpful", "harmful"):
        ranked = getattr(top, kind)
        for q in range(len(data.xq)):
            for r, (i, v) in enumerate(zip(ranked.indices[q], ranked.values[q], strict=True)):
                rows.append((q, kind, r + 1, int(i), label(data.y, int(i)), f"{v:.8g}"))
    _write_csv(table, rows)


def write_audit(result: dict[str, Any], page: Path, table: Path, *, shown: int = 24) -> None:
    """The page of `audit`, and one CSV row for each training point."""
    data = result["data"]
    suspicion, harm, alone = result["suspicion"], result["harm"], result["isolation"]
    predicted = result["predicted"]

    def says(i: int) -> str:
        given = html.escape(label(data.y, i))
        if predicted is None:
            return f"target {given}"
        return f"label <b>{given}</b><br>model says <b>{int(predicted[i])}</b>"

    text = f"""
<h1>Audit of a training set</h1>
<p>{len(data.x)} examples ({html.escape(data.name)}), judged by models trained <i>without</i> each of them
in turn. {_skill(result)}</p>
<h2>Labels that look wrong</h2>
<p>The model that never saw the example disagrees most with its label. Check these first.</p>
{_cards(data, _order(suspicion), says, "harmful", shown)}
<h2>Most harmful examples</h2>
<p>Leaving one of these out would lower the error on fresh questions most, by the number below.</p>
{_cards(data, _order(harm), lambda i: f"{says(i)}<br><b>{-harm[i]:+.2g}</b>", "harmful", shown // 2)}
<h2>Most isolated examples</h2>
<p>Nothing else in the set is like them: rare cases, or errors of measurement.</p>
{_isolated(data, alone, says, shown // 2)}
<h2>Groups</h2>
<p>Change of the error on fresh questions if a whole group were left out, beside the sum of what its
examples do one by one. A large difference means that they stand in for each other.</p>
{_group_table(result["groups"])}
<p class="note">{_notes(result)}</p>"""
    _write(page, "Audit", text)
    place = np.empty(len(data.x), int)
    place[_order(suspicion)] = np.arange(1, len(data.x) + 1)
    rows: list[tuple[Any, ...]] = [
        ("train", "target", "predicted_without", "suspicion", "suspicion_rank", "harm", "isolation")
    ]
    for i in range(len(data.x)):
        other = "" if predicted is None else int(predicted[i])
        numbers = (f"{suspicion[i]:.8g}", place[i], f"{harm[i]:.8g}", f"{alone[i]:.8g}")
        rows.append((i, label(data.y, i), other, *numbers))
    _write_csv(table, rows)


def _skill(result: dict[str, Any]) -> str:
    count, loss = len(result["data"].xq), result["query_loss"]
    right = result["accuracy"]
    answers = "" if right is None else f"The model answers {100 * right:.1f} % of them right. "
    return f"Then {count} fresh questions were put to the model. {answers}Mean error (loss): {loss:.3f}."


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
    query = card(data.xq[q], caption, "query", f"question {q}")
    rows = ""
    for kind in ("helpful", "harmful"):
        ranked = getattr(top, kind)
        cards = "".join(
            card(
                data.x[i], f"{html.escape(label(data.y, int(i)))}<br><b>{v:+.2g}</b>", kind, f"#{i}"
            )
            for i, v in zip(ranked.indices[q], ranked.values[q], strict=True)
        )
        rows += f'<div class="kind {kind}">{kind}</div><div class="row">{cards}</div>'
    return f'<div class="strip"><div>{query}</div><div>{rows}</div></div>'


def _cards(data: Data, order: np.ndarray, says: Any, kind: str, shown: int) -> str:
    cards = "".join(card(data.x[i], says(int(i)), kind, f"#{i}") for i in order[:shown])
    return f'<div class="row">{cards}</div>'


def _isolated(data: Data, alone: np.ndarray, says: Any, shown: int) -> str:
    if not np.isfinite(alone).all():
        return "<p>Not available: this kernel has no entries to compare.</p>"
    return _cards(data, _order(alone), says, "query", shown)


def card(features: np.ndarray, caption: str, kind: str, name: str) -> str:
    """A point as a picture, or its first numbers, above its name and caption."""
    picture = as_picture(features)
    if picture is None:
        text = np.array2string(np.asarray(features).ravel()[:6], precision=2, separator=" ")
        shown = f"<code>{html.escape(text)}</code>"
    else:
        shown = f'<img alt="{html.escape(name)}" src="data:image/png;base64,{_png(picture)}">'
    return f'<div class="card {kind}">{shown}{html.escape(name)}<br>{caption}</div>'


def _png(picture: np.ndarray) -> str:
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, picture, cmap="gray_r", format="png", vmin=0, vmax=1)
    return base64.b64encode(buffer.getvalue()).decode()


def _group_table(groups: Any) -> str:
    values, sums = groups.values.mean(axis=0), groups.sums.mean(axis=0)
    largest = max(np.abs(values).max(), 1e-12)
    rows = ""
    for j in _order(values):
        down = " down" if values[j] < 0 else ""
        width = 10 * abs(values[j]) / largest
        bar = f'<span class="bar{down}" style="width:{width:.2f}rem"></span>'
        rows += (
            f"<tr><td>{html.escape(groups.names[j])}</td><td>{groups.sizes[j]}</td>"
            f"<td>{values[j]:+.3g}</td><td style='text-align:left'>{bar}</td><td>{sums[j]:+.3g}</td></tr>"
        )
    return (
        "<table><tr><th>group</th><th>examples</th><th>error changes by</th><th></th>"
        f"<th>sum one by one</th></tr>{rows}</table>"
    )


def _notes(result: dict[str, Any]) -> str:
    notes = "; ".join(result["notes"])
    return html.escape(f"Ridge {result['ridge']:g}; {notes}; {result['seconds']:.1f} s in all.")


def _write(path: Path, title: str, body: str) -> None:
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body>{body}</body></html>"
    )
    write_atomically(path, lambda file: file.write(page.encode()))


def _write_csv(path: Path, rows: list[tuple[Any, ...]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))
