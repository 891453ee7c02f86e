"""The small parts that everything stands on, against what they are defined to be."""

import io
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualfluence._support import checks, memory, options, show
from dualfluence._support.archive import from_plain, to_plain
from dualfluence._support.compile import jit
from dualfluence._support.points import count_points, float_leaves, form_of, is_tree, tree_norm

GiB = 2**30


def test_panels_hold_at_least_a_row_and_at_most_all():
    rows = memory.PANEL_BYTES // 1000
    sizes = {(10, 8): 10, (10**9, 1000): rows, (10, 10**12): 1, (10, 0): 10, (0, 8): 0}
    assert {key: memory.panel_rows(*key) for key in sizes} == sizes


def test_an_accelerator_lends_tiles_a_share_of_what_is_free(monkeypatch):
    for limit, used, result, want in (
        (64 * GiB, 0, 1, GiB),  # room for a large tile
        (64 * GiB, 56 * GiB, 1, GiB),
        (64 * GiB, 60 * GiB, 1, GiB // 2),  # an eighth of the four that are free
        (64 * GiB, 64 * GiB, 1, memory.TILE_BYTES),
        (64 * GiB, 0, 33 * GiB, 4 * GiB),  # an eighth of the kernel, as a power of two
        (64 * GiB, 0, 10**13, 8 * GiB),
    ):
        stats = {"bytes_limit": limit, "bytes_in_use": used}
        monkeypatch.setattr(memory, "_device_stats", lambda stats=stats: stats)
        assert memory.tile_budget(result) == want
        assert memory.total_memory() == limit
        assert memory.memory_budget() == int(0.4 * limit)


def test_a_host_has_its_own_memory_and_plain_tiles():
    assert memory.tile_budget(10**13) == memory.TILE_BYTES
    assert 0 < memory.memory_budget() < memory.total_memory()


def test_progress_is_told_to_a_function():
    told = []
    with options.Ticker(5, "tiles", lambda *args: told.append(args)) as ticker:
        ticker.tick()
        ticker.tick(3)
    assert told == [(1, 5, "tiles"), (4, 5, "tiles")]


@pytest.mark.parametrize("on", [True, False])
def test_progress_is_drawn_after_two_seconds_on_a_terminal(monkeypatch, on):
    screen, now = io.StringIO(), SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(options.sys, "stderr", screen)
    monkeypatch.setattr(options.time, "monotonic", lambda: now.seconds)
    with options.Ticker(10, "tiles", on) as ticker:
        for seconds in (1.9, 3.0, 3.1, 3.5):
            now.seconds = 100 + seconds
            ticker.tick()
    shown = [part.replace("\x1b[K", "") for part in screen.getvalue().split("\r") if part]
    # 2 in 3 s: 8 more take 12 s; too early to draw again; 4 in 3.5 s: 6 more take 5.25 s.
    assert shown == (["tiles: 2/10, 12 s left", "tiles: 4/10, 5 s left", ""] if on else [])


def test_results_are_shown_in_columns():
    assert show.table("fit", [("n", "5"), ("ridge", "0.1")]) == "fit\n  n      5\n  ridge  0.1"
    assert [show.count(k, "step") for k in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]


class Pair(NamedTuple):
    left: int
    right: float | None


@dataclass(frozen=True)
class Kept:
    name: str
    flag: bool
    pair: Pair
    sizes: tuple[int, ...]


def test_records_come_back_and_every_field_is_checked():
    record = Kept("a", True, Pair(3, None), (1, 2))
    plain = to_plain(record)
    assert plain == {
        "name": "a", "flag": True, "pair": {"left": 3, "right": None}, "sizes": [1, 2],
    }  # fmt: skip
    assert from_plain(Kept, plain, "kept") == record
    assert to_plain(np.float64(0.5)) == 0.5
    assert from_plain(Pair, {"left": 1, "right": 2}, "pair") == Pair(1, 2.0)
    bad = {
        "name": 3, "flag": 1, "sizes": [1, 2.5], "pair": {"left": True, "right": 0.5},
    }  # fmt: skip
    for field, value in bad.items():
        with pytest.raises(ValueError, match=rf"kept\.{field}"):
            from_plain(Kept, plain | {field: value}, "kept")
    for value in ({"left": 1}, {"left": 1, "right": True}, [1, 2]):
        with pytest.raises(ValueError, match="pair"):
            from_plain(Pair, value, "pair")


def test_parameters_are_floating_arrays():
    tree = {"w": jnp.asarray([3.0]), "n": 7, "i": np.arange(3), "v": np.float32(4), "f": 9.0}
    assert [float(np.ravel(leaf)[0]) for leaf in float_leaves(tree)] == [4.0, 3.0]
    assert float(tree_norm(tree)) == 5.0


TREE = {
    "tokens": np.array([[1, -2, 300], [4, 5, 6]], np.int32),
    "mask": np.array([[True], [False]]),
    "more": (np.array([1.5, -2.5]), np.arange(4, dtype=np.uint8).reshape(2, 2)),
}


def test_trees_are_rows_of_bytes_and_come_back():
    form = form_of("x", TREE)
    rows = form.pack("x", TREE)
    assert rows.shape == (2, form.size) == (2, 3 * 4 + 1 + 8 + 2)
    assert rows.shape == form.struct(2).shape
    assert form.holds(rows)
    assert not form.holds(rows[:, 1:])
    assert form.pack("x", rows) is rows
    back = form.unpack(rows)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(TREE), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    assert type(form).from_plain(form.to_plain()) == form
    assert count_points(TREE) == 2
    x = TREE["tokens"]
    cases = {"tuple": (x, x), "numbers": (1, 2), "nested": (x, (x, x)), "list": [x], "array": x}
    assert [name for name, value in cases.items() if is_tree(value)] == ["tuple", "nested"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask": np.array([True, False])}, r"x\['mask'\]: expected shape \(q, 1\)"),
        ({"mask": np.ones((3, 1), bool)}, "same number of them"),
        ({"extra": np.ones(2)}, "expected a tree of arrays like"),
        ({"tokens": np.full((2, 3), 2**40)}, "cannot hold"),
    ],
)
def test_other_trees_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        form_of("x", TREE).pack("x", TREE | change)


