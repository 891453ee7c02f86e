"""A trained model: its objective, `K`, dual variables and certificate, and what is read from them
(parameters, predictions, changes).

What is asked of such a model (its edits, attributions, ridge path) lies in files of its own, and `Fitted`,
which puts it together, comes last.
"""

import abc
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from .._support.checks import OVERFLOW, check_finite
from .._support.compile import double, in_own_precision
from .._support.options import check_flag
from .._support.types import Inputs
from ..kernels._linearized import Linearized
from ..losses import AbstractLoss
from ..models._passes import outputs_at
from ..models._sources import AbstractSource
from ..operators import AbstractKernelOperator
from ..operators._base import Layout, every_row
from ..problem._certificate import Certificate, Stats
from ..problem._objective import Problem, State, TrainingSet, make_problem
from ..solvers import AbstractPreconditioner
from ._fidelity import Fidelity


class Reference(eqx.Module):
    """Parameters and dual variables of a network trained by the user; `θ = θ_ref + Jᵀ(α − α_ref)`.

    - `linearised`: outputs at `θ_ref` are those of the linearisation, not of the network.
    - `tangent`: `J` is taken at `θ₀` (`"initial"`) or at `θ_ref` (`"trained"`).
    - `gap`: `‖θ − θ₀ − Jᵀα‖`. It is the same at `θ_ref` and after every edit, which moves `θ` by `JᵀΔα`.
    - `certified`: whether the model is linear in its parameters, so that certificates hold.
    - `claimed`: whether `gap` and `certified` are a file's word, as the points they came from were purged.
    - `proven`: whether that is known for all parameters, and not only found at those tried.
    """

    params: PyTree
    alpha: Float[Array, "n c"]
    linearised: bool = eqx.field(static=True)
    tangent: str = eqx.field(static=True, default="initial")
    gap: float = eqx.field(static=True, default=0.0)
    certified: bool = eqx.field(static=True, default=False)
    claimed: bool = eqx.field(static=True, default=False)
    proven: bool = eqx.field(static=True, default=False)


