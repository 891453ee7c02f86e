"""`dualfluence explore` on the command line; imports what it needs when it runs."""

from pathlib import Path
from typing import Annotated

import typer

MODEL = (
    "Saved model, or module:function that returns (apply_fn, params) or a kernel. By default the "
    "network of the demo on embedded digits."
)
NETWORK = "For a saved model: module:function that it was fitted with."
DATA = "Data as .npz: x, y, xq, yq, and optionally groups. By default mnist-small."
SAVE = "Write the page as one file that needs no server, and exit."


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command(name="explore")
    def explore_command(
        model: Annotated[str | None, typer.Argument(help=MODEL)] = None,
        network: Annotated[str | None, typer.Option(help=NETWORK)] = None,
        data: Annotated[Path | None, typer.Option(help=DATA)] = None,
        points: Annotated[
            int | None, typer.Option(min=2, help="Number of points, from the first.")
        ] = None,
        queries: Annotated[
            int, typer.Option(min=1, max=500, help="Number of queries, from the first.")
        ] = 60,
        ridge: Annotated[float, typer.Option(help="λ of a model that is fitted here.")] = 1e-3,
        save: Annotated[Path | None, typer.Option(help=SAVE)] = None,
        host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
        port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for a free one.")] = 8766,
        browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = False,
        x64: Annotated[bool, typer.Option(help="Compute in float64.")] = True,
    ) -> None:
        """Open a page where one deletes a training point and watches what changes."""
        import jax

        if x64:
            jax.config.update("jax_enable_x64", True)
        from rich.console import Console

        from ..._support.files import check_writable
        from ._load import load_scene
        from ._session import Session

        console = Console()
        if save is not None:
            check_writable(save)
        else:
            _check_extra()
        with console.status("fitting the model …"):
            session = Session(
                load_scene(
                    model,
                    network=network,
                    data=data,
                    points=points,
                    queries=queries,
                    ridge=ridge,
                )
            )
        if save is not None:
            from ._run import save_page

            with console.status("leaving out every point …"):
                size = save_page(session, save)
            console.print(f"{save}: {size / 1e6:.1f} MB, opens without a server", soft_wrap=True)
            return
        from ._run import serve

        with console.status("compiling …"):
            session.warm_up()
        serve(session, host, port, browser=browser, tell=typer.echo)


def _check_extra() -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise typer.BadParameter(
            "explore needs an extra. Install it with: pip install 'dualfluence[serve]'"
        ) from error
