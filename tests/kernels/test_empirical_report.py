"""What the report says, and what wrong inputs answer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import NETWORKS

from dualfluence.kernels import empirical_kernel, kernel_block, kernel_report, ntk_mv


def rules(name, **options):
    report = kernel_report(*NETWORKS[name](), **options)
    return {leaf.path: leaf.rule for leaf in report.leaves}


def test_rules_by_layer():
    assert rules("mlp") == {"W1": "dense", "b1": "bias", "W2": "dense", "b2": "bias"}
    assert rules("cnn")["C2"] == "conv"
    residual = rules("residual")
    assert residual["block/scale"] == "scale"
    assert residual["group/bias"] == "bias"
    assert rules("attention")["qkv"] == "dense"
    assert rules("nested") == {
        f"{k}/{w}": r for k in range(3) for w, r in zip("Wb", ("dense", "bias"), strict=True)
    }


def test_fallbacks_say_why():
    scan = rules("rnn_scan")
    assert scan["U"] == "jacobian (inside scan)"
    assert scan["O"] == "dense"
    assert rules("attention")["E"].startswith("jacobian (embedding")
    nonlinear = rules("nonlinear")
    assert all(nonlinear[k].startswith("jacobian") for k in "vgqSk")
    assert nonlinear["r"] == "dense"  # the custom rule's own product
    assert set(rules("mlp", method="jacobian").values()) == {"jacobian (asked for)"}


def test_shared_weights_say_so():
    assert rules("rnn_unrolled")["V"] == "dense (shared)"


def test_views_keep_the_rule():
    found = rules("views")
    assert {found["W1"], found["W2"], found["W3"]} == {"dense"}


def test_unused_and_fixed_leaves():
    report = kernel_report(*NETWORKS["integers"]())
    assert report["unused"].rule == "unused"
    assert set(report.fixed) == {"order", "mask", "name", "depth"}
    text = str(report)
    assert "unused" in text
    assert "held fixed: depth, mask, name, order" in text
    with pytest.raises(KeyError):
        report["nothing"]


def test_report_needs_only_shapes():
    apply_fn, params, x = NETWORKS["cnn"]()
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params, x))
    assert kernel_report(apply_fn, *shapes) == kernel_report(apply_fn, params, x)


def test_only_unused_parameters_give_a_zero_kernel():
    apply_fn, params, x = NETWORKS["integers"]()
    got = empirical_kernel(apply_fn, params, x, trainable=lambda path: path == "unused")
    assert got.value.shape == (6, 3, 6, 3)
    assert not np.any(got.value)


@pytest.mark.parametrize(
    ("out", "text"),
    [
        (lambda y: y[:, 0], r"must return an array of shape \(n, c\) = \(7, c\), got \(7,\)"),
        (lambda y: y[:, :, None], r"got \(7, 3, 1\)"),
        (lambda y: y.sum(0, keepdims=True), r"got \(1, 3\)"),
        (lambda y: (y, y), "got 2 arrays"),
        (lambda y: jnp.argmax(y, 1, keepdims=True), "real floating-point numbers, got int"),
    ],
)
def test_wrong_outputs(out, text):
    apply_fn, params, x = NETWORKS["mlp"]()
    for call in (empirical_kernel, lambda *a: kernel_block(*a, x), kernel_report):
        with pytest.raises((ValueError, TypeError), match=text):
            call(lambda p, x: out(apply_fn(p, x)), params, x)


def test_wrong_inputs():
    apply_fn, params, x = NETWORKS["mlp"]()
    with pytest.raises(ValueError, match="x1 and x2 must agree"):
        empirical_kernel(apply_fn, params, x, x[:, :4])
    with pytest.raises(ValueError, match="x1 and x2 must agree"):
        empirical_kernel(apply_fn, params, x, x.astype(jnp.float32))
    with pytest.raises(ValueError, match="one or more points on axis 0"):
        empirical_kernel(apply_fn, params, x[:0])
    with pytest.raises(ValueError, match="no trainable parameters"):
        empirical_kernel(apply_fn, params, x, trainable=lambda path: False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        empirical_kernel(lambda p, x: x, {"k": jnp.arange(3)}, x)
    with pytest.raises(TypeError, match="real and imaginary"):
        empirical_kernel(lambda p, x: (x @ p["w"]).real, {"w": jnp.ones((5, 2), complex)}, x)
    with pytest.raises(ValueError, match="too small for one pair of points"):
        empirical_kernel(apply_fn, params, x, tile_bytes=100)
    with pytest.raises(ValueError, match="v must have the shape"):
        ntk_mv(apply_fn, params, x, np.ones(7))


def test_points_that_see_each_other():
    apply_fn, params, x = NETWORKS["mlp"]()
    with pytest.raises(ValueError, match="when it is evaluated together"):
        empirical_kernel(lambda p, x: apply_fn(p, x - x.mean(0)), params, x)


def test_non_finite_values_name_their_points():
    apply_fn, params, x = NETWORKS["mlp"]()
    with pytest.raises(FloatingPointError, match=r"outputs .* at 1 points of x1: \[3\]"):
        empirical_kernel(apply_fn, params, x.at[3, 0].set(jnp.nan))

    def root(p, x):
        return jnp.sqrt(jnp.abs(x @ p["W1"]))

    with pytest.raises(FloatingPointError, match=r"derivatives .* of x2: \[2\]"):
        empirical_kernel(root, params, x, x.at[2].set(0.0))
