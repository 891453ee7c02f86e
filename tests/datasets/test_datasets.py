"""Data sets: the embedded one, the file formats, and where files are looked for."""

import gzip
import hashlib
import http.server
import struct
import sys
import tarfile
import threading
from importlib import resources

import numpy as np
import pytest

from dualfluence import datasets
from dualfluence.datasets import _cifar10, _files, _mnist

pytestmark = pytest.mark.host

MNIST_FILES = [file.name for file in _mnist.FILES.values()]
CIFAR_FILES = [*_cifar10.TRAIN_FILES, _cifar10.TEST_FILE]


def idx_bytes(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(folder, *, n=12, q=5, seed=0, compress=True):
    """Four small files; returns the bytes of the training images and labels."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    splits = [
        (rng.integers(0, 256, (size, 28, 28), np.uint8), np.arange(size, dtype=np.uint8) % 10)
        for size in (n, q)
    ]
    arrays = [array for split in splits for array in split]
    for name, array in zip(MNIST_FILES, arrays, strict=True):
        content = idx_bytes(array)
        if compress:
            (folder / name).write_bytes(gzip.compress(content))
        else:
            (folder / name.removesuffix(".gz")).write_bytes(content)
    return splits[0]


def write_cifar(folder, *, labels=(0, 1, 0), seed=0):
    """Six small files with the given labels each; returns the records of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    records = rng.integers(0, 256, (len(CIFAR_FILES), len(labels), 3073), np.uint8)
    records[:, :, 0] = labels
    for name, batch in zip(CIFAR_FILES, records, strict=True):
        (folder / name).write_bytes(batch.tobytes())
    return records[0]


@pytest.fixture(autouse=True)
def no_folder_named(monkeypatch):
    monkeypatch.delenv(_files.ENVIRONMENT_VARIABLE, raising=False)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache of our own, so that no test sees or touches the user's."""
    pooch = pytest.importorskip("pooch")
    folder = tmp_path / "cache"
    monkeypatch.setattr(pooch, "os_cache", lambda project: folder)
    return folder


# The embedded set.


def test_embedded_set_has_the_stated_shape():
    small = datasets.load("mnist-small")
    for x, y in ((small.x_train, small.y_train), (small.x_test, small.y_test)):
        assert x.shape == (2000, 784)
        assert x.dtype == np.float32
        assert y.dtype == np.int32
        assert x.min() == 0.0
        assert x.max() == 1.0
        np.testing.assert_array_equal(np.bincount(y), np.full(10, 200))
    assert small.num_classes == 10
    assert "LeCun" in small.origin
    assert "CC BY-SA 3.0" in small.origin


@pytest.mark.parametrize("length", [1, 10, 25, 500, 1999])
def test_every_prefix_of_the_embedded_set_is_balanced(length):
    small = datasets.load("mnist-small")
    for labels in (small.y_train, small.y_test):
        counts = np.bincount(labels[:length], minlength=10)
        assert counts.max() - counts.min() <= 1


def test_embedded_images_are_digits_of_their_class():
    # Nearest class mean is right for 72 % of these test images; shuffled labels would give 10 %.
    small = datasets.load("mnist-small")
    means = np.stack([small.x_train[small.y_train == k].mean(0) for k in range(10)])
    distances = ((small.x_test[:, None] - means) ** 2).sum(-1)
    assert (distances.argmin(1) == small.y_test).mean() > 0.65


def test_embedded_splits_share_no_image():
    small = datasets.load("mnist-small")
    both = np.concatenate([small.x_train, small.x_test])
    assert len(np.unique(both, axis=0)) == len(both)


def test_embedded_file_is_small_and_states_its_licence():
    folder = resources.files("dualfluence.datasets")
    content = folder.joinpath("mnist_small.npz").read_bytes()
    assert len(content) < 1_000_000
    assert hashlib.sha256(content).hexdigest() == _mnist.SMALL_SHA256
    notice = folder.joinpath("mnist_small.txt").read_text()
    for word in ("LeCun", "Cortes", "Burges", "Attribution-Share Alike 3.0"):
        assert word in notice


def test_damaged_embedded_file_is_refused(monkeypatch):
    monkeypatch.setattr(_mnist, "SMALL_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="install dualfluence again"):
        datasets.load("mnist-small")


# MNIST files.


@pytest.mark.parametrize("subfolder", ["mnist", "."])
@pytest.mark.parametrize("compress", [True, False])
def test_mnist_is_read_from_a_folder(tmp_path, subfolder, compress):
    images, labels = write_mnist(tmp_path / subfolder, compress=compress)
    data = datasets.load("mnist", data_dir=tmp_path)
    np.testing.assert_array_equal(data.x_train, images.reshape(12, 784).astype(np.float32) / 255)
    np.testing.assert_array_equal(data.y_train, labels)
    assert data.x_test.shape == (5, 784)


def test_mnist_keeps_the_classes_asked_for(tmp_path):
    write_mnist(tmp_path)
    data = datasets.load("mnist", data_dir=tmp_path, classes=(1, 4))
    np.testing.assert_array_equal(data.y_train, [1, 4, 1])
    with pytest.raises(ValueError, match=r"classes must be in \[0, 10\), got \(3, 10\)"):
        datasets.load("mnist", data_dir=tmp_path, classes=(3, 10))


def damage_gzip(content):
    return content[:-20]


def damage_length(content):
    return gzip.compress(gzip.decompress(content)[:-1])


def damage_header(content):
    return gzip.compress(gzip.decompress(content)[:9])


def damage_by_excess(content):
    return gzip.compress(gzip.decompress(content) + b"\0")


def damage_magic(content):
    return gzip.compress(b"\0\0\x0d" + gzip.decompress(content)[3:])


def damage_all(content):
    return b""


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_gzip, "damaged or truncated gzip"),
        (damage_length, r"truncated, its header says \(12, 28, 28\)"),
        (damage_header, "truncated, 9 bytes where the header has 16"),
        (damage_by_excess, "too long"),
        (damage_magic, "starts with 00000803, this one with 00000d03"),
        (damage_all, "this one with nothing"),
    ],
)
def test_damaged_mnist_image_file_is_refused(tmp_path, damage, message):
    write_mnist(tmp_path)
    path = tmp_path / MNIST_FILES[0]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as error:
        datasets.load("mnist", data_dir=tmp_path)
    assert str(path) in str(error.value)


