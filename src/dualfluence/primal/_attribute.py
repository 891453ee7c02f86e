r"""Scores of all training points in parameter space, by any of the solvers.

$$S_{qi} = w_i\,\nabla m_q^\top (C + \delta I)^{-1}\,\nabla\ell_i ,$$

the first-order effect of leaving `i` out on the measured quantity `m_q`: positive if it rises.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree

from .._support.checks import check_finite, check_ridge
from .._support.compile import double, filter_jit
from .._support.options import (
    check_flag,
    check_on_failure,
)
from .._support.points import shown
from .._support.types import Inputs, Json, Numbers
from ..attribution._attribution import Attribution
from ..kernels._linearized import Linearized
from ..losses import AbstractLoss
from ..models._passes import gradient_products, gradients_at_once, outputs_at, point_gradients
from ..operators._base import Device, as_mesh
from ..problem._certificate import OnFailure
from ..problem._quantity import Quantity, as_quantity
from ._curvature import Curvature
from ._mesh import SpreadPoints, spread_curvature
from ._solvers import (
    CG,
    AbstractPrimalInverse,
    check_primal_solver,
    check_solved,
)
from ._start import curvature_at, entered_network, training_start


def attribute(
    model: object,
    params: PyTree,
    x: Inputs,
    y: Numbers,
    xq: Inputs,
    yq: Numbers | None = None,
    *,
    loss: AbstractLoss,
    ridge: float,
    solver: Any = None,
    of: str | Callable[[Array, Array], Array] = "loss",
    weights: Numbers | None = None,
    linearised: bool = True,
    batch_size: int | None = None,
    self_influence: bool = False,
    mesh: Mesh | Sequence[Device] | None = None,
    on_failure: OnFailure = "raise",
) -> Attribution:
    r"""Score every training point for every query by an influence function in parameter space.

    One solve per query, then one gradient per training point. Exact solvers give the same first-order
    effect as `Fitted.attribute`, which works in data space. The other solvers are the approximations of
    the literature.

    **Arguments:**

    - `model`, `params`, `x`, `y`, `weights`, `loss`, `ridge`, `linearised`: as for `influence`.
    - `xq`, `yq`: queries and their targets.
    - `solver`: `CG()`, `LiSSA()`, `Arnoldi()`, `Nystrom()`, `KFAC()` or `EKFAC()`; by default `CG()`.
    - `of`: what is measured at the queries, as in `Fitted.attribute`.
    - `batch_size`: points per product with the curvature; it changes only memory and rounding.
    - `self_influence`: also the effect of each point on itself, for one more solve per point.
    - `mesh`: devices that share the training points; each takes a part of every batch.
    - `on_failure`: `"report"` returns the answer of a solve that did not converge, with a note.

    **Returns:** `Attribution`; `stats` holds the solver, its residual and the numbers it reports.
    """
    began = time.perf_counter()
    linearised = check_flag("attribute: linearised", linearised)
    check_on_failure("attribute", on_failure)
    devices = None if mesh is None else as_mesh(mesh)
    model = entered_network("attribute", model, on_failure == "raise" and solver is None)
    solver = check_primal_solver("attribute", CG() if solver is None else solver)
    with double(model.widening is not None):
        start = training_start("attribute", model, params, x, y, weights, loss)
        data, queries = start.data, start.data.queries(xq)
        quantity = as_quantity(of, loss, yq, queries.shape[0], start.num_outputs, start.model.dtype)
        lam = check_ridge(ridge, start.model.dtype)
        count = 1 if devices is None else devices.size
        curvature, f = curvature_at("attribute", start, data, lam, batch_size, linearised, count)
        check_finite("attribute: outputs at params", f, hint="Did training diverge?")
        v = _query_directions(start.model, start.theta, queries, quantity, linearised)
        g = jnp.asarray(data.weights).astype(f.dtype)[:, None] * loss.grad(f, data.targets)
        points = None if devices is None else SpreadPoints.of(data.x, g, devices)
        curvature = curvature if devices is None else spread_curvature(curvature, devices)
        scorer = _Scorer(curvature, solver.inverse(curvature), data.x, g, points, on_failure)
        values = scorer.scores(queries, v)
        own = scorer.own(quantity, data.targets, f) if self_influence else None
        return Attribution(
            values=values,
            of=quantity.name,
            direction=quantity.direction,
            own=own,
            notes=(f"first-order effects in parameter space by {solver!r}", *scorer.notes),
            stats=scorer.stats | {"solver": repr(solver), "seconds": time.perf_counter() - began},
            x=shown(data.x, data.form),
            y=np.asarray(data.targets),
            xq=shown(queries, data.form),
            yq=None if yq is None else np.asarray(yq),
        )


class _Scorer:
    """Solves in chunks of queries, and keeps the worst of what the solves report."""

    def __init__(
        self,
        curvature: Curvature,
        inverse: AbstractPrimalInverse,
        x: Array,
        g: Float[Array, "n c"],
        points: SpreadPoints | None,
        on_failure: OnFailure,
    ) -> None:
        self.curvature, self.inverse, self.x, self.g = curvature, inverse, x, g
        self.points = points
        self.on_failure: OnFailure = on_failure
        self.stats: Json = {"iterations": 0, "residual": 0.0, "converged": True}
        self.notes: tuple[str, ...] = ()

    def scores(self, xq: Array, v: Float[Array, "q c"]) -> np.ndarray:
        model, size = self.curvature.model, gradients_at_once(self.curvature.model)
        blocks = []
        for i in range(0, xq.shape[0], size):
            b = point_gradients(model, xq[i : i + size], v[i : i + size])
            blocks.append(np.asarray(self._products(self._solve(b))))
        return np.concatenate(blocks)

    def _products(self, v: Float[Array, "k p"]) -> Float[Array, "k n"]:
        if self.points is not None:
            return self.points.products(self.curvature.model, v)
        return gradient_products(self.curvature.model, self.x, self.g, v)

    def own(self, quantity: Quantity, targets: Array, f: Float[Array, "n c"]) -> np.ndarray:
        """The diagonal of the scores with the training points as queries."""
        if quantity.name != "loss":
            raise ValueError(
                "attribute: self_influence=True is possible only with of='loss', because the training "
                f"points have targets for the loss and none for {quantity.name!r}."
            )
        model, size = self.curvature.model, gradients_at_once(self.curvature.model)
        v, parts = quantity.grad(f, targets), []
        for i in range(0, self.x.shape[0], size):
            rows = slice(i, i + size)
            value = self._solve(point_gradients(model, self.x[rows], v[rows]))
            grads = point_gradients(model, self.x[rows], self.g[rows])
            parts.append(np.asarray(jnp.sum(value * grads, axis=1)))
        return np.concatenate(parts)

    def _solve(self, b: Float[Array, "k p"]) -> Float[Array, "k p"]:
        solved = self.inverse.solve(b)
        check_solved("attribute", solved, self.on_failure)
        worst = self.stats
        self.stats = {
            "iterations": max(worst["iterations"], solved.iterations),
            "products": solved.products,
            "residual": max(worst["residual"], solved.residual),
            "converged": worst["converged"] and solved.converged,
            **solved.facts,
        }
        self.notes = solved.notes
        return solved.value


@filter_jit
def _query_directions(
    model: Linearized, params: PyTree, xq: Array, quantity: Quantity, linearised: bool
) -> Float[Array, "q c"]:
    return quantity.grad(outputs_at(model, params, xq, linearised), quantity.targets)
