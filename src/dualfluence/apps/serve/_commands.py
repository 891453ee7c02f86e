"""`dualfluence serve` and `dualfluence verify` on the command line."""

from pathlib import Path
from typing import Annotated, Literal

import typer

NETWORK = (
    "module:function that returns (apply_fn, params) or a kernel: the function that the file "
    "was fitted with."
)

VERIFIED = "module:function as for serve. K is computed again with it instead of being trusted."
HEAD = "Hash of a line that you kept: a ledger that was cut before this line is refused."


def register(app: typer.Typer) -> None:
    """Add both commands."""

    @app.command(name="serve")
    def serve_command(
        model: Annotated[Path, typer.Argument(help="File of the fitted model.")],
        ledger: Annotated[Path, typer.Option(help="Folder of the ledger.")],
        network: Annotated[str, typer.Option(help=NETWORK)],
        ids: Annotated[Path | None, typer.Option(help="Names, one per line and point.")] = None,
        references: Annotated[
            Literal["keep", "pseudonymise", "erase"],
            typer.Option(help="How lines identify persons."),
        ] = "keep",
        host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
        port: Annotated[int, typer.Option(min=0, max=65535, help="Port.")] = 8765,
        head: Annotated[str | None, typer.Option(help=HEAD)] = None,
        x64: Annotated[bool, typer.Option(help="Compute in float64.")] = True,
        warm: Annotated[
            bool, typer.Option(help="Compile attributions before the first request.")
        ] = True,
    ) -> None:
        """Serve requests to a model: remove, preview, predict, attribute, ledger, health."""
        import jax

        if x64:
            jax.config.update("jax_enable_x64", True)
        try:
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise typer.BadParameter(
                "serve needs an extra. Install it with: pip install 'dualfluence[serve]'"
            ) from error
        from ...unlearning import open as open_desk
        from ._app import make_app
        from ._model import load_fitted, read_names
        from ._run import address, listen, run
        from ._token import read_token

        listener = listen("serve", host, port)  # before the work, which takes longer
        ledger.mkdir(parents=True, exist_ok=True)
        token = read_token(ledger / "token")
        fitted = load_fitted(model, network)
        desk = open_desk(ledger, fitted, ids=read_names(ids), references=references, head=head)
        for note in desk.notes:
            typer.echo(f"note: {note}")
        here = f"listening at {address(host, listener)}; the token is in {ledger / 'token'}"
        run(make_app(desk, token, warm=warm), listener, lambda: typer.echo(here))

    @app.command(name="verify")
    def verify_command(
        ledger: Annotated[Path, typer.Argument(help="Ledger, or its folder.")],
        model: Annotated[Path | None, typer.Option(help="Model saved by a checkpoint.")] = None,
        network: Annotated[str | None, typer.Option(help=VERIFIED)] = None,
        at: Annotated[
            int | None,
            typer.Option(min=1, help=("Line that the model belongs to; by default the last.")),
        ] = None,
        head: Annotated[str | None, typer.Option(help=HEAD)] = None,
        documents: Annotated[
            Path | None, typer.Option(help="Folder for certificate documents.")
        ] = None,
        x64: Annotated[bool, typer.Option(help="Compute K of the network in float64.")] = True,
    ) -> None:
        """Check a ledger's chain and a model's certificate with NumPy alone, K by the network if named."""
        from ..._support.files import FileError
        from ...unlearning import verify
        from ...unlearning._documents import write_documents
        from ...unlearning._ledger import read_lines

        if network is not None and model is None:
            raise typer.BadParameter("--network was given without --model. Give --model too")
        if network is not None and x64:
            import jax

            jax.config.update("jax_enable_x64", True)
        from ._model import kernel_of

        try:
            kernel = None if network is None or model is None else kernel_of(model, network)
            report = verify(ledger, model, kernel=kernel, at=at, head=head)
        except (FileError, ValueError) as error:
            typer.echo(f"PROBLEM: {error}")
            raise typer.Exit(1) from error
        typer.echo(report.summary())
        if not report.valid:
            raise typer.Exit(1)
        if documents is not None:
            path = ledger / "ledger.jsonl" if ledger.is_dir() else ledger
            for line in read_lines(path)[0]:
                write_documents(line, documents)
            typer.echo(f"documents in {documents}")
