"""What a header and a record say of a store: sizes, differences, sums."""

from dataclasses import replace

import numpy as np
import pytest

from dualfluence.store._format import Header, word_sum

pytestmark = pytest.mark.host

HEADER = Header(11, 3, 1, 4, "float64", "float32", "abc", (2.0, 0.5, -1.0))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 23])
def test_the_sum_of_words_is_that_of_python_integers(size):
    raw = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    cut = size - size % 8
    words = [int.from_bytes(raw[k : k + 8].tobytes(), "little") for k in range(0, cut, 8)]
    assert word_sum(raw) == (sum(words) + sum(map(int, raw[cut:]))) % 2**64


def test_a_sum_past_64_bits_starts_again_at_zero():
    raw = np.full(9, 255, np.uint8)
    assert word_sum(raw) == 254
    assert word_sum(np.full(17, 255, np.uint8)) == 253


def test_headers_differ_by_field_and_probes_by_more_than_another_device_rounds():
    assert HEADER.differences(HEADER) == []
    assert HEADER.differences(replace(HEADER, tile=5, dtype="float32")) == ["tile", "dtype"]
    for factor, names in ((1 + 9e-4, []), (1 + 1.2e-3, ["probe"]), (1 - 1.2e-3, ["probe"])):
        probe = tuple(factor * value for value in HEADER.probe)
        assert HEADER.differences(replace(HEADER, probe=probe)) == names
    near = (2.0 + 1e-3, *HEADER.probe[1:])
    assert HEADER.differences(replace(HEADER, probe=near)) == []
    assert HEADER.differences(replace(HEADER, probe=HEADER.probe[:2])) == ["probe"]


def test_tiles_cover_the_upper_half_of_the_matrix_once():
    seen = np.zeros((HEADER.side, HEADER.side), int)
    for i, j in HEADER.tiles:
        seen[HEADER.rows(i), HEADER.rows(j)] += 1
        rows, cols = seen[HEADER.rows(i), HEADER.rows(j)].shape
        assert HEADER.tile_bytes((i, j)) == 4 * rows * cols
    np.testing.assert_array_equal(seen[np.triu_indices(HEADER.side)], 1)
    assert HEADER.tiles_per_side == 3
    whole = replace(HEADER, per_point=3, storage_dtype="bfloat16")
    assert whole.side == 33
    assert whole.tile_bytes((2, 2)) == 2 * 9 * 9


@pytest.mark.parametrize(
    "change",
    [{"num_points": 0}, {"tile": 12}, {"tile": 0}, {"dtype": "int8"}, {"storage_dtype": "x"}],
)
def test_a_header_that_makes_no_sense_is_refused(change):
    with pytest.raises(ValueError, match="sizes"):
        replace(HEADER, **change)
