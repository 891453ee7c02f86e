"""Leave-one-out over a grid of ridges is retraining for squared error, one Newton step elsewhere."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import gates
import oracles
import problems

N, C = 9, 2
GRID = [0.01, 0.1, 1.0]


def _fit(name, form, weighted, ridge=0.05):
    if form == "dense":
        p = problems.linear_problem(N, C, 30, name, weighted=weighted, ridge=ridge)
        return p, cases.fit(p)
    p, sigma, _ = problems.kronecker_problem(N, C, 15, name, weighted=weighted, ridge=ridge)
    fitted = dfl.fit(
        jnp.asarray(sigma),
        None,
        p.y,
        loss=cases.LOSSES[name],
        ridge=ridge,
        weights=p.sample_weights,
    )
    return p, fitted


def _leave_one_out(p, ridge, f0):
    """Weighted mean loss of each point under the model retrained without it, NumPy."""
    w = oracles.normalise(p.sample_weights)
    loss = oracles.LOSSES[p.loss_name]
    total = 0.0
    for i in range(N):
        s = cases.without(p, [i])
        theta = oracles.retrain(p.J, f0, p.y, oracles.normalise(s), ridge, loss)
        f = oracles.outputs(theta, p.J, f0)
        total += w[i] * loss(f, p.y)[0][i]
    return total


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("form", ["dense", "kronecker"])
def test_squared_error_is_retrained_at_every_ridge(form, weighted):
    p, fitted = _fit("squared", form, weighted)
    f0 = p.f0 if form == "dense" else np.zeros_like(p.f0)
    path = fitted.ridge_path(GRID)
    want = [_leave_one_out(p, ridge, f0) for ridge in GRID]
    np.testing.assert_allclose(path.leave_one_out, want, rtol=1e-7)
    assert path.exact


def test_gcv_is_its_definition():
    p, fitted = _fit("squared", "dense", False)
    path = fitted.ridge_path(GRID)
    K = p.K.reshape(N * C, N * C)
    for ridge, got, dof in zip(GRID, path.gcv, path.dof, strict=True):
        H = K @ np.linalg.inv(K + N * ridge * np.eye(N * C))
        e = (np.eye(N * C) - H) @ (p.y - p.f0).reshape(-1)
        want = 0.5 * (e**2).sum() / N / (1 - np.trace(H) / (N * C)) ** 2
        assert got == pytest.approx(want, rel=1e-8)
        assert dof == pytest.approx(np.trace(H), rel=1e-8)


OWN = list(itertools.product(["softmax", "logistic"], ["dense", "kronecker"]))


@pytest.mark.parametrize(("name", "form"), gates.table(OWN, [OWN[0], OWN[3]]))
def test_at_its_own_ridge_it_is_the_closed_form(name, form):
    _, fitted = _fit(name, form, True)
    path = fitted.ridge_path([fitted.ridge])
    f = np.asarray(fitted.outputs)
    total = 0.0
    for i in range(N):
        after = fitted.edit(dfl.Remove([i])).outputs[i : i + 1]
        loss = fitted.loss.value(after, fitted.data.targets[i : i + 1])
        total += fitted.data.weights[i] * float(loss[0])
    assert path.leave_one_out[0] == pytest.approx(total, rel=1e-8)
    assert f.shape == (N, C)
    assert not path.exact


def test_a_path_can_be_drawn(tmp_path):
    _, fitted = _fit("squared", "dense", False)
    fitted.ridge_path().plot().savefig(tmp_path / "path.png")
    assert (tmp_path / "path.png").stat().st_size > 1000


def test_bad_grids_and_kernels_without_entries_are_refused():
    p, fitted = _fit("squared", "dense", False)
    with pytest.raises(ValueError, match="positive finite"):
        fitted.ridge_path([0.1, -1.0])
    with pytest.raises(ValueError, match="needs the entries of K"):
        cases.fit(p, kernel="matrix-free").ridge_path(GRID)
    with pytest.raises(ValueError, match="needs at least two points that have a weight"):
        dfl.fit(np.eye(1), None, np.ones(1), loss=dfl.SquaredError(), ridge=0.1).ridge_path(GRID)
