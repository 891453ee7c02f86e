"""A fitted model and its edits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from .._plan import check_fits
from .._support.checks import OVERFLOW, check_finite, check_fraction, check_queries
from .._support.options import (
    check_count,
    check_flag,
    check_on_failure,
    check_path,
    check_positive,
    check_progress,
    check_solver,
    maybe,
)
from .._support.progress import ProgressFn
from ..losses import AbstractLoss
from ..models._sharded import ShardedSource
from ..models._sources import AbstractSource
from ..operators import AbstractKernelOperator
from ..operators._layout import Device, Layout, as_mesh, on_mesh, rows_for
from ..problem._certificate import Certificate
from ..problem._edits import AbstractEdit, TrainingSet, apply_edits, targets_like
from ..problem._objective import State
from ..solvers import (
    CG,
    AbstractDualSolver,
    AbstractPreconditioner,
    Auto,
    SpectralPreconditioner,
    resolve,
)
from ._attribute import attribute, attribute_groups
from ._attribution import Attribution, GroupAttribution
from ._drift import check_drift, distance_limit, exceeds, follow, told
from ._file import write_record
from ._model import TrainedModel
from ._newton import op_diagonal, op_mv
from ._purge import check_settled, purged_data, purged_operator, stand_ins
from ._readout import DualModel
from ._record import Clock, OnFailure, Stats, check_outcome
from ._ridge_path import ridge_path
from ._setup import make_preconditioner
from ._show import show_fitted, show_update
from ._train import (
    MAX_STEPS,
    Goal,
    Machine,
    default_rtol,
    default_tolerance,
    take_one_step,
    train,
)

AUTO = Auto()

NO_CERTIFICATE = Certificate(float("inf"), 0.0, 0.0, 1.0)
NO_STATS = Stats(0, 0, 0, False, float("inf"), 0.0, "none", "not trained yet")


class Settings(NamedTuple):
    """How a run is asked for, by whom, and what to do where it fails."""

    what: str
    goal: Goal
    solver: AbstractDualSolver | Auto
    rtol: float | None
    on_failure: OnFailure
    progress: bool | ProgressFn


@dataclass(frozen=True, eq=False)
class Fitted(TrainedModel):
    """A model at (or near) the optimum of its training objective.

    Made by `fit`, `from_trained` or `load`. Immutable: `edit` returns a new object.
    """

    def __repr__(self) -> str:
        return show_fitted(self)

    @classmethod
    def untrained(
        cls,
        source: AbstractSource,
        data: TrainingSet,
        loss: AbstractLoss,
        ridge: float,
        kernel_op: AbstractKernelOperator,
        offset: Float[Array, "n c"],
        preconditioner: AbstractPreconditioner,
    ) -> "Fitted":
        """The model at `α = 0`, where `fit` starts."""
        shape = (data.num_points, offset.shape[1])
        zero = kernel_op.layout.place(np.zeros(shape, offset.dtype))
        return cls(
            source=source,
            data=data,
            state=State(zero, zero),
            reference=None,
            loss=loss,
            ridge=ridge,
            kernel_op=kernel_op,
            offset=offset,
            kernel_diagonal=op_diagonal(kernel_op),
            preconditioner=preconditioner,
            certificate=NO_CERTIFICATE,
            stats=NO_STATS,
            epsilon=source.narrow_eps,
        )

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
    ) -> "Update":
        r"""The model after an edit of its training set, without retraining from scratch.

        One step (the default) is the influence function, exact for squared error. More steps, or
        `until`, converge to exact retraining, with a line search on the edited objective.

        **Arguments:**

        - `edits`: `Remove`, `Relabel`, `Reweight`, `Replace`, `Add`, or several in a list.
        - `steps`: number of Newton steps.
        - `until`: instead of counting steps, go on until `certificate.distance_bound` is at most this;
          refused for a model from `from_trained` that has no certificate, or a gap as large.
        - `drift`: take further steps where `certificate.relative_bound` exceeds this: many edits of one
          step in a row can otherwise move away from retraining, which `stats.notes` say.
        - `solver`: `Auto`, `Cholesky` or `CG`.
        - `rtol`: relative residual of the linear solve; by default near the dtype's limit.
        - `mesh`: devices to spread the rows of `K` over first; for several requests use `on` once.
        - `on_failure`: `"report"` returns an answer whose solve did not converge, marked in `stats`.

        **Returns:** an `Update`.
        """
        steps = check_count("edit: steps", steps)
        check_solver("edit", solver, (AbstractDualSolver, Auto))
        check_fraction("edit: rtol", rtol)
        until = maybe(check_positive, "edit: until", until, what="distance")
        check_on_failure("edit", on_failure)
        check_progress("edit", progress)
        check_drift(drift)
        until = self._remaining(until)
        data = apply_edits(edits, self.data, self.loss, self.num_outputs)
        clock = Clock()
        base = (self if mesh is None else self.on(mesh))._extended(data, progress)
        goal = Goal(until, None, steps if until is None else MAX_STEPS)
        settings = Settings("edit", goal, solver or AUTO, rtol, on_failure, progress)
        update = base.run(data, base.state, settings, clock)
        if drift is not None and exceeds(update.certificate, drift):
            limit = self._remaining(distance_limit(update.certificate, drift))
            settings = settings._replace(goal=Goal(limit, None, MAX_STEPS))
            update = base.run(data, base.state, settings, clock)
        asked = until is not None or drift is not None
        chain = follow(self.stats, update.certificate, met=asked and update.stats.converged)
        return replace(update, stats=told(update.stats, chain))

    def retrain(
        self,
        edits: AbstractEdit | Sequence[AbstractEdit],
        *,
        solver: AbstractDualSolver | Auto | None = None,
        tolerance: float | None = None,
        on_failure: OnFailure = "raise",
        progress: bool | ProgressFn = True,
    ) -> "Update":
        """The model trained from scratch (`α = 0`) on the edited set: the truth to compare with.

        Reuses the kernel, nothing else. `tolerance` is on `certificate.relative_bound`, as in `fit`.
        """
        check_solver("retrain", solver, (AbstractDualSolver, Auto))
        tolerance = maybe(check_positive, "retrain: tolerance", tolerance)
        check_on_failure("retrain", on_failure)
        check_progress("retrain", progress)
        data = apply_edits(edits, self.data, self.loss, self.num_outputs)
        clock = Clock()
        base = self._extended(data, progress)
        limit = default_tolerance(base.offset.dtype) if tolerance is None else tolerance
        goal = Goal(None, limit, MAX_STEPS)
        settings = Settings("retrain", goal, solver or AUTO, None, on_failure, progress)
        return base.run(data, base._zero(), settings, clock)

    def on(self, mesh: Mesh | Sequence[Device]) -> "Fitted":
        """The same model with the rows of `K` and of every `(n, c)` array spread over devices.

        For a model on one device, e.g. one that was loaded; `fit(mesh=...)` never holds all of `K`
        in one place to begin with.
        """
        if self.layout.sharding is not None:
            raise ValueError(
                f"on: the rows are on {self.layout.num_devices} devices already. Fit again with "
                "mesh=... to use others."
            )
        mesh = as_mesh(mesh)
        self = self.without_spare_rows()
        layout = on_mesh(self.data.num_points, mesh)
        op, pre = self.kernel_op.spread(layout), self.preconditioner
        if isinstance(pre, SpectralPreconditioner):
            pre = SpectralPreconditioner(layout.place(pre.features))
        return replace(
            self,
            source=ShardedSource(self.source.without_jacobian(), mesh),
            kernel_op=op,
            state=State(layout.place(self.state.alpha), layout.place(self.state.k_alpha)),
            offset=layout.place(self.offset, "last"),
            kernel_diagonal=op_diagonal(op),
            preconditioner=pre,
        )

    def with_jacobian(self) -> "Fitted":
        """The same model with `J` of its training points in memory, for many requests.

        Parameters and predictions then take one pass over `J` (`n·c` times the parameters) instead
        of a pass forward and backward through the network. It pays for networks with few parameters
        and much arithmetic, such as convolutional ones; the memory is checked first.
        """
        if self.layout.sharding is not None:
            raise ValueError(
                "with_jacobian: rows on a mesh are read out where they live, without J."
            )
        model, rows = self.network, self.data.num_points * self.num_outputs
        size = jnp.dtype(model.dtype).itemsize
        needed, hint = rows * model.num_params * size, "Go without it."
        check_fits(needed, 1, "the Jacobian", call="with_jacobian", hint=hint)
        return replace(self, source=self.source.with_jacobian(self.x))

    def _zero(self) -> State:
        """`α = 0`."""
        shape = (self.data.num_points, self.num_outputs)
        zero = self.layout.place(np.zeros(shape, self.offset.dtype))
        return State(zero, zero)

    def run(
        self,
        data: TrainingSet,
        start: State,
        settings: Settings,
        clock: Clock,
        notes: tuple[str, ...] = (),
    ) -> "Update":
        """Newton steps on `data` from `start`: what `fit`, `edit` and `retrain` have in common."""
        s, dtype, problem = settings, self.offset.dtype, self.problem(data)
        rtol = default_rtol(dtype) if s.rtol is None else s.rtol
        picked = resolve(s.solver, self.kernel_op, self._weights_of_rows(data))
        machine = Machine(
            self.kernel_op,
            self.kernel_diagonal,
            picked.solver,
            self.preconditioner,
            self.ridge,
            s.what,
        )
        if s.goal.counts_steps and s.goal.max_steps == 1:
            outcome = take_one_step(machine, problem, start, rtol)
        else:
            outcome = train(machine, problem, start, s.goal, rtol=rtol, progress=s.progress)
        # A distance that was asked for must be reached; without one, the limit of the dtype will do.
        reached = outcome.ending == "met" or (s.goal.distance is None and outcome.near_floor)
        at_end = outcome.solved or outcome.near_floor
        converged = at_end if s.goal.counts_steps else reached
        stats = outcome.stats(
            converged,
            clock.stop(outcome.point),
            picked.solver.describe(self.kernel_op),
            picked.reason,
            notes + outcome.notes(dtype),
        )
        check_outcome(stats, s.on_failure, s.what, outcome.certificate, dtype)
        return Update(
            source=self.source,
            data=data,
            state=outcome.point.state,
            reference=self.reference,
            before=self,
            certificate=self._widened(outcome.certificate),
            stats=stats,
        )

    def _extended(self, data: TrainingSet, progress: bool | ProgressFn) -> "Fitted":
        """Itself with rows for the points that `data` appends: `α = 0`, weight 0 before the edit.

        New points go into spare rows; where there are none, the kernel grows by more than it needs.
        A mesh gets a border instead.
        """
        old, new = self.data.num_points, data.num_points
        if old == new:
            return self
        x, targets = np.asarray(data.x), np.asarray(data.targets)
        x_new = jax.device_put(x[old:])
        on_mesh = self.layout.sharding is not None
        rows = new if on_mesh else rows_for(new, self.kernel_op.num_points)
        spare = np.repeat(x[-1:], rows - new, axis=0)
        op = self.source.extend(
            self.kernel_op, jax.device_put(np.concatenate([x, spare])), old, new, progress
        )
        layout = op.layout.holding(new)
        alpha = layout.grow(self.state.alpha, op.num_points)
        state = State(alpha, op_mv(op, alpha))
        k_alpha = jax.device_put(np.asarray(layout.points(state.k_alpha))[old:])
        offset_new = self._offset_at(x_new, k_alpha)
        offset = np.concatenate([self.layout.points(self.offset), offset_new])
        before = TrainingSet(
            data.x,
            jax.device_put(np.concatenate([self.data.targets, targets[old:]])),
            np.pad(self.data.sample_weights, (0, new - old)),
            self.data.purged,
        )
        pre = self.preconditioner
        if isinstance(pre, SpectralPreconditioner):
            pre = SpectralPreconditioner(layout.grow(pre.features, op.num_points))
        return replace(
            self,
            data=before,
            kernel_op=op,
            state=state,
            offset=layout.place(offset, "last"),
            kernel_diagonal=op_diagonal(op),
            preconditioner=pre,
        )

    def _weights_of_rows(self, data: TrainingSet) -> np.ndarray:
        """Sample weights by row: none for spare rows."""
        return self.layout.expand(data.sample_weights, "zero")

    def _offset_at(self, x: Array, k_alpha: Float[Array, "m c"]) -> Float[Array, "m c"]:
        """`f − Kα` at new points: the base outputs, or the trained network's less its dual part."""
        return self.predict(x) - k_alpha

    def purge(self) -> "Fitted":
        """The same model without the rows of its removed points: features, targets and kernel entries.

        `Remove` and `commit` take away a point's weight and its effect, not its row. This overwrites
        every row of weight zero by a copy of a point that stays (weight zero, `α = 0`), in memory and
        hence in files saved later; the preconditioner is sketched anew. Positions keep their
        meaning, later requests give the same answers, and no edit can bring a purged point back.

        Not reached are other objects that hold the row: this one, updates and fits before it, your own
        arrays, saved files, and a matrix or model that you hold. A kernel on disk, rows on a mesh and a
        removed landmark of a low-rank model are refused. Makes a copy of a `K` in memory.

        For `from_trained`, the reference becomes the parameters as they are now: `params()` and later
        edits of the remaining points are unchanged, and linearised predictions start from the network
        there. Those parameters, and those that `J` is taken at, were trained on the removed points;
        they are as free of them as the edit made them, no more.
        """
        gone = np.flatnonzero(self.data.sample_weights == 0)
        if gone.size == 0:
            return self
        base, rows = self.without_spare_rows(), stand_ins(self.data)
        data = purged_data(self.data, rows)
        op = purged_operator(base.kernel_op, data.x, rows)
        source = self.source.purged(self.data.x, self.data.sample_weights > 0, data.x)
        check_settled(base.state.alpha, base.kernel_diagonal, gone)
        alpha = jnp.where((data.sample_weights > 0)[:, None], base.state.alpha, 0)
        reference, pre = self.reference, self.preconditioner
        if reference is not None:
            reference = replace(reference, params=self.params(), alpha=alpha)
        if isinstance(pre, SpectralPreconditioner):
            pre, _ = make_preconditioner(source, data.x, op, CG(), pre.features.shape[2], None)
        return replace(
            self,
            source=source,
            data=data,
            state=State(alpha, op_mv(op, alpha)),
            reference=reference,
            kernel_op=op,
            offset=base.offset[rows],
            kernel_diagonal=base.kernel_diagonal[rows],
            preconditioner=pre,
        )

    def save(self, path: Any, *, include_kernel: bool = False) -> None:
        """Write to one `.npz` file without pickle, atomically; `dualfluence.load` reads it.

        Rows of removed points are in it unless they were purged. The model itself (a function) is
        not; `include_kernel` stores `K` as well, so that loading computes nothing.
        """
        path = check_path("save", path)
        check_flag("save: include_kernel", include_kernel)
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
            tangent_params=None if self.reference is None else self.network.params,
            loss=self.loss,
            ridge=self.ridge,
            records={
                "certificate": self.certificate,
                "stats": self.stats,
                "fidelity": self.fidelity,
            },
            include_kernel=include_kernel,
        )

    def attribute(self, xq: Any, yq: Any = None, **options: Any) -> Attribution:
        r"""What each query would change by if each training point were left out.

        For every point `i` one Newton step on the set without it, in closed form from one
        factorisation: exact for squared error, else the influence function. Values are
        differences of the measured quantity, as `edit(Remove([i])).delta_loss` gives them.

        **Arguments:**

        - `xq`, `yq`: queries and their targets.
        - `of`: `"loss"`, `"output"` (of the query's class), `"margin"` (own output less the
          log-sum-exp of the others), or a function of one query's outputs `(c,)` and target.
        - `first_order`: the cheaper infinitesimal effect: no leverage, no renormalised mean, the
          quantity linear in the outputs.
        - `refine`: go on until the certified distance to exact retraining without the point is at
          most this; the bounds are in the result.
        - `block_size`: queries and left-out points at a time; by default what memory allows.
        - `out`: a `.npy` file for the values, so that they need never be in memory.

        **Returns:** `Attribution`, axes query by training point.
        """
        return attribute(self, xq, yq, **options)

    def attribute_groups(
        self, groups: Any, xq: Any, yq: Any = None, **options: Any
    ) -> GroupAttribution:
        """What each query would change by if whole groups (a class, a source) were left out.

        **Arguments:**

        - `groups`: positions per group, as a dictionary by name or a list.
        - `of`, `refine`: as in `attribute`.
        - `interactions`: also the effect of every two groups together less that of each.

        **Returns:** `GroupAttribution`, with the sum of single effects beside each group's own.
        """
        return attribute_groups(self, groups, xq, yq, **options)

    def ridge_path(self, grid: Any = None) -> Any:
        """Leave-one-out and generalised cross-validation over a grid of ridges.

        From one eigendecomposition of `RᵀKR`. Exact for squared error; for other losses one
        Newton step from this fit, good near its own ridge.

        **Arguments:**

        - `grid`: ridges; by default from 1e-7 to 10 times the mean diagonal of `K`.

        **Returns:** `RidgePath`, with `best`, `reason` and `plot()`.
        """
        return ridge_path(self, grid)


