"""Tokenised data in the forms that libraries of language models keep them, as arrays."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .._support.padding import padding_of

IGNORED = -100
FILL = {"labels": IGNORED, "attention_mask": 0, "special_tokens_mask": 1}
"""What stands behind the end of a shorter sequence, by column; 0 in others."""


def tokenised(
    data: Any,
    *,
    labels: str = "labels",
    causal: bool = False,
    length: int | None = None,
    decoder_start: int | None = None,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Inputs and targets for `Trajectory` and `fit` from tokenised sequences.

    Sequences of different lengths are padded at their end, to the length of the longest. An `attention_mask`
    is added if there is none, and padding is −100 in the targets. Data that are padded already must come
    with their attention mask.

    **Arguments:**

    - `data`: a dict of columns (arrays, or lists of lists), a `datasets.Dataset`, or an iterable of batches
      or of rows, each such a dict: a `DataLoader`, the output of a tokenizer.
    - `labels`: the column with the targets: classes of sequences, or token numbers.
    - `causal`: for models that predict the next token, whose labels are their inputs. The model's output
      at `t` belongs to token `t + 1`, so that targets are the labels shifted by one. If there is no
      column of labels, the inputs at positions whose attention mask is one are the labels.
    - `length`: pad to this length instead of the longest. Queries need the length of the training
      sequences: give `length=y.shape[1]`.
    - `decoder_start`: for an encoder with a decoder, `model.config.decoder_start_token_id`. The decoder's
      inputs `decoder_input_ids` are then this token followed by the labels; `length` is the length of the
      labels.

    **Returns:** a dict of arrays, which `from_torch` passes to the model by name, and the targets.
    """
    rows = list(_rows(data))
    if not rows:
        raise ValueError("tokenised: expected one sequence or more, got none.")
    names = [name for name, value in rows[0].items() if not isinstance(value, str)]
    for i, row in enumerate(rows):
        if missing := [name for name in names if name not in row]:
            raise ValueError(
                f"tokenised: sequence {i} has no {', '.join(missing)}, which the first sequence has."
            )
    for i, row in enumerate(rows):
        if not len(row["input_ids"]):
            raise ValueError(f"tokenised: sequence {i} has no tokens. Leave it out.")
    if "attention_mask" not in names:
        if found := padding_of([np.asarray(row["input_ids"]) for row in rows]):
            raise ValueError(
                f"tokenised: no attention_mask, but {found}. Without a mask it would count as text. Keep the "
                "tokenizer's attention_mask. If these tokens are text, give an attention_mask that is 1 "
                "everywhere."
            )
        rows = [row | {"attention_mask": np.ones(len(row["input_ids"]), int)} for row in rows]
        names.append("attention_mask")
    if labels not in names:
        if not causal:
            raise ValueError(
                f"tokenised: no column {labels!r} among {', '.join(names)}. For a model that predicts its "
                "own next token give causal=True."
            )
        rows = [row | {labels: _own_labels(row)} for row in rows]
        names.append(labels)
    decodes = decoder_start is not None or "decoder_input_ids" in names
    if decodes and causal:
        raise ValueError(
            "tokenised: causal=True is for models without an encoder. With decoder_start or "
            "decoder_input_ids give causal=False: the labels belong to the decoder."
        )
    if not decodes:
        _check_labels(rows, labels)
    if decoder_start is not None and "decoder_input_ids" not in names:
        rows = [row | {"decoder_input_ids": _behind(row[labels], decoder_start)} for row in rows]
        names.append("decoder_input_ids")
    sizes = dict.fromkeys(names, length)
    if decodes and length is not None:
        sizes |= {name: None for name in names if name not in (labels, "decoder_input_ids")}
    columns = {
        name: _column(name, [row[name] for row in rows], labels, sizes[name]) for name in names
    }
    targets = columns.pop(labels)
    return columns, _shifted(targets) if causal else targets


def _rows(data: Any) -> Iterable[dict[str, Any]]:
    """One dict per sequence."""
    if isinstance(data, Mapping) or hasattr(data, "column_names") or hasattr(data, "data"):
        data = [data] if not hasattr(data, "column_names") else [data[:]]
    for part in data:
        given = dict(part.items()) if hasattr(part, "items") else None
        if given is None:
            raise TypeError(
                f"tokenised: expected dicts of columns, got {type(part).__name__}. Give a dict, a "
                "datasets.Dataset, or batches of dicts."
            )
        if "input_ids" not in given:
            raise ValueError(
                f"tokenised: expected a column input_ids, got {', '.join(map(str, given)) or 'no columns'}. "
                "Run the tokenizer over the texts first."
            )
        first = given["input_ids"][0] if len(given["input_ids"]) else 0
        if np.ndim(_host(first)) == 0:  # a row, not a batch
            yield {name: _host(value) for name, value in given.items()}
            continue
        sizes = {name: len(value) for name, value in given.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"tokenised: columns of different lengths, {sizes}.")
        for i in range(len(given["input_ids"])):
            yield {name: _host(value[i]) for name, value in given.items()}


def _host(value: Any) -> Any:
    """A tensor of any library as a NumPy array."""
    if hasattr(value, "detach"):
        return value.detach().cpu().numpy()
    return value if isinstance(value, str) else np.asarray(value)


def _own_labels(row: dict[str, Any]) -> np.ndarray:
    return np.where(np.asarray(row["attention_mask"]) == 1, row["input_ids"], IGNORED)


def _check_labels(rows: Sequence[dict[str, Any]], labels: str) -> None:
    """Raise unless there is one label for each token, and padding has no label."""
    for i, row in enumerate(rows):
        own = np.asarray(row[labels])
        if own.ndim == 0:
            return
        mask = np.asarray(row["attention_mask"])
        if own.shape != mask.shape:
            raise ValueError(
                f"tokenised: sequence {i} has {mask.size} tokens but {own.size} {labels}. Give one label "
                "for each token, -100 for a token that does not count. For an encoder with a decoder give "
                "decoder_start=model.config.decoder_start_token_id."
            )
        if ((own != IGNORED) & (mask == 0)).any():
            raise ValueError(
                f"tokenised: {labels} of sequence {i} are not -100 at token "
                f"{int(np.argmax((own != IGNORED) & (mask == 0)))}, where attention_mask is 0. Put -100 "
                "there; otherwise the model would be scored for padding."
            )


def _behind(labels: Any, start: int) -> np.ndarray:
    """The decoder's inputs: the first token, then the labels; padding is masked by the labels."""
    own = np.asarray(labels)
    return np.concatenate([[start], np.where(own[:-1] == IGNORED, 0, own[:-1])]).astype(own.dtype)


def _column(name: str, values: Sequence[Any], labels: str, length: int | None) -> np.ndarray:
    if np.ndim(values[0]) == 0:
        return np.asarray(values)
    fill = IGNORED if name == labels else FILL.get(name, 0)
    longest = max(len(v) for v in values)
    if length is not None and longest > length:
        raise ValueError(
            f"tokenised: {name} has a sequence of {longest} tokens, length={length} is less. Cut it, or "
            "give a larger length."
        )
    found = np.full((len(values), length or longest), fill, np.asarray(values[0]).dtype)
    for row, value in zip(found, values, strict=True):
        row[: len(value)] = value
    return found


def _shifted(targets: np.ndarray) -> np.ndarray:
    found = np.full_like(targets, IGNORED)
    found[:, :-1] = targets[:, 1:]
    return found
