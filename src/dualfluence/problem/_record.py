"""The record of a run: what it took, how long, and the error where it fell short."""

import time
from typing import Any, Literal, NamedTuple

import jax

from .._support.show import Shown, Table, count

OnFailure = Literal["raise", "report"]


class NotConverged(RuntimeError):
    """A solve or a fit did not reach its tolerance. The message says how far it came."""


class Stats(NamedTuple):
    """How an answer was reached.

    - `steps`: Newton steps.
    - `iterations`: iterations of the linear solver, over all steps.
    - `products`: products with `K`, all included.
    - `converged`: whether the answer is what was asked for; `notes` say so where rounding set the end.
    - `residual`: relative residual of the last linear solve.
    - `seconds`: wall time until the result was ready.
    - `solver`, `reason`: the linear solver, and why that one.
    - `notes`: what else happened: form of `K`, precision, preconditioner, floor of rounding.
    - `edits`: edits by a number of steps in a row, since the last answer that met a tolerance.
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


class Clock:
    """Wall time until a result is ready."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def stop(self, result: Any) -> float:
        jax.block_until_ready(result)
        return time.perf_counter() - self._start
