r"""Measures of forgetting: KLOM, membership inference, distance to retraining.

Each compares the models of an unlearning method with retrained models, over several seeds. The floor of
every measure is retraining compared with retraining, with other seeds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

CLIP = 100.0
"""Margins are clipped to ±this."""

BINS = 20
"""Bins of equal width over the joint range."""

FLOOR = 1e-5
"""Smallest share of a bin of the retrained models. With half this value, bins that they miss weigh `log
2` more."""

RESAMPLES = 400
"""Number of draws of every bootstrap. With twice this value, the ends of intervals move by a few per
cent of their length."""


def margins(
    outputs: Float[np.ndarray, "q c"], labels: Int[np.ndarray, " q"]
) -> Float[np.ndarray, " q"]:
    """`z_y − logsumexp(z_≠y)`; for one output `±z`, labels 0 and 1."""
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

    20 equal bins over the joint range after clipping to ±100, the retrained histogram floored at 1e-5.
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


def membership_auc(members: Any, others: Any) -> float:
    """Probability that a score of `members` exceeds one of `others`; ties count half. A value of ½
    means that the groups cannot be distinguished."""
    a, b = np.ravel(members), np.ravel(others)
    if a.size == 0 or b.size == 0:
        raise ValueError("membership_auc: both groups need at least one score.")
    order = np.sort(b)
    below = np.searchsorted(order, a, "left") + np.searchsorted(order, a, "right")
    return float(below.mean() / (2 * b.size))


class Judged(NamedTuple):
    """One model after a method.

    - `train`, `test`: outputs at all training points and at test points.
    - `distance`: to the retrained parameters, divided by the distance of those to the parameters before.
    - `seconds`: time of the method, including compilation for the first model.
    """

    train: Float[np.ndarray, "n c"]
    test: Float[np.ndarray, "q c"]
    distance: float
    seconds: float = 0.0


class Forgetting(NamedTuple):
    """The measures of one method.

    - `klom_…`: KLOM at the 50 % and 95 % quantiles of the points of a group.
    - `membership_auc`: mean over models.
    - `distance`, `seconds`: medians over models.
    - `intervals`: a 95 % bootstrap interval for each measure: the median KLOM over points, the mean AUC
      and the median distance over models. They do not cover the choice of the forgotten points.
    """

    method: str
    klom_forgotten: tuple[float, float]
    klom_retained: tuple[float, float]
    klom_test: tuple[float, float]
    membership_auc: float
    distance: float
    seconds: float
    intervals: dict[str, tuple[float, float]]


@dataclass(frozen=True, eq=False)
class Setting:
    """The points for the measures: forgotten, retained and test points."""

    forgotten: np.ndarray
    x_test: Any
    y: np.ndarray
    y_test: np.ndarray


def measure_forgetting(
    method: str, found: list[Judged], reference: list[Judged], setting: Setting
) -> Forgetting:
    """The outputs of a method over models, compared with those of retraining with other seeds."""
    kept = np.setdiff1d(np.arange(len(setting.y)), setting.forgotten)
    train, test = margins_of(found, setting)
    other_train, other_test = margins_of(reference, setting)
    scores = klom(train, other_train)
    groups = {
        "klom_forgotten": scores[setting.forgotten],
        "klom_retained": scores[kept],
        "klom_test": klom(test, other_test),
    }
    aucs = np.array(
        [membership_auc(a[setting.forgotten], b) for a, b in zip(train, test, strict=True)]
    )
    distances = np.array([each.distance for each in found])
    intervals = {name: _interval(values, np.median) for name, values in groups.items()}
    intervals |= {"membership_auc": _interval(aucs, np.mean)}
    intervals |= {"distance": _interval(distances, np.median)}
    return Forgetting(
        method,
        *(_quantiles(values) for values in groups.values()),
        membership_auc=float(aucs.mean()),
        distance=float(np.median(distances)),
        seconds=float(np.median([each.seconds for each in found])),
        intervals=intervals,
    )


def margins_of(found: list[Judged], setting: Setting) -> tuple[np.ndarray, np.ndarray]:
    """Margins of several models at training and test points, `(models, points)`."""
    train = np.stack([margins(each.train, setting.y) for each in found])
    return train, np.stack([margins(each.test, setting.y_test) for each in found])


def margin_error(found: list[Judged], exact: list[Judged], setting: Setting) -> float:
    """Root mean square of the errors of margins over models, with equal weight for forgotten, retained
    and test points.

    The rates of gradient methods are chosen by it.
    """
    kept = np.setdiff1d(np.arange(len(setting.y)), setting.forgotten)
    pairs = zip(margins_of(found, setting), margins_of(exact, setting), strict=True)
    train, test = (np.square(np.clip(a, -CLIP, CLIP) - np.clip(b, -CLIP, CLIP)) for a, b in pairs)
    groups = (train[:, setting.forgotten], train[:, kept], test)
    error = float(np.sqrt(np.mean([group.mean() for group in groups])))
    return error if np.isfinite(error) else np.inf


def _quantiles(values: np.ndarray) -> tuple[float, float]:
    return float(np.quantile(values, 0.5)), float(np.quantile(values, 0.95))


def _interval(values: np.ndarray, statistic: Callable[..., Any]) -> tuple[float, float]:
    """95 % of the statistic over resamples with replacement, always the same ones."""
    rows = np.random.default_rng(0).integers(0, values.size, (RESAMPLES, values.size))
    low, high = np.quantile(statistic(values[rows], axis=1), (0.025, 0.975))
    return float(low), float(high)


def forgetting_table(rows: list[Forgetting]) -> str:
    """The measures of all methods as a table in Markdown; KLOM as median and 95 % quantile."""
    lines = [
        "| method | KLOM forgotten | KLOM retained | KLOM test | membership AUC | distance |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [f"{low:.2g}, {high:.2g}" for low, high in row[1:4]]
        cells += [f"{row.membership_auc:.3f}", f"{row.distance:.2g}"]
        lines.append(f"| {row.method} | {' | '.join(cells)} |")
    return "\n".join(lines)
