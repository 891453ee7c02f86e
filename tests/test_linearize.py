"""What counts as a parameter, and modules as parameters."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(20, 4)), np.arange(20) % 3
OPTIONS = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 1e-2, "progress": False}


class Scaled(eqx.Module):
    w: jax.Array
    scale: float = 2.0


def test_modules_with_functions_among_their_leaves():
    net = eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0))
    model = dfl.linearize(lambda m, x: jax.vmap(m)(x), net)
    arrays, rest = eqx.partition(net, eqx.is_inexact_array)
    plain = dfl.linearize(lambda p, x: jax.vmap(eqx.combine(p, rest))(x), arrays)
    assert model.num_params == plain.num_params
    gone = dfl.Remove([1, 5])
    for form in ("dense", "matrix-free"):
        update, want = (dfl.fit(m, X, Y, form=form, **OPTIONS).edit(gone) for m in (model, plain))
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
