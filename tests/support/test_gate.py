"""Nothing that enters is bent: it works as meant, or an error says what came and what to try."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
from dualfluence._support.checks import as_array, as_dtype, as_jax, check_finite
from dualfluence._support.options import check_count, check_key, check_path, check_positive

pytestmark = pytest.mark.host

# Under its old name in older versions of JAX.
x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64

N = 6
RNG = np.random.default_rng(0)
X, Y, Y2 = RNG.normal(size=(N, 2)), RNG.normal(size=(N, 1)), RNG.normal(size=(N, 2))
OPTIONS = {"loss": dfl.SquaredError(), "ridge": 0.1, "progress": False}


def linear(outputs=1):
    return dfl.linearize(lambda w, x: x @ w, jnp.zeros((2, outputs)))


def fit(**changes):
    given = {"model": linear(), "x": X, "y": Y, **OPTIONS, **changes}
    return dfl.fit(given.pop("model"), given.pop("x"), given.pop("y"), **given)


def ridge_regression(weights, ridge=0.1):
    """`θ` of `Σ wᵢ ½(xᵢθ − yᵢ)² + ½λ‖θ‖²`, by its normal equations."""
    w = np.asarray(weights) / np.max(weights)
    w = w / w.sum()
    return np.linalg.solve(X.T @ (w[:, None] * X) + ridge * np.eye(2), X.T @ (w[:, None] * Y))


@pytest.fixture(scope="module")
def convex():
    loss = dfl.Convex(lambda f, y: jnp.sum((f - y) ** 2))
    return dfl.fit(linear(2), X, Y2, loss=loss, ridge=0.1, progress=False)


@pytest.mark.parametrize("size", [1.7e308, 1e-320, 1.0])
def test_weights_whose_sum_leaves_the_range_of_floats_mean_what_they_say(size):
    weights = size * np.array([1.0, 0.5, 1.0, 1.0, 0.25, 1.0])
    fitted = fit(weights=weights)
    # The oracle sees the same weights, rounded as they are below 1e-308: only its solve rounds.
    np.testing.assert_allclose(fitted.params(), ridge_regression(weights), rtol=1e-9)
    weights[2] = 0
    update = fitted.edit(dfl.Remove([2]))
    np.testing.assert_allclose(update.params(), ridge_regression(weights), rtol=1e-9)
    step = dfl.primal.influence(
        linear(), fitted.params(), X, Y, dfl.Remove([2]), weights=fitted.data.sample_weights,
        **{k: v for k, v in OPTIONS.items() if k != "progress"},
    )  # fmt: skip
    np.testing.assert_allclose(step.params(), ridge_regression(weights), rtol=1e-6)


@pytest.mark.parametrize(
    "edit",
    [
        lambda: dfl.Relabel([0, 1], [1.0, 2.0]),
        lambda: dfl.Replace([0, 1], targets=[1.0, 2.0]),
        lambda: dfl.Replace([0, 1], X[:2], [1.0, 2.0]),
        lambda: dfl.Add(X[:2], [1.0, 2.0]),
        lambda: dfl.Relabel([0, 1], Y2[:2, :1]),
    ],
)
def test_targets_are_not_spread_over_outputs(convex, edit):
    with pytest.raises(ValueError, match=r"targets: expected shape \(m, 2\), like the targets"):
        convex.edit(edit())


def test_targets_of_queries_are_not_spread_over_outputs(convex):
    update = convex.edit(dfl.Remove([0]))
    with pytest.raises(ValueError, match=r"delta_loss targets: expected shape \(m, 2\)"):
        update.delta_loss(X[:2], [1.0, 2.0])


@pytest.mark.parametrize("label", [2**32, 2**40 + 1, -(2**32)])
def test_labels_do_not_wrap_in_32_bits(label):
    labels = np.array([0, 1, label])
    with x64(False), pytest.raises(ValueError, match=r"\[0, 2\), got -?\d{10}"):
        dfl.SoftmaxCrossEntropy().prepare_targets(labels, 2, jnp.float32)


def test_features_do_not_wrap_or_overflow_in_32_bits():
    with x64(False):
        with pytest.raises(
            ValueError, match="x: expected integers of 32 bits, got 1 to 4294967296"
        ):
            as_jax("x", np.array([1, 2**32]))
        with pytest.raises(ValueError, match=r"x: every entry must be finite.*overflows float32"):
            as_jax("x", np.array([1.0, 1e300]))
        assert as_jax("x", np.array([1.5, 2.0])).dtype == jnp.float32


def test_labels_without_number_do_not_fill_the_memory():
    with pytest.raises(ValueError, match=r"mean \d+ classes, whose one-hot rows do not fit"):
        dfl.SoftmaxCrossEntropy().prepare_targets(np.array([0, 2**45]), None, jnp.float64)


class Table:
    """An array through `__array__` only, as tables of other libraries are."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def __array__(self, dtype=None, copy=None):
        return self.values


