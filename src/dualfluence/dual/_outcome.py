"""The outcome of a run of Newton steps, and its refusal where it falls short."""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from ..problem._certificate import Certificate
from ..problem._record import NotConverged, OnFailure, Stats

Ending = Literal["met", "steps", "floor", "stalled"]
"""Why a run stopped: at its tolerance, after the steps asked for, where the gradient is all rounding,
or where steps no longer help although the estimate of rounding is lower."""

FLOOR_LIMIT = 0.1
"""A run that ends at its floor is refused where the certified distance is more than this share of
`‖θ − θ₀‖`. Doubled, answers with one correct digit less would pass."""

OUTPUT_LIMIT = 1e-3
"""Unless no output can be off by more than this share of the largest one, as where nothing was left
to learn and `‖θ − θ₀‖` is rounding itself."""


UNDERFLOW = 1e-100
"""Nor where the distance itself is next to underflow."""


class Outcome(NamedTuple):
    """One column of a run, whoever asked for it.

    - `certificate`: how near its end is to the optimum.
    - `ending`: why it stopped.
    - `solved`: whether the last linear solve reached its residual.
    - `output_share`: the certified error of any output over the largest output.
    - `steps`, `iterations`, `products`, `residual`: as in `Stats`.
    - `jitter`: how much larger than `λ` the ridge of any step's system was.
    """

    certificate: Certificate
    ending: Ending
    solved: bool
    output_share: float
    steps: int
    iterations: int
    products: int
    residual: float
    jitter: float

    @property
    def near_floor(self) -> bool:
        """Whether rounding ended the run at an answer that is still of use."""
        cert = self.certificate
        small = cert.relative_bound <= FLOOR_LIMIT or self.output_share <= OUTPUT_LIMIT
        small = small or cert.distance_bound <= UNDERFLOW
        return self.ending in ("floor", "stalled") and small

    def notes(self, dtype: Any) -> tuple[str, ...]:
        """What to say where rounding changed a factorisation or ended the run."""
        notes = []
        if self.jitter:
            notes.append(
                f"rounding in {dtype} made a matrix indefinite: shifted by {self.jitter:.1e}"
            )
        if self.ending in ("floor", "stalled"):
            bound = self.certificate.relative_bound
            reached = f"certified to {bound:.1e} of ‖θ − θ₀‖"
            notes.append(f"stopped at the rounding floor of {dtype}, {reached}")
        return tuple(notes)

    def stats(
        self, converged: bool, seconds: float, solver: str, reason: str, notes: tuple[str, ...]
    ) -> Stats:
        return Stats(
            self.steps,
            self.iterations,
            self.products,
            converged,
            self.residual,
            seconds,
            solver,
            reason,
            notes,
        )


def check_outcome(
    stats: Stats, on_failure: OnFailure, what: str, cert: Certificate, dtype: Any
) -> None:
    """Raise unless the answer is what was asked for, or the caller wants it anyway."""
    if stats.converged or on_failure == "report":
        return
    floor = max(cert.rounding, cert.noise) / cert.ridge
    wider = "" if jnp.finfo(dtype).bits == 64 else "float64 (kernel=KernelOptions(refine=True)), "
    raise NotConverged(
        f"{what}: stopped after {stats.steps} steps and {stats.iterations} inner iterations at a "
        f"relative residual of {stats.residual:.3g} and a certified distance of "
        f"{cert.distance_bound:.3g} ({cert.relative_bound:.3g} of ‖θ − θ₀‖), of which rounding "
        f"in {dtype} accounts for {floor:.3g}. Try {wider}a larger ridge, a looser tolerance or "
        "more steps, or on_failure='report' to get this answer."
    )
