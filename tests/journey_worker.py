"""Runs the Python blocks of a page in order, as a reader who pastes them; prints one line of JSON.

`python tests/journey_worker.py PAGE 32 [PREAMBLE] [BLOCK ...]`, in an empty folder. With 32 bits the lines
that switch float64 on are left out, so that JAX is as it comes. `PREAMBLE` is a file with what the page takes
for granted (`-` for none); blocks are counted from 1, all of them unless some are named.
"""

import contextlib
import io
import json
import os
import re
import socket
import sys
import traceback
import warnings
from pathlib import Path

BLOCK = re.compile(r"^```(?:python|\{code-cell\} python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OPTION = re.compile(r"^:[a-z-]+:.*\n", re.MULTILINE)
X64 = re.compile(r"^.*jax_enable_x64.*\n", re.MULTILINE)


def blocks_of(text: str, bits: int) -> list[str]:
    found = [OPTION.sub("", block) for block in BLOCK.findall(text)]
    return [X64.sub("", block) for block in found] if bits == 32 else found


def refuse(*unused, **options):
    raise OSError("a page must run without a network")


def run(page: Path, bits: int, preamble: str, chosen: list[int]) -> dict:
    """What was printed and warned, and the error that ended the journey."""
    socket.socket.connect = socket.getaddrinfo = refuse
    steps = list(enumerate(blocks_of(page.read_text(), bits), 1))
    steps = [(k, block) for k, block in steps if not chosen or k in chosen]
    scope, out, error = {"__name__": "__main__"}, io.StringIO(), None
    with warnings.catch_warnings(record=True) as said, contextlib.redirect_stdout(out):
        warnings.simplefilter("default")
        try:
            if preamble != "-":
                exec(compile(Path(preamble).read_text(), preamble, "exec"), scope)
            for k, block in steps:
                exec(compile(block, f"{page.name}, block {k}", "exec"), scope)
        except Exception as reason:  # a page may fail in any way
            last = traceback.extract_tb(reason.__traceback__)
            at = next((f for f in last[::-1] if f.filename.startswith(page.name)), last[-1])
            error = f"{at.filename}, line {at.lineno}: {type(reason).__name__}: {reason}"
    told = [f"{w.category.__name__}: {w.message}" for w in said]
    return {"blocks": len(steps), "printed": out.getvalue(), "warned": told, "error": error}


if __name__ == "__main__":
    os.environ["MPLBACKEND"] = "Agg"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    page, bits, *rest = sys.argv[1:]
    preamble, chosen = (rest or ["-"])[0], [int(k) for k in rest[1:]]
    print(json.dumps(run(Path(page).resolve(), int(bits), preamble, chosen)))
