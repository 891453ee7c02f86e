"""Pages of text and pictures: each one HTML file that holds all of itself."""

import base64
import html
import io
from pathlib import Path

import numpy as np

from ..._support.files import write_whole
from ...attribution._attribution_plot import as_picture
from ._write import POLICY

STILL = POLICY + "style-src 'unsafe-inline'"
"""Rules for browsers: a page of this kind runs nothing."""

CARDS = """
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
"""


def write_document(path: Path, title: str, body: str, style: str = CARDS) -> None:
    """A page with this body; nothing is left behind if it fails."""
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{STILL}">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head><body>{body}</body></html>\n"
    )
    write_whole(path, page)


def png_image(content: bytes, name: str) -> str:
    """A picture in the page itself."""
    data = base64.b64encode(content).decode()
    return f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">'


def look(features: np.ndarray, name: str) -> str:
    """A point as a picture, or its first numbers."""
    picture = as_picture(features)
    if picture is None:
        text = np.array2string(np.asarray(features).ravel()[:6], precision=2, separator=" ")
        return f"<code>{html.escape(text)}</code>"
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, picture, cmap="gray_r", format="png", vmin=0, vmax=1)
    return png_image(buffer.getvalue(), name)


def card(features: np.ndarray, caption: str, kind: str, name: str) -> str:
    """A point's look above its name and caption."""
    shown = look(features, name)
    return f'<div class="card {kind}">{shown}{html.escape(name)}<br>{caption}</div>'


def strip(query: str, helpful: str, harmful: str) -> str:
    """The card of a query beside the cards of the points that helped and harmed it."""
    rows = "".join(
        f'<div class="kind {kind}">{kind}</div><div class="row">{cards}</div>'
        for kind, cards in (("helpful", helpful), ("harmful", harmful))
    )
    return f'<div class="strip"><div>{query}</div><div>{rows}</div></div>'
