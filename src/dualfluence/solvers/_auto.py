"""The choice of a solver, and the reason for it."""

from typing import NamedTuple

import equinox as eqx
import numpy as np

from .._support.options import check_count
from ..operators import AbstractKernelOperator
from ._base import AbstractDualSolver
from ._cg import CG
from ._cholesky import Cholesky
from ._gathered import Gathered, rows_that_count
from ._refined import Refined

DIRECT_SIZE = 1024
"""Up to this size of the factorised matrix a direct solve is both exact and quick."""


GATHER_SIZE = 1024
"""Up to this size of the matrix, solving on a block does not pay for another compilation."""

_CG, _CHOLESKY = CG(), Cholesky()


class Choice(NamedTuple):
    """A solver and the reason for it, in words."""

    solver: AbstractDualSolver
    reason: str


class Auto(eqx.Module):
    """Uses a direct solve if the factorised matrix is small, preconditioned CG otherwise.

    - `direct_size`: largest matrix that is factorised.
    - `gather_size`: if most points are removed and `K` is larger than this, only the rows and columns of
      the retained points are solved for.
    """

    direct_size: int = eqx.field(static=True, default=DIRECT_SIZE)
    gather_size: int = eqx.field(static=True, default=GATHER_SIZE)

    def __check_init__(self) -> None:
        # Zero sends everything to CG, and gathers wherever most points are gone.
        check_count("Auto: direct_size", self.direct_size, least=0)
        check_count("Auto: gather_size", self.gather_size, least=0)

    def choose(self, op: AbstractKernelOperator, num_points: int | None = None) -> Choice:
        """The solver for this operator, or for a block of it with the given number of points."""
        n, c = num_points or op.num_points, op.num_outputs
        if op.layout.sharding is not None:
            devices = op.layout.num_devices
            return Choice(_CG, f"rows on {devices} devices: CG, as a factor would gather K")
        if not op.in_memory:
            return Choice(_CG, "K is on disk: one pass over it per iteration")
        if op.rank is not None:
            return Choice(_CHOLESKY, f"low rank {op.rank}: Woodbury, a system of that size")
        size, what = (n, "n") if op.has_entries and op.is_kronecker else (n * c, "n·c")
        if size <= self.direct_size:
            return Choice(_CHOLESKY, f"{what} = {size} ≤ {self.direct_size}: direct and exact")
        return Choice(_CG, f"{what} = {size} > {self.direct_size}: one read of K per iteration")


def resolve(
    solver: "Auto | AbstractDualSolver",
    op: AbstractKernelOperator,
    weights: np.ndarray | None = None,
) -> Choice:
    """The choice of `Auto`, or the given solver; refined if `K` is in mixed precision.

    If the `weights` of the points are known and most are zero, it solves on the block of the others.
    """
    if op.narrow is not op:
        solver, reason = resolve(solver, op.narrow, weights)
        return Choice(Refined(solver), reason)
    size = solver.gather_size if isinstance(solver, Auto) else GATHER_SIZE
    # By functions and properties: a method of a module, bound, costs a tenth of a millisecond.
    rows = None if weights is None else _rows_to_gather(op, weights, size)
    if rows is not None:
        auto = isinstance(solver, Auto)
        inner = solver.choose(op, rows.size) if auto else Choice(solver, "asked for")
        share = f"{rows.size} of {op.num_points} points include every point with a weight"
        return Choice(Gathered(inner.solver, rows), f"{share}; {inner.reason}")
    if isinstance(solver, Auto):
        return Auto.choose(solver, op)  # not bound, for the same reason
    if isinstance(solver, Cholesky) and op.layout.sharding is not None:
        raise ValueError(
            f"Cholesky: the rows of K are on {op.layout.num_devices} devices, and a factor would "
            "gather them in one place. Use CG() or Auto(), or fit without mesh."
        )
    return Choice(solver, "asked for")


def _rows_to_gather(
    op: AbstractKernelOperator, weights: np.ndarray, gather_size: int
) -> np.ndarray | None:
    size = op.num_points * (1 if op.is_kronecker else op.num_outputs)
    return rows_that_count(weights) if op.has_entries and size > gather_size else None
