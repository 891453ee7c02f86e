"""`dualfluence attribute` and `dualfluence audit` on the command line.

Each imports what it needs when it runs, so that `--help` starts at once.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

Data = Annotated[
    Path | None,
    typer.Option(
        help="Data as .npz (x, y, xq, yq, perhaps groups), or with --text a table .csv or .tsv, perhaps "
        ".gz. By default mnist-small."
    ),
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
TABLES = (
    "Data as .npz (x, y, xq, yq, perhaps groups), or a table .csv or .tsv, perhaps .gz. "
    "By default mnist-small."
)
TASKS = (
    "For a table: classification or regression. By default numbers with a fraction are regression, "
    "names and few whole numbers are classification."
)


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
        label: Annotated[str, typer.Option(help="For a table: column of the labels.")] = "label",
        text: Annotated[str | None, typer.Option(help="For a table: column of texts.")] = None,
        prompt: Annotated[
            list[str] | None,
            typer.Option(help="For a table of texts: ask for this text instead of its last rows."),
        ] = None,
    ) -> None:
        """Show which training points made each prediction, as a page and a table."""
        from ._data import load_data, load_model
        from ._page import write_queries
        from ._queries import explain
        from ._table import is_table_file

        if is_table_file(data) or text is not None or prompt:
            _sentences(data, text, label, prompt, out, points, queries, model, ridge, top)
            return

        def answer(report: Callable[[str], None]) -> dict[str, Any]:
            rows = load_data(data, points=points, queries=queries)
            return explain(load_model(model), rows, ridge=ridge, k=top, report=report)

        page, table = out / "attribution.html", out / "attribution.csv"
        result = _watched(answer, page)
        write_queries(result, page, table, shown=queries)
        typer.echo(repr(result["attribution"]))
        typer.echo(f"Page: {page}  Table: {table}")

    @app.command(name="audit")
    def audit_command(
        data: Annotated[Path | None, typer.Option(help=TABLES)] = None,
        label: Annotated[str, typer.Option(help="For a table: column of the labels.")] = "label",
        text: Annotated[str | None, typer.Option(help="For a table: column of texts.")] = None,
        task: Annotated[str | None, typer.Option(help=TASKS)] = None,
        model: Model = None,
        out: Out = Path("dualfluence-audit"),
        points: Annotated[
            int | None, typer.Option(min=3, help="Number of points, from the first.")
        ] = None,
        queries: Queries = 200,
        ridge: Ridge = 1e-3,
        threshold: Annotated[
            float, typer.Option(help="Probability from which a label is called wrong.")
        ] = 0.5,
        near: Annotated[
            float,
            typer.Option(help="Distance below which points are near duplicates; 1 is the median."),
        ] = 0.25,
    ) -> None:
        """Find wrong labels, near duplicates, leaks, and points that decide all or nothing."""
        from rich.console import Console

        from ._inspect import audit_files

        found, written = _watched(
            audit_files,
            out / "findings.html",
            data,
            label=label,
            text=text,
            task=task,
            model=model,
            out=out,
            points=points,
            queries=queries,
            ridge=ridge,
            threshold=threshold,
            near=near,
        )
        console = Console()
        console.print(f"{found!r}", soft_wrap=True, markup=False)
        console.print(f"Written: {', '.join(map(str, written))}", soft_wrap=True, markup=False)


def _sentences(
    data: Path | None,
    text: str | None,
    label: str,
    prompts: list[str] | None,
    out: Path,
    points: int | None,
    queries: int,
    model: str | None,
    ridge: float,
    top: int,
) -> None:
    """A table of texts instead of arrays."""
    from ._sentences import explain_texts

    if model is not None:
        raise ValueError(
            "--model cannot be used with a table of texts, which is attributed with the library's own "
            "model. Leave it out."
        )
    result, written = _watched(
        explain_texts,
        out / "attribution.html",
        data,
        text=text,
        label=label,
        prompts=prompts or [],
        out=out,
        points=points,
        queries=queries,
        ridge=ridge,
        k=top,
    )
    typer.echo(repr(result))
    typer.echo(f"Page: {written[0]}  Table: {written[1]}")


def _watched(work: Callable[..., Any], page: Path, *args: Any, **options: Any) -> Any:
    """The result of `work`, which says on the terminal what it does. Its page must be writable first."""
    from rich.console import Console

    from ..._support.files import check_writable

    check_writable(page)
    with Console().status("starting") as status:
        report = lambda words: status.update(f"{words} …")  # noqa: E731
        return work(*args, report=report, **options)
