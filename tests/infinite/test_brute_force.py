"""Every layer and every activation against plain NumPy: quadrature in the plane, loops over windows."""

import brute_force
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gates
from dualfluence import infinite
from dualfluence.infinite._gap import joint_from_minus
from dualfluence.infinite._inputs import input_spec

ACTIVATIONS = {
    "relu": infinite.Relu(),
    "leaky": infinite.LeakyRelu(0.1),
    "abs": infinite.Abs(),
    "two_slopes": infinite.ABRelu(-0.4, 1.3),
    "sign": infinite.Sign(),
    "erf": infinite.Erf(1.3, 0.8, -0.4),
    "sigmoid_like": infinite.SigmoidLike(),
    "gelu": infinite.Gelu(),
    "sin": infinite.Sin(0.9, 1.4, 0.5),
    "cos": infinite.Cos(1.2, 0.7, -0.3),
    "rbf": infinite.Rbf(0.6),
    "gaussian": infinite.Gaussian(1.4, -0.7),
    "exp": infinite.Exp(0.8, 0.6),
    "polynomial": infinite.Polynomial((0.5, -0.3, 0.7, 0.2, 0.1)),
    "swish": infinite.Activation(jax.nn.swish),
}
RHOS = (-1.0, -0.9, -0.3, 0.0, 0.4, 0.8, 1.0)
SPREADS = ((0.8, 0.8), (0.5, 1.1))
POINTS = np.linspace(-3, 3, 600)


@pytest.fixture(scope="module")
def duals():
    """All activations at all correlations, from one compilation."""
    q1, q2 = (jnp.asarray(q)[:, None] for q in zip(*SPREADS, strict=True))
    rho = jnp.asarray(RHOS)[None, :]

    def every(q1, q2, rho):
        pair = joint_from_minus(q1, q2, jnp.sqrt(q1) * jnp.sqrt(q2) * (1 - rho))
        after = {}
        for name, layer in ACTIVATIONS.items():
            v1, v2 = layer.variance(q1), layer.variance(q2)
            joint, slope = layer.dual(pair, v1, v2)
            values = layer.function(jnp.asarray(POINTS))
            after[name] = (v1, v2, joint, joint.distance, slope, values)
        return after

    return jax.tree.map(np.asarray, jax.jit(every)(q1, q2, rho))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_has_the_expectations_of_its_function(duals, name):
    function = brute_force.FUNCTIONS[name]
    v1, v2, joint, distance, slope, values = duals[name]
    np.testing.assert_allclose(values, function(POINTS), rtol=1e-12, atol=1e-15)
    lipschitz = getattr(ACTIVATIONS[name], "lipschitz", None)
    steepest = np.abs(brute_force.slope(function, POINTS)).max()
    if lipschitz is not None:
        assert steepest * (1 - 1e-6) < lipschitz < 1.01 * steepest
    tight = {"rtol": 0, "atol": 1e-9}
    for i, (q1, q2) in enumerate(SPREADS):
        squares = [brute_force.expectations(function, q, q, 1.0)[0] for q in (q1, q2)]
        np.testing.assert_allclose([v1[i, 0], v2[i, 0]], squares, rtol=1e-9)
        r1, r2 = np.sqrt(squares)
        for j, rho in enumerate(RHOS):
            cov, bend = brute_force.expectations(function, q1, q2, rho)
            np.testing.assert_allclose(joint.cov[i, j], cov, **tight)
            np.testing.assert_allclose(joint.gap[i, j], r1 * r2 - abs(cov), **tight)
            np.testing.assert_allclose(distance[i, j], r1**2 + r2**2 - 2 * cov, **tight)
            np.testing.assert_allclose(slope[i, j], bend, **tight)
    # A point and itself: a later ReLU sees the square root of what rounding leaves of the distance.
    assert distance[0, -1] <= 1e-30


STANDARD = {"parameterization": "standard", "s": (2, 3)}
NETWORKS = {
    "windows": (
        (9, 7, 2),
        infinite.Conv((3, 2), W_std=1.5, b_std=0.1),
        infinite.Relu(),
        infinite.AvgPool((3, 2), (2, 1), "SAME", normalize_edges=True),
        infinite.Conv((2, 1), (1, 2), "VALID", W_std=1.2, b_std=0.3),
        infinite.residual(infinite.serial(infinite.Erf(), infinite.Conv((1, 2), W_std=1.3))),
        infinite.SumPool((2, 2), (1, 2), "SAME"),
        infinite.Flatten(),
        infinite.Dense(W_std=1.1, b_std=0.2),
    ),
    "torus": (
        (4, 5, 2),
        infinite.Conv((2, 3), (1, 2), "CIRCULAR", W_std=1.4, b_std=0.2, width=4, **STANDARD),
        infinite.LayerNorm((1, 2, 3), eps=0.1),
        infinite.Erf(),
        infinite.Dropout(0.7, "train"),
        infinite.Conv((3, 2), (2, 1), W_std=1.2, width=3, **STANDARD),
        infinite.Erf(),
        infinite.AvgPool((1, 2), (1, 1), "CIRCULAR"),
        infinite.GlobalSumPool(),
        infinite.Dense(W_std=0.9, b_std=0.1, width=2, **STANDARD),
    ),
    "softmax": (
        (2, 3, 2),
        infinite.Conv((2, 2), padding="VALID", W_std=1.3),
        infinite.LayerNorm(eps=0.2),
        infinite.Erf(),
        infinite.GlobalSelfAttention(1.1, 0.9, 1.2, 1.3, b_std=0.2),
        infinite.Erf(),
        infinite.GlobalAvgPool(),
        infinite.Dense(W_std=1.1),
    ),
    "attention": (
        (2, 2, 2),
        infinite.Dense(W_std=1.2, b_std=0.3),
        infinite.Relu(),
        infinite.GlobalSelfAttention(1.1, 0.9, 1.2, 1.3, mechanism="relu"),
        infinite.Erf(),
        infinite.GlobalSelfAttention(
            0.8, 0.9, 0.7, 0.8, b_std=0.2, mechanism="identity", scaling="sqrt"
        ),
        infinite.SumPool((2, 1), normalize_edges=True, padding="SAME"),
        infinite.Flatten(),
        infinite.Dense(W_std=1.1),
    ),
    "vectors": (
        (3,),
        infinite.Dense(W_std=1.4, b_std=0.2, width=4, **STANDARD),
        infinite.Erf(),
        infinite.Dropout(0.7, "train"),
        infinite.residual(
            infinite.serial(infinite.Scale(0.6), infinite.Dense(W_std=1.3, b_std=0.1, width=12)),
            infinite.Scale(1.7),
        ),
        infinite.LayerNorm(eps=0.3),
        infinite.Dense(W_std=1.2, width=5),
        infinite.Relu(),
        infinite.Dense(W_std=1.1, b_std=0.4, **STANDARD),
    ),
}


