"""A model after an edit of its training set: what changed, further edits, and how far a chain of edits
may have drifted.

One step leaves an error that is quadratic in the change. A later step starts from the new state, so a
chain of small edits mostly heals itself, and a chain of large ones does not. The certificate of the last
answer bounds the whole chain, because it is about the edited objective and not about the step.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._support.checks import OVERFLOW, check_finite
from .._support.compile import in_own_precision
from .._support.options import check_flag, check_positive, maybe
from .._support.show import Shown, Table, count
from .._support.types import Inputs, Numbers
from ..dual._model import DualModel, Trained, TrainedModel
from ..models._sources import AbstractSource
from ..operators._base import Layout
from ..problem._certificate import Certificate, Stats
from ..problem._edits import AbstractEdit, targets_like
from ..problem._objective import State


def fitted_table(fitted: TrainedModel) -> Table:
    """One screen about a model."""
    ref = fitted.reference
    claimed = " (gap and linearity claimed by the file)" if ref is not None and ref.claimed else ""
    rows = [*_rows(fitted, fitted), ("certificate", fitted.certificate.summary() + claimed)]
    if fitted.fidelity is not None:
        f = fitted.fidelity
        text = f"‖∇L‖ {f.gradient_norm:.2g}, gaps {f.parameter_gap:.2g} (θ), {f.output_gap:.2g} (f)"
        rows.append(("fidelity", text))
    return "Fitted", rows


def update_table(update: Any) -> Table:
    """One screen about a model after an edit."""
    delta = np.asarray(update.delta_alpha)
    moved = int((delta != 0).any(axis=1).sum())
    rows = _rows(update, update.before)
    rows.append(("change", f"dual variables of {count(moved, 'point')} moved"))
    rows.append(("certificate", update.certificate.summary()))
    return "Update", rows


def _rows(model: Any, base: TrainedModel) -> list[tuple[str, str]]:
    data = model.data
    used, shape = int((data.sample_weights > 0).sum()), _point(data)
    removed = data.num_points - used
    gone = f", {removed:,} more of weight zero" if removed else ""
    return [
        ("points", f"{used:,} of shape {shape}{gone}"),
        ("outputs", f"{base.num_outputs:,}"),
        ("model", _model(base.source)),
        ("loss", f"{type(base.loss).__name__}, ridge {base.ridge:.3g}"),
        ("kernel", f"{type(base.kernel_op).__name__}, {base.offset.dtype}"),
        ("solver", f"{model.stats.solver} ({model.stats.reason})"),
        ("run", model.stats.summary()),
    ]


def _point(data: Any) -> str:
    if data.form is None:
        return str(tuple(data.x.shape[1:]))
    return ", ".join(f"{shape} {dtype}" for shape, dtype in data.form.leaves)


def _model(source: AbstractSource) -> str:
    if source.network is None:
        return "kernel without parameters"
    return f"network with {count(source.network.num_params, 'parameter')}"


NOTABLE = 1e-2
"""Relative bound above which a note reports the drift of a chain of edits."""


class Chain(NamedTuple):
    """Edits in a row since the last answer that met a tolerance, and a note if they drifted."""

    edits: int
    notes: tuple[str, ...]


def check_drift(drift: Any) -> None:
    """Raise unless `drift` is `None` or a positive relative distance."""
    what = "share of ‖θ − θ₀‖, such as 0.01"
    try:
        maybe(check_positive, "edit: drift", drift, what=what)
    except TypeError as error:
        raise ValueError(f"edit: drift must be a positive {what}, got {drift!r}.") from error


def exceeds(certificate: Certificate, drift: float | None) -> bool:
    """Whether an answer may be farther from retraining than `drift` allows; also true without a
    certificate."""
    return drift is not None and not certificate.relative_bound <= drift


def follow(before: Stats, certificate: Certificate, *, met: bool) -> Chain:
    """The chain that an edit continues, or ends if it met `until` or `drift`.

    **Arguments:**

    - `before`: stats of the model that was edited.
    - `certificate`: the certificate of the answer.
    - `met`: whether a tolerance on the distance was asked for and met.
    """
    if met:
        return Chain(0, ())
    edits = before.edits + 1
    bound = certificate.relative_bound
    if edits == 1 or not certificate.certified or not bound > NOTABLE:
        return Chain(edits, ())
    note = (
        f"after {edits} edits in a row the certified distance is {100 * bound:.2g} % of ‖θ − "
        "θ₀‖; edit(..., drift=0.01) takes further steps if it exceeds 1 %"
    )
    return Chain(edits, (note,))


def told(stats: Stats, chain: Chain) -> Stats:
    """`stats` with the chain's length and note."""
    return stats._replace(edits=chain.edits, notes=(*stats.notes, *chain.notes))


