r"""Leaving points out one after another, each by a small solve with the anchor's inverse.

With the sums of weights as they were at the anchor, removing a point drops its term and lowers the ridge
by its share $\lambda m$. The step of the others and of the outputs is (DESIGN, section 1)

$$K\Delta\alpha = N(b + E_i\tau),\quad
  \Delta\alpha = \tfrac1\lambda\left(b + E_i\tau - W_0K\Delta\alpha\right),$$
$$b = \lambda m\,\alpha,\qquad \Delta\alpha_i = -\alpha_i,$$

where the last equation fixes `τ`. The point is then eliminated from the inverse by a symmetric update of rank
`c`, which is stored and not applied: $N \leftarrow N + YCY^\top$, $Y = N_{\cdot i}$,
$C = (I - W_iN_{ii})^{-1}W_i = R_i(I - R_i^\top N_{ii}R_i)^{-1}R_i^\top$. The matrix of `τ` has the inverse
$I + CN_{ii}$.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._support.compile import filter_jit
from ._anchor import HIGHEST, Anchor


@dataclass(frozen=True, eq=False)
class Gone:
    """Points eliminated since the anchor.

    - `Y`, `C`: the updates of `N`: `Yᵀ`, `(capacity·c, n·c)`, and `C` of each point, `(capacity, c, c)`. `Y`
      is written in place, and past `count` it is scratch, where `C` is zero. On a CPU both are arrays of the
      host, and both are written in place.
    - `v`: `Nα` of the anchor's `α` at the points that are left.
    - `force`: squared norm of the forces that `v` holds back at eliminated points.
    - `shares`: the anchor's weights, which sum to one, of the points that are left. `None` on a CPU, where
      requests bring them.
    - `place`: `count` where a program reads it; `None` on a CPU.
    - `count`: points eliminated.
    """

    Y: Any
    C: Any
    v: Any
    force: Any
    shares: Any
    place: Any
    count: int

    @property
    def on_host(self) -> bool:
        return isinstance(self.Y, np.ndarray)


class Step(NamedTuple):
    """What leaving one point out does: `Δα`, `KΔα`, its rounding, and what elimination needs later."""

    delta: Any
    k_delta: Any
    drift: Any
    C: Any
    v: Any
    force: Any


def on_host() -> bool:
    """Whether small algebra goes to NumPy: on a CPU it has no program to start and no copy to make."""
    return jax.default_backend() == "cpu"


def nothing_gone(anchor: Anchor, shares: np.ndarray, capacity: int) -> Gone:
    """Room for `capacity` points. On a CPU, memory is taken as it is used."""
    size, c = anchor.N.shape[0], anchor.alpha.shape[1]
    xp: Any = np if on_host() else jnp
    Y = xp.zeros((capacity * c, size), anchor.N.dtype)
    C = xp.zeros((capacity, c, c), anchor.N.dtype)
    v, force = xp.asarray(_product(anchor)), xp.zeros((), anchor.N.dtype)
    if on_host():
        return Gone(Y, C, v, force, None, None, 0)
    return Gone(Y, C, v, force, jnp.asarray(shares, anchor.N.dtype), jnp.zeros((), jnp.int32), 0)


@filter_jit
def _product(anchor: Anchor) -> jax.Array:
    flat = anchor.alpha.reshape(-1)
    return jnp.dot(anchor.N, flat, precision=HIGHEST).reshape(anchor.alpha.shape)


class Fixed(NamedTuple):
    """What a step reads of the anchor, as arrays of NumPy or JAX; `alpha` is the anchor's own."""

    alpha: Any
    hess: Any
    roots: Any
    diagonal: Any
    error: Any
    ridge: Any

    @staticmethod
    def of(anchor: Anchor) -> "Fixed":
        a = anchor
        return Fixed(a.alpha, a.hess, a.roots, a.kernel_diagonal, a.error, a.problem.ridge)


