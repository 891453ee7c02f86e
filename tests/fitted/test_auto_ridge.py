"""`ridge="auto"` is the ridge of the grid under which retraining without each point predicts it best."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import gates
import oracles
import problems
from dualfluence.attribution._ridge_path import GRID
from dualfluence.fitted._fit import auto_ridge, is_auto

N, C = 14, 2


def noisy(seed=0, noise=0.5, dtype=np.float64):
    """A Kronecker kernel, targets of it with noise: neither end of the grid is best."""
    rng = np.random.default_rng(seed)
    points = np.sort(rng.uniform(-3, 3, N))
    sigma = np.exp(-0.5 * (points[:, None] - points) ** 2)
    y = np.sin(points)[:, None] * [1.0, -0.5] + noise * rng.normal(size=(N, C))
    return sigma.astype(dtype), y


def left_out(sigma, y, ridge, s):
    """Weighted mean squared error of each point under kernel ridge regression without it, NumPy."""
    total, w = 0.0, s / s.sum()
    for i in np.flatnonzero(s):
        keep = np.flatnonzero((s > 0) & (np.arange(len(s)) != i))
        A = sigma[np.ix_(keep, keep)] + np.diag(ridge * s[keep].sum() / s[keep])
        f = sigma[i, keep] @ np.linalg.solve(A, y[keep])
        total += w[i] * 0.5 * ((f - y[i]) ** 2).sum()
    return total


@pytest.mark.parametrize("weights", gates.table(["plain", "weighted", "one removed"], ["weighted"]))
@pytest.mark.parametrize("seed", gates.table([0, 1, 2], [0]))
def test_squared_error_takes_the_best_of_the_grid_by_retraining(seed, weights):
    sigma, y = noisy(seed)
    s = np.ones(N) if weights == "plain" else np.random.default_rng(9).uniform(0.5, 2, N)
    s[3] = 0.0 if weights == "one removed" else s[3]
    fitted = dfl.fit(
        sigma, None, y, loss=dfl.SquaredError(), ridge="auto", weights=s, progress=False
    )
    grid = GRID * np.mean(np.diag(sigma))
    truth = np.array([left_out(sigma, y, ridge, s) for ridge in grid])
    best = int(np.argmin(truth))
    assert 0 < best < len(grid) - 1
    assert fitted.ridge == pytest.approx(grid[best], rel=1e-12)
    reason = next(note for note in fitted.stats.notes if note.startswith("ridge "))
    assert f"{truth[best]:.4g}" in reason
    assert "least leave-one-out loss" in reason
    assert "of 33 (exact; GCV would choose" in reason
    # It is the fit that this ridge gives, and one that can go on.
    same = dfl.fit(sigma, None, y, loss=dfl.SquaredError(), ridge=fitted.ridge, weights=s)
    np.testing.assert_array_equal(fitted.alpha, same.alpha)
    assert fitted.stats.converged
    assert fitted.certificate.ridge == fitted.ridge
    assert fitted.edit(dfl.Remove([0])).stats.converged


@pytest.mark.thorough
def test_networks_take_it_too():
    p = problems.linear_problem(9, C, 30, "squared")
    fitted = dfl.fit(
        cases.model(p), p.x, p.y, loss=dfl.SquaredError(), ridge="auto", progress=False
    )
    size = np.mean(np.einsum("nap,nap->na", p.J, p.J))
    truth = [retrained(p, ridge) for ridge in GRID * size]
    assert fitted.ridge == pytest.approx(GRID[int(np.argmin(truth))] * size, rel=1e-9)


def retrained(p, ridge):
    """Weighted mean loss of each point under the model retrained without it, by the NumPy oracle."""
    w, loss = oracles.normalise(p.sample_weights), oracles.LOSSES[p.loss_name]
    total = 0.0
    for i in range(len(w)):
        s = oracles.normalise(cases.without(p, [i]))
        f = oracles.outputs(oracles.retrain(p.J, p.f0, p.y, s, ridge, loss), p.J, p.f0)
        total += w[i] * loss(f, p.y)[0][i]
    return total


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "n", "p", "seed"),
    [("softmax", 15, 40, 3), ("logistic", 20, 8, 2)],
)
def test_other_losses_find_a_ridge_that_retraining_confirms(name, n, p, seed):
    p = problems.linear_problem(n, C, p, name, seed)
    fitted = dfl.fit(
        cases.model(p), p.x, p.y, loss=cases.LOSSES[name], ridge="auto", progress=False
    )
    reason = next(note for note in fitted.stats.notes if note.startswith("ridge "))
    assert f"ridge {fitted.ridge:.3g}: least leave-one-out loss" in reason
    assert "fits on a grid of 33" in reason
    assert fitted.stats.converged
    grid = GRID * np.mean(np.einsum("nap,nap->na", p.J, p.J))
    truth = np.array([retrained(p, ridge) for ridge in grid])
    assert 0 < int(np.argmin(truth)) < len(grid) - 1
    here = int(np.argmin(np.abs(np.log(grid / fitted.ridge))))
    # One Newton step for each point is an estimate of retraining, 0.2 % off near the minimum here.
    assert truth[here] <= 1.005 * truth.min()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["squared", "softmax"])
def test_it_is_the_best_of_a_given_grid_by_retraining(name):
    p = problems.linear_problem(9, C, 30, name)
    grid, loss = [0.01, 0.1, 1.0], cases.LOSSES[name]

    def fit_at(ridge):
        return dfl.fit(cases.model(p), p.x, p.y, loss=loss, ridge=ridge, progress=False)

    fitted, reason = auto_ridge(fit_at, fit_at(1.0), grid)
    truth = [retrained(p, ridge) for ridge in grid]
    assert fitted.ridge == grid[int(np.argmin(truth))]
    assert f"ridge {fitted.ridge:.3g}: least leave-one-out loss" in reason


@pytest.mark.thorough
def test_a_fit_that_missed_its_tolerance_is_not_taken():
    p = problems.linear_problem(9, C, 30, "softmax")
    taken = []

    def fit_at(ridge):
        steps = 1 if ridge < 0.5 else 100
        taken.append(
            dfl.fit(
                cases.model(p), p.x, p.y, loss=dfl.SoftmaxCrossEntropy(), ridge=ridge,
                max_steps=steps, on_failure="report", progress=False,
            )
        )  # fmt: skip
        return taken[-1]

    fitted, _ = auto_ridge(fit_at, fit_at(1.0), [0.01, 0.1, 1.0])
    assert fitted.ridge == 1.0
    with pytest.raises(dfl.NotConverged, match="fit: stopped after 1 steps"):
        dfl.fit(
            cases.model(p), p.x, p.y, loss=dfl.SoftmaxCrossEntropy(), ridge="auto", max_steps=1,
            tolerance=1e-14, progress=False,
        )  # fmt: skip


@pytest.mark.thorough
def test_a_float32_kernel_is_not_judged_by_rounding():
    """Below a thousand rounding units of K leave-one-out outputs are noise; the grid ends before."""
    sigma, y = noisy(0)
    wide = dfl.fit(sigma, None, y, loss=dfl.SquaredError(), ridge="auto", progress=False)
    narrow = dfl.fit(
        sigma.astype(np.float32), None, y, loss=dfl.SquaredError(), ridge="auto", progress=False
    )
    assert narrow.ridge == pytest.approx(wide.ridge, rel=1e-5)
    smooth, clean = noisy(0, noise=0.0)
    fitted = dfl.fit(
        smooth.astype(np.float32), None, clean, loss=dfl.SquaredError(), ridge="auto",
        progress=False, on_failure="report", kernel=dfl.KernelOptions(refine=False),
    )  # fmt: skip
    assert fitted.ridge >= 1e3 * np.finfo(np.float32).eps
    assert any("at the edge of the grid" in note for note in fitted.stats.notes)


X = np.random.default_rng(0).normal(size=(6, 2))
LOSS = {"loss": dfl.SquaredError(), "ridge": "auto", "progress": False}
REFUSED = {
    "fit: ridge='auto': needs the entries of K": lambda: dfl.fit(
        dfl.linearize(lambda w, x: x @ w, jnp.zeros((2, 1))),
        X,
        X[:, :1],
        kernel="matrix-free",
        **LOSS,
    ),
    "needs the entries of K as one matrix over the devices, not Sharded": lambda: dfl.fit(
        dfl.linearize(lambda w, x: x @ w, jnp.zeros((2, 1))),
        X,
        X[:, :1],
        kernel="matrix-free",
        mesh=jax.devices()[:1],
        **LOSS,
    ),
    "needs at least two points that have a weight": lambda: dfl.fit(
        np.eye(1), None, np.ones(1), **LOSS
    ),
    "the mean diagonal of K is 0": lambda: dfl.fit(np.zeros((3, 3)), None, np.ones(3), **LOSS),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_cannot_do_is_said(words):
    with pytest.raises((ValueError, FloatingPointError), match=words):
        REFUSED[words]()


def test_other_words_than_auto_are_refused():
    with pytest.raises(
        ValueError, match="ridge: λ must be a positive number or 'auto', got 'best'"
    ):
        is_auto("best")
