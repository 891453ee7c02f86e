"""Models of Flax and Equinox, trained as their users do, with batch norm and dropout."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import freeze
from promises import PROMISES, Case, X, Y

import dualfluence as dfl
import gates

pytestmark = [pytest.mark.host, pytest.mark.ordinary]

STEPS = 5


def cross_entropy(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(Y)).mean()


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        options = {"rngs": rngs, "param_dtype": jnp.float64}
        held = getattr(nnx, "List", list)  # Flax 0.11, the last for JAX 0.6, holds plain lists
        self.layers = held([nnx.Linear(5, 8, **options), nnx.Linear(8, 8, **options)])
        self.norm = nnx.BatchNorm(8, momentum=0.5, **options)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(8, 3, **options)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.layers[0](x)))
        return self.head(self.drop(jnp.tanh(self.layers[1](x))))


def nnx_case():
    model = NnxNet(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.5), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda m: cross_entropy(m(jnp.asarray(X))))(model)
        optimizer.update(model, grads)

    for _ in range(STEPS):
        step(model, optimizer)
    model.train()

    def own(x):
        copy = nnx.clone(model)
        copy.eval()
        return copy(jnp.asarray(x))

    def seen():
        values = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngKey)))
        return [*values, model.drop.deterministic, model.norm.use_running_average]

    adapted = dfl.adapters.from_nnx(model)
    return Case(adapted, own, lambda m, x: m(jnp.asarray(x)), seen, model)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(8, param_dtype=jnp.float64)(x)
        x = nn.relu(nn.BatchNorm(not train, momentum=0.5, param_dtype=jnp.float64)(x))
        x = nn.Dropout(0.3, deterministic=not train)(x)
        return nn.Dense(3, param_dtype=jnp.float64, name="head")(x)


def linen_case(frozen=False):
    module, key = LinenNet(), jax.random.key(0)
    variables = module.init(key, jnp.asarray(X), train=False)
    optimizer = optax.sgd(0.1)
    moments = optimizer.init(variables["params"])

    @jax.jit
    def step(variables, moments, key):
        def loss(params):
            logits, new = module.apply(
                {**variables, "params": params},
                jnp.asarray(X),
                train=True,
                rngs={"dropout": key},
                mutable=["batch_stats"],
            )
            return cross_entropy(logits), new

        grads, new = jax.grad(loss, has_aux=True)(variables["params"])
        moves, moments = optimizer.update(grads, moments)
        return {"params": optax.apply_updates(variables["params"], moves), **new}, moments

    for k in jax.random.split(key, STEPS):
        variables, moments = step(variables, moments, k)
    variables = freeze(variables) if frozen else variables

    def serve(variables, x):
        return module.apply(variables, jnp.asarray(x), train=False)

    adapted = dfl.adapters.from_linen(module, variables)
    seen = functools.partial(jax.tree.leaves, variables)
    return Case(adapted, functools.partial(serve, variables), serve, seen, variables)


class EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.first = eqx.nn.Linear(5, 8, key=k1)
        self.norm = eqx.nn.BatchNorm(8, axis_name="batch", momentum=0.5, mode="batch")
        self.drop = eqx.nn.Dropout(0.3)
        self.head = eqx.nn.Linear(8, 3, key=k2)

    def __call__(self, x, state, key):
        x, state = self.norm(self.first(x), state)
        return self.head(self.drop(jax.nn.relu(x), key=key)), state


def equinox_case():
    model, state = eqx.nn.make_with_state(EquinoxNet)(jax.random.key(0))
    optimizer = optax.sgd(0.1)
    moments = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, moments, key):
        def loss(model):
            batched = jax.vmap(model, in_axes=(0, None, 0), out_axes=(0, None), axis_name="batch")
            logits, new = batched(jnp.asarray(X), state, jax.random.split(key, len(X)))
            return cross_entropy(logits), new

        grads, state = eqx.filter_grad(loss, has_aux=True)(model)
        moves, moments = optimizer.update(grads, moments)
        return eqx.apply_updates(model, moves), state, moments

    for k in jax.random.split(jax.random.key(1), STEPS):
        model, state, moments = step(model, state, moments, k)

    def serve(pair, x):
        model, state = pair
        return jax.vmap(lambda v: model(v, state, None)[0])(jnp.asarray(x))

    def own(x):
        return serve((eqx.nn.inference_mode(model), state), x)

    def seen():
        return [*jax.tree.leaves(eqx.filter((model, state), eqx.is_array)), model.drop.inference]

    adapted = dfl.adapters.from_equinox(model, state)
    return Case(adapted, own, serve, seen, (model, state))


CASES = {
    "nnx": nnx_case,
    "linen": linen_case,
    "equinox": equinox_case,
}


@pytest.fixture(scope="module", params=gates.table(CASES, ["equinox"]))
def case(request):
    return CASES[request.param]()


@pytest.mark.parametrize("promise", PROMISES, ids=lambda f: f.__name__)
def test_an_adapted_model_keeps(case, promise):
    promise(case)


def test_an_equinox_module_without_state_is_served_as_a_module():
    net = eqx.nn.MLP(5, 3, 4, 2, key=jax.random.key(0))
    adapted = dfl.adapters.from_equinox(net)
    served = adapted.restore(adapted.params)
    assert isinstance(served, eqx.nn.MLP)
    want = jax.vmap(net)(jnp.asarray(X))
    np.testing.assert_array_equal(adapted(X), want)
    np.testing.assert_array_equal(jax.vmap(served)(jnp.asarray(X)), want)


def test_restored_linen_variables_are_frozen_as_they_came():
    for frozen in (False, True):
        case = linen_case(frozen)
        assert type(case.adapted.restore(case.adapted.params)) is type(case.model)