def test_tables_unmasked_arrays_and_other_byte_orders_work():
    want = fit().params()
    for x in (Table(X), np.ma.array(X), X.astype(">f8"), X.tolist(), X.astype(np.longdouble)):
        np.testing.assert_array_equal(fit(x=x).params(), want)


class Sparse:
    def toarray(self):
        return X


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (
            np.ma.array([1.0, 2.0], mask=[False, True]),
            ValueError,
            "1 masked entries. Drop these points",
        ),
        ([np.ma.array([1.0, 2.0], mask=[False, True])], ValueError, "1 masked entries"),
        (np.zeros(2, "m8[s]"), TypeError, r"dtype timedelta64\[s\]. Turn times into numbers"),
        (np.zeros(2, "M8[D]"), TypeError, "Turn times into numbers"),
        (np.ones(2) * 1j, TypeError, "expected real numbers, got complex128"),
        (jnp.full(2, 1j), TypeError, "expected real numbers, got complex128"),
        ([[1.0], [1.0, 2.0]], ValueError, "Rows must have equal lengths"),
        ([2**70], ValueError, "at most 64 bits"),
        ([None], TypeError, "first a NoneType"),
        (Table(np.array(["a"], object)), TypeError, r"\.to_numpy\(dtype=float\)"),
        ("cat", TypeError, "Encode names"),
        (Sparse(), TypeError, r"the sparse Sparse. Use \.toarray\(\)"),
        (jax.random.key(0), TypeError, "expected numbers, got dtype key"),
    ],
)
def test_what_is_no_array_of_real_numbers_is_refused(value, error, words):
    with pytest.raises(error, match=words):
        as_array("x", value)


@pytest.mark.parametrize("values", [[-1], [300], [0.5], [np.nan]])
def test_integers_hold_what_they_are_given_or_refuse(values):
    with pytest.raises(ValueError, match="cannot hold these"):
        as_dtype("x", np.array(values), np.uint8)
    with pytest.raises(ValueError, match="cannot hold these"):
        as_dtype("x", np.array([-1], np.int8), np.uint8)  # comes back as -1 after wrapping


@pytest.mark.parametrize(
    "indices",
    [
        np.ma.array([0, 1], mask=[False, True]),
        np.array([0, 1], "m8[s]"),
        np.array([0, 2**63 + 1], np.uint64),
        [2**64],
        [1 + 0j],
        ["1"],
        3,
    ],
)
def test_indices_are_positions_or_refused(indices):
    with pytest.raises((TypeError, ValueError), match=r"Remove.*indices"):
        dfl.Remove(indices)


def test_calls_inside_jit_say_so():
    fitted = fit()
    for inside in (
        lambda x: fit(x=x),
        lambda x: fit(weights=x[:, 0]),
        lambda x: fitted.predict(x),
        lambda x: fitted.edit(dfl.Add(x, Y)),
        lambda x: fitted.edit(dfl.Remove([0])),
        lambda x: fitted.edit(dfl.Remove([0]), steps=2),
    ):
        with pytest.raises(TypeError, match=r"JAX is tracing.* outside of jit"):
            jax.jit(lambda x, inside=inside: (inside(x), 0)[1])(X)


@pytest.mark.parametrize(
    "bad", [lambda w, x: {}["k"], lambda w, x: 1 / 0, lambda w, x: (x @ w).reshape(N, 1)]
)
def test_failures_of_apply_fn_name_it(bad):
    with pytest.raises(ValueError, match=r"apply_fn\(params, x\) fails for x of shape") as error:
        fit(model=dfl.linearize(bad, jnp.zeros((2, 1))))
    assert error.value.__cause__ is not None


@pytest.mark.parametrize("cast", [jnp.int32, jnp.complex128, jnp.bool_])
def test_apply_fn_returns_real_numbers(cast):
    model = dfl.linearize(lambda w, x: (x @ w).astype(cast), jnp.zeros((2, 1)))
    with pytest.raises(ValueError, match="must return real floating-point numbers, got"):
        fit(model=model)


def test_half_precision_networks_are_refused_before_a_solver_meets_them():
    model = dfl.linearize(lambda w, x: x @ w, jnp.zeros((2, 1), jnp.bfloat16))
    for call in (lambda: fit(model=model), lambda: dfl.kernel_operator(model, X)):
        with pytest.raises(ValueError, match="float32 or float64, got bfloat16"):
            call()


def test_kernels_of_integers_or_half_precision_are_widened():
    eye = fit(model=np.eye(N), x=None)
    for dtype in (np.int8, np.float16, bool):
        same = fit(model=np.eye(N, dtype=dtype), x=None)
        np.testing.assert_allclose(same.alpha, eye.alpha, rtol=1e-5)  # float16 goes to float32


def test_failures_and_shapes_of_kernel_functions_name_the_kernel():
    for kernel in (lambda a, b: {}["k"], lambda a: a, lambda a, b: np.ones((2, 3))):
        with pytest.raises(ValueError, match="kernel: "):
            fit(model=kernel)


