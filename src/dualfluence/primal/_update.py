"""The result of an influence step in parameter space."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .._support.checks import check_finite
from .._support.compile import PRECISION, filter_jit, in_own_precision
from .._support.options import check_flag
from .._support.points import tree_norm
from .._support.show import Shown, Table
from .._support.types import Inputs, Numbers
from ..kernels._linearized import Linearized
from ..losses import AbstractLoss
from ..models._passes import outputs_at
from ..problem._certificate import Stats
from ..problem._edits import targets_like
from ..problem._objective import TrainingSet


class PrimalUpdate(Shown, eqx.Module):
    """Parameters after an edit, by the influence function in parameter space.

    `step` is `Δθ` on the trainable leaves, in the units of the scale of the ridge if there is one.
    """

    model: Linearized
    before: PyTree
    step: PyTree
    data: TrainingSet
    loss: AbstractLoss
    ridge: float = eqx.field(static=True)
    linearised: bool = eqx.field(static=True)
    stats: Stats = eqx.field(static=True)

    @property
    def is_wide(self) -> bool:
        """Whether a float32 model was computed in float64."""
        return self.model.widening is not None

    def _table(self) -> Table:
        kind = "linearised" if self.linearised else "the network itself"
        return "PrimalUpdate", [
            ("parameters", f"{self.model.num_params:,}, {kind}"),
            ("loss", f"{type(self.loss).__name__}, ridge {self.ridge:.3g}"),
            ("change", f"‖Δθ‖ = {self.delta_norm:.3g}"),
            ("solver", f"{self.stats.solver} ({self.stats.reason})"),
            ("run", self.stats.summary()),
        ]

    @in_own_precision
    def params(self) -> PyTree:
        """`θ* + Δθ` (paper, eq. 1), a pytree like the parameters given to `linearize`."""
        return self.model.leave(self._after())

    @property
    @in_own_precision
    def delta_params(self) -> PyTree:
        """`Δθ` on the trainable leaves, `None` elsewhere."""
        return self.model.leave_step(self.step)

    @property
    @in_own_precision
    def delta_norm(self) -> float:
        """`‖Δθ‖`, with a scale in the norm `P⁻¹`."""
        return float(tree_norm(self.step))

    def _after(self) -> PyTree:
        """`θ* + Δθ` as the model takes it."""
        theta, frozen = self.model.split(self.before)
        return eqx.combine(jax.tree.map(jnp.add, theta, self.step), frozen)

    @in_own_precision
    def predict(self, xq: Inputs) -> Float[Array, "q c"]:
        """Outputs at queries with the new parameters: outputs of the linearised model if the update is
        linearised, else of the network."""
        outputs = outputs_at(
            self.model,
            self._after(),
            self.data.queries(xq),
            self.linearised,
        )
        check_finite("predict outputs", outputs)
        return outputs

    @in_own_precision
    def delta_outputs(self, xq: Inputs) -> Float[Array, "q c"]:
        """`J(x_q) Δθ` (paper, eq. 2), `J` at `θ₀` for a linearised model and at `θ*` otherwise."""
        xq = self.data.queries(xq)
        change = _push(tangent_model(self.model, self.before, self.linearised), xq, self.step)
        check_finite("delta_outputs", change)
        return change

    @in_own_precision
    def delta_loss(
        self,
        xq: Inputs,
        targets: Numbers,
        *,
        first_order: bool = False,
        include_ridge: bool = False,
    ) -> Float[Array, " q"]:
        r"""Change of the loss at queries, positive if the edit makes it worse:

        $$\ell(f_q(\theta^\star+\Delta\theta))-\ell(f_q)\qquad\text{or, to first order,}\qquad
          \nabla\ell(f_q)\cdot J_q\Delta\theta .$$

        **Arguments:**

        - `first_order`: the paper's estimate (eq. 3) instead of the difference of losses.
        - `include_ridge`: add the change of the ridge term `λ/2‖θ − θ₀‖²`, as the paper does. With
          `first_order` this is to first order too.
        """
        xq = self.data.queries(xq)
        check_flag("delta_loss: include_ridge", include_ridge)
        check_flag("delta_loss: first_order", first_order)
        f = outputs_at(self.model, self.before, xq, self.linearised)
        y = targets_like("delta_loss", targets, self.data.targets, self.loss, f.shape[1])
        if y.shape[0] != xq.shape[0]:
            raise ValueError(f"delta_loss: {xq.shape[0]} queries but {y.shape[0]} targets.")
        if first_order:
            change = jnp.sum(self.loss.grad(f, y) * self.delta_outputs(xq), axis=1)
        else:
            change = self.loss.value(self.predict(xq), y) - self.loss.value(f, y)
        check_finite("delta_loss", change)
        return change + self._ridge_change(first_order) if include_ridge else change

    def _ridge_change(self, first_order: bool) -> Float[Array, ""]:
        """`λ(δ·Δθ)` or `λ(δ·Δθ + ½‖Δθ‖²)`, with `δ = θ* − θ₀`: no difference of large squares."""
        moved = displacement(self.model, self.before)
        pairs = jax.tree.map(lambda d, step: jnp.sum(d * step), moved, self.step)
        change = sum(jax.tree.leaves(pairs), start=jnp.zeros((), self.model.dtype))
        if not first_order:
            change = change + 0.5 * tree_norm(self.step) ** 2
        return self.ridge * change


def tangent_model(model: Linearized, params: PyTree, linearised: bool) -> Linearized:
    """The model with the `jvp` and `vjp` of training: `J` at `θ₀`, or at `θ*`."""
    return model if linearised else replace(model, params=params)


def displacement(model: Linearized, params: PyTree) -> PyTree:
    """`θ − θ₀` on the trainable leaves."""
    theta, theta_0 = model.split(params)[0], model.split(model.params)[0]
    return jax.tree.map(jnp.subtract, theta, theta_0)


@filter_jit
def _push(model: Linearized, x: Array, tangent: PyTree) -> Float[Array, "n c"]:
    with jax.default_matmul_precision(PRECISION):
        return model.jvp(x, tangent)