@dataclass(frozen=True, eq=False)
class DualModel(abc.ABC):
    """A model as dual variables over training points. The common part of fits and updates. It is a
    plain record and not a pytree, because compiled functions never take it and building a pytree would
    slow down requests.
    """

    source: AbstractSource
    data: TrainingSet
    state: State
    reference: Reference | None

    @property
    def x(self) -> Any:
        """Training features in the form in which they were given, one row per point; rows of removed
        points stay."""
        return self.data.features

    @property
    def is_wide(self) -> bool:
        """Whether dual variables and outputs are in float64, even if the caller uses float32."""
        return self.state.alpha.dtype == np.float64

    def precision(self) -> AbstractContextManager[Any]:
        """A scope for computing with fields such as `state` and `kernel_op` in the precision of the
        model.

        It switches 64-bit types on for a model that keeps its dual variables in float64. You do not
        need it for `alpha`, `params()`, `predict` and similar calls.
        """
        return double(self.is_wide)

    @property
    @abc.abstractmethod
    def layout(self) -> Layout:
        """Which rows of `state` are training points, and on which devices they are."""

    @property
    @in_own_precision
    def alpha(self) -> Float[Array, "n c"]:
        """Dual variables, one row per training point."""
        return self.layout.points(self.state.alpha)

    @property
    def network(self) -> Linearized:
        """The linearised network with its parameters `θ`, or an error for a kernel without a network."""
        return self._network.as_given()

    @property
    def _network(self) -> Linearized:
        """The network as the kernel sees it, in the scale of the ridge."""
        if self.source.network is None:
            raise TypeError(
                "params: this model is a kernel without parameters (infinitely wide, or your own "
                "kernel). Read out predictions instead, or use linearize for a finite network."
            )
        return self.source.network

    def _reference_alpha(self) -> Float[Array, "n c"] | None:
        """`α_ref` of a network trained by the user, with zero rows for points added since."""
        if self.reference is None:
            return None
        return self._read_layout.grow(self.reference.alpha, self._read_layout.num_rows)

    @property
    def _read_layout(self) -> Layout:
        """Rows that read-outs go over. They include spare rows, because the number of rows with them
        seldom changes."""
        return self.layout if self.layout.sharding is None else every_row(self.data.num_points)

    @cached_property
    def _x_rows(self) -> Array:
        return self._read_layout.place(self.data.x, "last")

    def _read_rows(self, values: Float[Array, "n c"]) -> Float[Array, "m c"]:
        return values if self.layout.sharding is None else self.layout.points(values)

    def _cross_mv(self, xq: Array, values: Float[Array, "n c"]) -> Float[Array, "q c"]:
        """`K(xq, x) v` for values by row of `state`."""
        return self.source.cross_mv(xq, self._x_rows, self._read_rows(values))

    @in_own_precision
    def params(self) -> PyTree:
        """`θ₀ + Jᵀα` (with a scale `θ₀ + PJᵀα`), a pytree like the parameters given to `linearize`."""
        base = self._network.params if self.reference is None else self.reference.params
        alpha = self._read_rows(self.state.alpha)
        return self.source.moved_params(base, self._x_rows, alpha, self._reference_alpha())

    def _entered_params(self) -> PyTree:
        """`params()` in the form that the network of the kernel takes."""
        return self._network.enter(self.params())

    @in_own_precision
    def predict(self, xq: Inputs, *, linearised: bool = True) -> Float[Array, "q c"]:
        """Outputs at query points.

        **Arguments:**

        - `xq`: queries, like the training features.
        - `linearised`: `False` evaluates the network itself at `params()` instead.
        """
        xq = self.data.queries(xq)
        outputs = self._outputs_at(xq, check_flag("predict: linearised", linearised))
        check_finite("predict", outputs, hint=OVERFLOW)
        return outputs

    def _outputs_at(self, xq: Array, linearised: bool) -> Float[Array, "q c"]:
        if not linearised:
            return outputs_at(self._network, self._entered_params(), xq, linearised=False)
        since, alpha = self._reference_alpha(), self._read_rows(self.state.alpha)
        alpha = alpha if since is None else alpha - since
        move = self.source.cross_mv(xq, self._x_rows, alpha)
        if self.reference is not None:
            ref = self.reference
            return move + outputs_at(self._network, ref.params, xq, ref.linearised)
        base = self.source.base_outputs(xq, move.shape[1])
        return move if base is None else move + base


Widening = Literal["computed anew", "as stored", "at once", "never"]
"""If float32 is not enough, `K` is computed again in float64 or multiplied as it is stored; `refine`
asks for the latter at once, or for neither."""

SUMMED = 8.0
"""Rounding units of `‖Jᵀα‖` that its sum over points is off by in float32, where terms point the same way;
others are in the certificate already. Measured: 5 for 200,000 equal terms. Doubled, the smallest `until` of a
float32 model doubles."""

ROOM = 1.5
"""How much more than now parameters may round after the edit, because they move. Doubled, the smallest
`until` that is accepted doubles."""


