r"""A few directions of outputs per point instead of all of them.

The curvature of the loss in the outputs of point `i` is `H_i = R_iR_iᵀ`. Probes are `m` columns `P_i`
with `P_iP_iᵀ ≈ H_i`: the system of all points then has `n·m` unknowns instead of `n·rank`, and its
kernel is the kernel of a network whose outputs are folded along the probes, `(x, u) ↦ u·f(x)`.
"""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .._plan import COMPUTE
from .._support.compile import HIGHEST
from .._support.memory import total_memory
from .._support.options import check_count
from .._support.types import AnyLeaf
from ..linalg import spectrum_each
from ..losses import AbstractFactor

LEADING_WIDTH = 64
"""Outputs up to which a number of probes means leading ones. Beyond, blocks of `c²` numbers for every
point, and their eigenvectors, take more than they save."""

AUTO_PROBES = 3
"""Probes of `auto`. On MNIST three leading ones have an LDS of 0.696 where the exact form has 0.704."""

EXACT_SECONDS = 1.0
"""`auto` is exact where the Cholesky factor of one checkpoint takes no longer, at the rates of `plan`."""

FULL_SHARE = 0.6
"""Share of the memory that the system and its factor may take."""


@dataclass(frozen=True)
class LeadingProbes:
    """Probes are the directions of a point's outputs that `Trajectory` keeps. Here they are the `m`
    leading eigenvectors of each point's curvature (the Hessian of its loss), times the roots of their
    eigenvalues.

    They are the same at every call, and exact if `m` is the rank: the number of classes minus one for
    softmax cross-entropy, else the number of outputs. They are best for few classes.
    """

    m: int

    def __post_init__(self) -> None:
        check_count("LeadingProbes: m", self.m)

    def directions(self, factor: AbstractFactor, f: Float[Array, "n c"], key: Array) -> Array:
        """`P`, of shape `(n, c, m)`."""
        roots = root_blocks(factor, f)
        gram = jnp.einsum("ncr,ncs->nrs", roots, roots, precision=HIGHEST)
        turn = spectrum_each(gram)[1][:, :, ::-1][:, :, : self.m]  # the largest first
        return jnp.einsum("ncr,nrm->ncm", roots, turn, precision=HIGHEST)


@dataclass(frozen=True)
class RandomProbes:
    """`m` random combinations of the columns of each point's curvature factor `R`. The mean over draws of
    their outer products is the whole curvature `RRᵀ`.

    Nothing of size `c²` is formed, so that `c` may be a vocabulary. Every checkpoint draws its own.
    """

    m: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("RandomProbes: m", self.m)
        check_count("RandomProbes: seed", self.seed, least=0)

    def directions(self, factor: AbstractFactor, f: Float[Array, "n c"], key: Array) -> Array:
        """`P = Rε/√m` with random signs `ε`, of shape `(n, c, m)`."""
        signs = jax.random.rademacher(key, (*f.shape, self.m), f.dtype)
        return factor.mv(signs) / jnp.sqrt(jnp.asarray(self.m, f.dtype))


Probes = LeadingProbes | RandomProbes


def key_of(probes: Any, run: int, checkpoint: int) -> Array:
    """The key of a checkpoint's random probes."""
    seed = probes.seed if isinstance(probes, RandomProbes) else 0
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), run), checkpoint)


def root_blocks(factor: AbstractFactor, f: Float[Array, "n c"]) -> Float[Array, "n c r"]:
    """`R` as blocks, without empty columns."""
    n, c = f.shape
    narrow = factor.narrow()
    # Rᵀ of every output's unit vector, then turned: R as blocks.
    eye = jnp.broadcast_to(jnp.eye(c, dtype=f.dtype), (n, c, c))
    return jnp.transpose(narrow.rmv(eye), (0, 2, 1))


def rank_of(factor: AbstractFactor, f: AnyLeaf) -> int:
    """The largest rank that a point's curvature can have; nothing is computed but shapes."""
    return eqx.filter_eval_shape(root_blocks, factor, f).shape[2]


def chosen(
    probes: Any, n: int, c: int, rank: int, dtype: DTypeLike, devices: int = 1
) -> tuple[Probes | None, str]:
    """What the caller's `probes` means here, or `None` for the exact form, and a note on the choice."""
    if isinstance(probes, str) and probes == "auto":
        return _by_rule(n, c, rank, jnp.dtype(dtype).itemsize, devices)
    if probes is None:
        return None, ""
    if not isinstance(probes, LeadingProbes | RandomProbes):
        if not isinstance(probes, int) or isinstance(probes, bool):
            raise TypeError(
                'Trajectory: probes must be "auto", None (exact), a number, LeadingProbes(m) or '
                f"RandomProbes(m, seed), got {probes!r}."
            )
        check_count("Trajectory: probes", probes)
        probes = LeadingProbes(probes) if c <= LEADING_WIDTH else RandomProbes(probes)
    if probes.m > rank:
        raise ValueError(
            f"Trajectory: got {probes.m} probes, but the loss has curvature in at most {rank} of the {c} "
            f"output directions. probes=None gives the exact scores, with {rank} directions per point."
        )
    return probes, ""


def _by_rule(n: int, c: int, rank: int, size: int, devices: int) -> tuple[Probes | None, str]:
    """Exact if this is cheap, else the most probes up to `AUTO_PROBES` whose system fits in memory."""
    seconds = (n * rank) ** 3 / 3 / COMPUTE[jax.default_backend()] / devices
    most = FULL_SHARE * total_memory() * devices
    cheap = 2 * (n * rank) ** 2 * size <= most and seconds <= EXACT_SECONDS
    if cheap or rank <= 1:
        return None, ""
    m = AUTO_PROBES
    while m > 1 and (m > rank or 2 * (n * m) ** 2 * size > most):
        m -= 1
    probes = LeadingProbes(m) if c <= LEADING_WIDTH else RandomProbes(m)
    why = (
        f"probes chosen automatically: the exact form has {n * rank} unknowns, whose factor would take "
        f"about {seconds:.0f} s a checkpoint or does not fit in memory; probes=None computes it"
    )
    return probes, why


def said_of(probes: Probes | None, why: str, left_out: float, agreement: float) -> list[str]:
    """The note of a result on its probes."""
    found = []
    if isinstance(probes, LeadingProbes):
        found = [
            f"{probes.m} leading direction(s) of outputs per point leave out {left_out:.2g} of the curvature"
        ]
    elif isinstance(probes, RandomProbes):
        found = [f"{probes.m} random direction(s) of outputs per point, seed {probes.seed}"]
    if isinstance(probes, RandomProbes) and probes.m > 1 and agreement < 1:
        found.append(
            f"scores of one half of the random directions and of the other correlate by {agreement:.2f}"
        )
    return [*found, *([why] if why else [])]