def test_weights_ridges_and_fractions_at_the_edges_of_their_ranges():
    np.testing.assert_array_equal(checks.training_weights("fit", None, 2), np.ones(2))
    np.testing.assert_array_equal(checks.training_weights("fit", [0, 2], 2), [0.0, 2.0])
    np.testing.assert_array_equal(checks.as_weights("fit", [0, 0], 2, "point"), np.zeros(2))
    for weights, words in (
        ([0, 0], "positive sum"),
        ([1, -1], "non-negative"),
        ([1, np.inf], "finite"),
        ([1], "2 rows"),
        ([[1], [2]], "vector"),
    ):
        with pytest.raises(ValueError, match=words):
            checks.training_weights("fit", weights, 2)
    assert checks.check_ridge(1e-30) == 1e-30
    for ridge, dtype in ((0, None), (-1, None), (np.nan, None), (1e-40, np.float32)):
        with pytest.raises(ValueError, match="ridge: λ must"):
            checks.check_ridge(ridge, dtype)
    for value in (None, 0.1, 0.9):
        checks.check_fraction("share", value)
    for value in (0, 1, -0.1, np.nan):
        with pytest.raises(ValueError, match="share must lie between 0 and 1"):
            checks.check_fraction("share", value)
    with pytest.raises(TypeError, match="the flag True"):
        checks.check_number("share", True)


