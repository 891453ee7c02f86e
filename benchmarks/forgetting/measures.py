"""Measures of a method over models that differ in their seeds, with intervals, and their table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from dualfluence.unlearning import klom, margins, membership_auc
from dualfluence.unlearning._metrics import CLIP

RESAMPLES = 400
"""Of every bootstrap. Doubled, the ends of intervals move by a few per cent of their length."""


class Judged(NamedTuple):
    """One model after a method.

    - `train`, `test`: outputs at all training points and at test points.
    - `distance`: to the retrained parameters, over the distance of those to the parameters before.
    - `seconds`: what the method took, compilation of the first model included.
    """

    train: Float[np.ndarray, "n c"]
    test: Float[np.ndarray, "q c"]
    distance: float
    seconds: float = 0.0


class Forgetting(NamedTuple):
    """One method's measures.

    - `klom_…`: KLOM at the 50 % and 95 % quantiles of the points of a group.
    - `membership_auc`: mean over models.
    - `distance`, `seconds`: medians over models.
    - `intervals`: by measure, 95 % bootstrap intervals: of the median KLOM over points, of the mean AUC and
      of the median distance over models. They do not tell what other forgotten points would give.
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
    """Points to judge by: what is forgotten, what stays, what was never seen."""

    forgotten: np.ndarray
    x_test: Any
    y: np.ndarray
    y_test: np.ndarray


def measure_forgetting(
    method: str, found: list[Judged], reference: list[Judged], setting: Setting
) -> Forgetting:
    """A method's outputs over models against those of retraining with other seeds."""
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
    """Root mean square of the margins' errors, model by model, forgotten, retained and test points alike.

    What rates of gradient methods are chosen by: each of the three groups counts a third.
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
