"""Which solver, and why."""

from typing import NamedTuple

import equinox as eqx

from ..operators import (
    AbstractKernelOperator,
    KroneckerOperator,
    LowRankOperator,
    MixedOperator,
)
from ._base import AbstractDualSolver
from ._cg import CG
from ._cholesky import Cholesky
from ._refined import Refined

DIRECT_SIZE = 1024
"""Up to this size of the factorised matrix a direct solve is both exact and quick."""


_CG, _CHOLESKY = CG(), Cholesky()


class Choice(NamedTuple):
    """A solver and the reason for it, in words."""

    solver: AbstractDualSolver
    reason: str


class Auto(eqx.Module):
    """Takes a direct solve where the factorised matrix is small, preconditioned CG elsewhere."""

    direct_size: int = eqx.field(static=True, default=DIRECT_SIZE)

    def choose(self, op: AbstractKernelOperator) -> Choice:
        """The solver for this operator."""
        n, c = op.num_points, op.num_outputs
        if op.layout.sharding is not None:
            devices = op.layout.num_devices
            return Choice(_CG, f"rows on {devices} devices: CG, as a factor would gather K")
        if not op.in_memory:
            return Choice(_CG, "K is on disk: one pass over it per iteration")
        if isinstance(op, LowRankOperator):
            return Choice(_CHOLESKY, f"low rank {op.features.shape[2]}: Woodbury on that side")
        size, what = (n, "n") if isinstance(op, KroneckerOperator) else (n * c, "n·c")
        if size <= self.direct_size:
            return Choice(_CHOLESKY, f"{what} = {size} ≤ {self.direct_size}: direct and exact")
        return Choice(_CG, f"{what} = {size} > {self.direct_size}: one read of K per iteration")


def resolve(solver: "Auto | AbstractDualSolver", op: AbstractKernelOperator) -> Choice:
    """`Auto` resolved, anything else as asked; refined where `K` is in mixed precision."""
    if isinstance(op, MixedOperator):
        solver, reason = resolve(solver, op.op)
        return Choice(Refined(solver), reason)
    if isinstance(solver, Auto):
        return solver.choose(op)
    if isinstance(solver, Cholesky) and op.layout.sharding is not None:
        raise ValueError(
            f"Cholesky: the rows of K are on {op.layout.num_devices} devices, and a factor would "
            "gather them in one place. Use CG() or Auto(), or fit without mesh."
        )
    return Choice(solver, "asked for")
