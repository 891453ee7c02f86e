"""CIFAR-10 in its binary record format, all of it or files that hold only some classes."""

import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from .._support.options import ProgressFn
from ._dataset import Dataset, check_label_range
from ._files import RemoteFile, fetch, find_file, given_folder, where_to_put

NUM_CLASSES = 10
SUBFOLDER = "cifar-10-batches-bin"
TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST_FILE = "test_batch.bin"
ARCHIVE = RemoteFile(
    "cifar-10-binary.tar.gz",
    170052171,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/"),
)
BY_HAND = (
    where_to_put(SUBFOLDER, [*TRAIN_FILES, TEST_FILE])
    + f" They are in {ARCHIVE.name}, which may also be in that folder without being unpacked."
)
ORIGIN = (
    "CIFAR-10, A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009, "
    "https://www.cs.toronto.edu/~kriz/cifar.html"
)
PIXEL_BYTES = 3 * 32 * 32
RECORD_BYTES = 1 + PIXEL_BYTES


def parse_records(content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Images `(n, 32, 32, 3)` and labels `(n,)`, unsigned bytes, of one binary file.

    A record is one label byte, then the red, green and blue planes of 32 by 32 bytes each. The
    format has no header: only the length and the labels can be checked.
    """
    if not content or len(content) % RECORD_BYTES:
        raise ValueError(
            f"{where}: {len(content)} bytes are not a whole, positive number of "
            f"{RECORD_BYTES}-byte records. The file is truncated or is not CIFAR-10's binary "
            "version (the Python version is another format)."
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD_BYTES)
    labels, planes = records[:, 0], records[:, 1:].reshape(-1, 3, 32, 32)
    check_label_range(labels, NUM_CLASSES, where)
    return planes.transpose(0, 2, 3, 1), labels


def read_files(
    data_dir: str | Path | None, progress: bool | ProgressFn
) -> Iterator[tuple[str, bytes]]:
    """Path and content of each file: the training files in order, then the test file."""
    folder = given_folder(data_dir)
    names = (*TRAIN_FILES, TEST_FILE)
    if folder is None:
        yield from unpack_archive(fetch(ARCHIVE, SUBFOLDER, BY_HAND, progress))
        return
    paths = [find_file(folder, SUBFOLDER, (name,)) for name in names]
    missing = [name for name, path in zip(names, paths, strict=True) if path is None]
    if not missing:
        yield from ((str(path), path.read_bytes()) for path in paths if path is not None)
    elif archive := find_file(folder, SUBFOLDER, (ARCHIVE.name,)):
        yield from unpack_archive(archive)
    else:
        raise FileNotFoundError(f"cifar10: {folder} lacks {', '.join(missing)}. {BY_HAND}")


def unpack_archive(archive: Path) -> Iterator[tuple[str, bytes]]:
    """The same from the published archive, unpacked in memory: nothing is written."""
    names = (*TRAIN_FILES, TEST_FILE)
    found = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                file = tar.extractfile(member) if name in names else None
                if file is not None:
                    found[name] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{archive}: damaged or truncated archive ({error}).") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{archive}: lacks {', '.join(missing)}.")
    for name in names:
        yield f"{archive}, {name}", found[name]


def load_cifar10(
    classes: Sequence[int] = (0, 1),
    data_dir: str | Path | None = None,
    progress: bool | ProgressFn = True,
) -> Dataset:
    """The images of some classes, in the order of the files, pixels `(n, 32, 32, 3)`."""
    wanted = sorted(set(classes))
    if not wanted or wanted[0] < 0 or wanted[-1] >= NUM_CLASSES:
        raise ValueError(f"cifar10: classes must be in [0, {NUM_CLASSES}), got {tuple(classes)}.")
    images, labels = [], []
    for where, content in read_files(data_dir, progress):
        x, y = parse_records(content, where)
        keep = np.isin(y, wanted)
        images.append(x[keep].astype(np.float32) / np.float32(255))
        labels.append(y[keep].astype(np.int32))
    dataset = Dataset(
        x_train=np.concatenate(images[:-1]),
        y_train=np.concatenate(labels[:-1]),
        x_test=images[-1],
        y_test=labels[-1],
        name="cifar10",
        origin=ORIGIN,
        num_classes=NUM_CLASSES,
    )
    for split, y in (("training", dataset.y_train), ("test", dataset.y_test)):
        absent = np.setdiff1d(wanted, y).tolist()
        if absent:
            raise ValueError(
                f"cifar10: the {split} files hold no image of class {absent}. They seem to hold "
                "only some classes; ask for those or provide the full files."
            )
    return dataset
