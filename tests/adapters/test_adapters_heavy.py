"""Models of Haiku, Keras and PyTorch, trained as their users do: `make frameworks`."""

import copy
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from promises import PROMISES, Case, X, Y, check_kernel, check_removal, flat

import dualfluence as dfl

pytestmark = [pytest.mark.frameworks, pytest.mark.host, pytest.mark.ordinary]

STEPS = 5
IMAGES = np.random.default_rng(1).normal(size=(12, 1, 6, 6))


def haiku_case(with_key=True):
    import haiku as hk
    import optax

    def net(x, is_training):
        x = hk.Linear(8)(x)
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.5)(x, is_training))
        x = hk.dropout(hk.next_rng_key(), 0.3, x) if is_training else x
        return hk.Linear(3, name="head")(x)

    x = jnp.asarray(X)
    model = hk.transform_with_state(net)
    params, state = model.init(jax.random.key(0), x, True)
    optimizer = optax.sgd(0.1)
    moments = optimizer.init(params)

    @jax.jit
    def step(params, state, moments, key):
        def loss(params):
            logits, new = model.apply(params, state, key, x, True)
            labels = jnp.asarray(Y)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new

        grads, state = jax.grad(loss, has_aux=True)(params)
        moves, moments = optimizer.update(grads, moments)
        return optax.apply_updates(params, moves), state, moments

    for key in jax.random.split(jax.random.key(1), STEPS):
        params, state, moments = step(params, state, moments, key)

    def serve(pair, x):
        return model.apply(*pair, None, jnp.asarray(x), False)[0]

    def own(x):
        return serve((params, state), x)

    given = model if with_key else hk.without_apply_rng(model)
    adapted = dfl.adapters.from_haiku(given, params, state)
    return Case(adapted, own, serve, lambda: jax.tree.leaves((params, state)), (params, state))


def keras_case(batch_norm=True):
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    keras.config.set_floatx("float64")  # for good: `predict` casts what it is given to it
    keras.utils.set_random_seed(0)
    x = np.moveaxis(IMAGES, 1, -1)
    norm = [keras.layers.BatchNormalization(momentum=0.5)] if batch_norm else []
    layers = [
        keras.layers.Input((6, 6, 1)),
        keras.layers.Conv2D(4, 3, activation="relu"),
        *norm,
        keras.layers.Dropout(0.3),
        keras.layers.Flatten(),
        keras.layers.Dense(3, name="head"),
    ]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
    model.fit(x, Y, batch_size=6, epochs=STEPS, verbose=0)

    def own(x):
        return np.asarray(model(x, training=False))

    def serve(model, x):
        return model.predict(x, verbose=0)

    def seen():
        return [np.asarray(variable) for variable in model.variables]

    adapted = dfl.adapters.from_keras(model)
    # Keras normalises batches in float32 whatever its floatx is.
    return Case(adapted, own, serve, seen, model, x, widen=1e4 if batch_norm else 1.0)


def torch_net():
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4, momentum=0.5),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    ).double()


