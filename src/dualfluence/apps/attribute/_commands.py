"""`dualfluence attribute` and `dualfluence audit` on the command line.

Each imports what it needs when it runs, so that `--help` starts at once.
"""

from pathlib import Path
from typing import Annotated

import typer

DATA = "Data as .npz: x, y, xq, yq, and optionally groups. By default mnist-small."
MODEL = "module:function that returns (apply_fn, params) or a kernel. By default a wide network."


def register(app: typer.Typer) -> None:
    """Add both commands."""

    @app.command(name="attribute")
    def attribute_command(
        data: Annotated[Path | None, typer.Option(help=DATA)] = None,
        model: Annotated[str | None, typer.Option(help=MODEL)] = None,
        out: Annotated[Path, typer.Option(help="Folder for page and table.")] = Path(
            "dualfluence-attribution"
        ),
        points: Annotated[
            int | None, typer.Option(min=2, help="Number of points, from the first.")
        ] = None,
        queries: Annotated[
            int, typer.Option(min=1, help="Number of queries, from the first.")
        ] = 12,
        top: Annotated[int, typer.Option(min=1, help="Points in each strip.")] = 8,
        ridge: Annotated[float, typer.Option(help="λ of the ridge.")] = 1e-3,
    ) -> None:
        """Show which training points made each prediction, as a page and a table."""
        from rich.console import Console

        from ..._support.files import check_writable
        from ._data import load_data, load_model
        from ._page import write_queries
        from ._queries import explain

        console = Console()
        page, table = out / "attribution.html", out / "attribution.csv"
        check_writable(page)
        rows = load_data(data, points=points, queries=queries)
        with console.status("starting") as status:
            result = explain(
                load_model(model),
                rows,
                ridge=ridge,
                k=top,
                report=lambda text: status.update(f"{text} …"),
            )
        write_queries(result, page, table, shown=queries)
        console.print(f"{result['attribution']!r}", soft_wrap=True)
        console.print(f"Page: {page}  Table: {table}", soft_wrap=True)

    @app.command(name="audit")
    def audit_command(
        data: Annotated[Path | None, typer.Option(help=DATA)] = None,
        model: Annotated[str | None, typer.Option(help=MODEL)] = None,
        out: Annotated[Path, typer.Option(help="Folder for page and table.")] = Path(
            "dualfluence-audit"
        ),
        points: Annotated[
            int | None, typer.Option(min=2, help="Number of points, from the first.")
        ] = None,
        queries: Annotated[
            int, typer.Option(min=1, help="Number of queries, from the first.")
        ] = 200,
        ridge: Annotated[float, typer.Option(help="λ of the ridge.")] = 1e-3,
    ) -> None:
        """Rank labels that look wrong, harmful and isolated points, and the effect of groups."""
        from rich.console import Console

        from ..._support.files import check_writable
        from ._audit import audit
        from ._data import load_data, load_model
        from ._page import write_audit

        console = Console()
        page, table = out / "audit.html", out / "audit.csv"
        check_writable(page)
        rows = load_data(data, points=points, queries=queries)
        with console.status("starting") as status:
            result = audit(
                load_model(model),
                rows,
                ridge=ridge,
                report=lambda text: status.update(f"{text} …"),
            )
        write_audit(result, page, table)
        worst = result["suspicion"].argsort()[::-1][:10]
        console.print(f"Most suspicious labels: points {', '.join(map(str, worst))}")
        console.print(f"Page: {page}  Table: {table}", soft_wrap=True)
