"""Models of frameworks: the same outputs, and the way back."""

import importlib.util
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import dualfluence as dfl
from dualfluence import adapters

from .table import each, names_to_call, network, raises, row


class Layers(eqx.Module):
    params: dict

    def __call__(self, point):
        return network(self.params, point[None])[0]


@row("adapters.from_equinox")
@row(*each("adapters", "Adapted", "at at_zero linearized read restore with_scale"), shared=True)
def a_module_of_equinox(at):
    module = Layers(at.params)
    made = adapters.from_equinox(module)
    assert isinstance(made, adapters.Adapted)
    at.close(made(at.x), at.f0)
    at.close(made.linearized.kernel(at.xq, at.x), at.Kq)
    fitted = dfl.fit(made, at.x, at.y, loss=dfl.SquaredError(), ridge=at.ridge)
    at.close(fitted.predict(at.xq), at.fitted.predict(at.xq), 5)
    back = made.restore(fitted.params())
    assert isinstance(back, Layers)
    at.close(jax.vmap(back)(at.xq), fitted.predict(at.xq, linearised=False))
    other = made.at(made.read(Layers(at.other)))
    at.close(other(at.x), at.model(at.other, at.x))
    at.close(made.at_zero()(at.x), np.zeros((at.n, at.c)))
    free = made.with_scale(lambda path, leaf: 1 if leaf.ndim > 1 else 4.0)
    at.close(free.linearized.kernel(at.xq, at.x), at.Kq + 3 * np.eye(at.c)[None, :, None, :])


@row("adapters.from_linen", "adapters.from_nnx")
def modules_of_flax(at):
    if importlib.util.find_spec("flax") is None:
        with raises(ImportError, r"dualfluence\[flax\]"):
            adapters.from_nnx(None)
        with raises(ImportError, r"dualfluence\[flax\]"):
            adapters.from_linen(None, None)
        return
    from flax import linen, nnx

    module = linen.Dense(at.c, param_dtype=at.dtype)
    variables = module.init(jax.random.key(0), at.x)
    W = np.asarray(variables["params"]["kernel"], float)
    made = adapters.from_linen(module, variables)
    at.close(made(at.x), np.asarray(at.x, float) @ W)
    np.testing.assert_array_equal(made.restore(made.params)["params"]["kernel"], W)
    layer = nnx.Linear(at.d, at.c, param_dtype=at.dtype, dtype=at.dtype, rngs=nnx.Rngs(0))
    made = adapters.from_nnx(layer)
    at.close(made(at.x), layer(at.x))
    at.close(made.restore(made.params)(at.x), layer(at.x))


