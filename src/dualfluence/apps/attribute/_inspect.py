"""The body of `dualfluence audit`: data of either kind to findings, and to the page that one can explore."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...adapters import HashedText
from ...adapters._audit import audit
from ...attribution import Audit
from ._audit import audit as rank
from ._data import Data, load_data, load_model
from ._findings import Look, write_findings
from ._page import write_audit
from ._table import is_table_file, read_table

MOST_EXPLORED = 3000
"""Points up to which the page with the map is written: it holds every pair of point and query."""


def audit_files(
    path: Path | None,
    *,
    label: str,
    text: str | None,
    task: str | None,
    model: str | None,
    out: Path,
    points: int | None,
    queries: int,
    ridge: float,
    threshold: float,
    near: float,
    report: Callable[[str], None],
) -> tuple[Audit, list[Path]]:
    """Findings, and the files that were written."""
    page, table = out / "findings.html", out / "findings.csv"
    limits: dict[str, Any] = {"threshold": threshold, "near": near}
    if path is not None and is_table_file(path):
        if model is not None:
            raise ValueError(
                "--model cannot be used with a table, which is audited with the library's own model. "
                "Leave it out."
            )
        rows = read_table(path, label, text, points)
        report(f"leaving out each of {len(rows.y)} points")
        encoder = HashedText() if rows.is_text else None
        found = audit(None, rows.x, rows.y, encoder=encoder, task=task, **limits)
        write_findings(found, path.name, Look(rows.shown, None), page, table)
        return found, [page, table]
    if task is not None:
        raise ValueError(
            "--task is only for tables. For an .npz file, targets that are whole numbers are taken as "
            "classes. Leave it out."
        )
    data = load_data(path, points=points, queries=queries)
    written, result = [page, table], None
    if len(data.x) <= MOST_EXPLORED:
        result = rank(load_model(model), data, ridge=ridge, report=report)
        written += [out / "audit.html", out / "audit.csv"]
        write_audit(result, written[2], written[3])
    report("looking for findings")
    found = _findings(model, data, result, limits)
    write_findings(found, data.name, Look(data.x, data.xq), page, table)
    return found, written


def _findings(model: str | None, data: Data, result: Any, limits: dict[str, Any]) -> Audit:
    """Of the user's own model where there is one, else of the library's."""
    if model is not None:
        if result is None:
            raise ValueError(
                f"--model: expected at most {MOST_EXPLORED} points, got {len(data.x)}. Give --points."
            )
        return audit(result["fitted"], x_test=data.xq, y_test=data.yq, **limits)
    task = "classification" if data.is_classes else "regression"
    asked = {"x_test": data.xq, "y_test": data.yq}
    return audit(None, data.x, data.y, task=task, **asked, **limits)
