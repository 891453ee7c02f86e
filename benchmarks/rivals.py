"""Every attribution method of the literature on one trained network, each with several dampings."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree

from dualfluence import primal
from dualfluence.attribution import TRAK, GradCos, GradDot, TracIn
from dualfluence.kernels._linearized import linearize
from dualfluence.losses import SoftmaxCrossEntropy
from dualfluence.problem._certificate import NotConverged

SHIFTS = (0.01, 0.1, 1.0, 10.0, 100.0)
"""Dampings to try, as multiples of the ridge that training corresponds to. On the network of
`attribution_cpu.json` the best were inside this range, from 0.1 to 10."""

FEW_SHIFTS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Dampings of solvers that iterate for every query. They take as long as all others together, so the
range is smaller."""

RTOL = 1e-2
"""Relative residual of conjugate gradients. In float32 they stop above 1e-3 for a query with a
confident prediction, and one per cent hardly changes a rank correlation."""

TRAK_DAMPINGS = (1e-2, 1e-1, 1.0, 10.0)


class Trained(NamedTuple):
    """A trained network, and the data to score with it.

    - `checkpoints`, `rates`: checkpoints of its run, including the last, with learning rates for TracIn.
    - `halves`: models trained on random halves, for TRAK; the last checkpoint if there are none.
    - `ridge`: the one that stopped training corresponds to.
    """

    apply_fn: Callable[..., Any]
    checkpoints: Sequence[PyTree]
    rates: Sequence[float]
    halves: Sequence[PyTree]
    ridge: float
    data: tuple[Any, Any, Any, Any]


class Candidate(NamedTuple):
    """One method at one setting; `scores()` returns `(q, n)`."""

    name: str
    setting: str
    scores: Callable[[], np.ndarray]


def candidates(
    trained: Trained, *, rank: int = 100, projections: Sequence[int | None] = (None, 1024)
) -> list[Candidate]:
    """All methods with all dampings that are tried in their favour; TRAK once for each of `projections`."""
    last = trained.checkpoints[-1]
    apply_fn, data = trained.apply_fn, trained.data
    steps = {
        "Arnoldi": (primal.Arnoldi(rank=rank), SHIFTS),
        "Nyström": (primal.Nystrom(rank=rank), SHIFTS),
        "K-FAC": (primal.KFAC(), SHIFTS),
        "EK-FAC": (primal.EKFAC(), SHIFTS),
        "CG": (primal.CG(rtol=RTOL, max_steps=200), FEW_SHIFTS),
        "LiSSA": (primal.LiSSA(depth=100), FEW_SHIFTS),
    }
    plain = {
        "gradient dot": GradDot(apply_fn, last),
        "gradient cosine": GradCos(apply_fn, last),
        "TracIn": TracIn(apply_fn, trained.checkpoints, trained.rates),
    }
    found = [Candidate(k, "", partial(_values, v.attribute, data)) for k, v in plain.items()]
    model, loss = linearize(apply_fn, last), SoftmaxCrossEntropy()
    for name, (solver, shifts) in steps.items():
        for shift in shifts:
            options = {"loss": loss, "ridge": shift * trained.ridge, "linearised": False}
            call = partial(primal.attribute, model, last, solver=solver, **options)
            found.append(Candidate(name, f"{shift:g}·λ", partial(_values, call, data)))
    models = trained.halves or [last]
    for k in projections:
        label = "TRAK" if k is None else f"TRAK {k}"
        for damping in TRAK_DAMPINGS:
            score = TRAK(apply_fn, models, k, damping)
            name = f"{label} ({len(models)} model{'s' if len(models) > 1 else ''})"
            found.append(
                Candidate(name, f"ρ = {damping:g}", partial(_values, score.attribute, data))
            )
    return found


def rival_scores(
    trained: Trained, names: Sequence[str] | None = None, **options: Any
) -> Iterator[tuple[str, str, np.ndarray]]:
    """`(method, setting, scores)` of each candidate; one that diverges is left out, and a message says so.

    `names` selects methods, by default all.
    """
    tried = candidates(trained, **options)
    known = {candidate.name for candidate in tried}
    unknown = set(names or ()) - known
    if unknown:
        raise ValueError(
            f"methods: {', '.join(sorted(unknown))} not among {', '.join(sorted(known))}."
        )
    for candidate in tried:
        if candidate.name not in (names or known):
            continue
        try:
            yield candidate.name, candidate.setting, candidate.scores()
        except NotConverged as error:
            print(f"{candidate.name}, {candidate.setting}: left out. {error}", flush=True)


def _values(attribute: Callable[..., Any], data: tuple[Any, ...]) -> np.ndarray:
    return np.asarray(attribute(*data).values)
