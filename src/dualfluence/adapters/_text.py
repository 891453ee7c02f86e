"""Text as numbers without a model: hashed words and parts of words."""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float

from .._support.options import check_count

WORDS = re.compile(r"\w+")
PART = 4
"""Letters of a part of a word; parts of a word make `file` and `files` near."""


@dataclass(frozen=True)
class HashedText:
    """A frozen encoder of text: words, pairs of words and parts of words, hashed into signed columns.

    The same text gives the same row everywhere. Rows have length 1; an empty text is zero. Use it to
    audit text without a language model. The embeddings of a language model tell classes apart better.

    **Arguments:**

    - `size`: columns. With more columns, more words are kept apart.
    """

    size: int = 1024

    def __post_init__(self) -> None:
        check_count("HashedText: size", self.size, least=2)

    def __call__(self, texts: Sequence[str]) -> Float[np.ndarray, "n d"]:
        """One row per text."""
        rows = np.zeros((len(texts), self.size))
        for row, text in zip(rows, texts, strict=True):
            if not isinstance(text, str):
                raise TypeError(
                    f"HashedText: expected texts, got a {type(text).__name__}. Fill missing texts with ''."
                )
            for token in _tokens(text):
                code = zlib.crc32(token.encode())
                row[code % self.size] += 1 if code >> 31 else -1
        length = np.linalg.norm(rows, axis=1, keepdims=True)
        return rows / np.where(length > 0, length, 1)


def _tokens(text: str) -> Any:
    words = WORDS.findall(text.lower())
    yield from words
    yield from (f"{a} {b}" for a, b in pairwise(words))
    for word in words:
        padded = f"<{word}>"
        yield from (padded[i : i + PART] for i in range(len(padded) - PART + 1))
