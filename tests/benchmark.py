"""Scripts of `benchmarks` as modules."""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(name):
    """The script of this name; what it imports beside it is found as when it is run."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