@dataclass(frozen=True, eq=False)
class TrainedModel(DualModel):
    """A training set, its objective, `K` on it and the dual variables found.

    - `loss`, `ridge`: `ℓ` and `λ` of the objective.
    - `kernel_op`, `kernel_diagonal`: `K` and its diagonal; rows past the training points are spare.
    - `offset`: `f − Kα`, the outputs at `α = 0`.
    - `preconditioner`: of `K`, kept for later requests.
    - `certificate`, `stats`: how near to the optimum, and what it took.
    - `fidelity`: of a network trained by the user; how far its linearisation can be trusted.
    - `epsilon`: rounding unit of a network that computes less precisely than its dtype.
    - `start_norm`: `‖θ₀‖`, which parameters in float32 round in proportion to.
    - `widening`: how `K` is handled if float32 is not enough: see `KernelOptions.refine`.
    """

    loss: AbstractLoss
    ridge: float
    kernel_op: AbstractKernelOperator
    offset: Float[Array, "n c"]
    kernel_diagonal: Float[Array, "n c"]
    preconditioner: AbstractPreconditioner
    certificate: Certificate
    stats: Stats
    fidelity: Fidelity | None = None
    epsilon: float | None = None
    start_norm: float = 0.0
    widening: Widening = "as stored"

    @property
    def layout(self) -> Layout:
        """Rows of `kernel_op`; those after the points of `data` are spare, for later points."""
        return self.kernel_op.layout.holding(self.data.num_points)

    @property
    @in_own_precision
    def outputs(self) -> Float[Array, "n c"]:
        """Outputs at the training points."""
        return self.layout.points(self.offset + self.state.k_alpha)

    @property
    def num_outputs(self) -> int:
        return self.offset.shape[1]

    @in_own_precision
    def problem(self, data: TrainingSet | None = None) -> Problem:
        """The objective on this training set, or on an edited one with the same rows."""
        data = data or self.data
        return make_problem(data, self.loss, self.ridge, self.offset, self.layout, self.epsilon)

    def _widened(self, certificate: Certificate) -> Certificate:
        """The certificate of the dual variables, widened so that it holds for the parameters as they are
        returned."""
        ref, reading = self.reference, self._reading(certificate.parameter_norm)
        if ref is None:
            return replace(certificate, reading=reading)
        return replace(certificate, gap=ref.gap, certified=ref.certified, reading=reading)

    def _reading(self, moved: float) -> float:
        """The rounding of parameters that moved this far when they are returned in float32."""
        network = self.source.network
        if network is None or (network.widening is None and network.dtype != np.float32):
            return 0.0
        # The sum Jᵀα itself is rounded in float32 only where the model is.
        own = 0.5 if network.widening is not None else SUMMED
        return float(np.finfo(np.float32).eps) * (0.5 * self.start_norm + own * moved)

    def _remaining(self, until: float | None, what: str = "edit: until") -> float | None:
        """The part of `until` that is left for the dual variables after the gap and rounding; an error
        if nothing is left.

        `what` is the name of the option, for messages.
        """
        ref = self.reference
        if until is None:
            return until
        if ref is not None and not ref.certified:
            raise ValueError(
                f"{what} asks for a certified distance, but a network that is not linear in its "
                "parameters has no certificate. Leave it out; edits take steps=... instead."
            )
        gap = 0.0 if ref is None else ref.gap
        if not until > gap:
            raise ValueError(
                f"{what}={until:.3g} cannot be attained: the trained parameters have a gap of "
                f"{gap:.3g} to θ₀ + Jᵀα, which edits keep. Give a larger distance, or none, or fit, which "
                "trains to the optimum and leaves no gap."
            )
        reading = ROOM * self._reading(self.certificate.parameter_norm)
        if not until > gap + reading:
            raise ValueError(
                f"{what}={until:.3g} cannot be attained: parameters in float32 round by up to "
                f"{reading:.3g}. Give a larger distance, or parameters in float64."
            )
        return (until - gap - reading) * (1 - 4 * float(np.finfo(float).eps))

    @in_own_precision
    def without_spare_rows(self: "Trained") -> "Trained":
        """The same model with exactly one row per training point, as a fit from scratch has."""
        n, layout = self.data.num_points, self.layout
        if layout.sharding is not None or layout.num_rows == n:
            return self
        return replace(
            self,
            kernel_op=self.kernel_op.cut(n),
            state=State(
                layout.points(self.state.alpha),
                layout.points(self.state.k_alpha),
                self.state.drift,
            ),
            offset=layout.points(self.offset),
            kernel_diagonal=layout.points(self.kernel_diagonal),
            preconditioner=self.preconditioner.on_rows(layout.points),
        )


Trained = TypeVar("Trained", bound=TrainedModel)
"""`Fitted`, for what is asked of it in files before its own."""


def problem_on_device(fitted: TrainedModel) -> Problem:
    """The fit's objective with its weights and ridge on the device, for use outside of compiled functions."""
    return jax.tree.map(jnp.asarray, fitted.problem())
