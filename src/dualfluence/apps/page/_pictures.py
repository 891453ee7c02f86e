"""Points as one sheet of pictures, or as the first of their numbers."""

import base64
import math
import struct
import zlib
from typing import Any

import numpy as np

from ...attribution._attribution_plot import as_picture

MAX_SIDE = 64
"""Pixels of the longer side of a picture; larger pictures are reduced."""

NUMBERS = 6
"""Number of features shown for a point that is not a picture."""


def drawn(x: Any) -> dict[str, Any]:
    """A sheet of pictures if features are pictures, else rows of numbers."""
    array = np.asarray(x)
    first = as_picture(array[0]) if len(array) else None
    if first is None:
        flat = array.reshape(len(array), -1)[:, :NUMBERS].astype(float)
        return {"rows": [[float(f"{v:.3g}") for v in row] for row in flat], "sheet": None}
    return {"rows": None, "sheet": _sheet(array, first)}


def _sheet(array: np.ndarray, first: np.ndarray) -> dict[str, Any]:
    step = max(1, math.ceil(max(first.shape[:2]) / MAX_SIDE))
    pictures = [p[::step, ::step] for p in map(as_picture, array) if p is not None]
    height, width = pictures[0].shape[:2]
    columns = max(1, math.isqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    grey = pictures[0].ndim == 2
    sheet = np.full((rows * height, columns * width, *pictures[0].shape[2:]), 255, np.uint8)
    for i, picture in enumerate(pictures):
        top, left = i // columns * height, i % columns * width
        # Grey pictures are ink on paper, as in every figure of the library.
        shown = 1 - picture if grey else picture
        sheet[top : top + height, left : left + width] = np.round(255 * shown)
    url = "data:image/png;base64," + base64.b64encode(png(sheet)).decode()
    return {"url": url, "columns": columns, "rows": rows, "ratio": width / height, "grey": grey}


def png(pixels: np.ndarray) -> bytes:
    """An 8-bit picture, grey `(h, w)` or colour `(h, w, 3)`, as a PNG file; needs no other library."""
    height, width = pixels.shape[:2]
    colour = 0 if pixels.ndim == 2 else 2
    lines = pixels.reshape(height, -1)
    raw = np.concatenate([np.zeros((height, 1), np.uint8), lines], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(raw, 9))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
