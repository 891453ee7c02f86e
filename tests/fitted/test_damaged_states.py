"""Damaged, forged and foreign files are refused, before what they claim is believed."""

import json
import tracemalloc
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import problems
from dualfluence._support import archive
from dualfluence.dual import _file

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def case():
    p = problems.linear_problem(20, 3, 80, "softmax", ridge=0.05)
    return p, cases.fit(p, solver=dfl.CG(), sketch=dfl.Sketch(8))


@pytest.mark.parametrize("damage", ["truncate", "flip", "text", "foreign"])
def test_damaged_files_are_refused(case, tmp_path, damage):
    p, fitted = case
    path = tmp_path / "a.npz"
    fitted.save(path)
    raw = bytearray(path.read_bytes())
    if damage == "truncate":
        raw = raw[: len(raw) // 2]
    elif damage == "flip":
        raw[len(raw) // 3] ^= 0xFF
    elif damage == "text":
        raw = bytearray(b"not an archive")
    path.write_bytes(raw)
    if damage == "foreign":
        np.savez(path, a=np.zeros(3))
    with pytest.raises(ValueError, match="damaged"):
        dfl.load(path, cases.model(p))


def test_newer_files_are_refused(case, tmp_path, monkeypatch):
    p, fitted = case
    monkeypatch.setattr(_file, "VERSION", 99)
    fitted.save(tmp_path / "a.npz")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="version 99, this release reads version 3"):
        dfl.load(tmp_path / "a.npz", cases.model(p))


def test_nothing_in_the_file_needs_pickle(case, tmp_path):
    _, fitted = case
    fitted.save(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        meta = json.loads(file["meta"].tobytes())
        assert all(file[name].dtype != object for name in file.files)
    assert meta["format"] == "dualfluence-fitted"


def test_every_flipped_byte_is_found_or_changes_nothing(case, tmp_path):
    p, fitted = case
    path, model = tmp_path / "a.npz", cases.model(p)
    fitted.save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    # All of the archive's own bookkeeping at the end, the header at the start, and the rest at random.
    places = [*range(600), *range(len(whole) - 600, len(whole))]
    places = [*rng.choice(places, 150, replace=False), *rng.integers(0, len(whole), 250)]
    found = 0
    for place in places:
        raw = bytearray(whole)
        raw[place] ^= int(rng.integers(1, 256))
        path.write_bytes(raw)
        try:
            again = dfl.load(path, model, progress=False)
        except dfl.FileError:
            found += 1
        else:
            assert cases.same_state(again, fitted), place
    assert found > 300  # what is not found are times, versions and attributes of the archive


def test_a_file_cut_or_filled_anywhere_is_refused(case, tmp_path):
    p, fitted = case
    path, model = tmp_path / "a.npz", cases.model(p)
    fitted.save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(1)
    for length in (0, 1, 30, *rng.integers(0, len(whole), 40)):
        path.write_bytes(whole[:length])
        with pytest.raises(dfl.FileError):
            dfl.load(path, model, progress=False)
        path.write_bytes(whole[:length] + rng.bytes(len(whole) - length))
        with pytest.raises(dfl.FileError):
            dfl.load(path, model, progress=False)


def bomb_compressed(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name in ("meta.npy", "alpha.npy"):
            with file.open(name, "w") as member:
                np.lib.format.write_array_header_1_0(
                    member, {"descr": "|u1", "fortran_order": False, "shape": (2**27,)}
                )
                for _ in range(128):
                    member.write(bytes(2**20))


def bomb_shape(path):
    with zipfile.ZipFile(path, "w") as file, file.open("meta.npy", "w") as member:
        np.lib.format.write_array_header_1_0(
            member, {"descr": "<f8", "fortran_order": False, "shape": (2**40, 2**21)}
        )
        member.write(bytes(80))


def bomb_header(path):
    with zipfile.ZipFile(path, "w") as file, file.open("meta.npy", "w") as member:
        text = b"[" * 2**25
        np.lib.format.write_array(member, np.frombuffer(text, np.uint8))


def bomb_nested(path):
    text = np.frombuffer(b"[" * 100_000, np.uint8)
    np.savez(path, meta=text)


def bomb_pickle(path):
    np.savez(path, meta=np.array([print], dtype=object))


@pytest.mark.parametrize(
    "bomb", [bomb_compressed, bomb_shape, bomb_header, bomb_nested, bomb_pickle]
)
def test_bombs_are_refused_before_they_are_read(case, tmp_path, bomb):
    p, _ = case
    path = tmp_path / "a.npz"
    bomb(path)
    tracemalloc.start()
    with pytest.raises(dfl.FileError):
        dfl.load(path, cases.model(p))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23


def forge(path, change):
    """A file with every checksum right and one thing wrong."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(arrays.pop("meta").tobytes())
    change(header, arrays)
    kept = {k: v for k, v in header.items() if k not in ("sha256", "dtypes", "checksum")}
    archive.write_archive(path, kept, arrays)


def put(name, value):
    return lambda header, arrays: arrays.update({name: value(arrays.get(name))})


def say(value, *where):
    def change(header, arrays):
        *folders, last = where
        for folder in folders:
            header = header[folder]
        header[last] = value

    return change


def with_nan(array):
    array = array.copy()
    array.reshape(-1)[-1] = np.nan
    return array


FORGERIES = {
    "alpha nan": put("alpha", with_nan),
    "offset nan": put("offset", with_nan),
    "x nan": put("x", with_nan),
    "targets nan": put("targets", with_nan),
    "diagonal inf": put("kernel_diagonal", lambda a: a + np.inf),
    "preconditioner nan": put("preconditioner", with_nan),
    "weights negative": put("sample_weights", lambda a: -a),
    "weights zero": put("sample_weights", lambda a: 0 * a),
    "weights overflow": put("sample_weights", lambda a: a + 1e308),
    "fewer rows of x": put("x", lambda a: a[:-1]),
    "fewer rows of targets": put("targets", lambda a: a[:-1]),
    "fewer rows of alpha": put("alpha", lambda a: a[:-1]),
    "more rows of offset": put("offset", lambda a: np.concatenate([a, a])),
    "fewer weights": put("sample_weights", lambda a: a[:-1]),
    "no points": lambda header, arrays: arrays.update({k: v[:0] for k, v in arrays.items()}),
    "fewer outputs": put("k_alpha", lambda a: a[:, :1]),
    "preconditioner of others": put("preconditioner", lambda a: a[:-1]),
    "kernel of others": put("kernel", lambda a: np.eye(3)),
    "kernel not its diagonal": put("kernel", lambda a: np.eye(60)),
    "alpha of integers": put("alpha", lambda a: a.astype(int)),
    "alpha of halves": put("alpha", lambda a: a.astype(np.float16)),
    "scalar alpha": put("alpha", lambda a: a[0, 0]),
    "targets not probabilities": put("targets", lambda a: a + 1),
    "purged outside": put("purged", lambda a: np.array([99])),
    "purged present": put("purged", lambda a: np.array([0])),
    "unknown array": put("extra", lambda a: np.zeros(3)),
    "half a reference": put("reference_0", lambda a: np.zeros(3)),
    "missing array": lambda header, arrays: arrays.pop("offset"),
    "ridge negative": say(-1.0, "ridge"),
    "ridge nan": say(float("nan"), "ridge"),
    "ridge text": say("1", "ridge"),
    "drift negative": say(-1.0, "drift"),
    "drift nan": say(float("nan"), "drift"),
    "ridge other": say(0.5, "ridge"),
    "loss unknown": say("Absolute", "loss", "name"),
    "loss number": say(3, "loss"),
    "certificate negative": say(-1.0, "certificate", "gradient_norm"),
    "certificate nan": say(float("nan"), "certificate", "rounding"),
    "certificate text": say("0", "certificate", "rounding"),
    "certificate field": say(0.0, "certificate", "other"),
    "stats text": say("many", "stats", "steps"),
    "stats list": say([], "stats"),
    "fidelity": say({"gradient_norm": 1.0}, "fidelity"),
    "operator form": say("sparse", "operator", "form"),
    "operator precision": say("LOW", "operator", "precision"),
    "operator dtype": say("int8", "operator", "dtype"),
    "no field": lambda header, arrays: header.pop("stats"),
    "format": say("other", "format"),
    "version": say("2", "version"),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_every_field_is_checked(case, tmp_path, what):
    p, fitted = case
    fitted.save(tmp_path / "a.npz")
    forge(tmp_path / "a.npz", FORGERIES[what])
    with pytest.raises(dfl.FileError):
        dfl.load(tmp_path / "a.npz", cases.model(p), progress=False)


@pytest.mark.parametrize("name", ["alpha", "k_alpha", "offset", "x"])
def test_arrays_that_do_not_belong_together_are_refused(case, tmp_path, name):
    p, fitted = case
    fitted.save(tmp_path / "a.npz")
    forge(tmp_path / "a.npz", put(name, lambda a: a[::-1].copy()))
    with pytest.raises(ValueError, match="not the one that was saved"):
        dfl.load(tmp_path / "a.npz", cases.model(p), progress=False)


def test_a_model_that_cannot_take_the_points_is_a_clear_error(case, tmp_path):
    _, fitted = case
    fitted.save(tmp_path / "a.npz")
    other = dfl.linearize(lambda t, x: x @ t, jnp.zeros((7, 3)))
    with pytest.raises(ValueError, match="cannot take the stored points"):
        dfl.load(tmp_path / "a.npz", other)
