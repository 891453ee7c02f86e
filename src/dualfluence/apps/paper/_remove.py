"""A removal by one of the paper's forms, with the checks and the certificate of `Fitted.edit`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._support.compile import in_own_precision
from ..._support.options import Clock
from ...dual._newton import inspect_jit, op_mv
from ...fitted._fitted import Fitted
from ...fitted._update import Update
from ...problem._certificate import Certificate, NotConverged, OnFailure, Stats
from ...problem._edits import AbstractEdit, apply_edits
from ...problem._objective import State
from ._forms import REMOVE_ALONE, AbstractPaperForm, FormSolution, PaperCG

PAPER_CG = PaperCG()


@in_own_precision
def remove(
    fitted: Fitted,
    edits: AbstractEdit | Sequence[AbstractEdit],
    *,
    form: AbstractPaperForm = PAPER_CG,
    on_failure: OnFailure = "raise",
) -> Update:
    r"""The model after a removal, by one step of the paper's system instead of ours.

    The certificate and every check are those of `Fitted.edit`; only the system differs. The certificate
    is computed from a fresh product `Kα`. If `K` lacks full rank, the system does not determine the part
    of `α` in its null space. Rounding lets that part change `Kα`, which a running sum of products would
    miss.

    **Arguments:**

    - `fitted`: a model at its optimum.
    - `edits`: `Remove`, or several in a list. The paper's systems are only for removals.
    - `form`: `PaperCG` (eq. 12 by conjugate gradients), `PaperDirect` (eq. 12 by a direct solve),
      `PaperFull` (eq. 5 by conjugate gradients) or `FullDataHessian` (the Hessian of all points, an
      approximation for small removals).
    - `on_failure`: `"report"` returns an answer that missed its tolerance, marked in `stats`.

    **Returns:** an `Update`, as `Fitted.edit` does.
    """
    _check_options(form, on_failure)
    data = apply_edits(edits, fitted.data, fitted.loss, fitted.num_outputs)
    if data.num_points != fitted.data.num_points:
        raise ValueError(REMOVE_ALONE)
    clock, op, after = Clock(), fitted.kernel_op, fitted.problem(data)
    found = form.solve(op, fitted.problem(), after, fitted.state)
    alpha = fitted.state.alpha + found.delta
    point = inspect_jit(op, after, State(alpha, op_mv(op, alpha)), fitted.kernel_diagonal)
    certificate = point.norms.certificate(fitted.ridge)
    stats = _stats(form, found, clock.stop(point))
    _check(form, found, certificate, on_failure)
    return Update(
        source=fitted.source,
        data=data,
        state=point.state,
        reference=fitted.reference,
        before=fitted,
        certificate=fitted._widened(certificate),
        stats=stats,
    )


def _check_options(form: Any, on_failure: Any) -> None:
    if not isinstance(form, AbstractPaperForm):
        raise TypeError(
            "remove: form must be PaperCG, PaperDirect, PaperFull or FullDataHessian, got "
            f"{form!r}. The solvers of this library are options of Fitted.edit."
        )
    if on_failure not in ("raise", "report"):
        raise ValueError(f"remove: on_failure must be 'raise' or 'report', got {on_failure!r}.")


def _stats(form: AbstractPaperForm, found: FormSolution, seconds: float) -> Stats:
    return Stats(
        steps=1,
        iterations=found.iterations,
        products=found.products + 2 * found.iterations,
        converged=found.converged,
        residual=found.residual,
        seconds=seconds,
        solver=repr(form),
        reason="asked for",
    )


def _check(
    form: AbstractPaperForm, found: FormSolution, certificate: Certificate, on_failure: OnFailure
) -> None:
    """Raise on numbers that are not finite, and on a residual that was not reached."""
    name = type(form).__name__
    if not np.isfinite(found.residual + certificate.distance_bound):
        raise FloatingPointError(
            f"remove: the solution of {name} is not finite. The paper's system is singular where the "
            "kernel of the retained points lacks full rank. Try PaperCG, or Fitted.edit, whose system "
            "needs no full rank."
        )
    if not found.converged and on_failure == "raise":
        raise NotConverged(
            f"remove: {name} stopped after {found.iterations} iterations at a relative residual "
            f"of {found.residual:.3g} of this system and a certified distance of "
            f"{certificate.distance_bound:.3g}. Try float64, a larger rtol, or Fitted.edit; "
            "on_failure='report' returns this answer."
        )
