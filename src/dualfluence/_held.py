"""A model whose kernel on the training points is already there."""

from jaxtyping import Array, Float

from ._models import AbstractSource
from ._progress import ProgressFn
from .operators import AbstractKernelOperator


class HeldKernel(AbstractSource):
    """Another source with `K(x, x)` given, so that several fits share one kernel."""

    source: AbstractSource
    kernel_op: AbstractKernelOperator

    def base_outputs(self, x: Array, num_outputs: int | None) -> Float[Array, "n c"] | None:
        return self.source.base_outputs(x, num_outputs)

    def operator(
        self, x: Array, num_outputs: int, *, form: str, progress: bool | ProgressFn
    ) -> AbstractKernelOperator:
        have = (self.kernel_op.num_points, self.kernel_op.num_outputs)
        if have != (x.shape[0], num_outputs):
            raise ValueError(
                f"kernel_op: expected K of {x.shape[0]} points and {num_outputs} outputs, got one "
                f"of {have[0]} points and {have[1]} outputs."
            )
        return self.kernel_op

    def cross_mv(
        self, xq: Array, x: Array, v: Float[Array, "n c"], progress: bool | ProgressFn = True
    ) -> Float[Array, "q c"]:
        return self.source.cross_mv(xq, x, v, progress)

    def extend(
        self, op: AbstractKernelOperator, x: Array, x_new: Array, *, progress: bool | ProgressFn
    ) -> AbstractKernelOperator:
        return self.source.extend(op, x, x_new, progress=progress)
