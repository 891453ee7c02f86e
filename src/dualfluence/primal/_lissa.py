"""LiSSA: the Neumann series of the inverse, by Agarwal et al. and Koh and Liang."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._support.compile import PRECISION, filter_jit
from .._support.options import check_positive, maybe
from .._support.types import Json
from ..problem._certificate import NotConverged
from ._curvature import Curvature, Hessian, extreme_eigenvalues, relative_residuals
from ._hessian import Rows
from ._solvers import AT_ONCE, AbstractPrimalInverse, AbstractPrimalSolver, Solved, check_options

SAFETY = 1.05
"""The scale over the largest eigenvalue. The series converges down to a half."""


class LiSSA(AbstractPrimalSolver):
    r"""$x_{t+1} = x_t + (b - (C+\delta I)x_t)/s$, which converges for $s > \tfrac12\lambda_{\max}$.

    `C` is the curvature matrix without the ridge. If it is the Gauss-Newton matrix, the error after
    `depth` steps is at most $(1-\delta/s)^{\text{depth}}$ times the norm of the answer. The actual error
    is measured: `error` in the facts is $\|r\|/(\delta\|x\|)$ with the residual $r$. This bounds the
    relative error, since no eigenvalue of the Gauss-Newton `C + δI` is below `δ`.

    **Fields:**

    - `damping`: added to the ridge; their sum is `δ`.
    - `hessian`: `"gauss-newton"` or `"exact"`; a negative eigenvalue below `−δ` makes the series
      diverge.
    - `depth`: steps.
    - `scale`: `s`; by default 1.05 times the largest eigenvalue of `C + δI`, from 40 Lanczos steps.
    - `sample`: training points drawn in each step, as in the original; `None` takes all points, without
      noise. With small samples the series may diverge at a scale that is large enough for all points.
    - `repeats`, `seed`: independent runs to average, for samples.

    A run that ends further from the solution than it began raises an error that names the eigenvalue.
    """

    damping: float = eqx.field(static=True, default=0.0)
    hessian: Hessian = eqx.field(static=True, default="gauss-newton")
    depth: int = eqx.field(static=True, default=1000)
    scale: float | None = eqx.field(static=True, default=None)
    sample: int | None = eqx.field(static=True, default=None)
    repeats: int = eqx.field(static=True, default=1)
    seed: int = eqx.field(static=True, default=0)

    def __check_init__(self) -> None:
        counts = {"depth": self.depth, "sample": self.sample, "repeats": self.repeats}
        check_options("LiSSA", self.damping, self.hessian, self.seed, **counts)
        maybe(check_positive, "LiSSA: scale", self.scale)

    def inverse(self, curvature: Curvature) -> AbstractPrimalInverse:
        low, high = extreme_eigenvalues(curvature, self.hessian)
        shift = float(curvature.shift(self.damping))
        scale = SAFETY * (high + shift) if self.scale is None else self.scale
        return _LiSSAInverse(curvature, self, scale, low, high)


class _LiSSAInverse(AbstractPrimalInverse):
    curvature: Curvature
    solver: LiSSA
    scale: float = eqx.field(static=True)
    low: float = eqx.field(static=True)
    high: float = eqx.field(static=True)

    def solve(self, b: Float[Array, "k p"]) -> Solved:
        solver, shift = self.solver, self.curvature.shift(self.solver.damping)
        value = _series(self.curvature, solver, jnp.asarray(self.scale, b.dtype), b)
        finite = bool(jnp.isfinite(value).all())
        residuals = relative_residuals(self.curvature, shift, value, b, solver.hessian)
        residual = float(residuals.max()) if finite else float("inf")
        if not residual <= 1:
            raise NotConverged(self._diverged(residual, float(shift)))
        size = jnp.linalg.norm(value, axis=1)
        tiny = jnp.finfo(b.dtype).tiny
        error = residuals * jnp.linalg.norm(b, axis=1) / jnp.maximum(shift * size, tiny)
        facts: Json = {
            "largest_eigenvalue": self.high,
            "smallest_eigenvalue": self.low,
            "scale": self.scale,
            "error": float(error.max()) if self.low >= -1e-6 * self.high else None,
            "contraction": 1 - float(shift) / self.scale,
        }
        note = f"stopped after {solver.depth} steps at a relative residual of {residual:.2g}"
        steps = solver.depth * solver.repeats
        return Solved(value, residual, True, steps, steps + 1, facts, (note,))

    def _diverged(self, residual: float, shift: float) -> str:
        low, high = self.low + shift, self.high + shift
        if low < 0:
            cause = f"its smallest eigenvalue is {low:.3g}: more damping than {-self.low:.3g} helps"
        elif self.scale < high / 2:
            cause = f"the scale must be above half of the largest eigenvalue, {high / 2:.3g}"
        else:
            cause = "the samples are too small for this scale: draw more points, or raise the scale"
        return (
            f"LiSSA: diverged: after {self.solver.depth} steps the relative residual is "
            f"{residual:.3g}, it began at 1. The largest eigenvalue of the damped Hessian is "
            f"{high:.3g}, the scale {self.scale:.3g}; {cause}."
        )


@filter_jit
def _series(
    curvature: Curvature, solver: LiSSA, scale: Float[Array, ""], b: Float[Array, "k p"]
) -> Float[Array, "k p"]:
    shift = curvature.shift(solver.damping)
    keys = jax.random.split(jax.random.key(solver.seed), solver.repeats)

    def run(key: Array, row: Array) -> Array:
        def advance(t: Array, x: Array) -> Array:
            seen = _sampled(curvature, solver.sample, jax.random.fold_in(key, t))
            return x + (row - seen.product(x, solver.hessian) - shift * x) / scale

        return jax.lax.fori_loop(0, solver.depth, advance, row / scale)

    def mean(row: Array) -> Array:
        return jnp.mean(jax.lax.map(lambda key: run(key, row), keys), axis=0)

    with jax.default_matmul_precision(PRECISION):
        return jax.lax.map(mean, b, batch_size=min(AT_ONCE, b.shape[0]))


def _sampled(curvature: Curvature, sample: int | None, key: Array) -> Curvature:
    """The curvature of points drawn by weight, with replacement: right on average."""
    if sample is None:
        return curvature
    flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), curvature.rows)
    total = jnp.sum(flat.weights)
    drawn = jax.random.choice(key, flat.weights.size, (sample,), p=flat.weights / total)
    rows = jax.tree.map(lambda a: a[drawn][None], flat)
    weights = jnp.full_like(rows.weights, 1 / sample) * total
    chosen = Rows(rows.x, rows.targets, weights, rows.outputs)
    return eqx.tree_at(lambda c: c.rows, curvature, chosen)