def test_a_matrix_of_more_rows_than_targets_is_not_cut():
    with pytest.raises(ValueError, match=r"the kernel has 12 rows, but y has 6.*\(n, c, n, c\)"):
        fit(model=np.eye(12), x=None, y=Y2)
    full = fit(model=np.eye(12).reshape(6, 2, 6, 2), x=None, y=Y2)
    # K = I: α = −w(α − y)/λ with w = 1/6, so α = y/(6λ + 1)
    np.testing.assert_allclose(full.alpha, Y2 / 1.6, rtol=1e-9)


def test_losses_that_fail_or_give_no_scalar_are_named():
    for fn in (lambda f, y: f - y, lambda f, y: 1 / 0, lambda f, y: jnp.sum(f > y)):
        with pytest.raises(ValueError, match="fit: the loss"):
            fit(loss=dfl.Convex(fn))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"kernel": dfl.KernelOptions(num_outputs=3)},
            "num_outputs: 3 was given, but apply_fn has 1 outputs",
        ),
        ({"max_steps": -1}, "max_steps must be a whole number, at least 1, got -1"),
        ({"max_steps": 0}, "max_steps must be a whole number, at least 1, got 0"),
        ({"tolerance": np.inf}, "tolerance must be a positive number below infinity, got inf"),
        ({"ridge": 1e-320}, "ridge: λ must lie in the range of float64"),
    ],
)
def test_options_of_fit_that_cannot_be_meant(changes, words):
    with pytest.raises(ValueError, match=words):
        fit(**changes)


def test_options_of_requests_that_cannot_be_meant():
    fitted = fit()
    for tolerance in (np.nan, 0.0, -1.0, np.inf):
        with pytest.raises(ValueError, match="retrain: tolerance must be a positive number"):
            fitted.retrain(dfl.Remove([0]), tolerance=tolerance)
    with pytest.raises(ValueError, match="until must be a positive distance"):
        fitted.edit(dfl.Remove([0]), until=np.nan)


@pytest.mark.parametrize(
    ("mesh", "error", "words"),
    [
        (["gpu"], TypeError, "devices"),
        (["gpu", "gpu"], TypeError, "devices"),
        ([], ValueError, "at least one device"),
        ([None], TypeError, "devices"),
        (2 * jax.devices()[:1], ValueError, "every device once"),
    ],
)
def test_meshes_are_made_of_devices(mesh, error, words):
    for call in (lambda: fit(mesh=mesh), lambda: fit().on(mesh)):
        with pytest.raises(error, match=f"mesh: expected {words}"):
            call()


@pytest.mark.parametrize("name", ["c", "num_params", "memory", "tile", "products", "rank"])
def test_sizes_of_plans_are_positive(name):
    with pytest.raises(ValueError, match=f"plan: {name} must be a whole number"):
        dfl.plan(10, platform="cpu", **{name: -3})  # pyright: ignore[reportArgumentType]


def test_counts_and_numbers_take_numpy_and_refuse_flags():
    for three in (3, np.int8(3), np.array(3), jnp.asarray(3)):
        assert check_count("n", three) == 3
    for bad in (True, np.True_, 3.0, "3", None, [3], np.ma.masked, np.nan):
        with pytest.raises(TypeError, match="n must be a whole number"):
            check_count("n", bad)
    for half in (0.5, np.float32(0.5), np.array(0.5), jnp.asarray(0.5)):
        assert check_positive("t", half) == 0.5
    for bad in (True, "0.5", None, [0.5], 0.5 + 0j, np.timedelta64(1, "s")):
        with pytest.raises(TypeError, match="t: expected"):
            check_positive("t", bad)


def test_keys_and_paths():
    for key in (jax.random.key(1), jax.random.PRNGKey(1)):
        assert check_key("key", key) is key
    for bad in (0, np.zeros(2, np.uint32), jax.random.split(jax.random.key(0), 2), jnp.zeros(2)):
        with pytest.raises(TypeError, match="key must be one random key"):
            check_key("key", bad)
    for bad in ("", " ", "a\0b"):
        with pytest.raises(ValueError, match="path must name a file or folder"):
            check_path("load", bad)


def test_deleted_arrays_are_named():
    array = jnp.array(X)
    array.delete()
    with pytest.raises(ValueError, match="x: this array was deleted or donated"):
        fit(x=array)


def test_overflow_is_a_value_error_of_the_library():
    assert issubclass(dfl.NotFinite, FloatingPointError)
    assert issubclass(dfl.NotFinite, ValueError)
    with pytest.raises(dfl.NotFinite, match="too large"):
        dfl.kernel_gradient_descent(linear(), X, Y, rate=1e6, epochs=50, **OPTIONS)


def test_finite_checks_name_the_first_bad_entry():
    with pytest.raises(ValueError, match=r"x: .* got inf at index \(0, 1\) \(1 bad of 2\)"):
        check_finite("x", np.array([[1.0, np.inf]]))
