"""The model of a ledger's line: its digest, its rows, its residual and bound, with NumPy alone.

See `_verify`: nothing here is shared with the code that made the model, but for the reader of its file.
"""

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._support.archive import Damaged, checking, read_archive

BLOCK = 256
"""Number of rows of `K` that are computed at a time. With twice this value, they take twice the memory."""

ENTRY_SLACK, NORM_SLACK = 1e3, 1e2
"""Units in the last place that entries of `K`, and `αᵀKα` next to the magnitudes it is a sum of, may be off.
Larger, and other kernels pass."""

COARSE = 1e-2
"""Allowed error of entries if `K` was multiplied in less than full precision."""

SETTLED = 1e3
"""Dual variables of a removed point count as zero up to this many units in the last place."""

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


class Saved(NamedTuple):
    """The content of a model's file, for the remaining points.

    - `header`, `arrays`: the header and the arrays of the file.
    - `kept`: which points have a weight.
    """

    header: dict[str, Any]
    arrays: dict[str, np.ndarray]
    kept: np.ndarray

    def rows(self, name: str) -> np.ndarray:
        """Numbers of the remaining points, in float64."""
        return np.asarray(self.arrays[name], np.float64)[self.kept]


def check_model(
    path: Path,
    lines: list[dict[str, Any]],
    line: dict[str, Any],
    kernel: Callable[[Any, Any], Any] | None,
    report: Any,
) -> None:
    """Compare the model in `path` with a line and add problems to the report."""
    saved = _read(path)
    report.line = line["sequence"]
    if _model_digest(saved, line["points"]) != line["model_after"]:
        report.problems.append(_whose(saved, lines, line))
        return
    report.problems += _row_problems(saved, line["points"])
    report.retained = int(saved.kept.size)
    if report.retained != line["retained"]:
        report.problems.append(
            f"line {line['sequence']} leaves {line['retained']} points, the model {report.retained}"
        )
    alpha = np.abs(saved.arrays["alpha"])
    gone = np.delete(alpha, saved.kept, axis=0)
    if gone.size and not gone.max() <= SETTLED * np.finfo(alpha.dtype).eps * alpha.max():
        report.problems.append("a removed point still carries weight in the model")
    claim = line["certificate"]
    report.claimed = claim["distance_bound"]
    if saved.header["reference"] is not None or claim["gap"] > 0:
        report.trusted.append(
            f"the gap of {claim['gap']:.3g}, which your own training left: it is a claim of the "
            "ledger"
        )
    _check_bound(saved, line, kernel, report)


def joined(*parts: bytes) -> str:
    """A hash over parts of known lengths."""
    return hashlib.sha256(b"".join(len(p).to_bytes(8, "big") + p for p in parts)).hexdigest()


def _read(path: Path) -> Saved:
    header, arrays = read_archive(path, "dualfluence-fitted", 3, "verify")
    with checking(path, "verify"):
        weights = arrays["sample_weights"]
        kept = np.flatnonzero(weights > 0)
        n, c = arrays["alpha"].shape
        side = n if header["operator"]["kronecker"] else n * c
        shapes = {"offset": (n, c), "sample_weights": (n,)}
        more = {"kernel": (side, side), "commitments": (n, 32), "blinds": (n, 32)}
        shapes |= {name: shape for name, shape in more.items() if name in arrays}
        for name, shape in shapes.items():
            if arrays[name].dtype.kind == "c" or arrays[name].shape != shape:
                raise Damaged(f"{name} has shape {arrays[name].shape}, not {shape}")
        for name in ("x", "targets"):
            if arrays[name].shape[:1] != (n,):
                raise Damaged(f"{name} has shape {arrays[name].shape} for {n} points")
        if arrays["alpha"].dtype.kind != "f":
            raise Damaged(f"alpha has dtype {arrays['alpha'].dtype}")
        if not (kept.size and np.isfinite(weights).all() and (weights >= 0).all()):
            raise Damaged("its sample weights are not valid")
        loss, ridge = header["loss"]["name"], header["ridge"]
        if type(loss) is not str or type(ridge) is not float or not ridge > 0:
            raise Damaged("its header is not that of a model")
        _points(header, arrays["x"][kept])
        _ = header["reference"], header["operator"]["precision"]
    return Saved(header, arrays, kept)


def _model_digest(saved: Saved, root: str) -> str:
    header, arrays = saved.header, saved.arrays
    parts = [header["loss"]["name"].encode(), root.encode()]
    ridge = np.asarray(header["ridge"], np.float64)
    for array in (arrays["alpha"], arrays["sample_weights"], ridge, arrays["offset"]):
        parts += [f"{array.dtype.str} {array.shape}".encode(), array.tobytes()]
    return joined(*parts)


