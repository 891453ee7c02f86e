"""Low-rank kernels: the same calls, exact where the rank suffices, consistent where it does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl

LOSS = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 1e-2}


def network(params, x):
    return jnp.tanh(x @ params["inner"]) @ params["outer"]


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    params = {"inner": rng.normal(size=(4, 5)), "outer": rng.normal(size=(5, 2))}
    x, y = rng.normal(size=(40, 4)), rng.integers(0, 2, 40)
    return dfl.linearize(network, jax.tree.map(jnp.asarray, params)), x, y


@pytest.mark.thorough
def test_nystrom_of_full_rank_is_the_whole_kernel(problem):
    model, x, y = problem  # 30 parameters: 20 landmarks span all gradients
    small = dfl.fit(dfl.low_rank(model, x, 40), x, y, **LOSS)
    whole = dfl.fit(model, x, y, **LOSS)
    assert "Woodbury" in small.stats.reason
    for edit in (dfl.Remove([0, 1]), dfl.Add(x[:2] + 1, y[:2])):
        got, want = small.edit(edit), whole.edit(edit)
        # The pseudo-inverse loses the square root of the condition number of K_mm, about 1e3.
        np.testing.assert_allclose(got.predict(x[:5]), want.predict(x[:5]), atol=1e-8)
        for one, other in zip(*map(jax.tree.leaves, (got.params(), want.params())), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-7)


@pytest.mark.parametrize("method", ["nystrom", "random-features"])
def test_parameters_reproduce_the_predictions(problem, method):
    model, x, y = problem
    source = dfl.low_rank(model, x, 8, method=method, key=jax.random.key(3))
    fitted = dfl.fit(source, x, y, **LOSS)
    assert fitted.kernel_op.num_bytes == 40 * 2 * 8 * 8
    update = fitted.edit(dfl.Remove([1, 2]), until=1e-9)
    step = jax.tree.map(jnp.subtract, update.params(), model.params)
    want = model.base_outputs(jnp.asarray(x)) + model.jvp(jnp.asarray(x), step)
    np.testing.assert_allclose(update.predict(x), want, atol=1e-11)
    assert float(update.certificate.distance_bound) <= 1e-9


def test_random_features_are_unbiased(problem):
    model, x, _ = problem
    points = jnp.asarray(x[:6])
    want = np.asarray(model.kernel(points))
    draws = 40
    features = [
        dfl.low_rank(model, x, 50, method="random-features", key=key).block(points, None, False)
        for key in jax.random.split(jax.random.key(0), draws)
    ]
    error = np.linalg.norm(np.mean(features, axis=0) - want) / np.linalg.norm(want)
    # Each entry is a mean of 2000 products of Gaussians; √(2/2000) per entry, 3 % overall.
    assert error < 0.1


def test_refuses_what_it_cannot_do(problem):
    _, x, _ = problem
    kernel = lambda a, b: a @ b.T  # noqa: E731
    with pytest.raises(TypeError, match="linearised network"):
        dfl.low_rank(kernel, x, 3, method="random-features")
    with pytest.raises(ValueError, match="rank"):
        dfl.low_rank(kernel, x, 0)
    with pytest.raises(ValueError, match="method"):
        dfl.low_rank(kernel, x, 3, method="pca")


def test_landmark_columns_precondition_a_matrix_free_kernel(problem):
    model, x, y = problem
    options = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 1e-4, "kernel": "matrix-free"}
    plain = dfl.fit(model, x, y, solver=dfl.CG(), sketch=dfl.Sketch(0), **options)
    helped = dfl.fit(model, x, y, solver=dfl.CG(), sketch=dfl.Sketch(30), **options)
    assert any("landmarks" in note for note in helped.stats.notes)
    assert 2 * helped.stats.iterations < plain.stats.iterations
    np.testing.assert_allclose(helped.outputs, plain.outputs, atol=1e-6)
