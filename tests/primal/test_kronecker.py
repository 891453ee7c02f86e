"""K-FAC and EK-FAC against their definitions, formed naively from per-layer Jacobians."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rival_cases
from jax.flatten_util import ravel_pytree

import dualfluence as dfl
import gates
from dualfluence.primal import EKFAC, KFAC
from dualfluence.primal._kronecker import _looked_up

C = rival_cases.C


def _activations(name, p, x):
    """`a`, `(positions, inputs)`, of each layer, for one point, written out by hand."""
    p = {k: np.asarray(v) for k, v in p.items()}
    if name == "dense":
        return {("w1", "b1"): np.append(x, 1)[None],
                ("w2", "b2"): np.append(np.tanh(x @ p["w1"] + p["b1"]), 1)[None]}  # fmt: skip
    if name == "conv":
        patches = np.stack([x[i : i + 2, j : j + 2].ravel() for i in range(2) for j in range(2)])
        hidden = np.tanh(patches @ p["k"].reshape(8, 3) + p["b"]).ravel()
        return {("k",): patches, ("w",): hidden[None]}
    if name == "tied":
        first = np.tanh(x @ p["w"])
        return {("w",): np.stack([x, first]), ("o",): np.tanh(first @ p["w"])[None]}
    if name == "embedding":
        rows = np.eye(6)[x]
        return {("e",): rows, ("w", "b"): np.append(np.tanh((rows @ p["e"]).mean(0)), 1)[None]}
    return {("w",): np.tanh(x + p["b"])[None]}


def _pulls(name, p, x):
    """`∂f/∂(a W)` of each layer, `(c, positions, outputs)`, by Jacobians at added zeros."""
    head = {"dense": "w2", "conv": "w", "tied": "o", "embedding": "w", "bias": "w"}[name]
    last = ("w2", "b2") if name == "dense" else ("w", "b") if name == "embedding" else (head,)
    found = {last: np.eye(C)[:, None]}
    if name == "dense":
        h = lambda z: jnp.tanh(x @ p["w1"] + p["b1"] + z[0]) @ p["w2"]  # noqa: E731
        found["w1", "b1"] = jax.jacobian(h)(jnp.zeros((1, 5)))
    if name == "conv":
        patches = np.stack(
            [np.asarray(x[i : i + 2, j : j + 2]).ravel() for i in range(2) for j in range(2)]
        )
        h = lambda z: jnp.tanh(patches @ p["k"].reshape(8, 3) + p["b"] + z).ravel() @ p["w"]  # noqa: E731
        found[("k",)] = jax.jacobian(h)(jnp.zeros((4, 3)))
    if name == "tied":
        h = lambda z: jnp.tanh(jnp.tanh(x @ p["w"] + z[0]) @ p["w"] + z[1]) @ p["o"]  # noqa: E731
        found[("w",)] = jax.jacobian(h)(jnp.zeros((2, 5)))
    if name == "embedding":
        h = lambda z: jnp.tanh((p["e"][x] + z).mean(0)) @ p["w"]  # noqa: E731
        found[("e",)] = jax.jacobian(h)(jnp.zeros((4, 4)))
    return {k: np.asarray(v) for k, v in found.items()}


def _root(block):
    """A square root of one point's loss Hessian; which one does not matter to sums over it."""
    values, vectors = np.linalg.eigh(block)
    return vectors * np.sqrt(np.maximum(values, 0))


def _positions(params):
    """For each leaf its rows in the flat vector."""
    flat, unravel = ravel_pytree(params)
    return {k: np.asarray(v) for k, v in unravel(jnp.arange(flat.size)).items()}


