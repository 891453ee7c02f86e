"""Agreement of scores with the truth, with intervals over queries."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from ..._support.checks import check_finite
from ..._support.show import Shown, Table, count
from ..._support.types import Numbers
from .._attribution import Attribution

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True, eq=False, repr=False)
class Measured(Shown):
    """A mean over queries with an interval.

    - `value`: the mean.
    - `interval`: bootstrap interval over queries, 95 %.
    - `per_query`: one number per query; NaN if a query has no variation to explain.
    - `notes`: what was left out.
    """

    name: str
    value: float
    interval: tuple[float, float]
    per_query: np.ndarray
    notes: tuple[str, ...] = ()

    def _table(self) -> Table:
        low, high = self.interval
        over = count(self.per_query.size, "query", "queries")
        return f"{self.name} {self.value:.3f} [{low:.3f}, {high:.3f}] over {over}", ()


def lds(scores: Numbers, masks: Numbers, targets: Numbers, *, seed: int = 0) -> Measured:
    r"""Linear datamodelling score: how well summed scores rank models trained on subsets.

    For each query, Spearman's correlation over subsets of $-\sum_{i\in S}\mathrm{scores}_{qi}$ with
    the measured target of the model trained on `S`; the mean over queries.

    **Arguments:**

    - `scores`: `(q, n)` or an `Attribution`; positive means that leaving the point out raises the
      target (also for a target that should be high, such as a margin: positive means that the margin
      rises).
    - `masks`: `(s, n)`, true where a point was trained on.
    - `targets`: `(s, q)`, e.g. the query's loss, a mean over seeds if there are several.
    - `seed`: of the bootstrap over queries.
    """
    values, kept = _scores("lds", scores), _masks("lds", masks)
    truth = _matrix("lds: targets", targets)
    if kept.shape[1] != values.shape[1]:
        raise ValueError(
            f"lds: scores are for {values.shape[1]} training points but masks for {kept.shape[1]}."
        )
    if truth.shape != (kept.shape[0], values.shape[0]):
        raise ValueError(
            f"lds: targets must have shape (s, q) = ({kept.shape[0]}, {values.shape[0]}), got "
            f"{truth.shape}: one row per subset, one column per query."
        )
    if kept.shape[0] < 3:
        raise ValueError(f"lds: at least 3 subsets are needed to rank them, got {kept.shape[0]}.")
    predicted = -(kept.astype(float) @ values.T)
    return measured("LDS", spearman(predicted.T, truth.T), seed)


def noise_ceiling(repeats: Numbers, *, seed: int = 0, splits: int = 20) -> Measured:
    """The best LDS that any scores could have with the mean of these repeats as the truth.

    Split-half reliability over random halves of the repeats, raised to the full number by
    Spearman and Brown, `ρ = 2r/(1 + r)`; a perfect predictor correlates by `√ρ` with the mean.

    **Arguments:**

    - `repeats`: `(r, s, q)`, the targets of each seed, `r ≥ 2`.
    """
    truth = np.asarray(repeats, float)
    if truth.ndim != 3 or truth.shape[0] < 2:
        raise ValueError(
            f"noise_ceiling: expected targets of shape (r, s, q) with r ≥ 2, got {truth.shape}."
        )
    check_finite("noise_ceiling", truth)
    rng, half = np.random.default_rng(seed), truth.shape[0] // 2
    rows = []
    for _ in range(splits):
        order = rng.permutation(truth.shape[0])
        first, second = truth[order[:half]].mean(0), truth[order[half : 2 * half]].mean(0)
        rows.append(spearman(first.T, second.T))
    reliability = np.clip(np.nanmean(rows, axis=0), 0, 1)
    # Spearman-Brown from `half` repeats to all of them: a factor of r/half, two for even r.
    factor = truth.shape[0] / half
    full = factor * reliability / (1 + (factor - 1) * reliability)
    result = measured("noise ceiling", np.sqrt(full), seed)
    note = f"split-half reliability {np.nanmean(reliability):.3f}"
    return Measured(result.name, result.value, result.interval, result.per_query, (note,))


def loo_correlation(
    scores: Numbers, truth: Numbers, *, rank: bool = False, seed: int = 0
) -> Measured:
    """Correlation of scores with true leave-one-out changes for each query; both are `(q, n)`.

    It is Pearson's, or Spearman's with `rank`.
    """
    values, actual = _scores("loo_correlation", scores), _matrix("loo_correlation: truth", truth)
    if values.shape != actual.shape:
        raise ValueError(
            f"loo_correlation: scores and truth must have one shape, got {values.shape} and "
            f"{actual.shape}."
        )
    rows = spearman(values, actual) if rank else pearson(values, actual)
    return measured("leave-one-out correlation", rows, seed)


def mislabel_auc(suspicion: Numbers, mislabelled: Numbers) -> float:
    """Area under the ROC curve: the share of pairs in which a mislabelled point is more suspicious than
    a good one.

    **Arguments:**

    - `suspicion`: `(n,)`, higher if a label looks wrong, such as `self_influence()`.
    - `mislabelled`: `(n,)`, true if the label is wrong.
    """
    values, wrong = np.asarray(suspicion, float), np.asarray(mislabelled)
    if values.ndim != 1 or wrong.shape != values.shape:
        raise ValueError(
            "mislabel_auc: suspicion and mislabelled must be vectors of one length, got shapes "
            f"{values.shape} and {wrong.shape}."
        )
    check_finite("mislabel_auc", values)
    wrong = wrong.astype(bool)
    bad, good = int(wrong.sum()), int((~wrong).sum())
    if not bad or not good:
        raise ValueError("mislabel_auc: there must be mislabelled points and good ones.")
    ranks = _ranks(values[None])[0] + 1
    return float((ranks[wrong].sum() - bad * (bad + 1) / 2) / (bad * good))


def measured(name: str, per_query: np.ndarray, seed: int) -> Measured:
    """Mean and bootstrap interval over the queries that have a value."""
    valid = per_query[np.isfinite(per_query)]
    if not valid.size:
        raise ValueError(f"{name}: no query varies, so there is no correlation.")
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, valid.size, (RESAMPLES, valid.size))
    means = valid[draws].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    missing = per_query.size - valid.size
    notes = (f"{missing} queries do not vary and are left out",) if missing else ()
    return Measured(name, float(valid.mean()), (float(low), float(high)), per_query, notes)


def pearson(a: Float[np.ndarray, "q s"], b: Float[np.ndarray, "q s"]) -> Float[np.ndarray, " q"]:
    """Correlation row by row; NaN for a constant row."""
    a = a - a.mean(axis=1, keepdims=True)
    b = b - b.mean(axis=1, keepdims=True)
    size = np.sqrt((a**2).sum(axis=1) * (b**2).sum(axis=1))
    return np.where(size > 0, (a * b).sum(axis=1) / np.where(size > 0, size, 1), np.nan)


def spearman(a: np.ndarray, b: np.ndarray) -> Float[np.ndarray, " q"]:
    """Rank correlation row by row, equal values sharing their mean rank."""
    return pearson(_ranks(a), _ranks(b))


def _ranks(rows: np.ndarray) -> np.ndarray:
    """Ranks from zero along the last axis; ties get their mean."""
    result = np.empty(rows.shape)
    for out, row in zip(result, rows, strict=True):
        _, inverse, counts = np.unique(row, return_inverse=True, return_counts=True)
        ends = np.cumsum(counts)
        out[:] = ((ends - counts + ends - 1) / 2)[inverse.reshape(-1)]
    return result


def _scores(name: str, scores: Numbers) -> np.ndarray:
    values = scores.values if isinstance(scores, Attribution) else scores
    return _matrix(f"{name}: scores", values)


def _masks(name: str, masks: Numbers) -> np.ndarray:
    array = np.asarray(masks)
    if array.ndim != 2:
        raise ValueError(f"{name}: masks must have shape (s, n), got {array.shape}.")
    if array.dtype != bool and not np.isin(array, (0, 1)).all():
        raise ValueError(f"{name}: masks must be true or false (1 or 0) for each point and subset.")
    return array.astype(bool)


def _matrix(name: str, value: Numbers) -> np.ndarray:
    array = np.asarray(value, float)
    if array.ndim != 2:
        raise ValueError(f"{name} must be a matrix, got shape {array.shape}.")
    check_finite(name, array)
    return array
