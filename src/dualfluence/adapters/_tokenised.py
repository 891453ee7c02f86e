"""Tokenised data in the forms that libraries of language models keep them, as arrays."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

IGNORED = -100
FILL = {"labels": IGNORED, "attention_mask": 0, "special_tokens_mask": 1}
"""What stands behind the end of a shorter sequence, by column; 0 in others."""


def tokenised(
    data: Any, *, labels: str = "labels", causal: bool = False
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Inputs and targets for `Trajectory` and `fit` from tokenised sequences.

    Sequences of different lengths are padded behind to the longest; `attention_mask` is added if there is
    none, and padding is −100 in the targets.

    **Arguments:**

    - `data`: a dict of columns (arrays, or lists of lists), a `datasets.Dataset`, or an iterable of batches
      or of rows, each such a dict: a `DataLoader`, the output of a tokenizer.
    - `labels`: the column with the targets: classes of sequences, or token numbers.
    - `causal`: for models that predict the next token, whose labels are their inputs. The model's output at
      `t` belongs to token `t + 1`, so that targets are the labels shifted by one. Without a column of
      labels they are the inputs, where the attention mask is one.

    **Returns:** a dict of arrays, which `from_torch` passes to the model by name, and the targets.
    """
    rows = list(_rows(data))
    if not rows:
        raise ValueError("tokenised: expected one sequence or more, got none.")
    names = [name for name, value in rows[0].items() if not isinstance(value, str)]
    for i, row in enumerate(rows):
        if missing := [name for name in names if name not in row]:
            raise ValueError(f"tokenised: sequence {i} has no {', '.join(missing)}, the first has.")
    if "attention_mask" not in names:
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
    columns = {name: _column(name, [row[name] for row in rows], labels) for name in names}
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
        if np.ndim(_host(given["input_ids"][0])) == 0:  # a row, not a batch
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


def _column(name: str, values: Sequence[Any], labels: str) -> np.ndarray:
    if np.ndim(values[0]) == 0:
        return np.asarray(values)
    fill = IGNORED if name == labels else FILL.get(name, 0)
    found = np.full((len(values), max(len(v) for v in values)), fill, np.asarray(values[0]).dtype)
    for row, value in zip(found, values, strict=True):
        row[: len(value)] = value
    return found


def _shifted(targets: np.ndarray) -> np.ndarray:
    found = np.full_like(targets, IGNORED)
    found[:, :-1] = targets[:, 1:]
    return found
