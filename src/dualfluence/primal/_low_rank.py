"""Low-rank inverses: Arnoldi (Schioppa et al.) and Nyström (Hataya and Yamada; Frangella et al.)."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._support.compile import PRECISION, filter_jit, jit
from .._support.options import check_flag
from .._support.types import Json
from ._curvature import (
    Curvature,
    Hessian,
    curvature_trace,
    krylov_space,
    products,
    relative_residuals,
)
from ._solvers import AbstractPrimalInverse, AbstractPrimalSolver, Solved, check_options

OVERSAMPLING = 20
"""Steps beyond twice the rank, so that the eigenvalues that are kept have converged."""

SINGULAR = 1e3
"""Rounding units of the largest eigenvalue below which a damped eigenvalue cannot be divided by."""


class Arnoldi(AbstractPrimalSolver):
    r"""$\sum_{k\le r} v_k v_k^\top/(\mu_k+\delta)$ from the `r` largest eigenpairs of `C`.

    For a symmetric matrix Arnoldi's iteration is Lanczos' iteration; ours is reorthogonalised. The part
    of a right-hand side outside the `r` directions is dropped, as in the original method. With
    `complement=True` it is divided by `δ`. Exact at full rank. The facts report the share of the
    right-hand sides (`captured`) and of the trace of `C` (`captured_trace`) that the directions hold.

    **Fields:** `rank`; `steps`, of Lanczos, by default `2·rank + 20`; `damping`, added to the ridge;
    `hessian`; `complement`; `seed` of the starting vector.
    """

    rank: int = eqx.field(static=True, default=50)
    steps: int | None = eqx.field(static=True, default=None)
    damping: float = eqx.field(static=True, default=0.0)
    hessian: Hessian = eqx.field(static=True, default="gauss-newton")
    complement: bool = eqx.field(static=True, default=False)
    seed: int = eqx.field(static=True, default=0)

    def __check_init__(self) -> None:
        counts = {"rank": self.rank, "steps": self.steps}
        check_options("Arnoldi", self.damping, self.hessian, self.seed, **counts)
        check_flag("Arnoldi: complement", self.complement)
        if self.steps is not None and self.steps < self.rank:
            raise ValueError(
                f"Arnoldi: steps must be at least the rank {self.rank}, got {self.steps}."
            )

    def inverse(self, curvature: Curvature) -> AbstractPrimalInverse:
        p = curvature.num_params
        rank = min(self.rank, p)
        steps = min(2 * rank + OVERSAMPLING if self.steps is None else self.steps, p)
        krylov = krylov_space(curvature, self.hessian, steps, self.seed)
        values, vectors = krylov.ritz()
        kept = np.sort(np.argsort(-np.abs(values), kind="stable")[:rank])
        basis = _turned(krylov.basis, jnp.asarray(vectors[:, kept], curvature.dtype))
        facts: Json = {"steps": steps, "products": steps + 1}
        inverse = _LowRank("Arnoldi", curvature, basis, values[kept], self, facts)
        return inverse.checked()


class Nystrom(AbstractPrimalSolver):
    r"""$U(\Lambda+\delta)^{-1}U^\top + \delta^{-1}(I-UU^\top)$ with $C\Omega(\Omega^\top C\Omega)^{-1}
    \Omega^\top C = U\Lambda U^\top$ for `rank` random directions $\Omega$.

    One product with `C` per direction and no iteration. All other directions count as flat and are
    divided by `δ`, so a small `δ` makes their part large.

    **Fields:** `rank`; `damping`, added to the ridge; `hessian`, which must be positive semidefinite;
    `seed` of the directions.
    """

    rank: int = eqx.field(static=True, default=50)
    damping: float = eqx.field(static=True, default=0.0)
    hessian: Hessian = eqx.field(static=True, default="gauss-newton")
    seed: int = eqx.field(static=True, default=0)
    complement: bool = eqx.field(static=True, default=True, init=False)

    def __check_init__(self) -> None:
        check_options("Nystrom", self.damping, self.hessian, self.seed, rank=self.rank)

    def inverse(self, curvature: Curvature) -> AbstractPrimalInverse:
        p, dtype = curvature.num_params, curvature.dtype
        rank = min(self.rank, p)
        normal = jax.random.normal(jax.random.key(self.seed), (p, rank), dtype)
        directions = jnp.linalg.qr(normal)[0]
        seen = products(curvature, directions.T, self.hessian).T
        basis, values, low, high = _nystrom(directions, seen)
        slack = SINGULAR * float(jnp.finfo(dtype).eps) * max(float(high), 0.0)
        if float(low) < -slack:
            raise ValueError(
                "Nystrom: the Hessian is indefinite. On the drawn directions its smallest eigenvalue is "
                f"{float(low):.3g} and its largest {float(high):.3g}. Use hessian='gauss-newton'."
            )
        facts: Json = {"products": rank + 1}
        return _LowRank("Nystrom", curvature, basis, np.asarray(values), self, facts).checked()


class _LowRank(AbstractPrimalInverse):
    """Orthonormal rows and their eigenvalues, with or without the complement."""

    name: str = eqx.field(static=True)
    curvature: Curvature
    basis: Float[Array, "r p"]
    values: np.ndarray
    solver: Any
    facts: Json

    def checked(self) -> "_LowRank":
        """Itself, or an error where a damped eigenvalue is zero to rounding."""
        damped = self.values + float(self.curvature.shift(self.solver.damping))
        floor = SINGULAR * float(jnp.finfo(self.basis.dtype).eps) * float(np.abs(damped).max())
        nearest = damped[np.argmin(np.abs(damped))]
        if not abs(nearest) > floor:
            raise ValueError(
                f"{self.name}: a damped eigenvalue is {nearest:.3g}, zero up to rounding "
                f"compared with the largest, {np.abs(damped).max():.3g}. Raise the ridge or the "
                "damping."
            )
        return self

    def solve(self, b: Float[Array, "k p"]) -> Solved:
        shift = self.curvature.shift(self.solver.damping)
        values = jnp.asarray(self.values, b.dtype)
        value, inside = _apply(self.basis, values, shift, self.solver.complement, b)
        residuals = relative_residuals(self.curvature, shift, value[:1], b[:1], self.solver.hessian)
        facts = self.facts | {
            "rank": len(self.values),
            "largest_eigenvalue": float(np.max(self.values)),
            "smallest_eigenvalue_kept": float(np.min(np.abs(self.values))),
            "captured": float(inside.min()),
        }
        if self.solver.hessian == "gauss-newton" or self.curvature.linearised:
            trace = float(curvature_trace(self.curvature))
            facts["captured_trace"] = float(self.values.sum()) / trace if trace > 0 else 1.0
        notes = [f"rank {len(self.values)} of {self.basis.shape[1]}"]
        share = facts["captured"]
        where = (
            "only the damping acts on the rest" if self.solver.complement else "the rest is dropped"
        )
        notes.append(f"at least {share:.3g} of each right-hand side lies inside, {where}")
        negative = self.values + float(shift) < 0
        if negative.any():
            notes.append(
                f"indefinite: {int(negative.sum())} damped eigenvalues are negative, the smallest "
                f"{float(self.values.min() + float(shift)):.3g}"
            )
        used = facts.pop("products")
        return Solved(value, float(residuals.max()), True, 0, used, facts, tuple(notes))


@jit
def _turned(basis: Float[Array, "m p"], vectors: Float[Array, "m r"]) -> Float[Array, "r p"]:
    with jax.default_matmul_precision(PRECISION):
        return vectors.T @ basis


@jit
def _nystrom(
    directions: Float[Array, "p r"], seen: Float[Array, "p r"]
) -> tuple[Float[Array, "r p"], Float[Array, " r"], Float[Array, ""], Float[Array, ""]]:
    """Orthonormal rows, eigenvalues, and the ends of the spectrum of the core."""
    with jax.default_matmul_precision(PRECISION):
        core = directions.T @ seen
        ends = jnp.linalg.eigvalsh((core + core.T) / 2)
        # A small shift keeps the core invertible where directions see nothing; taken off again.
        nu = jnp.finfo(seen.dtype).eps * jnp.linalg.norm(seen)
        moved = seen + nu * directions
        core = directions.T @ moved
        values, vectors = jnp.linalg.eigh((core + core.T) / 2)
        # Directions below rounding are noise: they get no weight.
        good = values > 10 * nu
        root = jnp.where(good, 1 / jnp.sqrt(jnp.where(good, values, 1)), 0)
        U, s, _ = jnp.linalg.svd(moved @ (vectors * root[None]), full_matrices=False)
    return U.T, jnp.maximum(s**2 - nu, 0), ends[0], ends[-1]


@filter_jit
def _apply(
    basis: Float[Array, "r p"],
    values: Float[Array, " r"],
    shift: Float[Array, ""],
    complement: bool,
    b: Float[Array, "k p"],
) -> tuple[Float[Array, "k p"], Float[Array, " k"]]:
    """The answers, and the share of each right-hand side's square that lies in the basis."""
    with jax.default_matmul_precision(PRECISION):
        inside = b @ basis.T
        value = (inside / (values + shift)[None]) @ basis
        if complement:
            value = value + (b - inside @ basis) / shift
    size = jnp.maximum(jnp.sum(b**2, axis=1), jnp.finfo(b.dtype).tiny)
    return value, jnp.sum(inside**2, axis=1) / size
