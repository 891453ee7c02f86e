r"""Leave-one-out and generalised cross-validation over a grid of ridges, from one eigendecomposition.

With `Q = K(λI + WK)⁻¹` the outputs of point `i`, once it is left out, move by
`(Qb)_i + Q_{ii}τ_i` (see `_leave_one_out` for `b` and `τ`), and `RᵀKR = UΛUᵀ` gives `Q` for every `λ`:
`Q = (K − MD_λMᵀ)/λ`, `M = KRU`, `D_λ = 1/(Λ + λ)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._support.compile import HIGHEST, NotFinite, filter_jit
from .._support.show import Shown, Table
from .._support.types import Numbers
from ..dual._model import TrainedModel, problem_on_device
from ..linalg import spectrum
from ..losses import DiagonalFactor, SquaredError
from ..operators import UnsupportedStructure
from ._leave_one_out import Terms
from ._ridge_moves import Moves, left_out_moves
from ._ridge_path_mesh import moves_on_mesh
from ._spread_system import own_copy

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any

GRID = np.logspace(-7, 1, 33)
"""Ridges tried by default, over the mean diagonal of `K`: four to a decade."""

MAX_SIZE = 20_000
"""Largest eigendecomposition; beyond, hours and more memory than a laptop has."""


@dataclass(frozen=True, eq=False, repr=False)
class RidgePath(Shown):
    """Errors of prediction over a grid of ridges.

    - `ridges`: the grid.
    - `leave_one_out`: weighted mean, over the points, of the loss of each point under the model trained
      without it.
    - `gcv`: mean training loss over `(1 − dof/(n·c))²`.
    - `training`: mean training loss.
    - `dof`: effective degrees of freedom, the trace of the smoother.
    - `exact`: true for squared error; otherwise the values are one Newton step from the fit, accurate
      near its ridge.
    """

    ridges: np.ndarray
    leave_one_out: np.ndarray
    gcv: np.ndarray
    training: np.ndarray
    dof: np.ndarray
    exact: bool

    @property
    def best(self) -> float:
        """The ridge with the least leave-one-out loss."""
        return float(self.ridges[least(self.leave_one_out)])

    @property
    def best_gcv(self) -> float:
        """The ridge with the least generalised cross-validation error."""
        return float(self.ridges[least(self.gcv)])

    @property
    def reason(self) -> str:
        """The choice in words, for `stats.notes`."""
        at = least(self.leave_one_out)
        edge = ", at the edge of the grid" if at in (0, self.ridges.size - 1) else ""
        how = "exact" if self.exact else "one Newton step"
        return (
            f"ridge {self.best:.3g}: least leave-one-out loss, {self.leave_one_out[at]:.4g}, of "
            f"{self.ridges.size} ({how}; GCV would choose {self.best_gcv:.3g}){edge}"
        )

    def _table(self) -> Table:
        return f"RidgePath: {self.reason}", ()

    def plot(self) -> Figure:
        """Leave-one-out, GCV and training loss over the grid."""
        from matplotlib.figure import Figure as MakeFigure

        figure = MakeFigure(figsize=(6, 4), layout="constrained")
        axis = figure.add_subplot()
        for name, values, look in (
            ("leave-one-out", self.leave_one_out, "-"),
            ("GCV", self.gcv, "--"),
            ("training", self.training, ":"),
        ):
            axis.plot(self.ridges, values, look, label=name)
        axis.axvline(self.best, color="#777777", linewidth=1)
        axis.set_xscale("log")
        axis.set_xlabel("ridge λ")
        axis.set_ylabel("mean loss")
        axis.legend(frameon=False)
        return figure


def least(values: np.ndarray) -> int:
    """Where the least of these is; overflow at an extreme ridge is not least."""
    if np.isnan(values).all():
        raise NotFinite(
            "ridge_path: no ridge of the grid gives a finite loss. Scale features and targets to "
            "ordinary size, use float64, or give other ridges."
        )
    return int(np.nanargmin(values))


def ridge_path(
    fitted: TrainedModel, grid: Numbers | None = None, what: str = "ridge_path"
) -> RidgePath:
    """See `Fitted.ridge_path`; `what` is the name of the calling function, for messages."""
    fitted = fitted.without_spare_rows()
    data = fitted.data
    if np.count_nonzero(data.sample_weights) < 2:
        raise ValueError(
            f"{what}: leaving out points one by one needs at least two points that have a weight."
        )
    ridges = make_grid(fitted, grid, what)
    on_mesh = fitted.layout.sharding is not None
    moves_at = moves_on_mesh(fitted, what) if on_mesh else _moves_at(fitted, what)
    weights = jnp.asarray(data.weights, fitted.state.alpha.dtype)
    f, y = own_copy(fitted.outputs) if on_mesh else fitted.outputs, data.targets
    rows = []
    for ridge in ridges:
        moves, dof = moves_at(jnp.asarray(ridge, weights.dtype), weights)
        left_out, kept = (jnp.concatenate(part, axis=1) for part in zip(*moves, strict=True))
        losses = [float(jnp.sum(weights * fitted.loss.value(f + m, y))) for m in (left_out, kept)]
        rows.append((*losses, dof))
    leave_one_out, training, dof = (np.array(column) for column in zip(*rows, strict=True))
    share = 1 - dof / (np.count_nonzero(data.sample_weights) * fitted.num_outputs)
    return RidgePath(
        ridges,
        leave_one_out,
        training / np.maximum(share, np.finfo(float).tiny) ** 2,
        training,
        dof,
        isinstance(fitted.loss, SquaredError),
    )


def make_grid(fitted: TrainedModel, grid: Numbers | None, what: str) -> np.ndarray:
    """The ridges that were given, or the default ones."""
    if grid is None:
        grid = GRID * float(jnp.mean(fitted.layout.points(fitted.kernel_diagonal)))
    ridges = np.unique(np.asarray(grid, float))
    if ridges.ndim != 1 or not ridges.size or not (np.isfinite(ridges) & (ridges > 0)).all():
        raise ValueError(f"{what}: the grid must hold positive finite ridges, got {grid}.")
    return ridges


class _Spectrum(eqx.Module):
    """`K`, `RᵀKR = UΛUᵀ` and `M = KRU` for some of the outputs."""

    terms: Terms
    values: Float[Array, " m"]
    M: Float[Array, "n c m"]
    K_blocks: Float[Array, "n c c"]


def _spectra(fitted: TrainedModel, what: str) -> list[_Spectrum]:
    """One spectrum where outputs are coupled, one per output where they are not."""
    op, problem = fitted.kernel_op.narrow, problem_on_device(fitted)
    alpha, dtype = fitted.state.alpha, fitted.state.alpha.dtype
    factor, g = problem.factor(fitted.state), problem.loss_grad(fitted.state)
    if not op.has_entries:
        raise UnsupportedStructure(
            f"{what}: needs the entries of K for an eigendecomposition, not {type(op).__name__}. Fit "
            "with kernel='dense' on fewer points."
        )
    split = op.is_kronecker and isinstance(factor, DiagonalFactor)
    size = op.num_points * (1 if split else op.num_outputs)
    if size > MAX_SIZE:
        raise ValueError(
            f"{what}: the eigendecomposition would be of size {size}, more than {MAX_SIZE}. "
            "Choose the ridge on a subset of the points."
        )
    if not split:
        K = op.dense().astype(dtype)
        return [_spectrum(K, Terms(alpha, g, factor))]
    assert isinstance(factor, DiagonalFactor)
    scale = jnp.broadcast_to(factor.scale, alpha.shape)
    return [
        _spectrum(
            op.entries().astype(dtype),
            Terms(alpha[:, [a]], g[:, [a]], DiagonalFactor(scale[:, [a]])),
        )
        for a in range(op.num_outputs)
    ]


@filter_jit
def _spectrum(K: Float[Array, "m m"], terms: Terms) -> _Spectrum:
    (n, c), m = terms.alpha.shape, K.shape[0]
    values, vectors = spectrum(terms.factor.folded(K, c))
    right = terms.factor.mv(vectors.reshape(n, c, m)).reshape(m, m)
    M = jnp.dot(K, right, precision=HIGHEST).reshape(n, c, m)
    blocks = jnp.einsum("iaib->iab", K.reshape(n, c, n, c))
    return _Spectrum(terms, jnp.maximum(values, 0), M, blocks)


@filter_jit
def _moves(spectrum: _Spectrum, K_mv: Array, ridge: Array, weights: Float[Array, " n"]) -> Moves:
    """Newton steps to another ridge, with all points and without each."""
    terms, M = spectrum.terms, spectrum.M
    lam = ridge * (1 - weights)
    D = 1 / (spectrum.values[None, :] + lam[:, None])
    # b is linear in λ_i: K and M act on g and α once for all points.
    pair = -jnp.stack([terms.loss_grad, terms.alpha], axis=2)
    k_pair, r_pair = K_mv, _coefficients(spectrum, pair)
    k_b = k_pair[:, :, 0] + lam[:, None] * k_pair[:, :, 1]
    r_b = r_pair[None, :, 0] + lam[:, None] * r_pair[None, :, 1]
    Q_b = (k_b - jnp.einsum("ncm,nm->nc", M, D * r_b, precision=HIGHEST)) / lam[:, None]
    Q_own = spectrum.K_blocks - jnp.einsum("nam,nm,nbm->nab", M, D, M, precision=HIGHEST)
    Q_own = Q_own / lam[:, None, None]
    left_out = left_out_moves(terms, lam, Q_b, Q_own)
    whole = 1 / (spectrum.values + ridge)
    k_all = k_pair[:, :, 0] + ridge * k_pair[:, :, 1]
    r_all = whole * (r_pair[:, 0] + ridge * r_pair[:, 1])
    kept = (k_all - jnp.einsum("ncm,m->nc", M, r_all, precision=HIGHEST)) / ridge
    return Moves(left_out, kept)


def _coefficients(spectrum: _Spectrum, v: Float[Array, "n c s"]) -> Float[Array, "m s"]:
    """`UᵀRᵀK v = Mᵀv`."""
    return jnp.einsum("ncm,ncs->ms", spectrum.M, v, precision=HIGHEST)


def _moves_at(
    fitted: TrainedModel, what: str
) -> Callable[[Array, Array], tuple[list[Moves], float]]:
    """The moves at a ridge for the weights, output by output, and the trace of the smoother there."""
    parts, op, alpha = _spectra(fitted, what), fitted.kernel_op, fitted.state.alpha
    g = problem_on_device(fitted).loss_grad(fitted.state)
    k_pair = -jnp.stack([op.mv(g), op.mv(alpha)], axis=2)

    def at(ridge: Array, weights: Array) -> tuple[list[Moves], float]:
        moves, start = [], 0
        for part in parts:
            width = part.terms.alpha.shape[1]
            moves.append(_moves(part, k_pair[:, start : start + width], ridge, weights))
            start += width
        dof = sum(float(jnp.sum(part.values / (part.values + ridge))) for part in parts)
        return moves, dof

    return at
