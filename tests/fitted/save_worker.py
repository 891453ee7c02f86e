"""Saves two states in turn to one file, for ever: `PATH`."""

import sys
from pathlib import Path

import numpy as np

from dualfluence._support.archive import write_archive

path = Path(sys.argv[1])
for count in range(10**9):
    value = 1 + count % 2
    header = {"format": "worker", "version": 1, "value": value}
    write_archive(path, header, {"a": np.full(2**20, value)})
    if count == 0:
        print("started", flush=True)