def _whose(saved: Saved, lines: list[dict[str, Any]], line: dict[str, Any]) -> str:
    """Which line the model is of, if it is not the one it should be."""
    roots = {each["points"] for each in lines}
    own = {(root, _model_digest(saved, root)) for root in roots}
    others = [each["sequence"] for each in lines if (each["points"], each["model_after"]) in own]
    if not others:
        return "no line of the ledger is about this model"
    return (
        f"the model is that of line {others[-1]}, not of line {line['sequence']}: the model does "
        "not contain later requests. To compare it with that line, name the line (--at, at=)"
    )


def _row_problems(saved: Saved, root: str) -> list[str]:
    """Features and targets that are not those which the ledger is committed to."""
    commitments, blinds = (saved.arrays.get(name) for name in ("commitments", "blinds"))
    if commitments is None or blinds is None:
        return [
            "features and targets cannot be checked: the model file has no commitments to them. Save it "
            "with the desk's checkpoint"
        ]
    if joined(commitments.tobytes()) != root:
        return ["the model file does not have the commitments to its rows that the ledger names"]
    x, targets = saved.arrays["x"], saved.arrays["targets"]
    head = "".join(f"{a.dtype.name} {a.shape[1:]} " for a in (x, targets)).encode()
    wrong = []
    for i in saved.kept:
        content = hashlib.sha256(head + x[i].tobytes() + targets[i].tobytes()).digest()
        own = hashlib.sha256(blinds[i].tobytes() + content).digest()
        if own != commitments[i].tobytes():
            wrong.append(int(i))
    if not wrong:
        return []
    return [
        f"features or targets of {len(wrong)} points are not those of the ledger, the first at row {wrong[0]}"
    ]


def _check_bound(saved: Saved, line: dict[str, Any], kernel: Any, report: Any) -> None:
    claim, number = line["certificate"], line["sequence"]
    try:
        used = _Kernel(saved, kernel, report)
        slope = _slope(saved.header["loss"]["name"])
    except LookupError as error:
        report.problems.append(str(error.args[0]))
        return
    alpha, ridge = saved.rows("alpha"), saved.header["ridge"]
    k_alpha = used.times(alpha)
    weights = saved.rows("sample_weights")
    gradient = (weights / weights.sum())[:, None]
    gradient = gradient * slope(saved.rows("offset") + k_alpha, saved.rows("targets"))
    rho = gradient + ridge * alpha
    square = max(float((rho * used.times(rho)).sum()), 0.0)
    report.computed = math.sqrt(square) / ridge + claim["gap"]
    if claim["certified"]:
        bound = math.inf if claim["distance_bound"] is None else claim["distance_bound"]
        if not report.computed <= bound:
            report.problems.append(
                f"line {number} claims a distance of at most {bound:.6g}, but the residual gives "
                f"{report.computed:.6g}"
            )
    own, said = float((alpha * k_alpha).sum()), claim["parameter_norm"] ** 2
    roots = np.sqrt(np.maximum(used.diagonal, 0)) * np.abs(alpha)
    eps = float(np.finfo(saved.arrays["alpha"].dtype).eps)
    slack = math.sqrt(eps) * said + NORM_SLACK * eps * float(roots.sum()) ** 2
    if not abs(own - said) <= (COARSE * said if _is_coarse(saved) else 0) + slack:
        report.problems.append(
            f"line {number} claims a model of size {math.sqrt(said):.6g}, but αᵀKα gives "
            f"{math.sqrt(max(own, 0)):.6g}: K is not that of the model"
        )


def _is_coarse(saved: Saved) -> bool:
    return saved.header["operator"]["precision"] not in (None, "HIGHEST")


