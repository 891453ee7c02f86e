"""`dualfluence attribute` and `dualfluence audit` on the command line.

Each imports what it needs when it runs, so that `--help` starts at once.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

Data = Annotated[
    Path | None,
    typer.Option(help="Data as .npz: x, y, xq, yq, and optionally groups. By default mnist-small."),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="module:function that returns (apply_fn, params) or a kernel. By default a wide network."
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for page and table.")]
Points = Annotated[int | None, typer.Option(min=2, help="Number of points, from the first.")]
Queries = Annotated[int, typer.Option(min=1, help="Number of queries, from the first.")]
Ridge = Annotated[float, typer.Option(help="λ of the ridge.")]
FOLDER = Path("dualfluence-attribution")


def register(app: typer.Typer) -> None:
    """Add both commands."""

    @app.command(name="attribute")
    def attribute_command(
        data: Data = None,
        model: Model = None,
        out: Out = FOLDER,
        points: Points = None,
        queries: Queries = 12,
        top: Annotated[int, typer.Option(min=1, help="Points in each strip.")] = 8,
        ridge: Ridge = 1e-3,
    ) -> None:
        """Show which training points made each prediction, as a page and a table."""
        from ._page import write_queries
        from ._queries import explain

        result = _answered(explain, data, model, out, points, queries, ridge=ridge, k=top)
        page, table = out / "attribution.html", out / "attribution.csv"
        write_queries(result, page, table, shown=queries)
        typer.echo(repr(result["attribution"]))
        typer.echo(f"Page: {page}  Table: {table}")

    @app.command(name="audit")
    def audit_command(
        data: Data = None,
        model: Model = None,
        out: Out = Path("dualfluence-audit"),
        points: Points = None,
        queries: Queries = 200,
        ridge: Ridge = 1e-3,
    ) -> None:
        """Rank labels that look wrong, harmful and isolated points, and the effect of groups."""
        from ._audit import audit
        from ._page import write_audit

        result = _answered(audit, data, model, out, points, queries, ridge=ridge)
        page, table = out / "audit.html", out / "audit.csv"
        write_audit(result, page, table)
        worst = result["suspicion"].argsort()[::-1][:10]
        typer.echo(f"Most suspicious labels: points {', '.join(map(str, worst))}")
        typer.echo(f"Page: {page}  Table: {table}")


def _answered(
    question: Any, data: Any, model: Any, out: Path, points: Any, queries: int, **options: Any
) -> Any:
    """What the question finds about the model, after the folder was tried."""
    from rich.console import Console

    from ..._support.files import check_writable
    from ._data import load_data, load_model

    check_writable(out / "page.html")
    rows = load_data(data, points=points, queries=queries)
    with Console().status("starting") as status:
        report = lambda text: status.update(f"{text} …")  # noqa: E731
        return question(load_model(model), rows, report=report, **options)
