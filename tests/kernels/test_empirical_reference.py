"""The empirical kernel against Neural Tangents' numbers, stored under tests/data."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dualfluence._support.compile import jit
from dualfluence.kernels import empirical_kernel, kernel_report, traced_kernel
from users import ordinary

REFERENCE = np.load(Path(__file__).parents[1] / "data" / "empirical" / "reference.npz")
META = json.loads(str(REFERENCE["meta_json"]))
RTOL = 1e-12


def make_apply(layers):
    """The forward pass that the reference's README writes down."""

    @ordinary
    def apply(params, x):
        for k, (name, options) in enumerate(layers):
            x = _layer(name, options, params, f"{k:02d}_{name}", x)
        return x

    return apply


def _layer(name, options, params, key, x):
    if name in ("Dense", "Conv"):
        w, b = params[f"{key}_W"], params[f"{key}_b"]
        y = x @ w if name == "Dense" else _conv(x, w, options)
        if options["parameterization"] == "standard":
            return y + b
        return options["W_std"] / np.sqrt(np.prod(w.shape[:-1])) * y + options["b_std"] * b
    if name == "AvgPool":
        window = (1, *options["window_shape"], 1)
        strides = (1, *options["strides"], 1)
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, strides, "SAME") / 4
    if name == "GlobalAvgPool":
        return x.mean((1, 2))
    if name == "Flatten":
        return x.reshape(x.shape[0], -1)
    activations = {"Relu": jax.nn.relu, "Erf": jax.scipy.special.erf}
    return activations.get(name, lambda v: jax.nn.gelu(v, approximate=False))(x)


def _conv(x, w, options):
    padding = options["padding"]
    if padding == "CIRCULAR":
        x, padding = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="wrap"), "VALID"
    return jax.lax.conv_general_dilated(
        x, w, options["strides"], padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def load(name):
    prefix = f"empirical/{name}/params/"
    params = {k[len(prefix) :]: REFERENCE[k] for k in REFERENCE.files if k.startswith(prefix)}
    inputs = META[name]["inputs"]
    x1, x2 = REFERENCE[f"inputs/{inputs}/x1"], REFERENCE[f"inputs/{inputs}/x2"]
    return make_apply(META[name]["layers"]), params, x1, x2


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=RTOL * np.abs(want).max())


@pytest.mark.parametrize("name", META)
def test_agrees_with_neural_tangents(name):
    apply_fn, params, x1, x2 = load(name)
    # With the library's options: plain `jax.jit` on a GPU rounds a factor on a convolution to float32.
    outputs = jit(apply_fn)(params, x1)
    assert_close(outputs, REFERENCE[f"empirical/{name}/f_x1"])
    got = empirical_kernel(apply_fn, params, x1, x2).value
    want = REFERENCE[f"empirical/{name}/ntk_x1x2"]
    assert_close(np.transpose(got, (0, 2, 1, 3)), want)
    traced = traced_kernel(apply_fn, params, x1, x2)
    assert_close(traced, REFERENCE[f"empirical/{name}/ntk_trace_x1x2"])
    if name.endswith("erf"):
        got = empirical_kernel(apply_fn, params, x1).value
        assert_close(np.transpose(got, (0, 2, 1, 3)), REFERENCE[f"empirical/{name}/ntk_x1x1"])


@pytest.mark.parametrize("name", META)
def test_every_layer_has_a_rule(name):
    apply_fn, params, x1, _ = load(name)
    rules = {leaf.rule for leaf in kernel_report(apply_fn, params, x1).leaves}
    assert rules <= {"dense", "conv", "bias"}
