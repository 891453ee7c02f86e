"""One random problem against the truth: what the library promised, and what it must never do.

**Well-posed** is decided by the truth alone. Let `unit` be what one rounding of every number in the dual
iteration does to `θ`, by the certificate's own amplification `1/λ` (`truth.rounding_unit`), and `eps` that
of the dtype. A certificate is the root of a sum of squares over λ, so that what underflows in the sum is
below `lost = √(tiny·n·c)/λ`. A fit is well-posed where

- `MARGIN · (eps · unit + lost) ≤ RELATIVE · ‖θ* − θ₀‖` (or `unit` is 0): rounding leaves two digits of the
  answer, and
- no number at the optimum is beyond `RANGE` of the dtype, and
- the truth is known, `error ≤ RELATIVE · ‖θ* − θ₀‖`: anywhere else than at the optimum, the unit may be
  smaller by any factor, as it is where a loss has straight tails and the optimum lies in its bend. A refusal
  where it is not known counts as undecided.

An edit is well-posed where the fit before it is, the edited problem is, and the units of both together are
within that limit. With `until`, the distance that is asked for is above `2·MARGIN` units. Problems that are
not well-posed may be refused with `NotConverged`, `FloatingPointError` or `ValueError`; they may never be
certified falsely.
"""

import time
import traceback
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import truth
from random_problems import LOSS_OBJECTS, SOLVER_OBJECTS, Case, Data, Editor, make_case

import dualfluence as dfl
from dualfluence.apps import paper

MARGIN = 16.0
RELATIVE = 1e-2
CONVERGED = 0.5
"""A fit that calls itself converged has a `relative_bound` of at most this."""

OUTPUTS, UNDERFLOW = 1e-3, 1e-100
"""Or outputs certified to this share of the largest, or a distance next to underflow."""

RANGE = {"float64": 1e150, "float32": 1e18}
READOUT = 1e4
"""Read-outs may be off by this many units of rounding of the sums that they are."""

PAPER_FORMS = (paper.PaperDirect(), paper.PaperCG(), paper.PaperFull())
REFUSALS = (dfl.NotConverged, FloatingPointError, ValueError)


@dataclass
class Record:
    """What one problem showed."""

    index: int
    what: str
    certificates: int = 0
    refusals: int = 0
    undecided: int = 0
    well_posed: int = 0
    seconds: float = 0.0
    ratios: list[tuple[str, float]] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)

    def found(self, kind: str, call: str, detail: str) -> None:
        self.findings.append(
            {
                "index": self.index,
                "kind": kind,
                "call": call,
                "detail": detail[:400],
                "problem": self.what,
            }
        )


@dataclass(frozen=True)
class Posed:
    """An objective with its truth, and whether an answer in this dtype can be asked for.

    - `unit`: of rounding, with that of the fit before an edit.
    - `floor`: what rounding and underflow do to `θ`.
    """

    data: Data
    truth: truth.Truth
    well: bool
    unit: float
    floor: float

    @property
    def known(self) -> bool:
        return self.truth.error <= RELATIVE * self.truth.norm


