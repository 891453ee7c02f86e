"""`python -m dualfluence.experiments fig1 --scale smoke --out DIR`."""

import argparse
import sys
from pathlib import Path

from . import reproduce
from ._config import NAMES, SCALES


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, say where the results are."""
    parser = argparse.ArgumentParser(prog="python -m dualfluence.experiments", description=__doc__)
    parser.add_argument("name", choices=(*NAMES, "all"))
    parser.add_argument("--scale", choices=SCALES, default="smoke")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--resume", action="store_true", help="go on from what --out holds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, help="seconds after which no new piece is started")
    parser.add_argument("--percentages", type=_integers, help="e.g. 10,50,90")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--repeats", type=int, help="warm runs per method")
    parser.add_argument("--released-repeats", type=int, help="runs of the eager published methods")
    parser.add_argument("--cg-steps", type=int, help="of the published methods")
    parser.add_argument("--matmul-precision", help="e.g. highest, TF32_TF32_F32_X3")
    parser.add_argument("--plots-only", action="store_true", help="redraw from the JSON files")
    parser.add_argument("--quiet", action="store_true")
    given = parser.parse_args(arguments)
    overrides = {
        "percentages": given.percentages,
        "epochs": given.epochs,
        "repeats": given.repeats,
        "released_repeats": given.released_repeats,
        "cg_steps": given.cg_steps,
        "matmul_precision": given.matmul_precision,
    }
    finished = reproduce(
        given.name,
        scale=given.scale,
        out=given.out,
        data_dir=given.data_dir,
        resume=given.resume,
        seed=given.seed,
        budget=given.budget,
        overrides=overrides,
        plots_only=given.plots_only,
        progress=not given.quiet,
    )
    return 0 if finished else 3


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