def test_swapped_images_and_labels_are_refused(tmp_path):
    write_mnist(tmp_path)
    images, labels = (tmp_path / name for name in MNIST_FILES[:2])
    content = images.read_bytes()
    images.write_bytes(labels.read_bytes())
    labels.write_bytes(content)
    with pytest.raises(ValueError, match="may be swapped"):
        datasets.load("mnist", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([3, 10] * 6, np.uint8), r"labels must be in \[0, 10\), got 10 at record 1"),
        (np.zeros(11, np.uint8), "different splits"),
    ],
)
def test_wrong_mnist_labels_are_refused(tmp_path, array, message):
    write_mnist(tmp_path)
    (tmp_path / MNIST_FILES[1]).write_bytes(gzip.compress(idx_bytes(array)))
    with pytest.raises(ValueError, match=message):
        datasets.load("mnist", data_dir=tmp_path)


def test_wrong_image_size_is_refused(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / MNIST_FILES[0]).write_bytes(
        gzip.compress(idx_bytes(np.zeros((12, 8, 8), np.uint8)))
    )
    with pytest.raises(ValueError, match="28 by 28"):
        datasets.load("mnist", data_dir=tmp_path)


# CIFAR-10 files.


@pytest.mark.parametrize("subfolder", ["cifar-10-batches-bin", "."])
def test_cifar_records_become_images(tmp_path, subfolder):
    records = write_cifar(tmp_path / subfolder)
    data = datasets.load("cifar10", data_dir=tmp_path)
    assert data.x_train.shape == (15, 32, 32, 3)
    assert data.x_test.shape == (3, 32, 32, 3)
    assert data.x_train.dtype == np.float32
    np.testing.assert_array_equal(data.y_train, [0, 1, 0] * 5)
    # Channel 2 (blue), row 5, column 7 of the second record, by the published layout.
    raw = records[1, 1 + 2 * 1024 + 5 * 32 + 7]
    assert data.x_train[1, 5, 7, 2] == np.float32(raw) / np.float32(255)


def test_cifar_keeps_the_classes_asked_for(tmp_path):
    write_cifar(tmp_path, labels=range(10))
    assert set(datasets.load("cifar10", data_dir=tmp_path).y_train) == {0, 1}
    data = datasets.load("cifar10", data_dir=tmp_path, classes=(3, 5))
    np.testing.assert_array_equal(data.y_test, [3, 5])
    with pytest.raises(ValueError, match=r"classes must be in \[0, 10\)"):
        datasets.load("cifar10", data_dir=tmp_path, classes=(0, 10))


