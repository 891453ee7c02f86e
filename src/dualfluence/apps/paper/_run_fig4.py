"""Fig. 4: infinitely wide networks, estimated changes compared with actual ones."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ...fitted._descent import Descent
from ...fitted._fitted import Fitted
from ...fitted._update import Update
from ...models._sources import as_source
from ...problem._edits import Remove
from ...problem._objective import State
from ..compare._methods import facts
from ..compare._names import ITERATED, ONE_STEP, PAPER
from ..compare._networks import make_network
from ._common import LOSSES, Context, descend, fit_exactly, get_points, num_outputs
from ._config import Fig4, Row
from ._forms import PaperCG
from ._remove import remove


def run(config: Fig4, context: Context) -> None:
    """One piece per network and way of training."""
    for seed in (None, *config.seeds):
        here = context if seed is None else replace(context, seed=seed)
        prefix = "" if seed is None else f"seed/{seed}/"
        for row in config.rows:
            case = InfiniteCase(row, config, here)
            for training in ("published", "exact"):
                key = f"{prefix}{row.name}/{training}"
                context.run.piece(key, lambda c=case, t=training: c.compare(t))


class InfiniteCase:
    """One infinitely wide network, its training set and its queries."""

    def __init__(self, row: Row, config: Fig4, context: Context) -> None:
        self.row, self.config, self.context = row, config, context
        self.loss = LOSSES[row.training.loss]
        self.c = num_outputs(row.data)

    @cached_property
    def points(self) -> Any:
        return get_points(self.row.data, self.context)

    @cached_property
    def queries(self) -> np.ndarray:
        rng = np.random.default_rng([self.context.seed, 4])
        size = self.config.num_queries
        return np.sort(rng.choice(self.points.x_test.shape[0], size, replace=False))

    @cached_property
    def gone(self) -> np.ndarray:
        """The same share of every class."""
        rng = np.random.default_rng([self.context.seed, self.config.remove_percent])
        parts = []
        for label in self.row.data.classes:
            members = np.flatnonzero(self.points.classes == label)
            size = round(len(members) * self.config.remove_percent / 100)
            parts.append(rng.choice(members, size, replace=False))
        return np.sort(np.concatenate(parts))

    @cached_property
    def kept_weights(self) -> np.ndarray:
        everything = np.arange(self.points.x.shape[0])
        return (~np.isin(everything, self.gone)).astype(float)

    @cached_property
    def cross(self) -> Array:
        """`K_qn`, the kernel between queries and training points."""
        source = as_source(make_network(self.row.network))
        return source.block(self.points.x_test[self.queries], self.points.x, False)

    @cached_property
    def exact(self) -> Fitted:
        self.context.say(f"{self.row.name}: kernel of {self.points.x.shape[0]} points, optimum")
        return self.fit_exactly(None)

    def fit_exactly(self, weights: Any) -> Fitted:
        given = (self.points, self.loss, self.row.training.ridge, self.context)
        known: dict[str, Any] = (
            {"num_outputs": self.c} if weights is None else {"kernel": self.exact.kernel_op}
        )
        return fit_exactly(make_network(self.row.network), *given, weights=weights, **known)

    def descend(self, retain: Any) -> Descent:
        given = (self.points, self.row.training, self.context)
        return descend(make_network(self.row.network), *given, self.exact.kernel_op, retain)

    def published(self) -> tuple[Fitted, dict[str, Any]]:
        """The state after gradient descent: its outputs, with `α = −g/λ` as in the paper."""
        descent = self.descend(None)
        state = State(descent.alpha, self.exact.kernel_op.mv(descent.alpha))
        fitted = replace(self.exact, state=state, offset=descent.outputs - state.k_alpha)
        norms = descent.gradient_norms
        return fitted, {
            "gradient_norm_first": float(norms[0]),
            "gradient_norm_last": float(norms[-1]),
            "descent_seconds": descent.seconds,
        }

    def compare(self, training: str) -> dict[str, Any]:
        """Estimates from the trained model, actual changes from the retrained one."""
        self.context.say(f"{self.row.name}: trained {training}, {len(self.gone)} points removed")
        if training == "published":
            base, extra = self.published()
            alpha_after = self.descend(self.kept_weights).alpha
        else:
            base, extra = self.exact, {"fit_seconds": self.exact.stats.seconds}
            alpha_after = self.fit_exactly(self.kept_weights).alpha
        y = self.loss.prepare_targets(self.points.y_test[self.queries], self.c, base.offset.dtype)
        f = self._outputs(base.alpha)
        actual = self._outputs(alpha_after) - f
        updates = self._updates(base)
        estimates = {name: self._estimate(update, f, y) for name, update in updates.items()}
        loss_before = self.loss.value(f, y)
        ridge = self.row.training.ridge
        k_alpha = base.kernel_op.mv(alpha_after)
        ridge_change = (
            0.5
            * ridge
            * float(jnp.sum(alpha_after * k_alpha) - jnp.sum(base.alpha * base.state.k_alpha))
        )
        return extra | {
            "queries": self.queries.tolist(),
            "removed": len(self.gone),
            "outputs_before": f,
            "actual_outputs": actual,
            "actual_loss": self.loss.value(f + actual, y) - loss_before,
            "actual_ridge_change": ridge_change,
            "estimates": estimates,
        }

    def _outputs(self, alpha: Array) -> Array:
        return jnp.dot(self.cross, alpha, precision="highest")

    def _updates(self, base: Fitted) -> dict[str, Update]:
        """The removal by every method that needs no parameters."""
        edit, form = Remove(self.gone), PaperCG(self.config.cg_steps, self.config.cg_rtol)
        options: Any = {"on_failure": "report", "progress": False}
        until = self.config.until * self.exact.certificate.parameter_norm
        return {
            PAPER: remove(base, edit, form=form, on_failure="report"),
            ONE_STEP: base.edit(edit, **options),
            ITERATED: base.edit(edit, until=until, **options),
        }

    def _estimate(self, update: Update, f: Array, y: Array) -> dict[str, Any]:
        base, delta = update.before, update.delta_alpha
        outputs = self._outputs(delta)
        first_order = jnp.sum(self.loss.grad(f, y) * outputs, axis=1)
        ridge_term = base.ridge * jnp.sum(base.state.k_alpha * delta)
        return {
            "outputs": outputs,
            "loss_with_ridge": first_order + ridge_term,
            "loss_without_ridge": first_order,
            "loss_evaluated": self.loss.value(f + outputs, y) - self.loss.value(f, y),
            "ridge_term": float(ridge_term),
            "details": facts(update.stats),
        }