def step_on_host(
    anchor: Anchor, gone: Gone, alpha: np.ndarray, point: int, share: Any, kept: np.ndarray
) -> tuple[Gone, Step]:
    """Leave out one point of the given share of the weight; `kept` marks the points that are left."""
    c, used = alpha.shape[1], gone.count * alpha.shape[1]
    rows = slice(point * c, (point + 1) * c)
    fixed = Fixed(*map(np.asarray, Fixed.of(anchor)))
    own = (gone.C[: gone.count] @ gone.Y[:used, rows].reshape(-1, c, c)).reshape(used, c)
    new = gone.Y[used : used + c]
    np.matmul(own.T, gone.Y[:used], out=new)
    new += np.asarray(anchor.N)[rows]
    given = (alpha, gone.v, gone.force, share, kept, point)
    step = make_step(np, _solve, fixed, new.T, own, *given)
    gone.C[gone.count] = step.C
    return replace(gone, v=step.v, force=step.force, count=gone.count + 1), step


def _solve(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """`A⁻¹B`, or NaN where there is none, as on a device."""
    try:
        return np.linalg.solve(A, B)
    except np.linalg.LinAlgError:
        return np.full_like(B, np.nan)


def make_step(
    xp: Any,
    solve: Any,
    fixed: Fixed,
    column: Any,
    own: Any,
    alpha: Any,
    v: Any,
    force: Any,
    share: Any,
    kept: Any,
    i: Any,
) -> Step:
    """The formulas of this file's head in NumPy or JAX, with a solver for the system of one point.

    `column` is `N[:, i]`, and `own` is `CYᵀ` there, of all points eliminated so far.
    """
    start, ridge = fixed.alpha, fixed.ridge
    (n, c), W, R, scale = start.shape, fixed.hess[i], fixed.roots[i], ridge * share
    N_i = column.reshape(n, c, c)[i]
    C = R @ solve(xp.eye(c, dtype=column.dtype) - R.T @ N_i @ R, R.T)
    C, v_b = 0.5 * (C + C.T), scale * v
    right = -ridge * alpha[i] - scale * start[i] + W @ v_b[i]
    tau = right + C @ (N_i @ right)
    k_delta = v_b + (column @ tau).reshape(n, c)
    b = scale * start * kept[:, None]
    others = (b - (fixed.hess @ k_delta[:, :, None])[:, :, 0]) / ridge * kept[:, None]
    delta = xp.where((xp.arange(n) == i)[:, None], -alpha, others)
    pushed = C @ (column.T @ (start * kept[:, None]).reshape(-1))
    # By how much the point's own equation is missed, and what that adds to KΔα.
    missed = alpha[i] + (scale * start[i] + tau - W @ k_delta[i]) / ridge
    missed = (xp.sqrt(xp.maximum(fixed.diagonal[i], 0)) * xp.abs(missed)).sum()
    # What the error of N adds: the norm of what it is multiplied with, forces at eliminated points included.
    held = own @ tau
    size = xp.sqrt((b**2).sum() + (tau**2).sum() + (held**2).sum() + scale**2 * force)
    drift = fixed.error * size + missed / float(xp.finfo(column.dtype).eps)
    v = v + (column @ (pushed - start[i])).reshape(n, c)
    return Step(delta, k_delta, drift, C, v, xp.asarray(force + (pushed**2).sum()))


def make_correction(
    xp: Any,
    N: Any,
    Y: Any,
    C: Any,
    hess: Any,
    rho: Any,
    kept: Any,
    error: Any,
    scale: Any,
    ridge: Any,
) -> tuple[Any, Any, Any]:
    """`Δα = −A⁻¹ρ` without the eliminated points, `KΔα`, and what the error of `N` adds to it."""
    rho = rho * scale * kept[:, None]
    flat = rho.reshape(-1)
    held = (C @ (Y @ flat).reshape(-1, rho.shape[1], 1)).reshape(-1)
    k_delta = -(N @ flat + held @ Y).reshape(rho.shape)
    delta = (-rho - (hess @ k_delta[:, :, None])[:, :, 0]) / ridge * kept[:, None]
    return delta, k_delta, error * xp.sqrt((rho**2).sum() + (held**2).sum())
