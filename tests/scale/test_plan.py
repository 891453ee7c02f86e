"""The plan's bytes are the bytes that are used, and what cannot fit is refused with advice."""

import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence._plan import plan_command
from dualfluence.operators import DenseOperator, KroneckerOperator, LowRankOperator

GIB = 2**30


def test_bytes_in_memory_are_as_predicted():
    made = dfl.plan(50, 3, 1000, dtype="float32", rank=20, memory=GIB)
    dense = DenseOperator(jnp.zeros((150, 150), jnp.float32), 3)
    low = LowRankOperator(jnp.zeros((50, 3, 20), jnp.float32))
    assert made["dense"].num_bytes == dense.num_bytes == dense.matrix.nbytes
    assert made["low-rank"].num_bytes == low.num_bytes
    assert made["matrix-free"].num_bytes == 0
    kronecker = dfl.plan(50, 3, structure="kronecker", dtype="float64", memory=GIB)
    assert kronecker["kronecker"].num_bytes == KroneckerOperator(jnp.zeros((50, 50)), 3).num_bytes


@pytest.mark.parametrize("tile", [7, 16, 100])
def test_bytes_on_disk_are_as_predicted(tmp_path, tile):
    x = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    kernel = lambda a, b: np.asarray(a) @ np.asarray(b).T  # noqa: E731
    store = dfl.store.build(kernel, x, tmp_path / "k", tile=tile, progress=False)
    made = dfl.plan(50, 1, structure="kronecker", tile=tile, memory=GIB)
    assert made["stored"].num_bytes == store.num_bytes
    files = sum(f.stat().st_size for f in (tmp_path / "k" / "kernel").iterdir())
    padded = -(-50 // min(tile, 50)) * min(tile, 50)  # chunks at the edge are stored whole
    assert store.num_bytes <= files <= store.num_bytes * (padded / 50) ** 2 + 4096


def test_choice_follows_memory_and_says_why():
    paper = {"n": 10_000, "c": 10, "num_params": 2_900_000}
    large = dfl.plan(**paper, memory=139 * GIB)
    assert large.chosen == "dense"
    assert large["dense"].num_bytes == 40_000_000_000
    assert large.require("dense").fits
    small = dfl.plan(**paper, memory=16 * GIB)
    assert small.chosen == "matrix-free"
    assert "over" in small.reason
    with pytest.raises(dfl.PlanError, match=r"37.3 GiB.*matrix-free"):
        small.require("dense")
    shared = dfl.plan(**paper, memory=16 * GIB, devices=8)
    assert shared.chosen == "dense"
    assert dfl.plan(200_000, structure="kronecker", memory=16 * GIB).chosen == "none"
    assert not dfl.plan(200_000, memory=GIB, disk=GIB)["stored"].fits


def test_table_and_exit_status(capsys):
    assert plan_command(10_000, 10, 2_900_000, memory_gib=139.0) == 0
    assert "dense*" in capsys.readouterr().out
    assert plan_command(10_000_000, 10, memory_gib=1.0) == 1


def test_fit_refuses_before_allocating(monkeypatch):
    monkeypatch.setattr("dualfluence._plan.total_memory", lambda: 1000)
    model = dfl.linearize(lambda p, x: x @ p, jnp.ones((2, 1)))
    x = np.random.default_rng(0).normal(size=(40, 2))
    options = {"loss": dfl.SquaredError(), "ridge": 1.0}
    with pytest.raises(dfl.PlanError, match="matrix-free"):
        dfl.fit(model, x, x[:, :1], form="dense", **options)
    with pytest.raises(dfl.PlanError, match="store"):
        dfl.fit(lambda a, b: a @ b.T, x, x[:, :1], **options)
    assert dfl.fit(model, x, x[:, :1], form="matrix-free", **options).stats.converged


@pytest.mark.parametrize("bad", [{"n": 0}, {"n": 3, "rank": 0}, {"n": 3, "structure": "sparse"}])
def test_bad_arguments(bad):
    with pytest.raises(ValueError, match="plan: "):
        dfl.plan(**bad)


def test_times_follow_the_speed_of_this_machine_or_of_another():
    here = dfl.plan(4000, 1)
    assert "measured" in here.assumptions
    there = dfl.plan(4000, 1, platform="gpu")
    assert "assumed" in there.assumptions
    assert there["dense"].seconds < here["dense"].seconds or jnp.ones(1).device.platform != "cpu"
    given = dfl.plan(4000, 1, bandwidth=1e9, products=10)
    np.testing.assert_allclose(given["dense"].seconds, 10 * 4000**2 * 4 / 1e9)
    with pytest.raises(ValueError, match="platform"):
        dfl.plan(10, platform="abacus")