def torch_case():
    import torch

    torch.manual_seed(0)
    model = torch_net()
    x, y = torch.from_numpy(IMAGES), torch.from_numpy(Y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    def serve(model, x):
        with torch.no_grad():
            return model(torch.from_numpy(np.asarray(x))).numpy()

    def own(x):
        model.eval()
        outputs = serve(model, x)
        model.train()
        return outputs

    def seen():
        gradients = [p.grad.numpy() for p in model.parameters()]
        modes = [part.training for part in model.modules()]
        return [*(v.numpy() for v in model.state_dict().values()), *gradients, *modes]

    adapted = dfl.adapters.from_torch(model)
    return Case(adapted, own, serve, seen, model, IMAGES)


CASES = {"haiku": haiku_case, "keras": keras_case, "torch": torch_case}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return CASES[request.param]()


@pytest.mark.parametrize("promise", PROMISES, ids=lambda f: f.__name__)
def test_an_adapted_model_keeps(case, promise):
    promise(case)


@pytest.mark.parametrize("promise", [check_kernel, check_removal], ids=lambda f: f.__name__)
def test_keras_without_batch_norm_keeps_in_float64(promise):
    promise(keras_case(batch_norm=False))


def test_restored_keras_layers_have_the_names_that_they_had():
    case = keras_case(batch_norm=False)
    served = case.adapted.restore(case.adapted.params)
    assert [layer.name for layer in served.layers] == [layer.name for layer in case.model.layers]


def test_a_keras_model_of_an_own_class_is_restored():
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    class Scale(keras.layers.Layer):
        def build(self, shape):
            self.factor = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, x):
            return x * self.factor

    class Net(keras.Model):
        def __init__(self, **options):
            super().__init__(**options)
            self.scale, self.head = Scale(), keras.layers.Dense(3)
            self.drop = keras.layers.Dropout(0.5)

        def call(self, x):  # takes no `training`: layers are told by Keras
            return self.head(self.drop(self.scale(x)))

    model = Net()
    with pytest.raises(ValueError, match="no weights yet"):
        dfl.adapters.from_keras(model)
    model(X)
    adapted = dfl.adapters.from_keras(model)
    moved = jax.tree.map(lambda leaf: 2 * leaf, adapted.params)
    np.testing.assert_allclose(adapted.restore(moved)(X), adapted.at(moved)(X), rtol=0, atol=1e-12)


