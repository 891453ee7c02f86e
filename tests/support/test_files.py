"""Files are there whole or not at all, and an archive is what was written or refused."""

import errno
import json
import os
import stat
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from dualfluence._support import archive, files

pytestmark = pytest.mark.host


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_file_is_written_whole_with_ordinary_or_private_permissions(tmp_path):
    path = tmp_path / "new" / "file.txt"
    files.write_whole(path, "été")
    assert path.read_bytes() == "été".encode()
    umask = os.umask(0o027)
    try:
        files.write_whole(path, b"other")
        files.write_whole(path.with_name("secret"), b"x", private=True)
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(umask)
    assert path.read_bytes() == b"other"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert stat.S_IMODE(path.with_name("secret").stat().st_mode) == 0o600
    assert names(path.parent) == ["file.txt", "secret"]


def test_a_failure_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "file"
    files.write_whole(path, b"before")

    def fail(error):
        def write(file):
            file.write(b"half")
            raise error

        return write

    with pytest.raises(KeyError):
        files.write_atomically(path, fail(KeyError("mine")))
    with pytest.raises(files.FileError, match=r"cannot write .*file: the disk is full"):
        files.write_atomically(path, fail(OSError(errno.ENOSPC, "no space")))
    assert path.read_bytes() == b"before"
    assert names(tmp_path) == ["file"]
    with pytest.raises(files.FileError, match="part of the path is a file"):
        files.write_whole(path / "below", b"")
    with pytest.raises(files.FileError, match="it is a folder"):
        files.write_whole(tmp_path, b"")


def test_looking_whether_a_file_can_be_written_leaves_none(tmp_path):
    files.check_writable(tmp_path / "a" / "file")
    assert names(tmp_path / "a") == []
    (tmp_path / "plain").write_text("")
    with pytest.raises(files.FileError):
        files.check_writable(tmp_path / "plain" / "file")


def test_what_a_killed_process_left_is_deleted_but_not_what_is_in_use(tmp_path):
    left = [".a[1].x.tmp", ".a[1].y.tmp", ".b.x.tmp", ".a1.x.tmp", "a[1].tmp", ".a[1].x.other"]
    for name in left:
        (tmp_path / name).write_text("")
    with open(tmp_path / left[1], "rb") as file:
        assert files._try_lock(file)
        files.remove_stale(tmp_path, "a[1]")
        assert names(tmp_path) == sorted(left[1:])
        files.remove_stale(tmp_path)
        assert names(tmp_path) == sorted([left[1], *left[4:]])
    files.remove_stale(tmp_path)
    assert names(tmp_path) == sorted(left[4:])


def test_a_lock_has_one_holder_who_says_who_it_is(tmp_path):
    path, told = tmp_path / "lock", []

    class Busy(Exception):
        pass

    def busy(process):
        told.append(process)
        raise Busy

    with files.locked(path, busy):
        assert path.read_text() == f"{os.getpid()}\n"
        with pytest.raises(Busy), files.locked(path, busy):
            pass
    assert told == [str(os.getpid())]
    with files.locked(path, busy):
        assert path.read_text() == f"{os.getpid()}\n"
    assert len(told) == 1


def test_the_error_of_the_system_behind_another():
    system = OSError(errno.EIO, "bad")
    outer = ValueError("closed")
    outer.__context__ = system
    caused = RuntimeError("more")
    caused.__cause__ = outer
    assert files.system_error(caused) is system
    assert files.system_error(ValueError("no")) is None
    assert files.system_error(files.FileError("told already")) is None
    assert files.in_words(system) == "the disk is failing; give another path"
    assert "unheard of" in files.in_words(OSError(9999, "unheard of"))


ARRAYS = {
    "plain": np.arange(6.0).reshape(2, 3),
    "turned": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "scalar": np.float32(2.5),
    "empty": np.zeros((0, 3), np.int8),
    "narrow": np.asarray(jnp.asarray([1.5, -2.0], jnp.bfloat16)),
    "flags": np.array([True, False]),
}


def test_an_archive_comes_back(tmp_path):
    path = tmp_path / "file.npz"
    archive.write_archive(path, {"format": "test", "version": 3, "note": [1, None]}, ARRAYS)
    header, arrays = archive.read_archive(path, "test", 3)
    assert (header["note"], header["format"]) == ([1, None], "test")
    for name, want in ARRAYS.items():
        assert arrays[name].dtype == want.dtype, name
        np.testing.assert_array_equal(
            np.asarray(arrays[name], float), np.asarray(want, float), err_msg=name
        )
    assert names(tmp_path) == ["file.npz"]
    for wrong, words in (
        (("other", 3), "its format is 'test', not 'other'"),
        (("test", 4), "has format version 3, this release reads version 4"),
    ):
        with pytest.raises(files.FileError, match=words):
            archive.read_archive(path, *wrong)
    with pytest.raises(files.MissingFileError, match="load: there is no file"):
        archive.read_archive(tmp_path / "none", "test", 3)
    with pytest.raises(ValueError, match="must hold numbers, got dtype"):
        archive.write_archive(path, {}, {"words": np.array(["a"])})


def rewritten(path, change):
    """The members of an archive, changed and written as a program of one's own would."""
    with zipfile.ZipFile(path) as file:
        members = {info.filename: file.read(info) for info in file.infolist()}
    kind = change(members) or zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as file:
        for name, content in members.items():
            file.writestr(name, content)


def flip(name, at):
    def change(members):
        raw = bytearray(members[name])
        raw[at] ^= 1
        members[name] = bytes(raw)

    return change


def longer(members):
    members["plain.npy"] += b"\0" * 8


def more(members):
    members["more.npy"] = members["plain.npy"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (flip("plain.npy", -1), "array 'plain' fails its checksum"),
        (flip("meta.npy", -3), "its header"),
        (longer, "'plain' has another size than its shape"),
        (more, "its members are not those that its header lists"),
        (lambda members: members.pop("flags.npy") and None, "not those that its header lists"),
        (lambda members: members.pop("meta.npy") and None, "it has no header"),
        (lambda members: zipfile.ZIP_DEFLATED, "a member is compressed"),
    ],
)
def test_a_changed_archive_is_refused(tmp_path, change, words):
    path = tmp_path / "file.npz"
    archive.write_archive(path, {"format": "test", "version": 3}, ARRAYS)
    rewritten(path, change)
    with pytest.raises(files.FileError, match=words):
        archive.read_archive(path, "test", 3)


def test_sealed_text_is_as_it_was_written():
    text = archive.seal({"a": 1, "b": [0.5]})
    assert archive.unseal(text) == {"a": 1, "b": [0.5]}
    content = json.loads(text)
    for changed in (
        text.replace(b"0.5", b"0.6"),
        text.replace(b", ", b","),
        json.dumps({**content, "checksum": "0"}).encode(),
        b"[1]",
        b"{",
    ):
        with pytest.raises(archive.Damaged, match="its header"):
            archive.unseal(changed)


def test_a_digest_is_of_dtype_shape_and_bytes():
    one = np.arange(4.0)
    others = (one.reshape(2, 2), one.astype(np.float32), one.view(np.int64), one + 1)
    digests = {archive.digest_of_array(a) for a in (one, *others)}
    assert len(digests) == 5
    assert archive.digest_of_array(one[::-1]) == archive.digest_of_array(one[::-1].copy())
    tree = {"a": one, "b": (3, "x")}
    assert archive.digest_of_all(tree) == archive.digest_of_all({"b": (3, "x"), "a": one.copy()})
    assert archive.digest_of_all(tree) != archive.digest_of_all({"a": one, "b": (4, "x")})