class Checker:
    """Runs one problem; `bound_factor` spoils certificates, to see that the check can fail."""

    def __init__(self, case: Case, bound_factor: float = 1.0):
        self.case, self.factor = case, bound_factor
        self.record = Record(case.index, case.describe())
        self.eps = float(np.finfo(case.family.dtype).eps)
        self.size = np.zeros(case.data.phi.shape[2], truth.LD)

    def run(self) -> Record:
        start = time.perf_counter()
        try:
            self._run()
        except Exception:
            self.record.found("crash", "harness", traceback.format_exc()[-400:])
        self.record.seconds = time.perf_counter() - start
        return self.record

    def _run(self) -> None:
        case, editor = self.case, Editor(self.case)
        loss = LOSS_OBJECTS[case.family.loss]
        solver = SOLVER_OBJECTS[case.family.solver]
        kernel = dfl.KernelOptions(
            form="matrix-free" if case.family.kernel == "matrix-free" else "auto",
            refine=case.family.refine,
            num_outputs=None if case.family.is_network else case.family.c,
        )

        def fit() -> dfl.Fitted:
            return dfl.fit(
                case.model,
                case.x,
                case.y,
                loss=loss,
                ridge=case.ridge,
                weights=case.weights,
                kernel=kernel,
                solver=solver,
                progress=False,
            )

        fitted, posed = self._call("fit", fit, case.data, None)
        if fitted is None:
            return
        edit, data, name = editor.draw(case.data)

        def step() -> dfl.Update:
            return fitted.edit(edit, solver=solver, progress=False)

        update, _ = self._call(f"edit {name}", step, data, posed)
        self._paper(fitted, posed)
        mode = str(case.rng.choice(("steps=3", "until", "retrain")))
        again, edited = self._again(mode, name, fitted, edit, solver, data, posed)
        base = again if mode != "steps=3" or update is None else update
        if base is None:
            return
        edit, data, name = editor.draw(data)
        self._call(
            f"{mode}, commit, edit {name}",
            lambda: base.commit().edit(edit, solver=solver, progress=False),
            data,
            edited,
            fresh=mode != "steps=3",
        )

    def _paper(self, fitted: Any, posed: Posed) -> None:
        """Now and then the paper's own form: it may refuse, but not answer wrongly."""
        case, chunk = self.case, self.case.family.chunk
        samples = case.data.samples.copy()
        # All points present, one removed: one shape, hence one compilation for a chunk.
        if chunk % 3 or case.index % 4 != 1 or len(samples) < 2 or not samples.all():
            return
        form = PAPER_FORMS[chunk // 3 % len(PAPER_FORMS)]
        samples[0] = 0
        self._call(
            f"edit Remove paper {type(form).__name__}",
            lambda: paper.remove(fitted, dfl.Remove([0]), form=form),
            replace(case.data, samples=samples),
            posed,
            fresh=False,
        )

    def _again(
        self, mode: str, name: str, fitted: Any, edit: Any, solver: Any, data: Data, posed: Posed
    ) -> tuple[Any, Posed]:
        """The same edit, further: three steps, until a distance, or from scratch."""
        if mode == "retrain":
            return self._call(
                f"retrain {name}",
                lambda: fitted.retrain(edit, solver=solver, progress=False),
                data,
                posed,
            )
        if mode == "steps=3":
            return self._call(
                f"edit {name} steps=3",
                lambda: fitted.edit(edit, steps=3, solver=solver, progress=False),
                data,
                posed,
            )
        ahead = self._pose(data, posed)
        fraction = 1e-6 if self.case.family.dtype == "float64" else 1e-2
        until = max(fraction * ahead.truth.norm, 2 * MARGIN * ahead.floor)
        return self._call(
            f"edit {name} until={until:.3g}",
            lambda: fitted.edit(edit, until=until, solver=solver, progress=False),
            data,
            posed,
            until=until,
        )

    def _pose(self, data: Data, before: Posed | None, *starts: np.ndarray) -> Posed:
        family = self.case.family
        objective = data.objective(self.case.ridge, family.loss)
        true = truth.retrain(objective, *starts)
        unit = true.unit + (0.0 if before is None else before.unit)
        inside = max(true.largest, 0.0 if before is None else before.truth.largest)
        lost = np.sqrt(np.finfo(family.dtype).tiny * data.y.size) / self.case.ridge
        floor = self.eps * unit + float(lost)
        posed = Posed(data, true, before is None or before.well, unit, floor)
        enough = unit == 0 or MARGIN * floor <= RELATIVE * true.norm
        return replace(
            posed, well=posed.well and posed.known and enough and inside < RANGE[family.dtype]
        )

    def _call(
        self,
        call: str,
        fn: Any,
        data: Data,
        before: Posed | None,
        until: float | None = None,
        fresh: bool = True,
    ) -> tuple[Any, Posed]:
        record = self.record
        try:
            answer = fn()
        except Exception as error:
            posed = self._pose(data, before)
            record.refusals += 1
            record.undecided += not posed.known
            floor = self.eps * posed.unit / max(posed.truth.norm, 1e-300)
            said = f"{type(error).__name__}: {str(error)[:250]} [eps·unit/norm {floor:.1e}]"
            if not isinstance(error, REFUSALS):
                record.found("crash", call, said)
            elif posed.well and fresh:
                record.well_posed += 1
                record.found("refused", call, said)
            return None, posed
        posed = self._check(call, answer, data, before, until)
        return answer, posed

    def _check(
        self, call: str, answer: Any, data: Data, before: Posed | None, until: float | None
    ) -> Posed:
        record, cert = self.record, answer.certificate
        record.certificates += 1
        alpha = np.asarray(answer.alpha)
        if not self._finite(call, "alpha", alpha):
            return self._pose(data, before)
        delta, blur = truth.pulled_back(data.phi, alpha)
        posed = self._pose(data, before, delta)
        record.well_posed += posed.well
        true = posed.truth
        gap = delta - true.delta
        distance = float(np.sqrt(gap @ gap))
        error = true.error + blur
        bound = self.factor * float(cert.distance_bound)
        floor = self.eps * posed.unit / max(true.norm, 1e-300)
        said = (
            f"bound {bound:.3g}, true {distance:.3g} ± {error:.1e} "
            f"(ratio {distance / max(bound, 1e-300):.3g}), "
            f"‖θ*‖ {true.norm:.3g}, gradient {cert.gradient_norm:.2g}, rounding {cert.rounding:.2g} "
            f"[eps·unit/norm {floor:.1e}]"
        )
        if not bound >= distance - error:
            record.found("below-truth", call, said)
        elif not bound >= distance + error:
            record.undecided += 1
        if error < 0.1 * distance:
            record.ratios.append((_group(call), bound / distance))
        self._converged(call, answer, true, until, said)
        self._readouts(call, answer, data, delta, 0.0 if posed.well else bound)
        return posed

    def _converged(self, call: str, answer: Any, true: truth.Truth, until: Any, said: str) -> None:
        cert, kind = answer.certificate, None
        at_optimum = call.startswith(("fit", "retrain")) and "commit" not in call
        if not answer.stats.converged:
            kind = "not-converged"
        elif until is not None:
            kind = None if cert.distance_bound <= until else "loose"
        elif at_optimum and cert.relative_bound > CONVERGED and not _nothing_to_learn(answer):
            cancels = true.norm <= 1e-6 * true.uncancelled
            kind = "loose" + " (cancelling optimum)" * cancels
        if kind is not None:
            self.record.found(kind, call, said)

    def _readouts(
        self, call: str, answer: Any, data: Data, delta: np.ndarray, slack: float
    ) -> None:
        """Outputs, predictions, changes and parameters: finite, and what `α` says.

        `slack` is a distance in parameters that the answer does not promise anyway: the bound, where
        the problem is not well-posed.
        """
        # Outputs are sums over all steps so far: what was large before an edit still rounds.
        self.size += np.abs(data.phi.reshape(-1, data.phi.shape[2])).T @ np.abs(
            np.asarray(answer.alpha, truth.LD).reshape(-1)
        )
        queries = self.case.spare_x
        self._compare(call, "outputs", answer.outputs, data, delta, slack)
        try:
            self._compare(call, "predict", answer.predict(queries), self.case.spare, delta, slack)
            if isinstance(answer, dfl.Update):
                y = np.asarray(self.case.spare.y).astype(self.case.family.dtype)
                self._finite(call, "delta_loss", answer.delta_loss(queries, y))
            if self.case.family.is_network:
                self._parameters(call, answer.params(), delta)
        except Exception as error:
            self.record.found("readout", call, f"{type(error).__name__}: {error}")

    def _parameters(self, call: str, params: Any, delta: np.ndarray) -> None:
        """`θ₀ + Jᵀα`; a model of low rank has its own features, and `θ` is not made of them."""
        if not self._finite(call, "params", params) or self.case.family.kernel == "low-rank":
            return
        off = np.abs(np.asarray(params, truth.LD) - delta)
        if (off > READOUT * self.eps * self.size).any():
            self.record.found("readout", call, f"params off by {float(off.max()):.3g}")

    def _finite(self, call: str, name: str, values: Any) -> bool:
        finite = bool(np.isfinite(np.asarray(values)).all())
        if not finite:
            self.record.found("nan", call, name)
        return finite

    def _compare(
        self, call: str, name: str, got: Any, data: Data, delta: np.ndarray, slack: float
    ) -> None:
        if not self._finite(call, name, got):
            return
        off = np.abs(np.asarray(got, truth.LD) - (data.f0 + data.phi @ delta))
        unit = self.eps * (np.abs(data.phi) @ self.size + np.abs(data.f0))
        allowed = READOUT * unit + slack * np.sqrt((data.phi**2).sum(2))
        if (off > allowed).any():
            worst = float((off / np.maximum(unit, 1e-300)).max())
            said = f"{name} off by {float(off.max()):.3g}, {worst:.3g} units of rounding"
            self.record.found("readout", call, said)


def _nothing_to_learn(answer: Any) -> bool:
    """Where `‖θ − θ₀‖` is rounding itself, outputs decide: none may be off by more than OUTPUTS."""
    model = getattr(answer, "before", answer)
    reach = float(np.sqrt(np.max(np.asarray(model.kernel_diagonal))))
    off = reach * answer.certificate.distance_bound
    return off <= OUTPUTS * float(np.max(np.abs(np.asarray(answer.outputs)))) or off < UNDERFLOW


def _group(call: str) -> str:
    """Answers at the optimum, where the bound is mostly rounding, or some steps towards it."""
    towards = "commit" in call or "steps=3" in call or "paper" in call
    at = call.startswith(("fit", "retrain")) or "until" in call
    return "optimum" if at and not towards else "step"


def check_problem(index: int, bound_factor: float = 1.0) -> Record:
    """Problem `index` from its seed, checked."""
    return Checker(make_case(index), bound_factor).run()
