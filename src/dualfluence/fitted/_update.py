"""A model after an edit of its training set: what changed, and further edits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._support.checks import OVERFLOW, check_finite
from .._support.compile import in_own_precision
from .._support.options import check_flag
from .._support.show import Shown, Table
from ..dual._model import DualModel, Trained
from ..operators._base import Layout
from ..problem._certificate import Certificate, Stats
from ..problem._edits import AbstractEdit, targets_like
from ..problem._objective import State
from ._show import update_table


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
    def delta_outputs(self, xq: Any, *, linearised: bool = True) -> Float[Array, "q c"]:
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
        xq: Any,
        targets: Any,
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
