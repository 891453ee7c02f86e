"""Padding of token numbers, found without a mask."""

from collections.abc import Sequence

import numpy as np


def padding_of(rows: Sequence[np.ndarray]) -> str:
    """What looks like padding, in words: a token repeated at one end, and nowhere else; or nothing."""
    for end, side in ((-1, "end"), (0, "begin")):
        lengths: dict[int, list[int]] = {}
        for row in rows:
            token = int(row[end])
            turned = row[::-1] if end else row
            lengths.setdefault(token, []).append(int(np.argmax(np.append(turned != token, True))))
        for token, runs in lengths.items():
            everywhere = sum(int((row == token).sum()) for row in rows)
            if max(runs) > 1 and len(rows) > 1 and everywhere == sum(runs):
                return (
                    f"{sum(r > 1 for r in runs)} sequences {side} with token {token} up to {max(runs)} "
                    "times. The token occurs nowhere else, so it is probably padding"
                )
    return ""
