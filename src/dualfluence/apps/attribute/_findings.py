"""Findings of an audit as one self-contained page and a table."""

import html
from pathlib import Path
from typing import Any

import numpy as np

from ..._support.show import count
from ...attribution import Audit, Finding
from ...attribution._audit_record import FIELDS, KINDS, TITLES
from ..page._document import look, write_document
from ._page import write_csv

SHOWN = 48
"""Findings of a kind on the page; all are in the table."""

LETTERS = 240
"""Of a text on the page."""

WHAT = {
    "label": "The model that was trained without the point says something else, and is sure enough of it. "
    "Look at the first ones, put right what is wrong, and audit again.",
    "conflict": "Two points that are nearly the same have different targets. At least one of the two is "
    "wrong, or the features do not hold what tells them apart.",
    "leak": "A test point is nearly the same as a training point. Results on it say nothing about new data.",
    "leverage": "The prediction at the point depends on its own target. Nothing else in the data supports "
    "it, so that a mistake in it stays unseen. More points of this kind would help most.",
    "redundant": "All of these together can go and hardly a prediction changes. They cost time, and their "
    "labels need no second look.",
}

STYLE = """
:root{--paper:#fcfbf8;--card:#fff;--ink:#1c1b19;--soft:#5d5a54;--line:#e3dfd6;--bad:#b03a00;--good:#00785a;
--track:#eeebe4;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--paper:#16171a;--card:#1d1f23;--ink:#ecebe6;--soft:#a5a39b;
--line:#33363c;--bad:#ffa25e;--good:#33c497;--track:#2a2d33}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:76rem;padding:2rem 1.2rem 3rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
h1{font:400 2rem/1.2 Georgia,serif;margin:0 0 .4rem}
h2{font:400 1.35rem/1.3 Georgia,serif;margin:2.4rem 0 .2rem}
p{max-width:46rem;margin:.3rem 0}.soft{color:var(--soft);font-size:.9rem}
nav{display:flex;flex-wrap:wrap;gap:.6rem;margin:1.2rem 0}
nav a{border:1px solid var(--line);background:var(--card);border-radius:.5rem;padding:.4rem .8rem;
text-decoration:none;color:var(--ink);min-height:2.75rem;display:flex;align-items:center;gap:.5rem}
nav b{font-size:1.15rem;white-space:nowrap}
.cards{display:grid;gap:.7rem;margin:.8rem 0;
grid-template-columns:repeat(auto-fill,minmax(min(23rem,100%),1fr))}
.cards>div{display:grid;grid-template-columns:auto 1fr;gap:.2rem .8rem;background:var(--card);
border:1px solid var(--line);border-radius:.5rem;padding:.7rem;align-content:start}
.cards img{width:4.5rem;height:4.5rem;image-rendering:pixelated;border:1px solid var(--line)}
.wide{grid-column:1/-1}.name{color:var(--soft);font-size:.85rem}.given{color:var(--bad)}
.suggested{color:var(--good);font-weight:600}.small{font-size:.85rem;color:var(--soft)}
code{font-size:.8rem}
.bar{height:.35rem;background:var(--track);border-radius:.2rem;margin-top:.3rem}
.bar i{display:block;height:100%;background:var(--bad);border-radius:.2rem}
"""


class Look:
    """How the points of both splits look on a page: pictures, texts or first numbers."""

    def __init__(self, train: Any, test: Any) -> None:
        self.points = {"train": train, "test": test}

    def __call__(self, split: str, index: int) -> str:
        points = self.points[split]
        if points is None:
            return ""
        point = points[index]
        if isinstance(point, str):
            short = point
            if len(point) > LETTERS:  # ends with a whole word, where words are not endless
                short = point[:LETTERS].rpartition(" ")[0] or point[:LETTERS]
                short += " …"
            return f'<div class="wide">{html.escape(short)}</div>'
        shown = look(np.asarray(point), f"{split} point {index}")
        return f'<div class="wide">{shown}</div>' if shown.startswith("<code>") else shown


def write_findings(found: Audit, name: str, shown: Look, page: Path, table: Path) -> None:
    """The page and the CSV, one row per finding."""
    counts = found.counts
    links = "".join(
        f'<a href="#{kind}"><b>{counts[kind]:,}</b>{TITLES[kind]}</a>'
        for kind in KINDS
        if counts[kind]
    )
    sections = "".join(_section(found, kind, shown) for kind in KINDS if counts[kind])
    body = f"""<h1>Audit of {html.escape(name)}</h1>
<p>{_summary(found)}</p><nav aria-label="Kinds of findings">{links}</nav>{sections}
<h2>How this was found</h2><p class="soft">{html.escape("; ".join(found.notes))}.
{_seconds(found)} Every finding is in {html.escape(table.name)}. A wrong label that comes with copies of its
point supports itself and is not seen; what looks wrong may be a rare point that is right.</p>"""
    write_document(page, f"Audit of {name}", body, STYLE)
    write_csv(table, [tuple(FIELDS), *found.rows()])


def _summary(found: Audit) -> str:
    points = f"{found.num_points:,} training points"
    if found.classes is not None:
        points += f" in {len(found.classes):,} classes"
    one = "label" if found.classes is not None else "target"
    flagged, in_test = len(found.flagged), found.counts["label"] - len(found.flagged)
    test = f" In the test set {_look_wrong(in_test, one)}." if in_test else ""
    if not flagged:
        return f"{points}. None of their {one}s looks wrong.{test}"
    return (
        f"{points}. <b>{_look_wrong(flagged, one)}; about {found.expected_precision * flagged:,.0f} of "
        f"these should be wrong</b>, by models that were trained without the point. In all of the training "
        f"set, about {found.wrong.sum():,.0f} {one}s should be wrong.{test}"
    )


def _look_wrong(number: int, one: str) -> str:
    return f"{count(number, one)} look{'s' if number == 1 else ''} wrong"


def _seconds(found: Audit) -> str:
    return f"It took {found.stats['seconds']:.1f} s." if "seconds" in found.stats else ""


def _section(found: Audit, kind: str, shown: Look) -> str:
    all_of_them = [f for f in found.findings if f.kind == kind]
    cards = "".join(_card(f, shown) for f in all_of_them[:SHOWN])
    more = len(all_of_them) - SHOWN
    rest = f'<p class="soft">And {more:,} more in the table.</p>' if more > 0 else ""
    title = TITLES[kind][0].upper() + TITLES[kind][1:]
    return (
        f'<section><h2 id="{kind}">{title}</h2><p class="soft">{WHAT[kind]}</p>'
        f'<div class="cards">{cards}</div>{rest}</section>'
    )


def _card(f: Finding, shown: Look) -> str:
    look = "given" if f.kind in ("label", "conflict") else "name"
    given = "" if f.given is None else f'<span class="{look}">{_target(f.given)}</span>'
    better = ""
    if f.kind == "label" and f.suggested is not None:
        better = f' → <span class="suggested">{_target(f.suggested)}</span>'
    bar = ""
    if f.probability is not None:
        bar = f'<div class="bar wide"><i style="width:{100 * f.probability:.0f}%"></i></div>'
    other = "" if f.partner is None else shown("train", f.partner)
    return (
        f"<div>{shown(f.split, f.index)}<div><div class=name>{f.split} {f.index}</div>{given}{better}"
        f'<div class="small">{html.escape(f.reason)}</div></div>{other}{bar}</div>'
    )


def _target(value: Any) -> str:
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    return html.escape(str(value))
