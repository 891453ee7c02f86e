"""Calls every public name on ordinary input, in a process of its own; prints one line of JSON.

`python tests/ordinary_worker.py slice 32` takes each quick row once, `"turn 1"` every row once and
elsewhere, `full` every row at every `n` and `c`. With 32 bits JAX is left as it comes; with 64 it is told
to use them. Further words choose rows by their names.
"""

import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MPLBACKEND"] = "Agg"
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import jax
import numpy as np


def main(extent: str, bits: int, *words: str) -> dict:
    if bits == 64:
        jax.config.update("jax_enable_x64", True)
    from ordinary import rows, table  # noqa: F401

    warnings.simplefilter("error")
    calls, failures = 0, []
    chosen = [
        r for r in table.ROWS if not words or any(w in name for w in words for name in r.names)
    ]
    with tempfile.TemporaryDirectory() as folder:
        for sizes, part in plan(chosen, extent).items():
            case = table.Case(*sizes, bits, Path(folder) / "-".join(map(str, sizes)))
            case.folder.mkdir()
            for row in part:
                start = time.process_time()
                error = failure(row, case)
                seconds = time.process_time() - start
                calls += len(row.names)
                if os.environ.get("ORDINARY") == "--each":
                    print(
                        f"{seconds:.2f} s {row.check.__name__} {sizes} {error or ''}",
                        file=sys.stderr,
                    )
                if error is not None:
                    failures.append([row.check.__name__, *sizes, f"float{bits}", error])
                    if os.environ.get("ORDINARY") == "--first":
                        return {"calls": calls, "failures": failures}
    return {"calls": calls, "seconds": round(time.process_time(), 1), "failures": failures}


def plan(rows, extent):
    """Rows by `(n, c)`, so that those of one case share its models."""
    found = {}
    for k, row in enumerate(rows):
        for sizes in row.sizes(extent, k):
            found.setdefault(sizes, []).append(row)
    return dict(sorted(found.items()))


def failure(row, case) -> str | None:
    """What went wrong, in words, with the line of the row."""
    np.random.seed(0)
    try:
        row.check(case)
    except Exception as error:  # a row may fail in any way
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "ordinary" in f.filename and f.name != "failure"]
        where = f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?"
        if os.environ.get("ORDINARY") == "--trace":
            traceback.print_exc()
        return f"{where} {type(error).__name__}: {' '.join(str(error).split())[:500]}"
    return None


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])))
