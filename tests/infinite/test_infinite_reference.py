"""Against Neural Tangents' numbers and against 50 digits."""

import infinite_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest

NUMBERS = reference.Numbers()
SKIPPED = ("posemb",)  # positional embeddings are not offered
NAMES = [n for n in NUMBERS.nets if not any(s in n for s in SKIPPED)]
KINDS = ("nngp", "ntk")


def kernels(name: str, dtype=np.float64) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Both kernels, x1 against x2 and x1 against itself, from one compilation."""
    net = reference.build(NUMBERS.nets[name]["layers"])
    x1, x2 = (x.astype(dtype) for x in NUMBERS.inputs(name))
    x = jnp.concatenate([x1, x2])
    both = jax.jit(lambda x: net.kernel_block(x, x, "both"))(x)
    values = {k: np.asarray(v) for k, v in zip(KINDS, both, strict=True)}
    return {k: (v[:6, 6:], v[:6, :6]) for k, v in values.items()}


# One network of every kind; all the others run as `slow`.
QUICK = {
    "a_fcnn_relu3_W2_b0.1__std",
    "b_fcnn_gelu_W1.5_b0.05",
    "c_cnn_9x7x3",
    "d_cnn_CIRCULAR_avgpool_9x7x3",
    "e_residual_dense",
    "g_attention_identity_sqrt_8x8x3",
    "h_edge_fcnn_relu_b0.1",
}


def cases(names) -> list:
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in names]


def test_the_quick_networks_exist():
    assert set(NAMES) >= QUICK


@pytest.mark.parametrize(
    "name", cases(n for n in NAMES if "32x32" not in n and "dropout_train" not in n)
)
def test_agrees_with_neural_tangents_and_with_50_digits(name):
    got = kernels(name)
    for kind in KINDS:
        want12, want11 = NUMBERS.kernels(name, kind)
        got12, got11 = got[kind]
        if "h_edge" not in name:  # its zero and parallel points are compared below
            check_against_neural_tangents(name, kind, got12, got11, want12, want11)
        if f"{name}/{kind}_x1x2" in NUMBERS.exact:
            exact12, exact11 = NUMBERS.exact_kernels(name, kind)
            # Entries that are 0 in exact arithmetic are compared on the scale of the largest.
            tiny = 1e-12 * np.abs(exact12).max()
            np.testing.assert_allclose(got12, exact12, rtol=1e-12, atol=tiny)
            np.testing.assert_allclose(got11, exact11, rtol=1e-12, atol=tiny)


def check_against_neural_tangents(name, kind, got12, got11, want12, want11):
    np.testing.assert_allclose(got12, want12, rtol=1e-10)
    off = ~np.eye(6, dtype=bool)
    np.testing.assert_allclose(got11[off], want11[off], rtol=1e-10)
    # Equal points, where the reference cancels: against 50 digits wherever we have them.
    exact = NUMBERS.exact_diagonal(name, kind)
    if exact is None:
        np.testing.assert_allclose(np.diag(got11), np.diag(want11), rtol=1e-10)
    else:
        np.testing.assert_allclose(np.diag(got11), exact, rtol=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        "a_fcnn_relu3_W2_b0.1__std",
        "h_edge_fcnn_relu_b0.1",
        pytest.param("b_fcnn_relu_5hidden_W1.5_b0.05", marks=pytest.mark.slow),
        pytest.param("b_fcnn_abs_W1.5_b0.05", marks=pytest.mark.slow),
        pytest.param("c_cnn_9x7x3", marks=pytest.mark.slow),
        pytest.param("h_edge_fcnn_relu_nobias", marks=pytest.mark.slow),
    ],
)
def test_float32_keeps_its_digits_at_equal_and_parallel_points(name):
    got = kernels(name, np.float32)
    for kind in KINDS:
        for mine, exact in zip(got[kind], NUMBERS.exact_kernels(name, kind), strict=True):
            assert mine.dtype == np.float32
            # Inputs are rounded to float32 too: 6e-8 per entry, far below 2e-6.
            # Entries may nearly cancel, so errors count on the scale of the kernel ...
            np.testing.assert_allclose(mine, exact, rtol=0, atol=2e-6 * np.abs(exact).max())
        # ... but a point with itself does not.
        exact = np.diag(NUMBERS.exact_kernels(name, kind)[1])
        np.testing.assert_allclose(np.diag(got[kind][1]), exact, rtol=2e-6)


@pytest.mark.slow
def test_the_large_cnn_in_tiles():
    name = "c_cnn_32x32x3"
    net = reference.build(NUMBERS.nets[name]["layers"])
    x1, x2 = NUMBERS.inputs(name)
    want12, want11 = NUMBERS.kernels(name, "ntk")
    got12 = net.kernel(x1, x2, progress=False)
    np.testing.assert_allclose(got12, want12, rtol=1e-10)
    np.testing.assert_allclose(net.diagonal(x1), np.diag(want11), rtol=1e-10)


def test_train_dropout_scales_only_the_diagonal():
    name = "e_dropout_train_dense"
    net = reference.build(NUMBERS.nets[name]["layers"])
    x1, x2 = NUMBERS.inputs(name)
    crossed = net.kernel_block(x1, np.concatenate([x2, x1]), "both")
    for kind, got in zip(KINDS, crossed, strict=True):
        got11 = np.array(got[:, 4:])
        np.fill_diagonal(got11, net.diagonal(x1, kind=kind))
        check_against_neural_tangents(name, kind, got[:, :4], got11, *NUMBERS.kernels(name, kind))
    # The symmetric kernel has that diagonal; two equal batches are different draws of the mask.
    np.testing.assert_allclose(net.kernel(x1, progress=False), got11, rtol=1e-12)
    assert (np.diag(got[:, 4:]) < 0.9 * np.diag(got11)).all()
