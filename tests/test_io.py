"""Saved states come back, damaged ones are refused, interrupted writes leave nothing."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import problems
from dualfluence.dual import _io


@pytest.fixture(scope="module")
def case():
    p = problems.linear_problem(20, 3, 80, "softmax", ridge=0.05)
    return p, cases.fit(p, solver=dfl.CG(), rank=8)


@pytest.mark.parametrize("include_kernel", [True, False])
def test_round_trip(case, tmp_path, include_kernel):
    p, fitted = case
    fitted.save(tmp_path / "a.npz", include_kernel=include_kernel)
    again = dfl.load(tmp_path / "a.npz", cases.model(p))
    assert again.stats == fitted.stats
    for got, want in (
        (again.edit(dfl.Remove([1, 2])).delta_alpha, fitted.edit(dfl.Remove([1, 2])).delta_alpha),
        (again.predict(p.x_q), fitted.predict(p.x_q)),
        (again.certificate.distance_bound, fitted.certificate.distance_bound),
    ):
        np.testing.assert_array_equal(got, want)
    assert [f.name for f in tmp_path.iterdir()] == ["a.npz"]


def test_round_trip_of_a_trained_network(tmp_path):
    theta_0 = cases.mlp_params(jax.random.key(0), (5, 8, 2))
    theta = jax.tree.map(lambda t: t + 0.1, theta_0)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(10, 5)), rng.normal(size=(10, 2))
    model = dfl.linearize(cases.mlp, theta_0)
    fitted = dfl.from_trained(model, theta, x, y, loss=dfl.SquaredError(), ridge=0.1)
    fitted.save(tmp_path / "b.npz")
    again = dfl.load(tmp_path / "b.npz", model)
    np.testing.assert_array_equal(again.predict(x), fitted.predict(x))
    assert again.fidelity == fitted.fidelity


def test_own_loss_must_be_given_again(tmp_path):
    loss = dfl.Convex(lambda f, y: 0.5 * jnp.sum((f - y) ** 2), name="mine")
    fitted = dfl.fit(jnp.eye(4), None, np.ones((4, 1)), loss=loss, ridge=1.0)
    fitted.save(tmp_path / "c.npz")
    with pytest.raises(ValueError, match="named 'mine'"):
        dfl.load(tmp_path / "c.npz", jnp.eye(4))
    again = dfl.load(tmp_path / "c.npz", jnp.eye(4), loss=loss)
    np.testing.assert_array_equal(again.alpha, fitted.alpha)


def test_another_model_is_refused(case, tmp_path):
    p, fitted = case
    fitted.save(tmp_path / "a.npz")
    x = p.x.copy()
    other = dfl.linearize(lambda t, v: 1.01 * problems.apply(t, v), jnp.zeros(x.shape[2] - 1))
    with pytest.raises(ValueError, match="not the one that was saved"):
        dfl.load(tmp_path / "a.npz", other)


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
    monkeypatch.setattr(_io, "VERSION", 99)
    fitted.save(tmp_path / "a.npz")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="version 99, this release reads up to 1"):
        dfl.load(tmp_path / "a.npz", cases.model(p))


def test_nothing_in_the_file_needs_pickle(case, tmp_path):
    _, fitted = case
    fitted.save(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        meta = json.loads(file["meta"].tobytes())
        assert all(file[name].dtype != object for name in file.files)
    assert meta["format"] == "dualfluence-fitted"


def test_an_interrupted_write_leaves_the_old_file(case, tmp_path):
    _, fitted = case
    path = tmp_path / "a.npz"
    fitted.save(path)
    before = path.read_bytes()

    def broken(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _io.write_atomically(path, broken)
    assert path.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["a.npz"]


def test_missing_file(case, tmp_path):
    p, _ = case
    with pytest.raises(FileNotFoundError, match="no file"):
        dfl.load(tmp_path / "none.npz", cases.model(p))