@row("adapters.from_haiku", "adapters.from_keras", "adapters.from_torch", once=True)
def frameworks_that_are_not_there(at):
    """Where the framework is installed, `tests/adapters` asks more."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    calls = {
        "haiku": lambda: adapters.from_haiku(None, None),
        "keras": lambda: adapters.from_keras(None),
        "torch": lambda: adapters.from_torch(None),
    }
    for name, call in calls.items():
        if importlib.util.find_spec(name) is None:
            with raises(ImportError, rf"dualfluence\[{name}\]"):
                call()
        else:
            with raises(TypeError, "NoneType"):
                call()


@row("adapters.sgd_record")
def a_record_of_training(at):
    record = adapters.sgd_record(lambda step: 0.1 * (step + 1), [1, 3], momentum=0.9)
    np.testing.assert_allclose(record["learning_rate"], [0.1, 0.2])
    np.testing.assert_array_equal(record["steps"], [1, 3])
    run = dfl.attribution.Trajectory(network, [at.params, at.other], **record)
    np.testing.assert_allclose(run.ridge(0), 0.1 / (dfl.attribution.KAPPA * 0.1))


@row("adapters.adam_record")
def a_record_of_adam(at):
    optimizer = optax.adamw(0.1, b2=0.9, weight_decay=0.01)
    params, state = at.params, optimizer.init(at.params)
    gradients = jax.tree.map(jnp.ones_like, params)
    for _ in range(2):
        _, state = optimizer.update(gradients, state, params)
    given = {"learning_rate": 0.1, "b2": 0.9, "weight_decay": 0.01}
    record = adapters.adam_record([state], params, **given)
    for leaf in jax.tree.leaves(record["preconditioner"]):  # v̂ = 1 at every step
        at.close(leaf, np.ones(leaf.shape))
    run = dfl.attribution.Trajectory(network, [params], **record)
    np.testing.assert_allclose(run.ridge(0), 0.01 + 1 / (dfl.attribution.KAPPA * 0.1 * 2))


CLASSIFIER, REGRESSOR = "DualInfluenceClassifier", "DualInfluenceRegressor"
if f"adapters.{CLASSIFIER}" in names_to_call():

    @row(*each("adapters", REGRESSOR, "fit predict attribute unfit label_scores fitted_ precision"))
    def ridge_regression_of_scikit_learn(at):
        x, y = np.asarray(at.x), np.asarray(at.y)
        made = adapters.DualInfluenceRegressor(ridge=at.ridge).fit(x, y)
        A = np.concatenate([x, np.ones((at.n, 1))], axis=1).astype(float)

        def solve(A, y):
            return np.linalg.solve(A.T @ A / len(A) + at.ridge * np.eye(5), A.T @ y / len(A))

        ones = np.ones((at.q, 1))
        queries = np.concatenate([np.asarray(at.xq, float), ones], axis=1)
        at.close(made.predict(np.asarray(at.xq)), queries @ solve(A, y))
        if at.n == 1:
            return
        np.testing.assert_equal(
            made.attribute(np.asarray(at.xq), np.asarray(at.yq)).values.shape, (at.q, at.n)
        )
        keep = np.arange(at.n) != 0
        off = A[0] @ solve(A[keep], y[keep]) - y[0]
        scores = made.label_scores()
        np.testing.assert_equal(scores.shape, (at.n,))
        at.close(scores[0], 0.5 * np.sum(off**2), 2)
        with made.precision():
            at.close(made.fitted_.predict(x), A @ solve(A, y))
        made.unfit([0])
        at.close(made.predict(np.asarray(at.xq)), queries @ solve(A[1:], y[1:]), 2)

    @row(
        *each("adapters", CLASSIFIER, "fit predict predict_proba decision_function attribute unfit")
    )
    @row(*each("adapters", CLASSIFIER, "label_scores fitted_ precision"))
    def logistic_regression_of_scikit_learn(at):
        x, labels = np.asarray(at.x), at.labels
        if at.n < 2 or at.c < 2:
            with raises(ValueError, "two classes"):
                adapters.DualInfluenceClassifier().fit(x, labels)
            return
        made = adapters.DualInfluenceClassifier(ridge=at.ridge).fit(x, labels)
        p = made.predict_proba(np.asarray(at.xq))
        np.testing.assert_allclose(p.sum(1), 1, rtol=1e-5)
        np.testing.assert_array_equal(made.predict(np.asarray(at.xq)), made.classes_[p.argmax(1)])
        assert np.isfinite(made.decision_function(np.asarray(at.xq))).all()
        np.testing.assert_equal(made.attribute(np.asarray(at.xq)).values.shape, (at.q, at.n))
        scores = made.label_scores()
        np.testing.assert_equal(scores.shape, (at.n,))
        assert (scores > 0).all()
        with made.precision():
            np.testing.assert_equal(made.fitted_.predict(x).shape[0], at.n)
        if at.n > at.c:
            made.unfit([at.n - 1])
            again = adapters.DualInfluenceClassifier(ridge=at.ridge).fit(x[:-1], labels[:-1])
            want = again.predict_proba(np.asarray(at.xq))
            at.close(made.predict_proba(np.asarray(at.xq)), want, 10)

    assert jnp is not None


@row("adapters.from_sklearn", "adapters.to_sklearn", shared=True)
def a_model_of_scikit_learn(at):
    if importlib.util.find_spec("sklearn") is None:
        with raises(ImportError, "sklearn"):
            adapters.from_sklearn(None, at.x, at.y)
        with raises(ImportError, "sklearn"):
            adapters.to_sklearn(at.fitted, None)
        return
    from sklearn.linear_model import Ridge

    x, y = np.asarray(at.x, float), np.asarray(at.y, float)
    alone = Ridge(alpha=0.1 * at.n, fit_intercept=False).fit(x, y)
    taken = adapters.from_sklearn(alone, x, y)
    at.close(
        taken.predict(x), x @ np.linalg.solve(x.T @ x / at.n + 0.1 * np.eye(at.d), x.T @ y / at.n)
    )
    back = adapters.to_sklearn(taken, alone)
    np.testing.assert_allclose(
        np.reshape(back.coef_, -1), np.reshape(alone.coef_, -1), rtol=1e-4, atol=1e-6
    )


@row("adapters.tokenised")
def tokenised_data_are_arrays(at):
    rng = np.random.default_rng(at.n)
    rows = [{"input_ids": rng.integers(1, 9, 2 + i % 3).tolist()} for i in range(at.n)]
    x, y = adapters.tokenised(rows, causal=True)
    lengths = np.array([len(row["input_ids"]) for row in rows])
    np.testing.assert_array_equal(x["attention_mask"].sum(1), lengths)
    np.testing.assert_array_equal((y != -100).sum(1), lengths - 1)
    for given, target in zip(rows, y, strict=True):
        np.testing.assert_array_equal(target[target != -100], given["input_ids"][1:])
