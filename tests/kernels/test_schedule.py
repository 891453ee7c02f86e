"""Tiles of empirical kernels fit into their budget, and are as large as it allows."""

from math import ceil
from types import SimpleNamespace

import numpy as np
import pytest

from dualfluence.kernels._empirical import choose_tiles, even_parts
from dualfluence.kernels._prepare import Prepared


def network(per_point, workspace, c=1, groups=2):
    """A prepared kernel of these sizes, with nothing to compute."""
    made = object.__new__(Prepared)
    made.recipe = SimpleNamespace(num_outputs=c, dtype=np.float32, groups=(None,) * groups)
    made.feature_bytes, made.workspace_bytes = per_point, workspace
    return made


def cases():
    rng = np.random.default_rng(0)
    for _ in range(300):
        n1, n2, c = (int(v) for v in rng.integers(1, (60, 60, 4)))
        groups, per_point, workspace = (int(v) for v in rng.integers(1, (9, 900, 5000)))
        half = max(2 * per_point, workspace) + int(rng.integers(0, 40000))
        symmetric, traced = (bool(v) for v in rng.integers(0, 2, 2))
        yield n1, None if symmetric else n2, c, groups, per_point, workspace, half, traced


def test_tiles_fill_their_half_of_the_budget():
    kept = set()
    for n1, n2, c, groups, per_point, workspace, half, traced in cases():
        prepared = network(per_point, workspace, c, groups)
        tiles = choose_tiles(prepared, n1, n2, budget=2 * half, traced=traced)
        (rows, cols), columns = tiles.shape, n1 if n2 is None else n2
        assert 1 <= rows <= n1
        assert 1 <= cols <= columns
        assert n2 is not None or rows == cols
        # Products: each entry of the tile in as many copies as are summed, the sum, and one moved.
        entry = (1 if traced else c * c) * 4 * (min(groups + 1, 6) + 2)
        assert rows * cols * entry <= half or rows * cols == 1
        points = n1 + (0 if n2 is None else n2)
        assert tiles.keep == (points * per_point <= half)
        assert tiles.keep or (rows + cols) * per_point <= half
        assert tiles.chunk == half // workspace
        kept.add((tiles.keep, n2 is None))
        # As few tiles as would do: one row and column more would not fit, or there are no more.
        most = max(1, int(np.sqrt(half // entry)))
        if n2 is None:
            most = most if tiles.keep else min(most, half // (2 * per_point))
            assert rows == ceil(n1 / ceil(n1 / min(most, n1)))
        elif tiles.keep:
            assert rows == ceil(n1 / ceil(n1 / min(most, n1)))
            assert cols == ceil(n2 / ceil(n2 / min(most, n2)))
        else:
            # Tall tiles: three quarters of the features' memory for the rows.
            tall = max(1, min(n1, 3 * (half // per_point) // 4, half // entry))
            assert rows == ceil(n1 / ceil(n1 / tall))
            wide = max(1, min(n2, half // per_point - tall, half // (entry * tall)))
            assert cols == ceil(n2 / ceil(n2 / wide))
    assert len(kept) == 4


def test_large_symmetric_kernels_are_cut_into_five():
    for n, c, side in ((2048, 1, 410), (2047, 1, 2047), (1024, 2, 205), (1023, 2, 1023)):
        assert (
            choose_tiles(network(1, 1, c), n, None, budget=2**34, traced=False).shape == (side,) * 2
        )
    assert choose_tiles(network(1, 1), 4096, 4096, budget=2**34, traced=False).shape == (4096, 4096)


@pytest.mark.parametrize(("per_point", "workspace", "least"), [(100, 1, 400), (1, 300, 600)])
def test_a_budget_for_less_than_one_pair_is_refused(per_point, workspace, least):
    prepared = network(per_point, workspace)
    assert choose_tiles(prepared, 9, None, budget=least, traced=False).shape[0] >= 1
    with pytest.raises(ValueError, match=rf"too small for one pair of points, which needs {least}"):
        choose_tiles(prepared, 9, None, budget=least - 2, traced=False)


def test_parts_are_even_and_cover_every_row():
    assert even_parts(10, 4) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert even_parts(9, 4) == [slice(0, 3), slice(3, 6), slice(6, 9)]
    assert even_parts(3, 8) == [slice(0, 3)]
