"""The two questions of a trajectory, and the runs of the one about single points."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from .._support.checks import check_finite
from .._support.options import ProgressFn, Ticker
from ..losses import AbstractLoss
from ._adjoint import Moment, durations, queries_at_once, swept
from ._pieces import Pieces
from ._probes import Probes, key_of

QUESTIONS = ("subset", "point")


def check_point(method: str, leverage: bool, tokens: bool, worker: Any, mesh: Any) -> None:
    """Raise on options that belong to the question about subsets."""
    given = {
        f"method={method!r}": method != "outputs",
        "leverage=True": leverage,
        "tokens=True": tokens,
        "worker": worker is not None,
        "mesh": mesh is not None,
    }
    for name in (name for name, is_given in given.items() if is_given):
        raise ValueError(
            f'Trajectory: question="point" goes through the checkpoints one after the other and takes no '
            f'{name}. Leave it out, or ask question="subset".'
        )


def scores_of_points(
    runs: Sequence[Any],
    data: Any,
    loss: AbstractLoss,
    probes: Probes | None,
    pieces: Pieces,
    digest: Callable[[Any, int], str],
    progress: bool | ProgressFn,
) -> tuple[np.ndarray, np.ndarray]:
    """The effect of single points, the mean over runs; and what is said of probes."""
    each = [durations([run._time(k) for k in range(run.num_checkpoints)]) for run in runs]
    num_queries = data.xq.shape[0]
    blocks = -(-num_queries // queries_at_once(runs[0].model(0), num_queries))
    found = []
    with Ticker(blocks * sum(map(len, each)), "checkpoints", progress) as ticker:
        for r, (run, lengths) in enumerate(zip(runs, each, strict=True)):

            def moment(k: int, run: Any = run, lengths: Any = lengths, r: int = r) -> Moment:
                model = run._with_diagonal(k)
                plain = replace(model, scale=None).reading(data.form)
                key = key_of(probes, r, k)
                model = replace(plain, scale=model.scale)
                return Moment(model, float(lengths[k]), run.weight_decay, key)

            moments = [
                (f"run-{r:03d}-checkpoint-{k:03d}", partial(moment, k), partial(digest, run, k))
                for k in range(len(lengths))
            ]
            found.append(swept(moments, data, loss, probes, pieces, ticker.tick))
    values = np.mean([scores for scores, _ in found], axis=0)
    check_finite("Trajectory", values, hint="A factorisation failed: use float64 parameters.")
    return values, np.asarray([np.mean([left_out for _, left_out in found]), 1.0])


def point_notes(num_runs: int, steps: str) -> tuple[str, ...]:
    """What a result says of its scores of single points."""
    return (
        "the effect of leaving one point out of these runs, to first order: one implicit step back for each "
        "segment between checkpoints, with the curvature of the loss in the outputs",
        f"mean of {num_runs} run(s), checkpoints after {steps} steps; the last is the end of training",
    )
