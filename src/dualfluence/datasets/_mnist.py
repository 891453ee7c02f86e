"""MNIST: the idx file format, the full set and the small embedded one."""

import gzip
import hashlib
import io
import zlib
from importlib import resources
from pathlib import Path

import numpy as np

from .._support.options import ProgressFn
from ._dataset import Dataset, check_label_range
from ._files import RemoteFile, fetch, find_file, given_folder, where_to_put

NUM_CLASSES = 10
SUBFOLDER = "mnist"
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
FILES = {
    "train-images": RemoteFile(
        "train-images-idx3-ubyte.gz",
        9912422,
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        MIRRORS,
    ),
    "train-labels": RemoteFile(
        "train-labels-idx1-ubyte.gz",
        28881,
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        MIRRORS,
    ),
    "test-images": RemoteFile(
        "t10k-images-idx3-ubyte.gz",
        1648877,
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        MIRRORS,
    ),
    "test-labels": RemoteFile(
        "t10k-labels-idx1-ubyte.gz",
        4542,
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        MIRRORS,
    ),
}
BY_HAND = where_to_put(SUBFOLDER, [remote.name for remote in FILES.values()])
ORIGIN = (
    "MNIST, Y. LeCun, C. Cortes and C. J. C. Burges, "
    "http://yann.lecun.com/exdb/mnist/, CC BY-SA 3.0"
)
SMALL_FILE = "mnist_small.npz"
SMALL_SHA256 = "9f9e39e51e9860bd37a9d26fdc045856b59b81b976842ab1f98b630d5b34593f"

IDX_UINT8 = 0x08


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """Read an idx file of unsigned bytes with `ndim` axes, gzipped or not.

    The format is two zero bytes, the type (8: unsigned byte), the number of axes, each axis as a
    big-endian 32-bit integer, then only the values in row-major order.
    """
    content = path.read_bytes()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path}: damaged or truncated gzip file ({error}).") from error
    header = 4 + 4 * ndim
    magic = bytes([0, 0, IDX_UINT8, ndim])
    if content[:4] != magic:
        raise ValueError(
            f"{path}: an idx file of unsigned bytes with {ndim} axes starts with {magic.hex()}, "
            f"this one with {content[:4].hex() or 'nothing'}. Images and labels may be swapped, "
            "or this is another format."
        )
    if len(content) < header:
        raise ValueError(f"{path}: truncated, {len(content)} bytes where the header has {header}.")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", ndim, 4))
    expected = header + int(np.prod(shape, dtype=np.int64))
    if len(content) != expected:
        problem = "truncated" if len(content) < expected else "too long"
        raise ValueError(
            f"{path}: {problem}, its header says {shape}, so {expected} bytes, got {len(content)}."
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def read_split(images_path: Path, labels_path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images `(n, 28, 28)` and labels `(n,)` of one split, unsigned bytes, checked together."""
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if images.shape[1:] != (28, 28):
        raise ValueError(f"{images_path}: images must be 28 by 28, got {images.shape[1:]}.")
    if len(images) != len(labels):
        raise ValueError(
            f"{images_path} has {len(images)} images, {labels_path} {len(labels)} labels; "
            "they belong to different splits."
        )
    check_label_range(labels, NUM_CLASSES, str(labels_path))
    return images, labels


def to_features(images: np.ndarray) -> np.ndarray:
    """Bytes `(n, 28, 28)` to float32 pixels `(n, 784)` in `[0, 1]`."""
    return images.reshape(len(images), -1).astype(np.float32) / np.float32(255)


def locate(data_dir: str | Path | None, progress: bool | ProgressFn) -> dict[str, Path]:
    """The four files, in the user's folder if one is given, else in the cache."""
    folder = given_folder(data_dir)
    if folder is None:
        return {key: fetch(file, SUBFOLDER, BY_HAND, progress) for key, file in FILES.items()}
    found = {
        key: find_file(folder, SUBFOLDER, (file.name, file.name.removesuffix(".gz")))
        for key, file in FILES.items()
    }
    paths = {key: path for key, path in found.items() if path is not None}
    missing = [FILES[key].name for key in found if key not in paths]
    if missing:
        raise FileNotFoundError(f"mnist: {folder} lacks {', '.join(missing)}. {BY_HAND}")
    return paths


def load_mnist(data_dir: str | Path | None = None, progress: bool | ProgressFn = True) -> Dataset:
    """The full set: 60000 training and 10000 test images, in the order of the files."""
    paths = locate(data_dir, progress)
    x_train, y_train = read_split(paths["train-images"], paths["train-labels"])
    x_test, y_test = read_split(paths["test-images"], paths["test-labels"])
    return Dataset(
        x_train=to_features(x_train),
        y_train=y_train.astype(np.int32),
        x_test=to_features(x_test),
        y_test=y_test.astype(np.int32),
        name="mnist",
        origin=ORIGIN,
        num_classes=NUM_CLASSES,
    )


def load_mnist_small() -> Dataset:
    """The embedded part: the first 200 training and 200 test images of each class, interleaved."""
    content = resources.files("dualfluence.datasets").joinpath(SMALL_FILE).read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != SMALL_SHA256:
        raise ValueError(
            f"mnist-small: {SMALL_FILE} inside the package has SHA-256 {found}, expected "
            f"{SMALL_SHA256}. The installation is damaged; install dualfluence again."
        )
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return Dataset(
            x_train=to_features(arrays["x_train"]),
            y_train=arrays["y_train"].astype(np.int32),
            x_test=to_features(arrays["x_test"]),
            y_test=arrays["y_test"].astype(np.int32),
            name="mnist-small",
            origin=ORIGIN + "; first 200 training and 200 test images of each class",
            num_classes=NUM_CLASSES,
        )
