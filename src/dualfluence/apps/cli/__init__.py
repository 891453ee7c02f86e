"""The `dualfluence` command."""

import sys


def main() -> None:
    """Run the command; mistakes in its input end in one line, not in a traceback."""
    try:
        from ._app import app
    except ImportError as error:
        sys.exit(
            f"dualfluence: the command needs {error.name}, which is part of an extra. "
            "Install it with: pip install 'dualfluence[cli]'"
        )
    try:
        app()
    except (ValueError, OSError) as error:
        sys.exit(f"dualfluence: {error}")