class _Kernel:
    """`v ↦ Kv` between the points that are left, by the kernel of the caller or, without one, the kernel
    of the file.

    - `diagonal`: of the `K` in use, known after the first product.
    """

    def __init__(self, saved: Saved, kernel: Any, report: Any) -> None:
        self.saved, self.kernel, self.report = saved, kernel, report
        self.stored = _stored(saved)
        self.diagonal: np.ndarray = np.zeros_like(saved.rows("alpha"))
        self.compared, self.narrow = self.stored is None or kernel is None, False
        if kernel is None and self.stored is None:
            raise LookupError(
                "the model file holds no kernel, so its bound cannot be computed. Save it with "
                "include_kernel=True, or name the kernel (--network, kernel=)"
            )
        if kernel is None:
            report.trusted.append(
                "K, as stored in the file. The bound holds only if this is the kernel of the "
                "model; name the kernel to have it computed again (--network, kernel=)"
            )

    def times(self, v: np.ndarray) -> np.ndarray:
        """`Kv`, some rows of `K` at a time."""
        parts, m = [], len(v)
        for start in range(0, m, BLOCK):
            stop = min(start + BLOCK, m)
            entries = self._rows(start, stop)
            if not self.compared:
                problems = _differing(self.saved, self.stored, entries, start)
                self.report.problems += problems
                self.narrow = not problems and _is_narrower(entries, self.saved.arrays["kernel"])
            if self.narrow:  # the file's rows agree and have more digits
                entries = self._stored_rows(start, stop)
            parts.append(_times(entries, v))
            diagonal = np.diagonal(entries, start * (len(entries) // (stop - start)))
            self.diagonal[start:stop] = diagonal.reshape(stop - start, -1)
        if self.narrow and not self.compared:
            self.report.trusted.append(
                "the digits of K beyond those of the kernel that was named, which computes in less "
                "precision than the file; name it in float64 to have them computed again"
            )
        self.compared = True
        return np.concatenate(parts)

    def _rows(self, start: int, stop: int) -> np.ndarray:
        header = self.saved.header
        m, c = self.diagonal.shape
        if self.kernel is None or (self.narrow and self.compared):
            return self._stored_rows(start, stop)
        points = self.saved.arrays["x"][self.saved.kept]
        here, all_points = _points(header, points[start:stop]), _points(header, points)
        entries = np.asarray(self.kernel(here, all_points))
        return entries.reshape((stop - start) * c, m * c) if entries.ndim == 4 else entries

    def _stored_rows(self, start: int, stop: int) -> np.ndarray:
        width = len(self.stored) // len(self.diagonal)
        return self.stored[start * width : stop * width]


def _is_narrower(entries: np.ndarray, stored: np.ndarray) -> bool:
    """Whether the named kernel computes in less precision than the file has."""
    return _eps(entries) > _eps(stored)


def _eps(array: np.ndarray) -> float:
    whole_or_wide = array.dtype.kind in "biu" or array.dtype.itemsize > 8
    return EPS["float64"] if whole_or_wide else EPS.get(array.dtype.name, COARSE)


def _stored(saved: Saved) -> Any:
    """`K` of the file between the points that are left, or `None`."""
    stored, rows = saved.arrays.get("kernel"), saved.kept
    if stored is None:
        return None
    if not saved.header["operator"]["kronecker"]:
        c = saved.arrays["alpha"].shape[1]
        rows = (rows[:, None] * c + np.arange(c)).reshape(-1)
    return np.asarray(stored[np.ix_(rows, rows)], np.float64)


def _times(entries: np.ndarray, v: np.ndarray) -> np.ndarray:
    """`Kv` for rows of `K`: of points where outputs share them, else of points and outputs."""
    entries = np.asarray(entries, np.float64)
    if entries.shape[1] == v.shape[0]:
        return entries @ v
    return (entries @ v.reshape(-1)).reshape(-1, v.shape[1])


def _differing(saved: Saved, stored: np.ndarray, entries: np.ndarray, start: int) -> list[str]:
    """Whether some rows of the file's `K` are those of the caller's kernel."""
    c = saved.arrays["alpha"].shape[1]
    eps = max(_eps(saved.arrays["kernel"]), _eps(entries))
    if entries.shape[1] != stored.shape[1]:
        entries, stored = (
            np.kron(a, np.eye(c)) if a.shape[1] == saved.kept.size else a for a in (entries, stored)
        )
    width = stored.shape[1] // saved.kept.size
    rows = stored[start * width : start * width + len(entries)]
    slack = COARSE if _is_coarse(saved) else min(ENTRY_SLACK * eps, COARSE)
    size = float(np.abs(entries).max())
    worst = float(np.abs(rows - entries).max())
    if worst <= slack * size:
        return []
    first = int(saved.kept[start])
    return [
        f"the file's K is not the kernel that was named: rows from point {first} on differ by {worst:.3g}"
    ]


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


def _slope(loss: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The gradient of a loss in the outputs."""
    if loss == "SquaredError":
        return lambda outputs, targets: outputs - targets
    if loss == "SoftmaxCrossEntropy":
        return lambda outputs, targets: _softmax(outputs) - targets
    if loss == "Logistic":
        return lambda outputs, targets: 0.5 * (1 + np.tanh(0.5 * outputs)) - targets
    raise LookupError(f"the loss {loss!r} is not known here; check it with your own code")


def _softmax(outputs: np.ndarray) -> np.ndarray:
    shifted = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)
