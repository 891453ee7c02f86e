"""How far a network that the user trained is from the assumptions of the dual equation."""

import warnings
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from .._support.points import tree_norm
from ..kernels._linearized import Linearized
from ..models._passes import outputs_at
from ..models._sources import pull_back

FAR = 0.1
"""Relative gap above which `from_trained` warns. Doubled, it warns of fewer networks."""

LINEAR_SLACK = 64.0
"""Rounding allowed in `f(θ) = f₀ + J(θ − θ₀)`, in units of eps. Doubled, a nonlinearity of twice the
size counts as rounding."""

LINEAR_POINTS, LINEAR_PROBES = 8, 2
"""Points and random parameters at which linearity is tested before all training points are."""


class FidelityWarning(UserWarning):
    """A trained network is far from a stationary point or from its linearisation, so edits may be poor."""


@dataclass(frozen=True)
class Fidelity:
    """How far a network that the user trained is from the assumptions of the dual equation.

    - `gradient_norm`: `‖∇L‖` of the network's own objective at the trained parameters.
    - `parameter_gap`: `‖(θ − θ₀) − Jᵀα‖ / ‖θ − θ₀‖`, zero at a stationary point of the linearised model.
    - `output_gap`: root mean square of the difference between network and linearised outputs, divided by
      the root mean square of the change of outputs.

    The page "When to trust" has the λ that makes both gaps small for networks of several widths and
    depths, and
    the errors of removals at a given gap.
    """

    gradient_norm: float
    parameter_gap: float
    output_gap: float


class SeenNetwork(eqx.Module):
    """A network as its user trained it, seen from the training points.

    - `change`: `θ − θ₀` on the trainable leaves.
    - `outputs`, `linear_outputs`: `f(θ)` as trained, and `f₀ + J(θ₀)(θ − θ₀)`.
    - `base`: `f₀`.
    """

    model: Linearized
    params: PyTree
    x: Array
    change: PyTree
    outputs: Float[Array, "n c"]
    linear_outputs: Float[Array, "n c"]
    base: Float[Array, "n c"]

    @property
    def size(self) -> Float[Array, ""]:
        """`‖θ‖ + ‖θ₀‖`, what rounding of parameters is relative to."""
        return _size(self.model.as_given(), self.model.leave(self.params))

    @property
    def is_linear(self) -> bool:
        """Whether `f(θ) = f₀ + J(θ − θ₀)` holds to rounding.

        At random parameters on a few points first, so that a nonlinear network costs a few passes,
        then at the trained parameters on all points.
        """
        # Without the scale: a large one of some parameters would hide what others do.
        plain = self.model.plain(self.x)
        return _linear_at_random(plain, self.x) and _same(
            self.outputs,
            self.linear_outputs,
            jnp.sqrt(plain.kernel_diagonal(self.x)) * _size(plain, self.model.leave(self.params)),
        )


def _size(model: Linearized, params: PyTree) -> Float[Array, ""]:
    return model.norm(model.split(params)[0]) + model.norm(model.split(model.params)[0])


def see(model: Linearized, params: PyTree, x: Array, linearised: bool) -> SeenNetwork:
    """Outputs and movement of a trained network."""
    theta, theta_0 = model.split(params)[0], model.split(model.params)[0]
    linear = outputs_at(model, params, x, linearised=True)
    return SeenNetwork(
        model,
        params,
        x,
        change=jax.tree.map(jnp.subtract, theta, theta_0),
        outputs=linear if linearised else outputs_at(model, params, x, linearised=False),
        linear_outputs=linear,
        base=outputs_at(model, model.params, x, linearised=False),
    )


def measure_fidelity(
    trained: SeenNetwork, gradient_at: Linearized, g: Array, gap: PyTree, ridge: float
) -> Fidelity:
    """`gradient_at` has the Jacobian of the objective that was trained; `gap` is `θ − θ₀ − Jᵀα`."""
    pulled = pull_back(gradient_at, trained.x, g)
    gradient = jax.tree.map(lambda a, b: a + ridge * b, pulled, trained.change)
    moved = float(jnp.linalg.norm(trained.linear_outputs - trained.base))
    apart = float(jnp.linalg.norm(trained.outputs - trained.linear_outputs))
    return Fidelity(
        gradient_norm=float(tree_norm(gradient)),
        parameter_gap=float(tree_norm(gap)) / max(float(tree_norm(trained.change)), 1e-30),
        output_gap=apart / max(moved, 1e-30),
    )


def warn_if_far(fidelity: Fidelity, *, stationary: bool, certified: bool) -> None:
    """Say in words what a large gap means for edits."""
    reasons = []
    if not fidelity.parameter_gap <= FAR:
        why = (
            "the Jacobian at θ₀ does not explain how θ moved; try tangent='trained'"
            if stationary
            else "training stopped before its optimum, or had another loss, ridge or start"
        )
        reasons.append(
            f"‖θ − θ₀ − Jᵀα‖ is {_percent(fidelity.parameter_gap)} of ‖θ − θ₀‖, with a gradient of norm "
            f"{fidelity.gradient_norm:.2g}: {why}"
        )
    if not certified and not fidelity.output_gap <= FAR:
        reasons.append(
            "outputs differ from the linearisation's by "
            f"{_percent(fidelity.output_gap)} of their change"
        )
    if reasons:
        after = "the certificate includes this gap" if certified else "they carry no certificate"
        text = f"from_trained: {'; '.join(reasons)}. Edits are estimates, and {after}."
        warnings.warn(text, FidelityWarning, stacklevel=3)


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.3g} %" if ratio < 10 else "more than 1000 %"


def _linear_at_random(model: Linearized, x: Array) -> bool:
    rows = np.unique(np.linspace(0, x.shape[0] - 1, LINEAR_POINTS).astype(int))
    few, (theta_0, frozen) = x[rows], model.split(model.params)
    lengths = jnp.sqrt(model.kernel_diagonal(few))
    for seed in range(LINEAR_PROBES):
        step = random_like(theta_0, seed)
        params = eqx.combine(jax.tree.map(jnp.add, theta_0, step), frozen)
        f, linear = (outputs_at(model, params, few, linearised=kind) for kind in (False, True))
        size = tree_norm(theta_0) + tree_norm(step)
        if not _same(f, linear, lengths * size):
            return False
    return True


def still_linear(model: Linearized, params: PyTree, x: Array, linear: Array) -> bool:
    """Whether the network at `params`, in the form that `model` takes, has its linearisation's outputs."""
    plain = model.plain(x)
    f = outputs_at(model, params, x, linearised=False)
    reach = jnp.sqrt(plain.kernel_diagonal(x)) * _size(plain, model.leave(params))
    # Parameters that are handed out in float32 have its rounding, whatever computed them.
    dtype = f.dtype if model.widening is None else jnp.float32
    return _same(f, linear, reach, dtype)


def random_like(tree: PyTree, seed: int) -> PyTree:
    """Standard normal leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [jax.random.normal(k, v.shape, v.dtype) for k, v in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(treedef, drawn)


def _same(f: Array, linear: Array, reach: Array, dtype: DTypeLike | None = None) -> bool:
    """Equal to rounding, where a sum of products of size `reach` may have cancelled."""
    eps = float(jnp.finfo(dtype or f.dtype).eps)
    allowed = LINEAR_SLACK * eps * (jnp.abs(f) + jnp.abs(linear) + reach)
    return bool((jnp.isfinite(allowed) & (jnp.abs(f - linear) <= allowed)).all())
