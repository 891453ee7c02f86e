"""What there is to a trained model: its objective, `K`, dual variables and certificate.

What is asked of such a model (its edits, attributions, ridge path) lies in files of its own, and `Fitted`,
which puts it together, comes last.
"""

from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._support.compile import in_own_precision
from ..losses import AbstractLoss
from ..operators import AbstractKernelOperator
from ..operators._layout import Layout
from ..problem._certificate import Certificate
from ..problem._edits import TrainingSet
from ..problem._objective import Problem, State, make_problem
from ..problem._record import Stats
from ..solvers import AbstractPreconditioner
from ._fidelity import Fidelity
from ._readout import DualModel

Widening = Literal["computed anew", "as stored", "at once", "never"]
"""Where float32 is not enough, `K` is computed anew in float64 or multiplied as it is stored; `refine`
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
    - `epsilon`: rounding unit of a network that computes more coarsely than its dtype says.
    - `start_norm`: `‖θ₀‖`, which parameters in float32 round in proportion to.
    - `widening`: what becomes of `K` where float32 is not enough: see `KernelOptions.refine`.
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
        """The dual variables' own certificate, made true for parameters as they are handed out."""
        ref, reading = self.reference, self._reading(certificate.parameter_norm)
        if ref is None:
            return replace(certificate, reading=reading)
        return replace(certificate, gap=ref.gap, certified=ref.certified, reading=reading)

    def _reading(self, moved: float) -> float:
        """What is lost where parameters that moved so far are handed out in float32."""
        network = self.source.network
        if network is None or (network.widening is None and network.dtype != np.float32):
            return 0.0
        # The sum Jᵀα itself is rounded in float32 only where the model is.
        own = 0.5 if network.widening is not None else SUMMED
        return float(np.finfo(np.float32).eps) * (0.5 * self.start_norm + own * moved)

    def _remaining(self, until: float | None, what: str = "edit: until") -> float | None:
        """What `until` leaves to the dual variables beside the gap and rounding, or an error if nothing.

        `what` is the option that asks, for messages.
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
