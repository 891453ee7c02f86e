"""Every public function that takes a network takes an adapted one, and gives the same."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence import attribution, kernels, primal

RNG = np.random.default_rng(0)
X, XQ = RNG.normal(size=(6, 3)), RNG.normal(size=(2, 3))
Y, YQ = np.array([0, 1, 1, 0, 1, 0]), np.array([1, 0])
LOSS, RIDGE = dfl.SoftmaxCrossEntropy(), 0.1
NET = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
HEAD = "layers/1/*"
QUICK = {
    "primal.attribute",
    "kernel_operator",
    "GradDot",
    "TRAK",
    "ntk_mv",
    "kernel_report",
    "linearize",
}
"""One of each way in; the other rows of the tables are `thorough`."""
QUIET = {"progress": False}


def rows(table):
    return [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.thorough) for name in table
    ]


def adapted():
    return dfl.adapters.from_equinox(NET, trainable=HEAD)


def by_hand():
    """The same network and choice of parameters without the adapter."""
    own = adapted()
    names = ("layers[1].weight", "layers[1].bias")

    def rule(path, leaf):
        return path[0].key == "params" and jax.tree_util.keystr(path[1:]).endswith(names)

    mask = jax.tree_util.tree_map_with_path(
        lambda path, leaf: bool(rule(path, leaf) and eqx.is_inexact_array(leaf)), own.params
    )
    return own.apply_fn, own.params, rule, mask


def fitted_values(model):
    fitted = dfl.fit(model, X, Y, loss=LOSS, ridge=RIDGE, **QUIET)
    return fitted.predict(XQ)


def loaded(model, folder):
    path = folder / "model"
    dfl.fit(model, X, Y, loss=LOSS, ridge=RIDGE, **QUIET).save(path)
    return dfl.load(path, model, **QUIET).predict(XQ)


def descent(model):
    options = {"loss": LOSS, "ridge": RIDGE, "rate": 0.1, "epochs": 2}
    return dfl.kernel_gradient_descent(model, X, Y, **options, **QUIET).alpha


def stored(model, folder):
    dfl.store.build(model, X, folder / "kernel", **QUIET)
    return dfl.store.open_store(folder / "kernel").operator().mv(jnp.ones((6, 2)))


OF_A_MODEL = {
    "fit": lambda m, p, d: fitted_values(m),
    "load": lambda m, p, d: loaded(m, d),
    "from_trained": lambda m, p, d: (
        dfl.from_trained(m, p, X, Y, loss=LOSS, ridge=RIDGE, **QUIET).alpha
    ),
    "kernel_operator": lambda m, p, d: dfl.kernel_operator(m, X, **QUIET).entries(),
    "kernel_gradient_descent": lambda m, p, d: descent(m),
    "low_rank": lambda m, p, d: fitted_values(dfl.low_rank(m, X, 5)),
    "store.build": lambda m, p, d: stored(m, d),
    "primal.influence": lambda m, p, d: primal.influence(
        m, p, X, Y, dfl.Remove([1]), loss=LOSS, ridge=RIDGE
    ).predict(XQ),
    "primal.attribute": lambda m, p, d: (
        primal.attribute(m, p, X, Y, XQ, YQ, loss=LOSS, ridge=RIDGE).values
    ),
    "audit": lambda m, p, d: dfl.audit(m, X, Y, ridge=RIDGE).probabilities,
}


@pytest.mark.filterwarnings("ignore::dualfluence.FidelityWarning")
@pytest.mark.parametrize("name", rows(OF_A_MODEL))
def test_a_call_with_a_model_takes_an_adapted_one(name, tmp_path):
    call, (apply_fn, params, rule, _) = OF_A_MODEL[name], by_hand()
    linear = dfl.linearize(apply_fn, params, trainable=rule)
    (tmp_path / "own").mkdir()
    want = call(linear, params, tmp_path)
    got = call(adapted(), params, tmp_path / "own")
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


OF_A_FUNCTION = {
    "linearize": lambda f, p, **t: dfl.linearize(f, p, **t).kernel(X, **QUIET),
    "empirical_kernel": lambda f, p, **t: kernels.empirical_kernel(f, p, X, **QUIET, **t).value,
    "traced_kernel": lambda f, p, **t: kernels.traced_kernel(f, p, X, **QUIET, **t),
    "kernel_block": lambda f, p, **t: kernels.kernel_block(f, p, XQ, X, **t),
    "kernel_rows": lambda f, p, **t: next(kernels.kernel_rows(f, p, X, 4, **t))[1],
    "kernel_report": lambda f, p, **t: np.array(
        [np.prod(leaf.shape) for leaf in kernels.kernel_report(f, p, X, **t).leaves]
    ),
    "ntk_mv": lambda f, p, **t: kernels.ntk_mv(f, p, X, jnp.ones((6, 2)), **t),
    "GradDot": lambda f, p, **t: attribution.GradDot(f, p, **t).attribute(X, Y, XQ, YQ).values,
    "GradCos": lambda f, p, **t: attribution.GradCos(f, p, **t).attribute(X, Y, XQ, YQ).values,
    "TracIn": lambda f, p, **t: (
        attribution.TracIn(f, [p, p], 0.1, **t).attribute(X, Y, XQ, YQ).values
    ),
    "TRAK": lambda f, p, **t: attribution.TRAK(f, [p], **t).attribute(X, Y, XQ, YQ).values,
    "TRAK projected": lambda f, p, **t: (
        attribution.TRAK(f, [p], projection=4, **t).attribute(X, Y, XQ, YQ).values
    ),
    "Trajectory": lambda f, p, **t: (
        attribution.Trajectory(f, [p, p], steps=[3, 9], learning_rate=0.1, **t)
        .attribute(X, Y, XQ, YQ, **QUIET)
        .values
    ),
}
BY_MASK = {
    "empirical_kernel",
    "traced_kernel",
    "kernel_block",
    "kernel_rows",
    "kernel_report",
    "ntk_mv",
}


@pytest.mark.parametrize("name", rows(OF_A_FUNCTION))
def test_a_call_with_a_function_takes_a_model_and_its_choice_of_parameters(name):
    call, (apply_fn, params, rule, mask) = OF_A_FUNCTION[name], by_hand()
    want = np.asarray(call(apply_fn, params, trainable=mask if name in BY_MASK else rule))
    every = np.asarray(call(apply_fn, params))
    assert every.shape != want.shape or np.abs(every - want).max() > 1e-3 * np.abs(want).max()
    for model in (adapted(), adapted().linearized):
        np.testing.assert_allclose(call(model, params), want, rtol=0, atol=1e-12)


def test_products_without_a_choice_of_parameters_take_a_model_too():
    """`gradient_dot` as an array, `TRAK`, and `narrowest_dtype`."""
    own = adapted()
    for model in (own, own.linearized):
        dots = attribution.gradient_dot(model, own.params, X, Y, XQ, YQ)
        want = attribution.GradDot(own, own.params).attribute(X, Y, XQ, YQ).values
        np.testing.assert_array_equal(dots, want)
        scores = attribution.TRAK(model, [own.params]).attribute(X, Y, XQ, YQ).values
        want = attribution.TRAK(own, [own.params]).attribute(X, Y, XQ, YQ).values
        np.testing.assert_array_equal(scores, want)
        narrow = kernels.narrowest_dtype(model, own.params, X)
        assert narrow == kernels.narrowest_dtype(own.apply_fn, own.params, X)


def test_a_scale_that_a_call_does_not_follow_is_refused():
    own = adapted().with_scale(2.0)
    calls = [
        lambda: kernels.empirical_kernel(own, own.params, X),
        lambda: attribution.GradDot(own, own.params).attribute(X, Y, XQ, YQ),
        lambda: attribution.TRAK(own, [own.params]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="has a scale of its ridge"):
            call()


def test_every_public_call_with_a_model_is_in_the_tables():
    """A new function that takes a network joins them, or says here why not."""
    rooms = (dfl, attribution, kernels, primal, dfl.store)
    found = {
        f"{room.__name__.removeprefix('dualfluence').lstrip('.')}.{name}".lstrip(".")
        for room in rooms
        for name in dir(room)
        if not name.startswith("_") and callable(getattr(room, name))
        if {"model", "apply_fn"} & set(_arguments(getattr(room, name)))
    }
    tested = set(OF_A_MODEL) | {
        f"{room}.{name}".lstrip(".")
        for name in (*OF_A_FUNCTION, "gradient_dot", "narrowest_dtype")
        for room in ("", "attribution", "kernels")
    }
    # Records of results, which nobody makes by hand.
    assert found - tested == {"Linearized", "primal.PrimalUpdate"}


def _arguments(call):
    try:
        return inspect.signature(call).parameters
    except (TypeError, ValueError):
        return ()


def test_a_module_in_place_of_a_function_is_said():
    from flax import nnx

    made = type("Module", (), {"__module__": "torch.nn.modules.module"})
    call = {"__module__": "transformers", "__call__": lambda self, x: x}
    torch_like = type("Llama", (made,), call)()
    for module, door in (
        (torch_like, "from_torch"),
        (nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "from_nnx"),
    ):
        said = rf"expected apply_fn\(params, x\), got the module \w+\. Give dualfluence\.adapters\.{door}"
        with pytest.raises(TypeError, match=f"linearize: {said}"):
            dfl.linearize(module, {})
        with pytest.raises(TypeError, match=f"Trajectory: {said}"):
            dfl.attribution.Trajectory(module, [{}], [1], 0.1)
