"""The effect on queries of removing the points with the most helpful scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..._support.show import Shown
from ..._support.types import Numbers
from ._measures import _scores


@dataclass(frozen=True, eq=False, repr=False)
class RemovalCurve(Shown):
    """Mean target after removing the `counts` most helpful, most harmful or random points.

    All curves are `(len(counts),)`; `random` is a mean over several draws.
    """

    counts: np.ndarray
    helpful: np.ndarray
    harmful: np.ndarray
    random: np.ndarray


def removal_curve(
    scores: Numbers,
    retrain: Callable[[np.ndarray], np.ndarray],
    counts: Sequence[int],
    *,
    random_draws: int = 3,
    seed: int = 0,
) -> RemovalCurve:
    """Retrain without the points with the highest mean score over queries, and without random ones.

    Good scores pull the curves apart: without helpful points the target rises fast.

    **Arguments:**

    - `scores`: `(q, n)` or an `Attribution`.
    - `retrain`: from masks `(s, n)` to targets `(s, q)`, e.g. made from `retrain_linearised`.
    - `counts`: how many points to remove.
    """
    values = _scores("removal_curve", scores).mean(axis=0)
    n, amounts = values.size, np.asarray(counts)
    if amounts.ndim != 1 or amounts.size == 0 or amounts.min() < 0 or amounts.max() >= n:
        raise ValueError(f"removal_curve: counts must be in [0, {n}), got {list(counts)}.")
    order, rng = np.argsort(-values, kind="stable"), np.random.default_rng(seed)
    orders = [order, order[::-1], *(rng.permutation(n) for _ in range(random_draws))]
    masks = np.ones((len(orders) * amounts.size, n), bool)
    for row, (which, amount) in enumerate((o, a) for o in orders for a in amounts):
        masks[row, which[:amount]] = False
    targets = np.asarray(retrain(masks), float)
    if targets.ndim != 2 or targets.shape[0] != masks.shape[0]:
        raise ValueError(
            f"removal_curve: retrain must return targets (s, q) with s = {masks.shape[0]}, got "
            f"{targets.shape}."
        )
    curves = targets.mean(axis=1).reshape(len(orders), amounts.size)
    return RemovalCurve(amounts, curves[0], curves[1], curves[2:].mean(axis=0))