def test_cifar_files_without_the_class_asked_for_are_an_error(tmp_path):
    write_cifar(tmp_path)
    with pytest.raises(ValueError, match=r"no image of class \[3\]"):
        datasets.load("cifar10", data_dir=tmp_path, classes=(0, 3))


def test_cifar_archive_is_read_where_it_lies(tmp_path):
    write_cifar(tmp_path / "source")
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "source", "cifar-10-batches-bin")
    packed = datasets.load("cifar10", data_dir=tmp_path)
    np.testing.assert_array_equal(
        packed.x_train, datasets.load("cifar10", data_dir=tmp_path / "source").x_train
    )
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged or truncated archive"):
        datasets.load("cifar10", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(3073 * 2 - 1), "6145 bytes are not a whole"),
        (b"", "0 bytes are not a whole"),
        (bytes(3073) + b"\x0a" + bytes(3072), r"labels must be in \[0, 10\), got 10 at record 1"),
    ],
)
def test_damaged_cifar_file_is_refused(tmp_path, content, message):
    write_cifar(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        datasets.load("cifar10", data_dir=tmp_path)
    assert "data_batch_3.bin" in str(error.value)


# Where files are looked for.


def test_environment_names_the_folder_and_data_dir_wins(tmp_path, monkeypatch):
    write_mnist(tmp_path / "environment", n=11)
    write_mnist(tmp_path / "argument", n=12)
    monkeypatch.setenv(_files.ENVIRONMENT_VARIABLE, str(tmp_path / "environment"))
    assert len(datasets.load("mnist").x_train) == 11
    assert len(datasets.load("mnist", data_dir=str(tmp_path / "argument")).x_train) == 12


@pytest.mark.parametrize(("name", "file"), [("mnist", MNIST_FILES[2]), ("cifar10", CIFAR_FILES[2])])
def test_named_folder_without_the_files_is_an_error_and_no_download(tmp_path, name, file, cache):
    write_mnist(tmp_path / "mnist")
    write_cifar(tmp_path / "cifar-10-batches-bin")
    next(tmp_path.glob(f"*/{file}")).unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {file}") as error:
        datasets.load(name, data_dir=tmp_path)
    assert "--data-dir" in str(error.value)
    assert "DUALFLUENCE_DATA" in str(error.value)
    assert not cache.exists()


def test_folder_that_is_not_there_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"data_dir names .*nowhere, which is not a folder"):
        datasets.load("mnist", data_dir=tmp_path / "nowhere")
    monkeypatch.setenv(_files.ENVIRONMENT_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="DUALFLUENCE_DATA names"):
        datasets.load("cifar10")


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("mnist", [f"mnist/{file}" for file in MNIST_FILES]),
        ("cifar10", [f"cifar-10-batches-bin/{file}" for file in CIFAR_FILES]),
    ],
)
def test_offline_error_says_which_files_to_put_where(monkeypatch, cache, name, files):
    requests = pytest.importorskip("requests")

    def offline(*args, **kwargs):
        raise requests.exceptions.ConnectionError("no route to host")

    monkeypatch.setattr(requests, "get", offline)
    with pytest.raises(FileNotFoundError, match="could not be downloaded") as error:
        datasets.load(name, progress=False)
    text = str(error.value)
    for part in (*files, "no route to host", "--data-dir", "DUALFLUENCE_DATA"):
        assert part in text
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_without_pooch_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ModuleNotFoundError, match=r"dualfluence\[cli\]") as error:
        datasets.load("mnist")
    assert MNIST_FILES[0] in str(error.value)


# Downloads, from a server in this process on the loopback interface.