def test_tied_torch_weights_stay_tied():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.ReLU(), torch.nn.Linear(5, 5))
    model[2].weight = model[0].weight
    adapted = dfl.adapters.from_torch(model.double())
    moved = jax.tree.map(lambda leaf: 2 * leaf, adapted.params)
    served = adapted.restore(moved)
    assert served[2].weight is served[0].weight
    with torch.no_grad():
        want = served(torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(adapted.at(moved)(X), want, rtol=0, atol=1e-12)


def test_keras_on_another_backend_is_refused():
    code = (
        "import keras; from dualfluence.adapters import from_keras\n"
        "from_keras(keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)]))"
    )
    env = {**os.environ, "KERAS_BACKEND": "torch"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "Keras runs on torch, expected jax" in run.stderr


def test_haiku_without_a_random_key_is_called_without():
    case = haiku_case(with_key=False)
    np.testing.assert_array_equal(case.adapted(X), case.own(X))


def test_a_plain_haiku_function_gives_its_parameters_back():
    import haiku as hk

    model = hk.transform(lambda x: hk.Linear(3)(x))
    params = model.init(jax.random.key(0), jnp.asarray(X))
    adapted = dfl.adapters.from_haiku(model, params)
    served = adapted.restore(adapted.params)
    np.testing.assert_array_equal(model.apply(served, None, jnp.asarray(X)), adapted(X))
    with pytest.raises(ValueError, match="a state was given"):
        dfl.adapters.from_haiku(model, params, {})
    with pytest.raises(TypeError, match=r"hk\.transform"):
        dfl.adapters.from_haiku(lambda x: x, params)


def test_the_torch_kernel_equals_the_jacobians_of_torch():
    import torch

    case = torch_case()
    model = case.model.eval()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def outputs(params):
        return torch.func.functional_call(model, params, (torch.from_numpy(IMAGES),))

    parts = torch.func.jacrev(outputs)(params).values()
    J = np.concatenate([part.numpy().reshape(12, 3, -1) for part in parts], axis=2)
    want = np.einsum("iap,jbp->iajb", J, J)
    got = case.adapted.linearized.kernel(jnp.asarray(IMAGES), progress=False)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-10 * np.abs(want).max())


def test_frozen_torch_parameters_are_held():
    model = torch_net()
    model[0].requires_grad_(False)
    adapted = dfl.adapters.from_torch(model)
    assert sorted(adapted.params["params"]) == ["1.bias", "1.weight", "6.bias", "6.weight"]
    assert {"0.weight", "0.bias"} <= set(adapted.params["state"])


def test_training_the_torch_module_further_changes_nothing_here():
    import torch

    model = torch_net()
    adapted = dfl.adapters.from_torch(model)
    before = np.asarray(adapted(IMAGES))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    np.testing.assert_array_equal(adapted(IMAGES), before)
    assert (
        np.abs(flat({"params": adapted.read(model)["params"]}) - flat(adapted.params)).min() > 0.9
    )


def test_a_float64_torch_module_needs_jax_in_float64():
    with jax.enable_x64(False), pytest.raises(ValueError, match="jax_enable_x64"):
        dfl.adapters.from_torch(torch_net())


def test_torch_sgd_and_an_optax_schedule_become_records():
    import optax
    import torch

    sgd = torch.optim.SGD(torch_net().parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    record = dfl.adapters.sgd_record(sgd, [3, 6])
    rest = {"momentum": 0.9, "weight_decay": 0.01}
    assert record == {"steps": [3, 6], "learning_rate": [0.1, 0.1], **rest}
    rates = []
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, 6)
    for _ in range(6):
        rates += schedule.get_last_lr()
        sgd.step()
        schedule.step()
    with pytest.raises(ValueError, match="a scheduler has changed"):
        dfl.adapters.sgd_record(sgd, [3, 6])
    ours = dfl.adapters.sgd_record(rates, [3, 6], momentum=0.9)
    theirs = dfl.adapters.sgd_record(optax.cosine_decay_schedule(0.1, 6), [3, 6], momentum=0.9)
    # Optax counts in float32 where it is not told otherwise.
    np.testing.assert_allclose(ours["learning_rate"], theirs["learning_rate"], rtol=1e-6)


def test_what_torch_adamw_keeps_is_the_diagonal_of_its_step():
    """Without a first moment the step is −η(Pg + decay·θ): P read off the parameters and off the state."""
    import torch

    model = torch_net()
    options = {"lr": 1e-3, "betas": (0.0, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    adamw = torch.optim.AdamW(model.named_parameters(), **options)
    adapted = dfl.adapters.from_torch(model)
    inputs = torch.as_tensor(np.asarray(IMAGES))
    states = []
    for _ in range(4):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        adamw.zero_grad()
        (model(inputs) ** 2).mean().backward()
        gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
        adamw.step()
        states.append(copy.deepcopy(adamw.state_dict()))
    record = dfl.adapters.adam_record(states[1:], adapted.params)
    assert record["steps"] == [2, 3, 4]
    assert record["weight_decay"] == 0.1
    np.testing.assert_allclose(record["learning_rate"], 1e-3)
    last = record["preconditioner"][-1]["params"]
    for name, p in model.named_parameters():
        step = p.detach() - before[name] + 1e-3 * 0.1 * before[name]
        want = -1e-3 * np.asarray(last[name]) * gradient[name].numpy()
        np.testing.assert_allclose(step.numpy(), want, rtol=1e-6, atol=1e-9)
    run = dfl.attribution.Trajectory(adapted, [adapted.read(model)] * 3, **record)
    assert run.ridge(2) == pytest.approx(0.1 + 1 / (3 * 1e-3 * 4))
    names = [name for name, _ in model.named_parameters()]
    unnamed = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    unnamed.step()
    with pytest.raises(ValueError, match="AdamW"):
        dfl.adapters.adam_record([unnamed.state_dict()], adapted.params, names=names)
    plain = torch.optim.Adam(model.parameters())
    plain.step()
    with pytest.raises(ValueError, match="named_parameters"):
        dfl.adapters.adam_record([plain.state_dict()], adapted.params)
    dfl.adapters.adam_record([plain.state_dict()], adapted.params, names=names)
