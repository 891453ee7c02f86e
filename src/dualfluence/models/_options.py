"""Options for `K`, in one object that every call takes."""

from dataclasses import dataclass
from typing import Any

import jax

from .._support.options import check_choice, check_count, check_flag, check_instance, maybe
from ..operators import AbstractKernelOperator

FORMS = ("auto", "dense", "matrix-free")


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelOptions:
    """How `K` is stored and multiplied: the argument `kernel` of `fit`, `from_trained`,
    `kernel_operator` and `kernel_gradient_descent`. The short forms `kernel="dense"` and `kernel=op`
    set only the form or only the operator.

    - `form`: `"dense"` stores `K`, `"matrix-free"` does not, `"auto"` stores it if it fits in memory.
    - `operator`: `K` on these points, if you have it: `store.build(...).operator()` for one on disk,
      `kernel_operator(...)`, `fitted.kernel_op`, or one of your own. The model is then used only for
      base outputs and queries.
    - `refine`: what a float32 model does if rounding limits its accuracy. By default it continues in
      float64: on a CPU wherever float32 would miss its tolerance (up to 2,048 unknowns), otherwise only
      if the answer would be refused. `True` keeps `K` in float32, dual variables and residuals in
      float64, and refines float32 solves, also in the fit. `False` stays in float32.
    - `precision`: of products with a dense `K`; `jax.lax.Precision.DEFAULT` allows TF32 or bfloat16 on
      accelerators, and `stats.notes` states the error of this.
    - `num_outputs`: `c`, if it follows neither from the model nor from the targets, as for a kernel
      with class labels.
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
                f"KernelOptions: form={self.form!r} and operator exclude each other, because the "
                f"operator, a {type(op).__name__}, already has a form. Leave one of them out."
            )
        if num_outputs not in (None, op.num_outputs):
            raise ValueError(
                f"KernelOptions: num_outputs={num_outputs}, but the operator has {op.num_outputs} "
                "outputs. Leave num_outputs out."
            )


KernelArgument = KernelOptions | AbstractKernelOperator | str | None
"""The values of `kernel=`: options, an operator, the name of a form, or nothing."""


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
