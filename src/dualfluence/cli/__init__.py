"""The `dualfluence` command."""

import sys


def main() -> None:
    """Run the command, or say what to install if its extra is missing."""
    try:
        from ._app import app
    except ImportError as error:
        sys.exit(
            f"dualfluence: the command needs {error.name}, which is part of an extra. "
            "Install it with: pip install 'dualfluence[cli]'"
        )
    app()
