"""What there is to a trained model: its objective, `K`, dual variables and certificate.

What is asked of such a model (its edits, attributions, ridge path) lies in files of its own, and `Fitted`,
which puts it together, comes last.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

from jaxtyping import Array, Float

from ..losses import AbstractLoss
from ..operators import AbstractKernelOperator
from ..operators._layout import Layout
from ..problem._certificate import Certificate
from ..problem._edits import TrainingSet
from ..problem._objective import Problem, State, make_problem
from ..solvers import AbstractPreconditioner, SpectralPreconditioner
from ._fidelity import Fidelity
from ._readout import DualModel
from ._record import Stats


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

    @property
    def layout(self) -> Layout:
        """Rows of `kernel_op`; those past the points of `data` are spare, for points to come."""
        return self.kernel_op.layout.holding(self.data.num_points)

    @property
    def outputs(self) -> Float[Array, "n c"]:
        """Outputs at the training points."""
        return self.layout.points(self.offset + self.state.k_alpha)

    @property
    def num_outputs(self) -> int:
        return self.offset.shape[1]

    def problem(self, data: TrainingSet | None = None) -> Problem:
        """The objective on this training set, or on an edited one with the same rows."""
        data = data or self.data
        return make_problem(data, self.loss, self.ridge, self.offset, self.layout, self.epsilon)

    def without_spare_rows(self: "Trained") -> "Trained":
        """The same model with exactly one row per training point, as a fit from scratch has."""
        n, layout, pre = self.data.num_points, self.layout, self.preconditioner
        if layout.sharding is not None or layout.num_rows == n:
            return self
        if isinstance(pre, SpectralPreconditioner):
            pre = SpectralPreconditioner(layout.points(pre.features))
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
            preconditioner=pre,
        )


Trained = TypeVar("Trained", bound=TrainedModel)
"""`Fitted`, for what is asked of it in files before its own."""
