"""Check a ledger and a saved model with NumPy alone.

Nothing here is shared with the code that made them: hashes, losses, residual and bound are written again from
their definitions, so that a mistake there is not repeated here. The file trusts no field that it can compute.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

ZERO = "0" * 64


@dataclass
class Report:
    """What a check found.

    - `lines`: lines read.
    - `problems`: what is wrong, in words; empty means that everything agrees.
    - `line`: the line that the model belongs to, if one was given.
    - `claimed`, `computed`: the distance bound that the line states, and the one computed here.
    - `retained`: training points with weight.
    """

    lines: int = 0
    problems: list[str] = field(default_factory=list)
    line: int | None = None
    claimed: float | None = None
    computed: float | None = None
    retained: int | None = None

    @property
    def valid(self) -> bool:
        return not self.problems

    def summary(self) -> str:
        """The finding in a few lines."""
        said = [f"{self.lines} lines, each following from the one before"] if self.valid else []
        said += [f"PROBLEM: {problem}" for problem in self.problems]
        if self.computed is not None:
            claim = "no bound" if self.claimed is None else f"{self.claimed:.6g}"
            said.append(
                f"line {self.line}: distance to retraining on the {self.retained} retained points at most "
                f"{self.computed:.6g}, computed here from the residual; the ledger claims {claim}"
            )
        return "\n".join(said)


def verify(
    ledger: Any, model: Any = None, *, kernel: Callable[[Any, Any], Any] | None = None
) -> Report:
    """Check the chain of a ledger, and the certificate of a model saved from its desk.

    **Arguments:**

    - `ledger`: the file, or its folder.
    - `model`: a file written by `Desk.checkpoint` or `Fitted.save`.
    - `kernel`: `kernel(x1, x2)`, `(n1, n2)` or `(n1, c, n2, c)`, computed independently, with a scale of the
      ridge in it (`JPJᵀ`); without it the file must hold `K` (`include_kernel=True`), which is then believed.
    """
    path, report = Path(ledger), Report()
    path = path / "ledger.jsonl" if path.is_dir() else path
    lines = _chain(path.read_bytes(), report)
    if model is not None:
        _check_model(Path(model), lines, kernel, report)
    return report


def _chain(raw: bytes, report: Report) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    before, pieces = ZERO, raw.split(b"\n")
    if not raw:
        report.problems.append("the ledger is empty")
    if pieces[-1]:
        report.problems.append(f"line {len(pieces)} has no end: it is torn or was changed")
    for number, piece in enumerate(pieces[:-1], start=1):
        found = _line(piece, number, before)
        if isinstance(found, str):
            report.problems.append(f"line {number} {found}")
            break
        before = found["hash"]
        lines.append(found)
    report.lines = len(lines)
    for earlier, later in pairwise(lines):
        if earlier["model_after"] != later["model_before"]:
            report.problems.append(f"line {later['sequence']} starts from another model")
    return lines


def _line(piece: bytes, number: int, before: str) -> dict[str, Any] | str:
    try:
        found = json.loads(piece.decode("utf-8"))
    except (ValueError, RecursionError):
        return "is not JSON"
    if not isinstance(found, dict) or _text(found) != piece:
        return "is not in the form that it was written in"
    rest = {key: value for key, value in found.items() if key not in ("hash", "references")}
    if hashlib.sha256(_text(rest)).hexdigest() != found.get("hash"):
        return "does not have the hash of its fields"
    if found.get("before") != before or found.get("sequence") != number:
        return "does not follow from the line before"
    named = found.get("references")
    if named is not None:
        try:
            parts = (named["blind"].encode(), _text(named["names"]))
        except (TypeError, KeyError, AttributeError):
            return "has references in another form"
        if len(named) != 2 or _joined(parts) != found.get("references_hash"):
            return "has other references than it was written with"
    return found


def _text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _joined(parts: tuple[bytes, ...]) -> str:
    return hashlib.sha256(b"".join(len(p).to_bytes(8, "big") + p for p in parts)).hexdigest()


def _check_model(path: Path, lines: list[dict[str, Any]], kernel: Any, report: Report) -> None:
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(arrays.pop("meta").tobytes())
    own = _model_digest(arrays["alpha"], arrays["sample_weights"], header["ridge"])
    stands = [line for line in lines if line["model_after"] == own]
    if not stands:
        report.problems.append(f"no line of the ledger is about the model {own[:12]}…")
        return
    claim = stands[-1]["certificate"]
    report.line, report.claimed = stands[-1]["sequence"], claim["distance_bound"]
    kept = np.flatnonzero(arrays["sample_weights"] > 0)
    report.retained = int(kept.size)
    report.computed = _bound(header, arrays, kept, kernel) + claim["gap"]
    if claim["certified"] and not report.computed <= claim["distance_bound"]:
        report.problems.append(
            f"line {report.line} claims a distance of at most {claim['distance_bound']:.6g}, but the "
            f"residual gives {report.computed:.6g}"
        )
    if np.abs(np.delete(arrays["alpha"], kept, axis=0)).sum() > 0:
        report.problems.append("a removed point still carries weight in the model")


def _model_digest(alpha: np.ndarray, weights: np.ndarray, ridge: float) -> str:
    total = hashlib.sha256()
    for array in (alpha, weights, np.asarray(ridge, np.float64)):
        total.update(f"{array.dtype.str} {array.shape} ".encode() + array.tobytes())
    return total.hexdigest()


def _bound(
    header: dict[str, Any], arrays: dict[str, np.ndarray], kept: np.ndarray, kernel: Any
) -> float:
    r"""$\sqrt{\rho^\top K\rho}/\lambda$ from retained rows alone, in float64."""
    alpha, offset, targets = (
        np.asarray(arrays[name], np.float64)[kept] for name in ("alpha", "offset", "targets")
    )
    weights = arrays["sample_weights"][kept] / arrays["sample_weights"][kept].sum()
    K = _kernel_of(header, arrays, kept, kernel, alpha.shape[1])
    outputs = offset + K(alpha)
    gradient = weights[:, None] * _slope(header["loss"]["name"], outputs, targets)
    rho = gradient + header["ridge"] * alpha
    return math.sqrt(max(float((rho * K(rho)).sum()), 0.0)) / header["ridge"]


def _kernel_of(
    header: dict[str, Any], arrays: dict[str, np.ndarray], kept: np.ndarray, kernel: Any, c: int
) -> Callable[[np.ndarray], np.ndarray]:
    if kernel is not None:
        points = _points(header, arrays["x"][kept])
        matrix = np.asarray(kernel(points, points), np.float64)
    elif "kernel" in arrays:
        rows = kept
        if not header["operator"]["kronecker"]:
            rows = (kept[:, None] * c + np.arange(c)).reshape(-1)
        matrix = np.asarray(arrays["kernel"], np.float64)[np.ix_(rows, rows)]
    else:
        raise ValueError(
            "verify: the model file holds no kernel. Save it with include_kernel=True, or give kernel=."
        )
    if matrix.shape == (kept.size, kept.size) and (c == 1 or kernel is None or matrix.ndim == 2):
        return lambda v: matrix @ v
    flat = matrix.reshape(kept.size * c, kept.size * c)
    return lambda v: (flat @ v.reshape(-1)).reshape(v.shape)


def _points(header: dict[str, Any], rows: np.ndarray) -> Any:
    """Features as they were given: one array, or a tree of arrays, whose points are rows of bytes."""
    if "form" not in header:
        return rows
    tree, leaves = header["form"]
    ends = np.cumsum([math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in leaves])
    parts = [
        np.ascontiguousarray(part).view(np.dtype(dtype)).reshape(len(rows), *shape)
        for part, (shape, dtype) in zip(np.split(rows, ends[:-1], axis=1), leaves, strict=True)
    ]

    def placed(node: Any) -> Any:
        if not isinstance(node, list):
            return node if node is None else parts[node]
        kind, inner = node
        if kind == "dict":
            return {key: placed(part) for key, part in inner.items()}
        made = [placed(part) for part in inner]
        return tuple(made) if kind == "tuple" else made

    return placed(tree)


def _slope(loss: str, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    if loss == "SquaredError":
        return outputs - targets
    if loss == "SoftmaxCrossEntropy":
        shifted = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        return shifted / shifted.sum(axis=1, keepdims=True) - targets
    if loss == "Logistic":
        return 0.5 * (1 + np.tanh(0.5 * outputs)) - targets
    raise ValueError(f"verify: the loss {loss!r} is not known here; check it with your own code.")
