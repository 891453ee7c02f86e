"""What is no kernel is refused, at the size of one tile of work space."""

import jax.numpy as jnp
import numpy as np
import pytest

from dualfluence.operators import DenseOperator
from dualfluence.operators import _checks as checks


def gram(size=97):
    features = np.random.default_rng(0).normal(size=(size, size))
    return features @ features.T


@pytest.mark.parametrize("side", [5, 32, 97, 1024])
def test_tiles_see_every_entry(monkeypatch, side):
    """Tiles that divide the kernel, that do not, and one tile for all of it: the same numbers."""
    monkeypatch.setattr(checks, "TILE_SIDE", side)
    entries = checks._entries.__wrapped__
    K = gram()
    for place in ((0, 0), (40, 41), (96, 3), (3, 96), (96, 96)):
        poked = K.copy()
        poked[place] += 1e4
        got = [float(value) for value in entries(jnp.asarray(poked))]
        assert got == [1.0, np.abs(poked).max(), np.abs(poked - poked.T).max()], place
        poked[place] = np.nan
        assert not bool(entries(jnp.asarray(poked))[0]), place


def test_the_first_bad_entry_is_named():
    K = gram()
    K[91, 3], K[60, 2] = np.nan, np.inf
    with pytest.raises(ValueError, match=r"every entry must be finite, got inf at index \(60, 2\)"):
        DenseOperator(jnp.asarray(K), 1).check()
