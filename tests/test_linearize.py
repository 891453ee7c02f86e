"""What counts as a parameter, and modules as parameters."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import dualfluence as dfl
from dualfluence.kernels import empirical_kernel

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(20, 4)), np.arange(20) % 3
OPTIONS = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 1e-2, "progress": False}


class Scaled(eqx.Module):
    w: jax.Array
    scale: float = 2.0


@pytest.mark.thorough
def test_modules_with_functions_among_their_leaves():
    net = eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0))
    model = dfl.linearize(lambda m, x: jax.vmap(m)(x), net)
    arrays, rest = eqx.partition(net, eqx.is_inexact_array)
    plain = dfl.linearize(lambda p, x: jax.vmap(eqx.combine(p, rest))(x), arrays)
    assert model.num_params == plain.num_params
    gone = dfl.Remove([1, 5])
    for form in ("dense", "matrix-free"):
        update, want = (dfl.fit(m, X, Y, kernel=form, **OPTIONS).edit(gone) for m in (model, plain))
        moved = update.params()
        assert isinstance(moved, eqx.nn.MLP)
        np.testing.assert_allclose(
            jax.vmap(moved)(X), update.predict(X, linearised=False), rtol=1e-10
        )
        np.testing.assert_allclose(update.predict(X), want.predict(X), rtol=1e-10)


def test_only_arrays_are_parameters():
    model = dfl.linearize(lambda m, x: x @ m.w * m.scale, Scaled(jnp.zeros((4, 3))))
    assert model.num_params == 12
    assert dfl.fit(model, X, Y, **OPTIONS).params().scale == 2.0
    with pytest.raises(ValueError, match=r"no trainable parameter .* make Python numbers arrays"):
        dfl.linearize(lambda p, x: x * p["a"], {"a": 1.5})


def test_errors_inside_apply_fn_name_what_it_was_given():
    model = dfl.linearize(lambda w, x: x @ w, jnp.zeros((5, 3)))
    with pytest.raises(ValueError, match=r"apply_fn\(params, x\) fails for x of shape \(20, 4\)"):
        dfl.fit(model, X, Y, **OPTIONS)
    with pytest.raises(ValueError, match="a network needs its training features"):
        dfl.fit(model, None, Y, **OPTIONS)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train, param_dtype=jnp.float64)(x)
        return nn.Dense(3, param_dtype=jnp.float64)(x)


class NnxNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs, param_dtype=jnp.float64)
        self.dense = nnx.Linear(4, 3, rngs=rngs, param_dtype=jnp.float64)
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.dense(self.norm(x)))


def linen_case():
    net = LinenNet()
    variables = net.init(jax.random.key(0), jnp.asarray(X))
    stats = {"BatchNorm_0": {"mean": jnp.full(4, 0.3), "var": jnp.full(4, 2.0)}}
    variables = {**variables, "batch_stats": stats}
    want = dfl.linearize(
        lambda p, x: net.apply({"params": p, "batch_stats": stats}, x), variables["params"]
    )
    return net.apply, variables, want


def nnx_case():
    net = NnxNet()
    net.norm.mean[...] = jnp.full(4, 0.3)
    graph, params, rest = nnx.split(net, nnx.Param, ...)
    return (
        (lambda m, x: m(x)),
        net,
        dfl.linearize(lambda p, x: nnx.merge(graph, p, rest)(x), params),
    )


@pytest.mark.parametrize("case", [linen_case, nnx_case])
def test_statistics_among_the_parameters_are_held_fixed_and_named(case):
    apply_fn, everything, want = case()
    model = dfl.linearize(apply_fn, everything)
    assert model.num_params == want.num_params == 4 + 4 + 12 + 3
    x = jnp.asarray(X)
    K = want.kernel(x, progress=False)
    np.testing.assert_allclose(model.kernel(x, progress=False), K, atol=1e-12)
    raw = empirical_kernel(apply_fn, everything, x, progress=False)
    np.testing.assert_allclose(raw.value, K, atol=1e-12)
    fitted = dfl.fit(model, X, Y, **OPTIONS)
    (note,) = [note for note in fitted.stats.notes if "statistics held fixed" in note]
    assert all(name in note for name in ("mean", "var"))
    assert "kernel" not in note
    np.testing.assert_allclose(
        apply_fn(fitted.params(), x), fitted.predict(X, linearised=False), atol=1e-10
    )


def test_trainable_has_the_last_word_on_statistics():
    apply_fn, variables, want = linen_case()
    model = dfl.linearize(apply_fn, variables, trainable=lambda path, leaf: True)
    assert model.num_params == want.num_params + 8
    assert model.notes == ()


def test_statistics_of_training_mode_are_refused_for_what_they_do():
    net, (_, variables, _) = LinenNet(), linen_case()

    def train(v, x):
        return net.apply(v, x, train=True, mutable=["batch_stats"])[0]

    with pytest.raises(ValueError, match=r"depends on other points.*batch norm"):
        dfl.fit(dfl.linearize(train, variables), X, Y, **OPTIONS)


def test_the_diagonal_is_computed_at_full_precision():
    """A GPU's default for float32 products is TF32; only the program tells on a CPU."""
    model = dfl.linearize(lambda w, x: jnp.tanh(x @ w), jnp.ones((4, 3), jnp.float32))
    x = jnp.ones((5, 4), jnp.float32)
    for call in (model.kernel_diagonal, model.jacobian, model.base_outputs):
        text = str(jax.make_jaxpr(call)(x))
        assert "dot_general" in text
        assert text.count("HIGHEST") >= text.count("dot_general"), call
