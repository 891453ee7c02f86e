"""The preconditioner: a sketch of `K` made at the fit and kept for every later request."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, PRNGKeyArray

from .._plan import DEFAULT_RANK
from .._support.options import check_count, check_instance, check_key, maybe
from ..models._low_rank import nystrom
from ..models._sources import AbstractSource
from ..operators import AbstractKernelOperator
from ..solvers import (
    CG,
    AbstractDualSolver,
    AbstractPreconditioner,
    NoPreconditioner,
    Refined,
    SpectralPreconditioner,
    spectral_preconditioner,
)

POWER_STEPS = 1
"""Passes over `K` that sharpen the sketch. Doubled, CG saves an iteration or two, and the fit takes one
more block product."""


@dataclass(frozen=True, eq=False)
class Sketch:
    """The preconditioner of CG: the `sketch` of `fit` and `from_trained`.

    - `rank`: number of columns; 0 for no preconditioner. By default 200, or an eighth of the unknowns,
      if the solver is CG.
    - `key`: randomness; `jax.random.key(0)` by default.
    """

    rank: int | None = None
    key: PRNGKeyArray | None = None

    def __post_init__(self) -> None:
        maybe(check_key, "Sketch: key", self.key)
        rank = maybe(check_count, "Sketch: rank", self.rank, least=0)
        object.__setattr__(self, "rank", rank)  # NumPy's integers as Python's


DEFAULT = Sketch()


def as_sketch(what: str, sketch: Any) -> Sketch:
    """The sketch that was asked for, or the default."""
    maybe(check_instance, f"{what}: sketch", sketch, kinds=Sketch, example="a Sketch(rank, key)")
    return DEFAULT if sketch is None else sketch


class Sketched(NamedTuple):
    """What a preconditioner cost: products with `K`, and words."""

    products: int = 0
    notes: tuple[str, ...] = ()


def make_preconditioner(
    source: AbstractSource,
    x: Array,
    op: AbstractKernelOperator,
    solver: AbstractDualSolver,
    sketch: Sketch,
) -> tuple[AbstractPreconditioner, Sketched]:
    """A sketch of `K` for CG: two passes over the entries if `K` has any, otherwise columns at
    landmarks."""
    op, rank = op.narrow, sketch.rank
    solver = solver.inner if isinstance(solver, Refined) else solver
    size = op.num_points * op.num_outputs
    on_devices = op.layout.sharding is not None
    if rank is None:
        dear = op.follows_points and on_devices
        rank = min(DEFAULT_RANK, size // 8) if isinstance(solver, CG) and not dear else 0
    if rank == 0:
        return NoPreconditioner(), Sketched()
    if rank > size:
        raise ValueError(f"sketch: rank must be in [0, n·c] = [0, {size}], got {rank}.")
    key = jax.random.key(0) if sketch.key is None else sketch.key
    if op.follows_points and not on_devices:
        # A block product costs as much as `rank` products here; landmark columns are entries.
        features = nystrom(source, x, rank, op.num_outputs, key).features(x)
        note = f"preconditioner: {features.shape[2]} columns of K at landmarks"
        return SpectralPreconditioner(features), Sketched(0, (note,))
    note = f"preconditioner: rank {rank} from {POWER_STEPS + 1} block products with K"
    made = spectral_preconditioner(op, rank, key, POWER_STEPS)
    return made, Sketched(POWER_STEPS + 1, (note,))
