"""Functions whose points depend on each other are refused at every door, every time, and no others are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import NETWORKS

import dualfluence as dfl
from dualfluence.kernels import empirical_kernel, kernel_block, ntk_mv, traced_kernel
from dualfluence.kernels._apart import Apart, _compare, proves_apart
from dualfluence.kernels._params import split_params
from users import ordinary

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(9, 4)), np.arange(9) % 3
PARAMS = {"W": jnp.asarray(RNG.normal(size=(4, 6))), "O": jnp.asarray(RNG.normal(size=(6, 3)))}
OPTIONS = {"loss": dfl.SoftmaxCrossEntropy(), "ridge": 0.1, "progress": False}
SEES = "output at one point depends on other points"


def plain(p, x):
    return jnp.tanh(x @ p["W"]) @ p["O"]


@jax.custom_vjp
def clipped(h):
    return h


# The forward pass keeps points apart, the backward one does not.
clipped.defvjp(lambda h: (h, h.mean(0)), lambda mean, g: (g * (1 + mean),))

COUPLED = {
    "batch norm in training": lambda p, x: plain(p, (x - x.mean(0)) / (x.std(0) + 1e-3)),
    "a coupling of 4e-3": lambda p, x: plain(p, x + 4e-3 * x.mean(0)),
    "attention over points": lambda p, x: jax.nn.softmax(x @ x.T / 4) @ plain(p, x),
    "the point before": lambda p, x: plain(p, x + 0.1 * jnp.roll(x, 1, axis=0)),
    "only earlier points": lambda p, x: plain(p, jnp.cumsum(x, axis=0)),
    "their number": lambda p, x: plain(p, x) / x.shape[0],
    "dropout": lambda p, x: plain(p, x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)),
    "the place in the batch": lambda p, x: plain(p, x) * jnp.arange(1.0, len(x) + 1)[:, None],
    "derivatives alone": lambda p, x: clipped(jnp.tanh(x @ p["W"])) @ p["O"],
    "zero outputs": lambda p, x: (
        (x - x.mean(0)) @ p["W"] @ p["O"] * 0 + (x - x.mean(0))[:, :3] * p["O"][0]
    ),
}
COUPLED = {name: ordinary(fn) for name, fn in COUPLED.items()}
DOORS = {
    "fit": lambda m: dfl.fit(m, X, Y, kernel="dense", **OPTIONS),
    "matrix-free": lambda m: dfl.fit(m, X, Y, kernel="matrix-free", **OPTIONS),
    "nystrom": lambda m: dfl.low_rank(m, X, 6),
    "random features": lambda m: dfl.fit(
        dfl.low_rank(m, X, 6, method="random-features"), X, Y, **OPTIONS
    ),
    "from_trained": lambda m: dfl.from_trained(m, m.params, X, Y, **OPTIONS),
    "primal": lambda m: dfl.primal.influence(
        m, m.params, X, Y, dfl.Remove([0]), loss=OPTIONS["loss"], ridge=0.1
    ),
    "kernel": lambda m: m.kernel(jnp.asarray(X), progress=False),
    "kernel_operator": lambda m: dfl.kernel_operator(m, X, progress=False),
    "diagonal": lambda m: m.kernel_diagonal(jnp.asarray(X)),
    "jacobian": lambda m: m.jacobian(jnp.asarray(X)),
    "vjp": lambda m: m.vjp(jnp.asarray(X), jnp.ones((9, 3))),
    "empirical_kernel": lambda m: empirical_kernel(m.apply_fn, m.params, X, progress=False),
    "traced_kernel": lambda m: traced_kernel(m.apply_fn, m.params, X, progress=False),
    "kernel_block": lambda m: kernel_block(m.apply_fn, m.params, X, X),
    "ntk_mv": lambda m: ntk_mv(m.apply_fn, m.params, X, np.ones((9, 3))),
}


@pytest.mark.parametrize("name", COUPLED)
def test_every_coupling_is_refused_by_the_guard(name):
    model = dfl.linearize(COUPLED[name], PARAMS)
    for _ in range(2):
        with pytest.raises(ValueError, match=SEES):
            model.apply_shape(jnp.asarray(X))


@pytest.mark.parametrize("door", DOORS)
def test_every_door_refuses_every_time(door):
    model = dfl.linearize(COUPLED["a coupling of 4e-3"], PARAMS)
    for _ in range(2):
        with pytest.raises(ValueError, match=SEES):
            DOORS[door](model)


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(set(NETWORKS) - {"nonlinear"}))
def test_networks_are_proven_apart_without_computing(name):
    apply_fn, params, x = NETWORKS[name]()
    split, leaves, rest = split_params(params)
    assert proves_apart(lambda a, b, x: apply_fn(split.merge(a, b), x), leaves, rest, x)


def test_what_is_not_proven_is_probed_and_passes():
    """A custom reverse rule hides its derivative from the jaxpr; a loop may end by its data."""

    def until_small(p, x):
        def go(state):
            return jnp.max(jnp.abs(state)) > 1

        return jax.vmap(lambda v: jax.lax.while_loop(go, lambda s: s / 2, v))(x) @ p["W"] @ p["O"]

    for fn in (NETWORKS["nonlinear"], lambda: (until_small, PARAMS, jnp.asarray(X))):
        apply_fn, params, x = fn()
        split, leaves, rest = split_params(params)
        guard = Apart(lambda a, b, x, s=split, f=apply_fn: f(s.merge(a, b), x), leaves, rest, x)
        assert not guard.proven
        guard.check(leaves, rest, x)
        guard.check(leaves, rest, x[:1])


def test_parameters_that_are_new_are_probed_anew():
    """The coupling is switched by a parameter, so that no proof and no earlier pass can cover it."""

    @ordinary
    def fn(leaves, rest, x):
        return x @ leaves[0] + leaves[1] * x.mean(0) @ leaves[0]

    off, on = ([PARAMS["W"], jnp.asarray(s)] for s in (0.0, 1e-6))
    guard = Apart(lambda a, b, x: fn(a, b, jax.lax.stop_gradient(x)), off, [], jnp.asarray(X))
    for _ in range(2):
        with pytest.raises(ValueError, match=SEES):
            guard.check(on, [], X)


def test_equal_or_zero_points_do_not_hide_a_coupling():
    for x in (np.ones((4, 4)), np.zeros((4, 4)), np.ones((1, 4))):
        model = dfl.linearize(COUPLED["a coupling of 4e-3"], PARAMS)
        with pytest.raises(ValueError, match=SEES):
            model.apply_shape(jnp.asarray(x))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_rounding_of_deep_networks_is_no_coupling(dtype):
    """The probe, which a proof would spare this network, on 30 layers near the edge of chaos."""
    ws = [jnp.asarray(RNG.normal(size=(32, 32)) * 1.3 / np.sqrt(32), dtype) for _ in range(30)]

    def fn(leaves, rest, x):
        for w in leaves:
            x = jnp.tanh(x @ w)
        return x

    x = jnp.asarray(RNG.normal(size=(9, 32)), dtype)
    guard = Apart(fn, ws, [], x)
    guard.proven = False
    guard.check(ws, [], x)


def test_small_differences_count_against_small_sizes():
    with pytest.raises(ValueError, match=r"change by 1e-08 \(their size is 2e-08\)"):
        _compare("here", "outputs", [jnp.array([1e-8])], [jnp.array([2e-8])], slack=0.1)
    _compare("here", "outputs", [jnp.array([1e-8])], [jnp.array([1.01e-8])], slack=0.1)
