r"""Measures of forgetting: KLOM and membership inference.

Each compares the models of an unlearning method with retrained models, over several seeds. The floor of
every measure is retraining compared with retraining, with other seeds.
"""

import numpy as np
from jaxtyping import Float, Int

from .._support.types import Numbers

CLIP = 100.0
"""Margins are clipped to ±this."""

BINS = 20
"""Bins of equal width over the joint range."""

FLOOR = 1e-5
"""Smallest share of a bin of the retrained models. With half this value, bins that they miss weigh `log
2` more."""


def margins(
    outputs: Float[np.ndarray, "q c"], labels: Int[np.ndarray, " q"]
) -> Float[np.ndarray, " q"]:
    """`z_y − logsumexp(z_≠y)`; for one output, `z` where the label is 1 and `−z` where it is 0."""
    if outputs.shape[1] == 1:
        return np.where(labels > 0, 1, -1) * outputs[:, 0]
    own = outputs[np.arange(len(labels)), labels]
    others = np.where(np.arange(outputs.shape[1])[None, :] == labels[:, None], -np.inf, outputs)
    top = others.max(axis=1)
    return own - top - np.log(np.exp(others - top[:, None]).sum(axis=1))


def klom(
    unlearned: Float[np.ndarray, "..."], retrained: Float[np.ndarray, "..."]
) -> Float[np.ndarray, " q"]:
    """`KL(unlearned ‖ retrained)` of margins, point by point (Georgiev et al., 2024).

    Margins are clipped to ±100 and put into 20 equal bins over the joint range. Shares of the retrained
    models below 1e-5 are raised to 1e-5.
    """
    if unlearned.ndim != 2 or unlearned.shape[1:] != retrained.shape[1:]:
        raise ValueError(
            f"klom: expected margins (models, points) of the same points, got {unlearned.shape} and "
            f"{retrained.shape}."
        )
    first, second = (np.clip(each, -CLIP, CLIP) for each in (unlearned, retrained))
    return np.array([_klom_of(first[:, j], second[:, j]) for j in range(first.shape[1])])


def _klom_of(first: np.ndarray, second: np.ndarray) -> float:
    low, high = min(first.min(), second.min()), max(first.max(), second.max())
    if low == high:
        return 0.0
    edges = np.linspace(low, high, BINS + 1)
    p, q = (np.histogram(each, edges)[0] / each.size for each in (first, second))
    q, inside = np.maximum(q, FLOOR), p > 0
    return float(np.sum(p[inside] * np.log(p[inside] / q[inside])))


def membership_auc(members: Numbers, others: Numbers) -> float:
    """Probability that a score of `members` exceeds one of `others`; ties count half. A value of ½
    means that the groups cannot be distinguished."""
    a, b = np.ravel(members), np.ravel(others)
    if a.size == 0 or b.size == 0:
        raise ValueError("membership_auc: both groups need at least one score.")
    order = np.sort(b)
    below = np.searchsorted(order, a, "left") + np.searchsorted(order, a, "right")
    return float(below.mean() / (2 * b.size))