CONTENT = np.random.default_rng(0).bytes(700_001)


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT: /good/ knows ranges, /plain/ does not, /wrong/ has one byte changed,
    /broken/ stops half way."""

    requests: list[tuple[str, str | None]] = []  # noqa: RUF012

    def do_GET(self):
        kind, asked = self.path.split("/")[1], self.headers.get("Range")
        self.requests.append((kind, asked))
        content = b"x" + CONTENT[1:] if kind == "wrong" else CONTENT
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        if kind == "plain":
            start = 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : len(content) // 2 if kind == "broken" else None])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    Handler.requests.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def remote_file(server, *kinds):
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    mirrors = tuple(f"{server}/{kind}/" for kind in kinds)
    return _files.RemoteFile("file.bin", len(CONTENT), sha256, mirrors)


def test_download_is_checked_kept_and_reported(server, cache):
    seen = []
    remote = remote_file(server, "good")
    path = _files.fetch(remote, "some", "", lambda *args: seen.append(args))
    assert path == cache / "some" / "file.bin"
    assert path.read_bytes() == CONTENT
    assert seen[-1][:2] == (len(CONTENT), len(CONTENT))
    assert _files.fetch(remote, "some", "") == path
    assert len(Handler.requests) == 1
    assert [p.name for p in path.parent.iterdir()] == ["file.bin"]


@pytest.mark.parametrize("kind", ["good", "plain"])
def test_interrupted_download_is_resumed(server, cache, kind):
    with pytest.raises(FileNotFoundError, match="could not be downloaded"):
        _files.fetch(remote_file(server, "broken"), "some", "", False)
    part = cache / "some" / "file.bin.part"
    half = part.stat().st_size
    assert 0 < half < len(CONTENT)
    path = _files.fetch(remote_file(server, kind), "some", "", False)
    asked = (
        [("good", f"bytes={half}-")]
        if kind == "good"
        else [("plain", f"bytes={half}-"), ("plain", None)]
    )
    assert Handler.requests[1:] == asked
    assert path.read_bytes() == CONTENT
    assert not part.exists()


def test_wrong_content_is_never_kept_and_the_next_mirror_is_tried(server, cache):
    with pytest.raises(FileNotFoundError, match="hash"):
        _files.fetch(remote_file(server, "wrong"), "some", "", False)
    assert list((cache / "some").iterdir()) == []
    path = _files.fetch(remote_file(server, "wrong", "good"), "some", "", False)
    assert path.read_bytes() == CONTENT


# Parts of a data set, targets, names.


def test_subset_is_balanced_and_repeatable():
    small = datasets.load("mnist-small")
    first = datasets.subset(small, per_class_train=7, per_class_test=3, classes=(3, 8))
    np.testing.assert_array_equal(first.y_train, [3, 8] * 7)
    np.testing.assert_array_equal(first.y_test, [3, 8] * 3)
    np.testing.assert_array_equal(first.x_train[::2], small.x_train[small.y_train == 3][:7])
    drawn = [datasets.subset(small, per_class_train=7, per_class_test=3, seed=s) for s in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0].x_train, drawn[1].x_train)
    assert (drawn[0].x_train != drawn[2].x_train).any()
    assert len(np.unique(drawn[0].x_train, axis=0)) == 70


def test_subset_of_all_points_is_the_embedded_set():
    small = datasets.load("mnist-small")
    same = datasets.subset(small, per_class_train=200, per_class_test=200)
    np.testing.assert_array_equal(same.x_train, small.x_train)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"per_class_train": 201}, "201 points of class 0 requested, but there are only 200"),
        ({"per_class_train": 0}, "at least 1"),
        ({"classes": ()}, "not empty"),
        ({"classes": (1, 1)}, "distinct"),
        ({"classes": (11,)}, "1 points of class 11 requested, but there are only 0"),
    ],
)
def test_impossible_subset_is_refused(change, message):
    small = datasets.load("mnist-small")
    with pytest.raises(ValueError, match=message):
        datasets.subset(small, **{"per_class_train": 1, "per_class_test": 1, **change})


def test_plus_minus_one():
    labels = np.array([3, 8, 8, 3], np.int32)
    targets = datasets.plus_minus_one(labels, negative=3, positive=8)
    assert targets.dtype == np.float32
    np.testing.assert_array_equal(targets, [[-1], [1], [1], [-1]])
    with pytest.raises(ValueError, match=r"got \[8\] too"):
        datasets.plus_minus_one(labels, negative=3, positive=4)
    with pytest.raises(ValueError, match="the same"):
        datasets.plus_minus_one(labels, negative=3, positive=3)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="mnist-small, mnist, cifar10"):
        datasets.load("imagenet")


def test_labels_must_match_images():
    x, y = np.zeros((3, 2), np.float32), np.zeros(3, np.int32)
    with pytest.raises(Exception, match=r"3 training images|Type-check"):
        datasets.Dataset(x, y[:2], x, y, "name", "origin", 2)
    with pytest.raises(ValueError, match=r"labels must be in \[0, 2\), got 5 at record 0"):
        datasets.Dataset(x, y, x, y + 5, "name", "origin", 2)
