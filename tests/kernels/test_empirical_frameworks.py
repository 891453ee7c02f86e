"""Models of other libraries, whose parameters are whatever pytree they use."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ntk_oracles import jacobian_kernel

from dualfluence.kernels import empirical_kernel, kernel_report

pytestmark = [pytest.mark.host, pytest.mark.ordinary]

IMAGES = np.random.default_rng(0).normal(size=(5, 8, 8, 3))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3), strides=(2, 2), param_dtype=jnp.float64)(x)
        x = nn.relu(nn.GroupNorm(num_groups=2, param_dtype=jnp.float64)(x))
        x = nn.Conv(8, (3, 3), feature_group_count=2, param_dtype=jnp.float64)(x)
        x = nn.gelu(nn.LayerNorm(param_dtype=jnp.float64)(x)).mean((1, 2))
        return nn.Dense(3, param_dtype=jnp.float64)(x)


def linen():
    model = LinenNet()
    params = jax.jit(model.init)(jax.random.key(0), jnp.asarray(IMAGES))
    return model.apply, params, jnp.asarray(IMAGES)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        options = {"rngs": rngs, "param_dtype": jnp.float64}
        self.conv = nnx.Conv(3, 6, (3, 3), strides=2, **options)
        self.norm = nnx.LayerNorm(6, **options)
        self.batch = nnx.BatchNorm(6, use_running_average=True, **options)
        self.head = nnx.Linear(6, 4, **options)

    def __call__(self, x):
        x = nnx.relu(self.batch(self.norm(self.conv(x))))
        return self.head(x.mean((1, 2)))


def flax_nnx():
    graph, params, rest = nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param, ...)

    def apply(params, x):
        return nnx.merge(graph, params, rest)(x)

    return apply, params, jnp.asarray(IMAGES)


class EquinoxNet(eqx.Module):
    embed: eqx.nn.Embedding
    mlp: eqx.nn.MLP
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.embed = eqx.nn.Embedding(13, 6, key=k1)
        self.mlp = eqx.nn.MLP(6, 3, 8, 2, key=k2)
        self.norm = eqx.nn.LayerNorm(6)

    def __call__(self, x):
        return self.mlp(self.norm(jax.vmap(self.embed)(x).mean(0)))


def equinox():
    model = EquinoxNet(jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).integers(0, 13, (6, 4)))
    return (lambda model, x: jax.vmap(model)(x)), model, x


CASES = {"linen": linen, "nnx": flax_nnx, "equinox": equinox}


@pytest.mark.parametrize("name", CASES)
def test_equals_contracted_jacobian(name):
    apply_fn, params, x = CASES[name]()
    got = empirical_kernel(apply_fn, params, x)
    want = jacobian_kernel(apply_fn, params, x)
    np.testing.assert_allclose(got.value, want, rtol=0, atol=1e-12 * np.abs(want).max())
    assert "jacobian" not in str(got.report)  # every layer has a rule


def test_a_mask_of_bools_may_be_a_callable_module():
    apply_fn, model, x = equinox()
    mask = jax.tree.map(lambda _: False, model)
    mask = eqx.tree_at(lambda m: m.embed.weight, mask, True)
    report = kernel_report(apply_fn, model, x, trainable=mask)
    assert [leaf.path for leaf in report.leaves] == ["embed/weight"]
