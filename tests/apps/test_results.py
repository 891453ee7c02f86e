"""A run believes nothing damaged that an earlier one left."""

import numpy as np
import pytest

import dualfluence as dfl
from dualfluence.apps.paper._results import ResultsFolder, read_results, write_json

pytestmark = pytest.mark.host


def test_a_damaged_cache_is_computed_again(tmp_path):
    want = [np.arange(6.0).reshape(2, 3), np.array(3)]
    calls = []

    def compute():
        calls.append(1)
        return want

    assert len(ResultsFolder(tmp_path).arrays("settings", compute)) == 2
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(want[0].tobytes()) + 9] ^= 1
    for count, damage in enumerate((whole, flipped, whole[:-40], b"", b"text")):
        file.write_bytes(damage)
        got = ResultsFolder(tmp_path, resume=True).arrays("settings", compute)
        assert len(calls) == 1 + count
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


def test_damaged_results_say_so(tmp_path):
    assert read_results(tmp_path, "fig1") is None
    write_json(tmp_path / "fig1.json", {"x": 1.5})
    assert read_results(tmp_path, "fig1") == {"x": 1.5}
    for damage in (b"{", b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "fig1.json").write_bytes(damage)
        with pytest.raises(dfl.FileError, match=r"fig1\.json is damaged"):
            read_results(tmp_path, "fig1")
