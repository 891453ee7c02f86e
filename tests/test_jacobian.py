"""Holding `J` changes how long a read-out takes, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import gates

SIZES = (4, 6, 3)
EDITS = {
    "remove": lambda x, y: dfl.Remove([0, 3, 5]),
    "relabel": lambda x, y: dfl.Relabel([1, 2], [0, 1]),
    "replace": lambda x, y: dfl.Replace([4], x=x[:1] + 0.1),
    "add": lambda x, y: dfl.Add(x[:2] - 0.2, y[:2]),
}


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(11, 4)), rng.integers(0, 3, 11), rng.normal(size=(5, 4))


@pytest.fixture(scope="module", params=["fit", "from_trained", "frozen leaf"])
def fitted(request, data):
    x, y, _ = data
    params = cases.mlp_params(jax.random.key(0), SIZES)
    trainable = (lambda path, leaf: leaf.shape == (6, 3)) if "frozen" in request.param else None
    model = dfl.linearize(cases.mlp, params, trainable=trainable)
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 0.1, "progress": False}
    if request.param == "from_trained":
        moved = jax.tree.map(lambda a: a + 0.01, params)
        return dfl.from_trained(model, moved, x, y, **options)
    return dfl.fit(model, x, y, **options)


def test_jacobian_is_the_derivative_of_every_output(data):
    x, _, _ = data
    params = cases.mlp_params(jax.random.key(0), SIZES)
    J = dfl.linearize(cases.mlp, params).jacobian(jnp.asarray(x))
    want = jax.jacfwd(lambda p: cases.mlp(p, jnp.asarray(x)))(params)
    for got, truth in zip(jax.tree.leaves(J), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, truth, atol=1e-12)


@pytest.mark.parametrize("name", gates.table(EDITS, list(EDITS)[:1]))
def test_read_outs_are_the_same(fitted, data, name):
    x, y, xq = data
    edit = EDITS[name](x, y)
    want, got = fitted.edit(edit), fitted.with_jacobian().edit(edit)
    for a, b in zip(*(jax.tree.leaves(u.params()) for u in (got, want)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
    np.testing.assert_allclose(got.predict(xq), want.predict(xq), atol=1e-12)
    np.testing.assert_allclose(got.delta_outputs(xq), want.delta_outputs(xq), atol=1e-12)
    again = got.commit().edit(dfl.Remove([7]))
    truth = want.commit().edit(dfl.Remove([7]))
    np.testing.assert_allclose(again.predict(xq), truth.predict(xq), atol=1e-12)


def test_moving_to_a_mesh_leaves_the_jacobian_behind(fitted, data):
    _, _, xq = data
    held = fitted.with_jacobian()
    on_mesh = held.on(jax.devices()[:1])
    np.testing.assert_allclose(on_mesh.predict(xq), fitted.predict(xq), atol=1e-10)
    with pytest.raises(ValueError, match="mesh"):
        on_mesh.with_jacobian()


def test_refused_without_parameters_or_memory(fitted, monkeypatch):
    kernel = np.eye(4) + 0.5
    bare = dfl.fit(kernel, None, np.ones((4, 1)), loss=dfl.SquaredError(), ridge=0.1)
    with pytest.raises(TypeError, match="kernel without parameters"):
        bare.with_jacobian()
    params = cases.mlp_params(jax.random.key(0), SIZES)
    narrow = dfl.low_rank(dfl.linearize(cases.mlp, params), fitted.x, 6)
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 0.1, "progress": False}
    with pytest.raises(TypeError, match="NystromSource"):
        dfl.fit(narrow, fitted.x, np.arange(11) % 3, **options).with_jacobian()
    monkeypatch.setattr("dualfluence._plan.total_memory", lambda: 100)
    with pytest.raises(dfl.PlanError, match=r"with_jacobian: the Jacobian needs"):
        fitted.with_jacobian()
