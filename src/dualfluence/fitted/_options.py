"""First stage: the options of a call, checked. How to store `K`, its sketch, and how to run."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
from jaxtyping import PRNGKeyArray

from .._support.checks import check_fraction
from .._support.options import (
    ProgressFn,
    check_choice,
    check_count,
    check_flag,
    check_instance,
    check_key,
    check_on_failure,
    check_progress,
    check_solver,
    maybe,
)
from ..operators import AbstractKernelOperator
from ..problem._certificate import OnFailure
from ..solvers import AbstractDualSolver, Auto

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
      float64 if the answer in float32 would be refused. On a CPU, with up to 2,048 unknowns, it does so
      already if float32 would miss its tolerance. `True` keeps `K` in float32, dual variables and
      residuals in float64, and refines float32 solves, also in the fit. `False` stays in float32.
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


def check_operator(name: str, op: object) -> None:
    """Raise unless `op` is an operator."""
    example = (
        "an operator, from kernel_operator(...) or store.operator() (a low-rank model goes in place "
        "of model)"
    )
    check_instance(name, op, AbstractKernelOperator, example)


def kernel_options(what: str, kernel: KernelArgument) -> KernelOptions:
    """The `KernelOptions` for the argument `kernel=`."""
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


@dataclass(frozen=True, eq=False)
class Sketch:
    """The preconditioner of CG: the `sketch` of `fit` and `from_trained`.

    - `rank`: number of columns; 0 for no preconditioner. By default 200, or an eighth of the unknowns,
      if the solver is CG.
    - `key`: randomness; `jax.random.key(0)` by default.
    """

    rank: int | None = None
    key: PRNGKeyArray | None = None

    def __post_init__(self) -> None:
        maybe(check_key, "Sketch: key", self.key)
        rank = maybe(check_count, "Sketch: rank", self.rank, least=0)
        object.__setattr__(self, "rank", rank)  # NumPy's integers as Python's


DEFAULT = Sketch()


def as_sketch(what: str, sketch: Sketch | None) -> Sketch:
    """The sketch that was asked for, or the default."""
    maybe(check_instance, f"{what}: sketch", sketch, kinds=Sketch, example="a Sketch(rank, key)")
    return DEFAULT if sketch is None else sketch


AUTO = Auto()


class Settings(NamedTuple):
    """What the caller asked of a run.

    - `what`: the name of the calling function, for messages.
    - `solver`: of the linear systems.
    - `rtol`: relative residual of the last linear system; `None` for the default of the dtype.
    - `on_failure`: whether an answer short of its goal is an error.
    - `progress`: where to report.
    """

    what: str
    solver: AbstractDualSolver | Auto
    rtol: float | None
    on_failure: OnFailure
    progress: bool | ProgressFn


def settings(
    what: str,
    solver: AbstractDualSolver | Auto | None,
    rtol: float | None,
    on_failure: OnFailure,
    progress: bool | ProgressFn,
) -> Settings:
    """Checked settings, `Auto` where no solver was given."""
    check_solver(what, solver, (AbstractDualSolver, Auto))
    check_fraction(f"{what}: rtol", rtol)
    check_on_failure(what, on_failure)
    check_progress(what, progress)
    return Settings(what, solver or AUTO, rtol, on_failure, progress)


def is_auto(ridge: object) -> bool:
    """Whether the ridge is `"auto"`; any other string raises an error."""
    if isinstance(ridge, str) and ridge != "auto":
        raise ValueError(f"ridge: λ must be a positive number or 'auto', got {ridge!r}.")
    return isinstance(ridge, str)
