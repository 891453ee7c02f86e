"""What a caller may say about `K`, in one object that every call takes."""

from dataclasses import dataclass
from typing import Any

import jax

from .._support.options import check_choice, check_count, check_flag, check_instance, maybe
from ..operators import AbstractKernelOperator

FORMS = ("auto", "dense", "matrix-free")


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelOptions:
    """How `K` is held and multiplied: the `kernel` of `fit`, `from_trained`, `kernel_operator` and
    `kernel_gradient_descent`. A form by its name, `kernel="dense"`, or an operator, `kernel=op`, stand for
    options with nothing else in them.

    - `form`: `"dense"` holds `K`, `"matrix-free"` does not, `"auto"` holds it if it fits in memory.
    - `operator`: `K` on these points, if you have it: `store.build(...).operator()` for one on disk,
      `kernel_operator(...)`, `fitted.kernel_op`, or one of your own. The model then serves base
      outputs and queries.
    - `refine`: what a float32 model does where rounding limits it. By default it goes on in float64: on a CPU
      wherever float32 would fall short of its tolerance (up to 2,048 unknowns), else where the answer
      would be refused. `True` keeps `K` in float32, dual variables and residuals in float64, and refines
      float32 solves, from the start. `False` stays in float32.
    - `precision`: of products with a dense `K`; `jax.lax.Precision.DEFAULT` allows TF32 or bfloat16
      on accelerators, and the error that makes is in `stats.notes`.
    - `num_outputs`: `c`, where neither model nor targets tell: a kernel with class labels.
    """

    form: str = "auto"
    operator: AbstractKernelOperator | None = None
    refine: bool | None = None
    precision: jax.lax.Precision | None = None
    num_outputs: int | None = None

    def __post_init__(self) -> None:
        check_choice("KernelOptions: form", self.form, FORMS)
        maybe(check_operator, "KernelOptions: operator", self.operator)
        refine = maybe(check_flag, "KernelOptions: refine", self.refine)
        kinds, example = jax.lax.Precision, "one of jax.lax.Precision, e.g. jax.lax.Precision.HIGH"
        maybe(
            check_instance,
            "KernelOptions: precision",
            self.precision,
            kinds=kinds,
            example=example,
        )
        c = maybe(check_count, "KernelOptions: num_outputs", self.num_outputs)
        if self.operator is not None:
            self._check_agreement(self.operator, c)
        object.__setattr__(self, "refine", refine)  # NumPy's flags and integers as Python's
        object.__setattr__(self, "num_outputs", c)

    def _check_agreement(self, op: AbstractKernelOperator, num_outputs: int | None) -> None:
        if self.form != "auto":
            raise ValueError(
                f"KernelOptions: form={self.form!r} and operator exclude each other: the operator, a "
                f"{type(op).__name__}, has its form. Leave one of them out."
            )
        if num_outputs not in (None, op.num_outputs):
            raise ValueError(
                f"KernelOptions: num_outputs={num_outputs}, but the operator has {op.num_outputs} "
                "outputs. Leave num_outputs out."
            )


KernelArgument = KernelOptions | AbstractKernelOperator | str | None
"""What `kernel=` takes: options, an operator, the name of a form, or nothing."""


def check_operator(name: str, op: Any) -> None:
    """Raise unless `op` is an operator."""
    example = (
        "an operator, from kernel_operator(...) or store.operator() (a low-rank model goes in place "
        "of model)"
    )
    check_instance(name, op, AbstractKernelOperator, example)


def kernel_options(what: str, kernel: Any) -> KernelOptions:
    """The options that `kernel=` stands for."""
    if kernel is None:
        return KernelOptions()
    if isinstance(kernel, KernelOptions):
        return kernel
    if isinstance(kernel, str):
        return KernelOptions(form=check_choice(f"{what}: kernel", kernel, FORMS))
    example = (
        f"one of {FORMS}, KernelOptions(...), or an operator from kernel_operator(...) or "
        "store.operator() (a low-rank model goes in place of model)"
    )
    kinds = (AbstractKernelOperator, KernelOptions)
    check_instance(f"{what}: kernel", kernel, kinds, example)
    return KernelOptions(operator=kernel)