def distance_limit(certificate: Certificate, drift: float) -> float:
    """`drift` as a distance for `until`. `‖θ − θ₀‖` changes a little in the steps to come, so the
    distance is a tenth smaller.
    """
    if not certificate.certified:
        raise ValueError(
            "edit: drift limits a certified distance, but a network that is not linear in its "
            "parameters has no certificate. Use steps=... to iterate on its linearisation."
        )
    return 0.9 * drift * max(certificate.parameter_norm - certificate.gap, sys.float_info.min)


@dataclass(frozen=True, eq=False, repr=False)
class Update(Shown, DualModel, Generic[Trained]):
    """A model after an edit, and what changed.

    - `before`: the model that was edited, with rows for added points (weight zero).
    - `certificate`: bounds the distance of the answer to exact retraining on the edited set.
    - `stats`: steps, solver and time.
    """

    before: Trained
    certificate: Certificate
    stats: Stats

    def _table(self) -> Table:
        return update_table(self)

    @property
    def layout(self) -> Layout:
        return self.before.layout

    @property
    @in_own_precision
    def delta_alpha(self) -> Float[Array, "n c"]:
        """`Δα`; rows of added or replaced points come last."""
        return self.layout.points(self.state.alpha - self.before.state.alpha)

    @property
    @in_own_precision
    def outputs(self) -> Float[Array, "n c"]:
        """Outputs at all training rows, removed ones included."""
        return self.layout.points(self.before.offset + self.state.k_alpha)

    @in_own_precision
    def delta_outputs(self, xq: Inputs, *, linearised: bool = True) -> Float[Array, "q c"]:
        """`f_after − f_before` at queries: `K_qn Δα` (paper, eq. 8), or the difference of the networks'
        outputs."""
        xq = self.data.queries(xq)
        if check_flag("delta_outputs: linearised", linearised):
            change = self._cross_mv(xq, self.state.alpha - self.before.state.alpha)
            check_finite("delta_outputs", change, hint=OVERFLOW)
            return change
        return self.predict(xq, linearised=False) - self.before.predict(xq, linearised=False)

    @in_own_precision
    def delta_loss(
        self,
        xq: Inputs,
        targets: Numbers,
        *,
        first_order: bool = False,
        include_ridge: bool = False,
        linearised: bool = True,
    ) -> Float[Array, " q"]:
        r"""Change of the loss at queries, positive if the edit makes it worse:

        $$\ell(f_q+\Delta f_q)-\ell(f_q)\qquad\text{or, to first order,}\qquad
          \nabla\ell(f_q)\cdot\Delta f_q,\qquad \Delta f_q = K_{qn}\Delta\alpha .$$

        **Arguments:**

        - `first_order`: the paper's estimate (eqs. 9 and 13, for any number of outputs) instead of the
          difference of losses.
        - `include_ridge`: add the change of the ridge term `λ/2‖Jᵀα‖²`, as the paper does. With
          `first_order` this is to first order too.
        - `linearised`: With `False`, `f` and `Δf` come from the network itself, as in `predict`.
        """
        xq = self.data.queries(xq)
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

    def edit(
        self, edits: AbstractEdit | Sequence[AbstractEdit], **options: Any
    ) -> "Update[Trained]":
        """The next edit, after this one: `commit().edit(...)`, with the options of `Fitted.edit`."""
        model: Any = self.commit()  # `Fitted` has edits, and is made of this module
        return model.edit(edits, **options)

    def commit(self) -> Trained:
        """The updated model as a `Fitted`, ready for the next request.

        Removed points stay as rows of weight zero, in memory and in files: their positions remain
        valid, nothing recompiles, and `Reweight` can bring them back. `purge` removes them permanently.
        """
        return replace(
            self.before,
            data=self.data,
            state=self.state,
            certificate=self.certificate,
            stats=self.stats,
        )


def updated(before: Trained, after: Trained, stats: Stats) -> Update[Trained]:
    """The update from one model to another on the same kernel."""
    return Update(
        source=after.source,
        data=after.data,
        state=after.state,
        reference=after.reference,
        before=before,
        certificate=after.certificate,
        stats=stats,
    )


def _square(state: State) -> Float[Array, ""]:
    return jnp.sum(state.alpha * state.k_alpha)
