"""A fitted model and its edits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .._plan import check_fits
from .._support.compile import in_own_precision
from .._support.options import (
    Clock,
    ProgressFn,
    check_count,
    check_flag,
    check_path,
    check_positive,
    maybe,
)
from .._support.show import Shown, Table
from .._support.types import AnyPath, Inputs, Numbers
from ..attribution._attribute import attribute, attribute_groups
from ..attribution._attribution import Attribution, GroupAttribution
from ..attribution._ridge_path import RidgePath, ridge_path
from ..dual._course import MAX_STEPS, Goal, fit_goal
from ..dual._model import TrainedModel
from ..dual._newton import op_diagonal
from ..models._sharded import ShardedSource
from ..operators._base import Device, as_mesh, on_mesh
from ..problem._certificate import OnFailure
from ..problem._edits import AbstractEdit, apply_edits
from ..problem._objective import State
from ..solvers import AbstractDualSolver, Auto
from ._file import write_record
from ._options import settings
from ._purge import purged
from ._run import Task, run, zero
from ._setup import extended
from ._update import (
    Update,
    check_drift,
    distance_limit,
    exceeds,
    fitted_table,
    follow,
    told,
    updated,
)


@dataclass(frozen=True, eq=False, repr=False)
class Fitted(Shown, TrainedModel):
    """A model at (or near) the optimum of its training objective.

    Made by `fit`, `from_trained` or `load`. Immutable: `edit` returns a new object.
    """

    def _table(self) -> Table:
        return fitted_table(self)

    @in_own_precision
    def edit(
        self,
        edits: AbstractEdit | Sequence[AbstractEdit],
        *,
        steps: int = 1,
        until: float | None = None,
        drift: float | None = None,
        solver: AbstractDualSolver | Auto | None = None,
        rtol: float | None = None,
        mesh: Mesh | Sequence[Device] | None = None,
        on_failure: OnFailure = "raise",
        progress: bool | ProgressFn = True,
    ) -> "Update[Fitted]":
        r"""The model after an edit of its training set, without retraining from scratch.

        One step (the default) is the influence function, exact for squared error. More steps, or
        `until`, converge to exact retraining, with a line search on the edited objective.

        **Arguments:**

        - `edits`: `Remove`, `Relabel`, `Reweight`, `Replace`, `Add`, or several in a list.
        - `steps`: number of Newton steps.
        - `until`: take steps until `certificate.distance_bound` is at most this; at least one step if
          the edit changes the objective. It raises an error for a model from `from_trained` that has no
          certificate, or whose gap is larger.
        - `drift`: take further steps if `certificate.relative_bound` exceeds this. Without
          `drift`, many one-step edits in a row can move away from retraining; `stats.notes` then says so.
        - `solver`, `rtol`: `Auto`, `Cholesky` or `CG`; relative residual of its solves.
        - `mesh`: devices over which to spread the rows of `K` before the edit; for several requests, call
          the method `on` once instead.
        - `on_failure`: `"report"` returns an answer whose solve did not converge, marked in `stats`.
        - `progress`: `False` for silence, or a function `(done, total, label)`.
        """
        how = settings("edit", solver, rtol, on_failure, progress)
        steps = check_count("edit: steps", steps)
        until = self._remaining(maybe(check_positive, "edit: until", until, what="distance"))
        check_drift(drift)
        data = apply_edits(edits, self.data, self.loss, self.num_outputs)
        clock = Clock()
        base = extended(self if mesh is None else self.on(mesh), data, progress)
        least = int(not data.same_objective(self.data))
        goal = Goal(until, None, steps if until is None else MAX_STEPS, min_steps=least)
        done = run(Task(base, data, base.state, goal, how, clock))
        if drift is not None and exceeds(done.after.certificate, drift):
            limit = self._remaining(distance_limit(done.after.certificate, drift))
            goal = Goal(limit, None, MAX_STEPS, min_steps=least)
            done = run(Task(base, data, base.state, goal, how, clock))
        certificate, stats = done.after.certificate, done.after.stats
        asked = until is not None or drift is not None
        chain = follow(self.stats, certificate, met=asked and stats.converged)
        return updated(done.before, done.after, told(stats, chain))

    @in_own_precision
    def retrain(
        self,
        edits: AbstractEdit | Sequence[AbstractEdit],
        *,
        solver: AbstractDualSolver | Auto | None = None,
        tolerance: float | None = None,
        on_failure: OnFailure = "raise",
        progress: bool | ProgressFn = True,
    ) -> "Update[Fitted]":
        """The model trained from scratch (`α = 0`) on the edited set, for comparison with `edit`. It
        reuses only the kernel. Options as in `fit`; `tolerance` is on `certificate.relative_bound`.
        """
        how = settings("retrain", solver, None, on_failure, progress)
        tolerance = maybe(check_positive, "retrain: tolerance", tolerance)
        data = apply_edits(edits, self.data, self.loss, self.num_outputs)
        clock = Clock()
        base = extended(self, data, progress)
        goal = fit_goal(tolerance, MAX_STEPS, base.offset.dtype)
        done = run(Task(base, data, zero(base), goal, how, clock))
        return updated(done.before, done.after, done.after.stats)

    @in_own_precision
    def on(self, mesh: Mesh | Sequence[Device]) -> "Fitted":
        """The same model with the rows of `K` and of every `(n, c)` array spread over devices.

        Use it for a model on one device, e.g. one that was loaded; `fit(mesh=...)` never holds all of
        `K` in one place.
        """
        if self.layout.sharding is not None:
            raise ValueError(
                f"on: the rows are on {self.layout.num_devices} devices already. Fit again with "
                "mesh=... to use others."
            )
        mesh = as_mesh(mesh)
        self = self.without_spare_rows()
        layout = on_mesh(self.data.num_points, mesh)
        op = self.kernel_op.spread(layout)
        return replace(
            self,
            source=ShardedSource(self.source.without_jacobian(), mesh),
            kernel_op=op,
            state=State(
                layout.place(self.state.alpha),
                layout.place(self.state.k_alpha),
                layout.scalar(float(self.state.drift), self.offset.dtype),
            ),
            offset=layout.place(self.offset, "last"),
            kernel_diagonal=op_diagonal(op),
            preconditioner=self.preconditioner.on_rows(layout.place),
        )

    @in_own_precision
    def with_jacobian(self) -> "Fitted":
        """The same model with `J` of its training points in memory, for many requests.

        Parameters and predictions then take one pass over `J` (`n·c` times the parameters) instead of a
        forward and a backward pass through the network. It is worthwhile for networks with few
        parameters and much arithmetic, such as convolutional ones; the memory is checked first.
        """
        if self.layout.sharding is not None:
            raise ValueError(
                "with_jacobian: the rows of this model are on a mesh, where read-outs are computed "
                "without J. Use the model as it is, or fit without mesh."
            )
        model, rows = self._network, self.data.num_points * self.num_outputs
        size = jnp.dtype(model.dtype).itemsize
        needed, hint = rows * model.num_params * size, "Go without it."
        check_fits(needed, 1, "the Jacobian", call="with_jacobian", hint=hint)
        return replace(self, source=self.source.with_jacobian(self.data.x))

    @in_own_precision
    def purge(self) -> "Fitted":
        """The same model without the rows of its removed points: features, targets and kernel entries.

        `Remove` and `commit` remove the weight and the effect of a point, not its row. A purge
        overwrites every row of weight zero by a copy of a retained point (with weight zero, `α = 0`),
        in memory and so in files saved later; the preconditioner is computed again. Positions stay
        valid, later requests give the same answers, and no edit can bring a purged point back.

        The purge does not change other objects that hold the row: this one, updates and fits before it,
        your own arrays, saved files, and a matrix or model that you hold. A kernel on disk, rows on a mesh
        and a removed landmark of a low-rank model raise an error. A `K` in memory is copied.

        For a model of `from_trained`, the present parameters take the place of the trained ones:
        `params()` and later edits of the remaining points are unchanged, and linearised predictions start
        from the network at these parameters. With `tangent="trained"` the parameters at which `J` is taken
        were trained on the removed points and still carry information about them. Their effect on
        the present parameters was removed by the edit alone; the purge removes nothing more of it.
        """
        return purged(self)

    @in_own_precision
    def save(self, path: AnyPath, *, include_kernel: bool = False) -> None:
        """Write to one `.npz` file without pickle, atomically; `dualfluence.load` reads it.

        The file contains the rows of removed points unless they were purged. It does not contain the
        model itself (a function). `include_kernel` stores `K` as well, so that loading need not compute
        it.
        """
        path = check_path("save", path)
        check_flag("save: include_kernel", include_kernel)
        self._save(path, include_kernel, {})

    def _save(self, path: Path, include_kernel: bool, witnesses: dict[str, np.ndarray]) -> None:
        fitted = self.without_spare_rows()
        write_record(
            path,
            data=self.data,
            op=fitted.kernel_op,
            state=fitted.state,
            offset=fitted.offset,
            kernel_diagonal=fitted.kernel_diagonal,
            preconditioner=fitted.preconditioner,
            reference=self.reference,
            tangent_params=None if self.reference is None else self._network.params,
            loss=self.loss,
            ridge=self.ridge,
            records={
                "certificate": self.certificate,
                "stats": self.stats,
                "fidelity": self.fidelity,
                "may_widen": self.widening != "never",
            },
            include_kernel=include_kernel,
            witnesses=witnesses,
        )

    @in_own_precision
    def attribute(self, xq: Inputs, yq: Numbers | None = None, **options: Any) -> Attribution:
        r"""The effect of leaving out each training point on each query.

        It takes one Newton step on the training set without each point, in closed form from one
        factorisation. This is exact for squared error, otherwise it is the influence function. Values
        are differences of the measured quantity, as `edit(Remove([i])).delta_loss` gives them. For a model
        on a mesh the rows of the factor are on its devices.

        **Arguments:**

        - `xq`, `yq`: queries and their targets.
        - `of`: `"loss"`, `"output"` (of the query's class), `"margin"` (the output of the query's class
          minus the log-sum-exp of the other outputs), or a function of one query's outputs `(c,)` and
          target.
        - `first_order`: the effect to first order in the weight of the point, which is cheaper. It
          ignores the leverage of the point and the renormalisation of the mean, and it replaces the
          measured quantity by its tangent in the outputs.
        - `refine`: take steps until the certified distance to exact retraining without the point is at
          most this; the bounds are in the result.
        - `block_size`: queries and left-out points at a time; by default as many as memory allows.
        - `out`: a `.npy` file for the values, so that they need not be in memory.

        **Returns:** `Attribution`, axes query by training point.
        """
        return attribute(self, xq, yq, **options)

    @in_own_precision
    def attribute_groups(
        self, groups: Any, xq: Inputs, yq: Numbers | None = None, **options: Any
    ) -> GroupAttribution:
        """The effect of leaving out whole groups (a class, a source) on each query.

        **Arguments:**

        - `groups`: positions per group, as a dictionary by name or a list.
        - `of`, `refine`: as in `attribute`.
        - `interactions`: for every two groups, also the effect of both together minus the effect of
          each.

        **Returns:** `GroupAttribution`, with the sum of single effects beside the effect of each group.
        """
        return attribute_groups(self, groups, xq, yq, **options)

    @in_own_precision
    def ridge_path(self, grid: Numbers | None = None) -> RidgePath:
        """Leave-one-out and generalised cross-validation over a grid of ridges.

        It takes one eigendecomposition of `RᵀKR`, where `RRᵀ` are the weighted Hessians of the losses. It
        is exact for squared error. For other losses each ridge is reached by one Newton step from this
        fit, which is accurate near the ridge of the fit. For a model on a mesh it takes two Cholesky
        factors for each ridge instead, with their rows on its devices.

        **Arguments:**

        - `grid`: ridges; by default from 1e-7 to 10 times the mean diagonal of `K`.

        **Returns:** `RidgePath`, with `best`, `reason` and `plot()`.
        """
        return ridge_path(self, grid)
