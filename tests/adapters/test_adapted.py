"""The record that adapters return, whatever the framework."""

import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from promises import X, Y, jacobian

import dualfluence as dfl
from dualfluence.adapters._adapted import need

pytestmark = [pytest.mark.host, pytest.mark.ordinary]


def mlp():
    return eqx.nn.MLP(5, 3, 4, 1, key=jax.random.key(0))


def last_layer(path, leaf):
    return "layers/1" in jax.tree_util.keystr(path, simple=True, separator="/")


@pytest.mark.parametrize("trainable", ["layers/1/*", ["layers/1/weight", "*/1/bias"], last_layer])
def test_parts_are_chosen_by_path(trainable):
    adapted = dfl.adapters.from_equinox(mlp(), trainable=trainable)
    assert adapted.linearized.num_params == 4 * 3 + 3
    moved = dfl.fit(adapted, X, Y, loss=dfl.SoftmaxCrossEntropy(), ridge=0.1).params()
    served = adapted.restore(moved)
    np.testing.assert_array_equal(served.layers[0].weight, mlp().layers[0].weight)
    assert np.abs(served.layers[1].weight - mlp().layers[1].weight).max() > 1e-3


def test_a_trajectory_scores_the_chosen_parts():
    adapted = dfl.adapters.from_equinox(mlp(), trainable="layers/1/*")
    run = dfl.attribution.Trajectory(adapted, [adapted.params], steps=[3], learning_rate=0.1)
    model = run.model(0)
    K = np.asarray(model.kernel(jnp.asarray(X), progress=False))
    J = jacobian(adapted, jnp.asarray(X))[:, :, -15:]  # the last layer's, in the order of the tree
    np.testing.assert_allclose(K, np.einsum("iap,jbp->iajb", J, J), rtol=0, atol=1e-12)


def test_a_pattern_that_fits_nothing_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        dfl.fit(
            dfl.adapters.from_equinox(mlp(), trainable="hed/*"),
            X,
            Y,
            loss=dfl.SoftmaxCrossEntropy(),
            ridge=0.1,
        )


def test_zero_is_where_weight_decay_pulls():
    adapted = dfl.adapters.from_equinox(mlp(), trainable="layers/1/*").at_zero()
    net = adapted.restore(adapted.params)
    assert not np.any(net.layers[1].weight)
    np.testing.assert_array_equal(net.layers[0].weight, mlp().layers[0].weight)


def test_a_model_of_one_output_without_an_axis_gets_it():
    class Flat(eqx.Module):
        w: jax.Array

        def __call__(self, x):
            return self.w @ x

    adapted = dfl.adapters.from_equinox(Flat(jnp.arange(5.0)))
    np.testing.assert_allclose(adapted(X), X @ np.arange(5.0)[:, None], atol=1e-12)


def test_foreign_parameters_are_refused():
    adapted = dfl.adapters.from_equinox(mlp())
    with pytest.raises(ValueError, match="restore: params must have the tree of this Equinox"):
        adapted.restore({"params": 1})
    wrong = jax.tree.map(lambda leaf: leaf[:1], adapted.params)
    with pytest.raises(ValueError, match=r"restore: params.*weight must have shape"):
        adapted.restore(wrong)


@pytest.mark.parametrize("model", [eqx.nn.MLP, "model", None])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match=r"from_equinox: model must be an eqx\.Module"):
        dfl.adapters.from_equinox(model)


def test_a_missing_framework_is_named_with_its_extra():
    with pytest.raises(ImportError, match=r"from_x: needs no_such.*dualfluence\[x\]"):
        need("no_such.module", "from_x", "x")


def test_no_framework_is_imported_until_it_is_used():
    names = "flax haiku keras torch torchax sklearn optax"
    code = f"import sys, dualfluence; print([n for n in {names.split()} if n in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


class FakeSGD:
    def __init__(self, *groups):
        self.param_groups = [{"dampening": 0, **group} for group in groups]


def test_a_schedule_becomes_its_mean_up_to_each_checkpoint():
    record = dfl.adapters.sgd_record(lambda step: 1.0 / (1 + step), [1, 4], momentum=0.9)
    assert record["steps"] == [1, 4]
    np.testing.assert_allclose(record["learning_rate"], [1, (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4])
    assert record["momentum"] == 0.9
    listed = dfl.adapters.sgd_record([1.0, 1 / 2, 1 / 3, 1 / 4, 7.0], [1, 4], momentum=0.9)
    assert listed == record
    assert dfl.adapters.sgd_record(0.5, [2])["learning_rate"] == [0.5]


def test_a_torch_optimiser_is_read():
    group = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    record = dfl.adapters.sgd_record(FakeSGD(group), [1, 4])
    rest = {"momentum": 0.9, "weight_decay": 0.01}
    assert record == {"steps": [1, 4], "learning_rate": [0.1, 0.1], **rest}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"lr": 0.1, "betas": (0.9, 0.99)}], "FakeSGD is not SGD"),
        ([{"lr": 0.1, "momentum": 0.0}, {"lr": 0.2, "momentum": 0.0}], "one learning rate"),
        ([{"lr": 0.1, "momentum": 0.5, "dampening": 0.5}], "no dampening"),
        ([{"lr": 0.1, "momentum": 0.0, "initial_lr": 0.2}], "a scheduler has changed"),
    ],
)
def test_what_plain_sgd_does_not_say_is_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        dfl.adapters.sgd_record(FakeSGD(*groups), [1])


def test_too_few_rates_are_refused():
    with pytest.raises(ValueError, match="each of 4 steps"):
        dfl.adapters.sgd_record([0.1, 0.1], [4])


def test_keras_without_its_backend_is_told_from_no_keras(monkeypatch):
    from dualfluence.adapters import _keras

    def fails(*unused):
        raise ImportError("needs keras") from ModuleNotFoundError("No module named 'tensorflow'")

    monkeypatch.setattr(_keras, "need", fails)
    monkeypatch.setattr(_keras, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs keras"):
        dfl.adapters.from_keras(None)
    monkeypatch.setattr(_keras, "find_spec", lambda name: name)
    with pytest.raises(ImportError, match=r"tensorflow.*KERAS_BACKEND=jax"):
        dfl.adapters.from_keras(None)
