"""What an attribution can be asked for, and its files."""

import numpy as np
import pytest

from dualfluence.attribution import Attribution
from dualfluence.attribution._attribution_plot import as_picture


def _scores(direction=1, **fields):
    values = np.array([[3.0, -1.0, 0.5, -4.0], [0.0, 2.0, -2.0, 1.0]])
    return Attribution(values=values, of="loss", direction=direction, **fields)


def test_helpful_points_are_those_whose_absence_raises_the_loss():
    top = _scores().top(2)
    np.testing.assert_array_equal(top.helpful.indices, [[0, 2], [1, 3]])
    np.testing.assert_array_equal(top.harmful.indices, [[3, 1], [2, 0]])
    np.testing.assert_array_equal(top.harmful.values[0], [-4.0, -1.0])


def test_a_margin_that_falls_is_worse():
    top = _scores(direction=-1).top(1)
    np.testing.assert_array_equal(top.helpful.indices, [[3], [2]])


def test_equal_scores_come_in_order_of_position():
    flat = Attribution(values=np.zeros((1, 5)), of="loss")
    np.testing.assert_array_equal(flat.top(5).helpful.indices, [[0, 1, 2, 3, 4]])


def test_saved_and_loaded_is_the_same(tmp_path):
    before = _scores(own=np.arange(4.0), notes=("a", "b"), stats={"seconds": 1.5}, unit=None)
    before.save(tmp_path / "scores.npz")
    after = Attribution.load(tmp_path / "scores.npz")
    np.testing.assert_array_equal(after.values, before.values)
    np.testing.assert_array_equal(after.self_influence(), before.own)
    assert (after.of, after.notes, after.unit) == ("loss", ("a", "b"), None)
    assert after.distance_bound is None


def test_features_are_saved_on_request(tmp_path):
    _scores(x=np.ones((4, 16))).save(tmp_path / "a.npz", include_features=True)
    assert Attribution.load(tmp_path / "a.npz").x.shape == (4, 16)


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "scores.npz"
    _scores().save(path)
    raw = bytearray(path.read_bytes())
    where = raw.find(np.float64(3.0).tobytes())
    raw[where] ^= 1
    path.write_bytes(bytes(raw))
    with pytest.raises(ValueError, match="damaged"):
        Attribution.load(path)


def test_a_foreign_file_is_refused(tmp_path):
    np.savez(tmp_path / "other.npz", values=np.ones(3))
    with pytest.raises(ValueError, match="not written by dualfluence"):
        Attribution.load(tmp_path / "other.npz")


def test_repr_is_short_and_says_the_sign():
    text = repr(_scores())
    assert len(text) < 200
    assert "2 queries × 4 training points" in text
    assert "positive: leaving the point out raises" in text


@pytest.mark.parametrize("k", [0, -5])
def test_top_wants_at_least_one_point(k):
    with pytest.raises(ValueError, match="top: k must be a whole number, at least 1"):
        _scores().top(k)


def test_scores_without_own_effects_say_so():
    with pytest.raises(ValueError, match="self_influence"):
        _scores().self_influence()


@pytest.mark.parametrize("shape", [(16,), (3,), (8, 8, 3)], ids=["flat picture", "table", "colour"])
def test_plot_draws_pictures_or_a_table(shape, tmp_path):
    rng = np.random.default_rng(0)
    result = _scores().with_features(
        rng.normal(size=(4, *shape)), np.arange(4), rng.normal(size=(2, *shape)), np.arange(2)
    )
    figure = result.plot(query=1, k=3, names=["nought", "one", "two", "three"])
    figure.savefig(tmp_path / "strip.png")
    assert (tmp_path / "strip.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("shape", "side"),
    [((16,), (4, 4)), ((4, 5), (4, 5)), ((4, 4, 1), (4, 4)), ((5, 4, 3), (5, 4, 3)), ((9,), None),
     ((18,), None), ((3, 5), None), ((3, 4, 3), None), ((4, 4, 2), None), ((2, 4, 4, 3), None)],
)  # fmt: skip
def test_only_what_may_be_a_picture_is_shown_as_one(shape, side):
    """From four pixels on each side, grey or with three colours."""
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    found = as_picture(values)
    assert (None if found is None else found.shape) == side
    if side is not None:  # from black to white
        np.testing.assert_allclose(found, values.reshape(side) / values.max(), atol=1e-6)