def naive_inverse(case, name, corrected):
    """The damped inverse as a dense matrix, block by block, from the definition alone."""
    where, W = _positions(case.params), case.loss_hessians()
    inverse = np.zeros((case.model.num_params,) * 2)
    a = [_activations(name, case.params, np.asarray(x)) for x in case.x]
    pulls = [_pulls(name, case.params, x) for x in case.x]
    done = set()
    for leaves in a[0]:
        A = sum(np.einsum("sm,sk->mk", ai[leaves], ai[leaves]) / len(ai[leaves]) for ai in a)
        A = A / case.n
        S, grads = 0, []
        for ai, pull, block in zip(a, pulls, W, strict=True):
            g = np.einsum("cr,csn->rsn", _root(block / case.n), pull[leaves])
            S = S + np.einsum("rsn,rsk->nk", g, g)
            grads += list(np.einsum("sm,rsn->rmn", ai[leaves], g))
        values_a, Q_a = np.linalg.eigh(A)
        if leaves == ("e",):  # one-hot rows: diagonal as it stands
            values_a, Q_a = np.diag(A), np.eye(len(A))
        values_s, Q_s = np.linalg.eigh(S)
        Lambda = np.outer(values_a, values_s)
        if corrected:
            Lambda = sum((Q_a.T @ grad @ Q_s) ** 2 for grad in grads)
        basis = np.einsum("mk,nl->mnkl", Q_a, Q_s).reshape(Lambda.size, Lambda.size)
        block = basis @ np.diag(1 / (Lambda.ravel() + case.ridge)) @ basis.T
        rows = np.concatenate([where[k].reshape(-1, S.shape[0]) for k in leaves]).ravel()
        inverse[np.ix_(rows, rows)] = block
        done |= set(leaves)
    for k in set(where) - done:  # no factors: the exact block
        rows = where[k].ravel()
        M = case.gauss_newton()[np.ix_(rows, rows)]
        inverse[np.ix_(rows, rows)] = np.linalg.inv(M + case.ridge * np.eye(len(rows)))
    return inverse


@pytest.mark.parametrize("solver", [EKFAC(), KFAC()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("name", gates.table(rival_cases.SHAPES, ["tied"]))
def test_scores_are_those_of_the_definition(name, solver):
    case = rival_cases.make(name)
    want = case.scores(naive_inverse(case, name, isinstance(solver, EKFAC)))
    found = case.attribute(solver)
    # Eigenvalues of the factors are 1e-3 apart or more here: vectors are good to 1e-13.
    np.testing.assert_allclose(found.values, want, rtol=1e-10, atol=1e-10 * np.abs(want).max())
    loose = {"conv": ["b"], "bias": ["b"]}.get(name, [])
    assert [k for k, kind in found.stats["blocks"].items() if kind == "exact"] == loose
    assert any("b (exact block)" in note for note in found.notes) == bool(loose)


def test_one_place_with_one_output_is_exact():
    """A linear model of one output: the curvature is one Kronecker factor, and its blocks are it."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 4)), rng.normal(size=(30, 1))
    model = dfl.linearize(lambda w, x: x @ w, jnp.zeros((4, 1)))
    options = {"loss": dfl.SquaredError(), "ridge": 0.1}
    data = (jnp.zeros((4, 1)), x, y, x[:3], y[:3])
    want = dfl.primal.attribute(model, *data, solver=dfl.primal.CG(rtol=1e-13), **options).values
    for solver in (KFAC(), EKFAC()):
        got = dfl.primal.attribute(model, *data, solver=solver, **options).values
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.thorough
def test_many_parameters_without_factors_keep_a_diagonal():
    case = rival_cases.make("bias", seed=1)
    found = case.attribute(EKFAC(exact_limit=3))
    assert found.stats["blocks"]["b"] == "diagonal"
    rows = _positions(case.params)["b"].ravel()
    inverse = naive_inverse(case, "bias", True)
    diagonal = np.diag(case.gauss_newton())[rows] + case.ridge
    inverse[np.ix_(rows, rows)] = np.diag(1 / diagonal)
    np.testing.assert_allclose(found.values, case.scores(inverse), rtol=1e-10, atol=1e-12)


def test_rows_that_are_looked_up_are_those_of_a_loop():
    """Squares of an embedding's gradient, added up in NumPy; a token of −1 is in no row."""
    rng = np.random.default_rng(0)
    points, spots, length, size, rows = 4, 2, 3, 5, 6
    at = rng.integers(-1, rows, size=(points, length))
    g = rng.normal(size=(points, spots, 1, length, size))
    want = np.zeros((rows, size))
    for i in range(points):
        for r in range(spots):
            table = np.zeros((rows, size))
            for s in range(length):
                if at[i, s] >= 0:
                    table[at[i, s]] += g[i, r, 0, s]
            want += table**2
    got = _looked_up(jnp.asarray(at)[:, None], jnp.asarray(g), rows)
    np.testing.assert_allclose(np.asarray(got).reshape(rows, size), want, rtol=1e-12)