def test_one_network_stores_displacements_and_the_others_all_pairs_of_pixels():
    bands = {}
    for name, (shape, *layers) in NETWORKS.items():
        bands[name] = infinite.serial(*layers)._band(input_spec((1, *shape)))
    pairs = dict.fromkeys(("torus", "softmax", "attention"))
    assert bands == {"windows": (4, 3), "vectors": (0, 0), **pairs}


@pytest.mark.parametrize("name", gates.table(NETWORKS, list(NETWORKS)[::2]))
def test_a_network_has_the_kernels_of_every_pair_of_pixels(name):
    shape, *layers = NETWORKS[name]
    net = infinite.serial(*layers)
    x = np.random.default_rng(0).normal(size=(4, *shape))
    both = jax.jit(lambda x: net.kernel_block(x[:2], x[2:], "both"))(jnp.asarray(x))
    nngp, ntk = brute_force.kernels(net, x)
    np.testing.assert_allclose(both[0], nngp[:2, 2:], rtol=1e-10)
    np.testing.assert_allclose(both[1], ntk[:2, 2:], rtol=1e-10)
    # The brute force has the angle of a point with itself to the square root of rounding only.
    np.testing.assert_allclose(net.diagonal(jnp.asarray(x)), np.diag(ntk), rtol=1e-7)


FINITE = {
    "images": (
        (5, 4, 2),
        infinite.Conv((3, 2), (2, 1), W_std=1.5, b_std=0.1, width=18),
        infinite.LayerNorm((1, 2, 3), eps=0.1),
        infinite.AvgPool((2, 3), (1, 2), "SAME", normalize_edges=True),
        infinite.residual(
            infinite.Conv((1, 2), padding="CIRCULAR", W_std=1.3, width=6, **STANDARD)
        ),
        infinite.SumPool((2, 1), (1, 1), "CIRCULAR"),
        infinite.Conv((2, 2), padding="VALID", W_std=1.3),
        infinite.Flatten(),
        infinite.Dense(W_std=1.1, b_std=0.2),
    ),
    "read-outs": (
        (3, 4, 2),
        infinite.Dense(W_std=1.2, b_std=0.3, width=4, **STANDARD),
        infinite.Relu(),
        infinite.add(
            infinite.serial(infinite.GlobalAvgPool(), infinite.Dense(W_std=1.1, b_std=0.2)),
            infinite.serial(infinite.GlobalSumPool(), infinite.Scale(0.7), infinite.Dense()),
        ),
        infinite.LayerNorm(eps=0.1),
        infinite.Dense(W_std=1.1),
    ),
}


@pytest.mark.parametrize("name", FINITE)
def test_the_finite_network_is_its_layers_one_after_another(name):
    shape, *layers = FINITE[name]
    net, x = infinite.serial(*layers), np.random.default_rng(0).normal(size=(3, *shape))
    params = net.init(jax.random.key(0), shape, width=18, outputs=2)
    want = brute_force.outputs(net, params, x)
    assert want.shape == (3, 2)
    np.testing.assert_allclose(jax.jit(net.apply)(params, x), want, rtol=1e-10)


def test_parameters_have_the_spread_that_their_layers_say():
    weights = {"W_std": 1.5, "b_std": 0.4}
    net = infinite.serial(
        infinite.Dense(**weights, width=200, **STANDARD),
        infinite.Relu(),
        infinite.Dense(**weights, **STANDARD),
    )
    first, _, last = net.init(jax.random.key(0), (3,), outputs=400)
    plain = infinite.serial(infinite.Dense(**weights)).init(jax.random.key(1), (30,), outputs=400)
    assert (first["W"].shape, last["W"].shape) == ((3, 600), (600, 400))
    # Standard: W² s / fan-in, which `apply` divides by s = 2. Else all weights are of size one.
    spreads = {"first": 1.5 * (2 / 3) ** 0.5, "last": 1.5 * (2 / 600) ** 0.5, "plain": 1.0}
    for name, params in {"first": first, "last": last, "plain": plain[0]}.items():
        np.testing.assert_allclose(np.std(params["W"]), spreads[name], rtol=0.08)
        np.testing.assert_allclose(np.std(params["b"]), 1 if name == "plain" else 0.4, rtol=0.15)
