"""Make the embedded `mnist-small` from the four original MNIST files.

    python scripts/make_mnist_small.py FOLDER

FOLDER holds the published `*.gz` files. Takes the first 200 images of each class in the order of
the training and of the test file, interleaves the classes, writes the bytes beside the code that
reads them, and prints the SHA-256 which that code must state.
"""

import argparse
from pathlib import Path

import numpy as np
import pooch

import dualfluence.datasets
from dualfluence.datasets._dataset import balanced_order
from dualfluence.datasets._mnist import FILES, NUM_CLASSES, SMALL_FILE, read_split

PER_CLASS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with the four original *.gz files")
    folder = parser.parse_args().folder

    for remote in FILES.values():
        found = pooch.file_hash(folder / remote.name)
        if found != remote.sha256:
            raise SystemExit(f"{remote.name}: SHA-256 {found}, expected {remote.sha256}")

    arrays = {}
    for split in ("train", "test"):
        paths = (folder / FILES[f"{split}-{kind}"].name for kind in ("images", "labels"))
        images, labels = read_split(*paths)
        order = balanced_order(labels, range(NUM_CLASSES), PER_CLASS, split)
        arrays |= {f"x_{split}": images[order], f"y_{split}": labels[order]}

    target = Path(dualfluence.datasets.__file__).parent / SMALL_FILE
    with target.open("wb") as file:
        np.savez_compressed(file, **arrays)
    print(f"{target.name}: {target.stat().st_size} bytes, SHA-256 {pooch.file_hash(target)}")


if __name__ == "__main__":
    main()