@dataclass(frozen=True, eq=False)
class Update(DualModel):
    """A model after an edit: dual variables, certificate, stats, and what changed."""

    before: Fitted
    certificate: Certificate
    stats: Stats

    def __repr__(self) -> str:
        return show_update(self)

    @property
    def layout(self) -> Layout:
        return self.before.layout

    @property
    def delta_alpha(self) -> Float[Array, "n c"]:
        """`Δα`; rows of added or replaced points come last."""
        return self.layout.points(self.state.alpha - self.before.state.alpha)

    @property
    def outputs(self) -> Float[Array, "n c"]:
        """Outputs at all training rows, removed ones included."""
        return self.layout.points(self.before.offset + self.state.k_alpha)

    def delta_outputs(self, xq: Any, *, linearised: bool = True) -> Float[Array, "q c"]:
        """`f_after − f_before` at queries: `K_qn Δα` (paper, eq. 8), or the networks' own difference."""
        xq = check_queries(xq, self.x)
        if check_flag("delta_outputs: linearised", linearised):
            change = self._cross_mv(xq, self.state.alpha - self.before.state.alpha)
            check_finite("delta_outputs", change, hint=OVERFLOW)
            return change
        return self.predict(xq, linearised=False) - self.before.predict(xq, linearised=False)

    def delta_loss(
        self,
        xq: Any,
        targets: Any,
        *,
        first_order: bool = False,
        include_ridge: bool = False,
        linearised: bool = True,
    ) -> Float[Array, " q"]:
        r"""Change of the loss at queries, positive where the edit makes it worse:

        $$\ell(f_q+\Delta f_q)-\ell(f_q)\qquad\text{or, to first order,}\qquad
          \nabla\ell(f_q)\cdot\Delta f_q,\qquad \Delta f_q = K_{qn}\Delta\alpha .$$

        **Arguments:**

        - `first_order`: the paper's estimate (eqs. 9 and 13, for any number of outputs) instead of the
          loss after less the loss before.
        - `include_ridge`: add the change of `λ/2‖Jᵀα‖²`, as the paper does, to first order if
          `first_order`.
        - `linearised`: `False` takes `f` and `Δf` from the network itself, as in `predict`.
        """
        xq = check_queries(xq, self.x)
        check_flag("delta_loss: first_order", first_order)
        check_flag("delta_loss: include_ridge", include_ridge)
        check_flag("delta_loss: linearised", linearised)
        before, loss = self.before, self.before.loss
        y = targets_like("delta_loss", targets, before.data.targets, loss, before.num_outputs)
        if y.shape[0] != xq.shape[0]:
            raise ValueError(f"delta_loss: {xq.shape[0]} queries but {y.shape[0]} targets.")
        f = before.predict(xq, linearised=linearised)
        delta_f = self.delta_outputs(xq, linearised=linearised)
        if first_order:
            change = jnp.sum(loss.grad(f, y) * delta_f, axis=1)
            ridge_change = jnp.sum(before.state.k_alpha * (self.state.alpha - before.state.alpha))
        else:
            change = loss.value(f + delta_f, y) - loss.value(f, y)
            ridge_change = 0.5 * (_square(self.state) - _square(before.state))
        if include_ridge:
            change = change + before.ridge * ridge_change
        check_finite("delta_loss", change, hint=OVERFLOW)
        return change

    def edit(self, edits: AbstractEdit | Sequence[AbstractEdit], **options: Any) -> "Update":
        """The next edit, on top of this one: `commit().edit(...)`, with the options of `Fitted.edit`."""
        return self.commit().edit(edits, **options)

    def commit(self) -> Fitted:
        """The updated model as a fit of its own, ready for the next request.

        Removed points stay as rows of weight zero, in memory and in files: their positions remain
        valid, nothing recompiles, and `Reweight` can bring them back. `purge` makes them go for good.
        """
        return replace(
            self.before,
            data=self.data,
            state=self.state,
            certificate=self.certificate,
            stats=self.stats,
        )


def _square(state: State) -> Float[Array, ""]:
    return jnp.sum(state.alpha * state.k_alpha)