def test_indices_at_the_edges_of_their_range():
    assert checks.check_indices("Remove", [3, 0, 2]).tolist() == [3, 0, 2]
    checks.check_range("Remove", np.array([0, 4]), 5)
    for bad in (-1, 5):
        with pytest.raises(ValueError, match=rf"in \[0, 5\), got {bad}"):
            checks.check_range("Remove", np.array([0, bad]), 5)
    for bad, words in (
        ([2, 1, 2], "2 comes 2 times"),
        ([], "empty"),
        ([[0]], "one axis"),
        (np.array([True]), "boolean mask"),
        ([0.5], "integers"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            checks.check_indices("Remove", bad)


def test_queries_and_features_have_points():
    x = jnp.zeros((3, 2))
    assert checks.check_queries([[1, 2]], x).dtype == x.dtype
    for queries, words in (
        (np.zeros((1, 3)), r"expected shape \(q, 2\)"),
        (np.zeros((0, 2)), "at least one row"),
        (np.full((1, 2), np.inf), "finite"),
    ):
        with pytest.raises(ValueError, match=words):
            checks.check_queries(queries, x)
    for features, words in (
        (np.zeros((0, 2)), "at least one point"),
        (np.zeros((2, 0)), "not empty"),
    ):
        with pytest.raises(ValueError, match=words):
            checks.as_features("x", features)
    np.testing.assert_array_equal(checks.as_dtype("x", [0.0, 2.0], np.uint8), [0, 2])
    for wide, narrow in ((1e300, np.float32), (70000, np.float16)):
        with pytest.raises(ValueError, match="overflows"):
            checks.as_dtype("x", np.asarray(wide), narrow)
    assert float(checks.as_dtype("x", np.asarray(70000), np.float32)) == 70000


def test_options_at_the_edges_of_their_range():
    assert [options.check_count("k", k, least=2, most=4) for k in (2, 4)] == [2, 4]
    for bad, words in ((1, "at least 2"), (5, "at most 4")):
        with pytest.raises(ValueError, match=words):
            options.check_count("k", bad, least=2, most=4)
    with pytest.raises(ValueError, match=r"got about 2\*\*70"):
        options.check_count("k", 2**70)
    assert options.maybe(options.check_count, "k", None) is None
    assert options.maybe(options.check_count, "k", 3) == 3
    assert options.check_choice("kind", "a", ("a", "b")) == "a"
    for bad, error in (("c", ValueError), (1, TypeError)):
        with pytest.raises(error, match="kind must be 'a' or 'b'"):
            options.check_choice("kind", bad, ("a", "b"))
    assert options.check_flag("on", np.True_) is True
    with pytest.raises(TypeError, match="must be True or False"):
        options.check_flag("on", 1)
    for good in (True, False, print):
        options.check_progress("fit", good)
    with pytest.raises(TypeError, match="progress must be"):
        options.check_progress("fit", 1)
    options.check_function("fn", print, "of text")
    for bad in (3, dict):
        with pytest.raises(TypeError, match="fn must be a function of text"):
            options.check_function("fn", bad, "of text")
    options.check_solver("edit", None, (int,))
    with pytest.raises(TypeError, match="solver must be an object"):
        options.check_solver("edit", int, (int,))


def test_a_program_is_compiled_for_where_it_runs(monkeypatch):
    """On a GPU with the library's options, inside another program without."""
    from dualfluence._support import compile

    seen = []

    def transform(fn, **given):
        seen.append(given)
        return jax.jit(fn)

    compiled = compile.Compiled(lambda x: x + 1, transform)
    monkeypatch.setattr(compile.Compiled, "_on_gpu", True)
    assert compiled(1.0) == 2.0
    assert compiled(np.float32(2)) == 3.0
    assert jax.jit(compiled)(1.0) == 2.0
    monkeypatch.setattr(compile, "UNTUNED_BYTES", 16)
    assert compiled(np.zeros(2)).shape == (2,)
    assert compiled(np.zeros(3)).shape == (3,)
    options = compile.gpu_options()
    assert seen == [
        {"compiler_options": options},
        {},
        {"compiler_options": options | compile.UNTUNED_OPTIONS},
    ]
    assert jit(lambda x: x * 2, static_argnums=())(3) == 6
