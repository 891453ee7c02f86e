"""A run that is killed with SIGKILL goes on where it stopped, to the same bits."""

import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualfluence.attribution import Trajectory, evaluate

pytestmark = [pytest.mark.thorough, pytest.mark.host]

CHECKPOINTS, SLICES = 40, 30


def network(params, x):
    return jnp.tanh(x @ params[0]) @ params[1]


def trajectory(folder):
    """Scores of 30 points for 4 queries from 40 checkpoints."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 5)), rng.integers(0, 3, 30)
    saved = [[rng.normal(size=s) for s in ((5, 8), (8, 3))] for _ in range(CHECKPOINTS)]
    run = Trajectory(network, saved, steps=range(1, CHECKPOINTS + 1), learning_rate=0.1)
    return run.attribute(x, y, x[:4], y[:4], folder=folder, progress=False).values


def truth(folder):
    """Losses of 30 models, trained one after another."""
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(40, 5))), jnp.asarray(rng.normal(size=40))

    def train(key, rows):
        def step(w, _):
            return w - 0.01 * (x[rows].T @ (x[rows] @ w - y[rows])), None

        return jax.lax.scan(step, jax.random.normal(key, (5,), x.dtype), None, 2000)[0]

    measure = lambda w: (x[:3] @ w - y[:3]) ** 2  # noqa: E731
    masks = evaluate.random_masks(40, SLICES // 2, seed=0)
    options = {"seeds": range(2), "slice_size": 1, "folder": folder, "progress": False}
    return evaluate.retrain_networks(train, measure, masks, **options).repeats


@pytest.mark.parametrize(
    ("what", "pieces"), [(trajectory, CHECKPOINTS), (truth, SLICES)], ids=["trajectory", "truth"]
)
def test_a_killed_run_goes_on_to_the_same_bits(what, pieces, tmp_path):
    want = what(None)
    folder = tmp_path / "pieces"
    code = (
        "import sys; sys.path.insert(0, sys.argv[2]); import conftest; "
        f"from attribution.test_killed import {what.__name__}; {what.__name__}(sys.argv[1])"
    )
    command = [sys.executable, "-c", code, str(folder), str(Path(__file__).parents[1])]
    for part in (0.3, 0.6):
        process = subprocess.Popen(command)
        end = time.monotonic() + 120
        while len(list(folder.glob("*.npz"))) < part * pieces and time.monotonic() < end:
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
        process.wait()
        # Killed in the middle, or this shows nothing.
        assert part * pieces <= len(list(folder.glob("*.npz"))) < pieces
    np.testing.assert_array_equal(what(folder), want)
    assert len(list(folder.glob("*.npz"))) == pieces
