"""What a run of Newton steps leaves behind: its outcome, its public record, its refusal."""

import time
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from .._support.show import Shown, Table, count
from ..problem._certificate import Certificate
from ._newton import Point

OnFailure = Literal["raise", "report"]

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


class NotConverged(RuntimeError):
    """A solve or a fit missed its tolerance. The message says how near it came."""


class Stats(NamedTuple):
    """How an answer was computed.

    - `steps`: Newton steps.
    - `iterations`: iterations of the linear solver, over all steps.
    - `products`: products with `K`, all included.
    - `converged`: whether the answer met its tolerance; `notes` say so if rounding ended the run.
    - `residual`: relative residual of the last linear solve.
    - `seconds`: wall time until the result was ready.
    - `solver`, `reason`: the linear solver, and the reason for the choice.
    - `notes`: further facts: form of `K`, precision, preconditioner, floor of rounding.
    - `edits`: number of edits in a row since the last answer that met a tolerance on the distance.
    """

    steps: int
    iterations: int
    products: int
    converged: bool
    residual: float
    seconds: float
    solver: str
    reason: str
    notes: tuple[str, ...] = ()
    edits: int = 0

    def summary(self) -> str:
        """The run in one line."""
        ended = "converged" if self.converged else "not converged"
        parts = (count(self.steps, "step"), count(self.products, "product") + " with K")
        return f"{', '.join(parts)}, {self.seconds:.2g} s, {ended}"

    def _table(self) -> Table:
        rows = [("run", self.summary()), ("solver", f"{self.solver} ({self.reason})")]
        rows.append(("iterations", f"{self.iterations:,}, relative residual {self.residual:.2g}"))
        if self.edits:
            rows.append(("edits", f"{self.edits:,} in a row since the last that met a tolerance"))
        return "Stats", [*rows, *(("note", note) for note in self.notes)]

    # A tuple has no other bases.
    __repr__, _repr_html_ = Shown.__repr__, Shown._repr_html_  # pyright: ignore


NOT_DONE = Stats(0, 0, 0, False, float("inf"), 0.0, "none", "not done yet")
"""Of an answer whose run is still to be judged."""


class Outcome(NamedTuple):
    """One run, whoever asked for it.

    - `point`, `certificate`: where it ended, and how near that is to the optimum.
    - `ending`: why it stopped.
    - `solved`: whether the last linear solve reached its residual.
    - `output_share`: the certified error of any output over the largest output.
    - `steps`, `iterations`, `products`, `residual`: as in `Stats`.
    - `jitter`: how much larger than `λ` the ridge of any step's system was.
    """

    point: Point
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


class Clock:
    """Wall time until a result is ready."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def stop(self, result: Any) -> float:
        jax.block_until_ready(result)
        return time.perf_counter() - self._start
