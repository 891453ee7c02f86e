"""A page of sentences: each query with those that helped and harmed it, their tokens shaded."""

import html
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..losses._tokens import IGNORED

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""A rule for browsers: the page loads nothing and runs nothing."""

STYLE = """
:root{--paper:#fcfbf8;--card:#fff;--ink:#1c1b19;--soft:#5d5a54;--line:#e3dfd6;--good:0,114,178;--bad:213,94,0;
--good-ink:#005a8d;--bad-ink:#a33f00;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--paper:#16171a;--card:#1d1f23;--ink:#ecebe6;--soft:#a5a39b;
--line:#33363c;--good:86,180,233;--bad:230,140,60;--good-ink:#7cc6ef;--bad-ink:#ffa25e}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:76rem;padding:1.6rem 1.2rem 3rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25;margin:0 0 .4rem}h3{font-size:.95rem;margin:.6rem 0 .2rem}
p{max-width:62rem;margin:.4rem 0}.note{color:var(--soft);font-size:.85rem}
section{margin-top:1.8rem;border-top:2px solid var(--line);padding-top:.8rem}
h2{font-size:1.15rem;font-weight:600;margin:0 0 .4rem}h2 small{color:var(--soft);font-weight:400}
.sides{display:grid;grid-template-columns:1fr 1fr;gap:1.6rem}
@media(max-width:44rem){.sides{grid-template-columns:1fr;gap:.6rem}}
.good h3{color:var(--good-ink)}.bad h3{color:var(--bad-ink)}
ol{list-style:none;margin:0;padding:0}li{border-bottom:1px solid var(--line);padding:.45rem 0}
.head{display:flex;gap:.6rem;align-items:center;color:var(--soft);font-size:.8rem;
font-variant-numeric:tabular-nums}
.head span:first-child{min-width:3.2rem}.head span:last-child{min-width:4.2rem;text-align:right}
.bar{flex:1;height:.35rem;background:var(--line);border-radius:.2rem;overflow:hidden}
.bar i{display:block;height:100%}
.good .bar i{background:rgb(var(--good))}.bad .bar i{background:rgb(var(--bad))}
mark{color:inherit;background:none;border-radius:.15rem;white-space:pre-wrap}
"""

STRONGEST = 0.45
"""Opacity behind the token with the largest part, so that the text stays readable."""

Decode = Callable[[list[int]], Any]


def text_page(
    result: Any,
    texts: Iterable[Any] | None,
    queries: Iterable[Any] | None,
    decode: Decode | None,
    names: Sequence[Any] | None,
    k: int,
) -> str:
    """The page as one HTML text; the arguments are those of `Attribution.to_html`."""
    shown = _Sentences(result, texts, queries, decode, names)
    top = result.top(k)
    parts = [_section(shown, top, q) for q in range(result.num_queries)]
    unit = "rank the sentences of one query and have no unit"
    if result.unit is not None:
        unit = f"say how much the {html.escape(result.of)} changes without the sentence"
    shade = (
        "Shading divides a score among the tokens of its sentence: blue tokens helped, orange ones harmed. "
        if shown.has_parts
        else ""
    )
    title = "Which sentences made the model say this?"
    notes = "; ".join(html.escape(note) for note in result.notes)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><h1>{title}</h1>"
        "<p><b>Helpful</b> sentences made the model say this: without them it would be less likely. "
        f"<b>Harmful</b> ones spoke against it. {shade}The numbers {unit}.</p>"
        f'{"".join(parts)}<p class="note">{notes}</p></body></html>\n'
    )


class _Sentences:
    """What is shown of training points and queries."""

    def __init__(self, result: Any, texts: Any, queries: Any, decode: Any, names: Any) -> None:
        self.result, self.decode, self.names = result, decode, names
        self.texts = _checked("texts", texts, result.num_points)
        self.queries = _checked("queries", queries, result.num_queries)
        self.has_parts = decode is not None and result.tokens is not None
        for name, given, targets in (("texts", texts, result.y), ("queries", queries, result.yq)):
            if given is None and (decode is None or np.ndim(targets) != 2):
                raise ValueError(
                    f"to_html: expected {name}, a text for each "
                    f"{'training point' if name == 'texts' else 'query'}. If the targets are token numbers, "
                    "give decode=tokenizer.decode to show the decoded text instead."
                )

    def query(self, q: int) -> str:
        said = self._label(self.result.yq, q)
        if self.queries is not None:
            return html.escape(self.queries[q]) + said
        return html.escape(self._plain(self.result.yq[q]))

    def training(self, q: int, i: int, largest: float) -> str:
        if self.has_parts:
            parts = self.result.direction * np.asarray(self.result.tokens[q, i])
            return self._shaded(self.result.y[i], parts, largest)
        if self.texts is not None:
            return html.escape(self.texts[i]) + self._label(self.result.y, i)
        return html.escape(self._plain(self.result.y[i]))

    def _label(self, targets: Any, at: int) -> str:
        if targets is None or np.ndim(targets) != 1:
            return ""
        value = np.asarray(targets)[at]
        name = f"{value:g}" if self.names is None else str(self.names[int(value)])
        return f" <small>→ {html.escape(name)}</small>"

    def _pieces(self, targets: Any) -> list[tuple[int, str]]:
        """Position and text of every token that counts."""
        found = []
        for t, token in enumerate(np.asarray(targets).tolist()):
            if token != IGNORED:
                piece = self.decode([token])
                found.append((t, piece if isinstance(piece, str) else "".join(map(str, piece))))
        # Pieces without any white space are words: tokenizers strip it from single tokens.
        if not any(c.isspace() for _, piece in found for c in piece):
            found = [
                (t, piece.removeprefix("##") if piece.startswith("##") else " " * (n > 0) + piece)
                for n, (t, piece) in enumerate(found)
            ]
        return found

    def _plain(self, targets: Any) -> str:
        return "".join(piece for _, piece in self._pieces(targets))

    def _shaded(self, targets: Any, parts: np.ndarray, largest: float) -> str:
        spans = []
        for t, piece in self._pieces(targets):
            share = float(parts[t]) / largest if largest > 0 else 0.0
            colour = "good" if share > 0 else "bad"
            spans.append(
                f'<mark title="{float(parts[t]):+.3g}" style="background:rgba(var(--{colour}),'
                f'{STRONGEST * min(abs(share), 1):.3f})">{html.escape(piece)}</mark>'
            )
        return "".join(spans)


def _section(shown: _Sentences, top: Any, q: int) -> str:
    result, ranked = shown.result, (top.helpful, top.harmful)
    each = np.concatenate([side.indices[q] for side in ranked])
    largest = float(np.abs(result.tokens[q, each]).max()) if shown.has_parts else 0.0
    strongest = max(float(np.abs(side.values[q]).max()) for side in ranked)
    columns = "".join(
        f'<div class="{look}"><h3>{name}</h3><ol>'
        + "".join(
            _item(shown, q, int(i), float(v), sign * result.direction, largest, strongest)
            for i, v in zip(side.indices[q], side.values[q], strict=True)
        )
        + "</ol></div>"
        for look, name, sign, side in zip(
            ("good", "bad"), ("Helpful", "Harmful"), (1, -1), ranked, strict=True
        )
    )
    heading = f"<h2><small>Query {q}:</small> {shown.query(q)}</h2>"
    return f'<section>{heading}<div class="sides">{columns}</div></section>'


def _item(
    shown: _Sentences, q: int, i: int, value: float, sign: int, largest: float, strongest: float
) -> str:
    if sign * value <= 0:  # there are fewer helpful or harmful sentences than were asked for
        return ""
    width = 100 * abs(value) / strongest if strongest > 0 else 0
    return (
        f'<li><div class="head"><span>#{i}</span><span class="bar"><i style="width:{width:.0f}%"></i></span>'
        f"<span>{value:+.3g}</span></div>{shown.training(q, i, largest)}</li>"
    )


def _checked(name: str, texts: Any, count: int) -> list[str] | None:
    if texts is None:
        return None
    found = list(texts)
    if len(found) != count:
        raise ValueError(f"to_html: {name} must be {count} texts, got {len(found)}.")
    if wrong := [text for text in found if not isinstance(text, str)]:
        raise TypeError(f"to_html: {name} must be texts, got a {type(wrong[0]).__name__}.")
    return found
