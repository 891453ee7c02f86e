"""JAX as it comes: float32, and nobody has heard of 64-bit types. The answers are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl
import gates
import oracles
from gates import table

LOSSES = {
    "squared": (dfl.SquaredError(), oracles.squared, 1),
    "logistic": (dfl.Logistic(), oracles.logistic, 1),
    "softmax": (dfl.SoftmaxCrossEntropy(), oracles.softmax_ce, 3),
}
FEATURES = 8

PROBLEMS = [
    (n, ridge, scale, loss)
    for n in (100, 450)
    for ridge in (1e-1, 1e-2, 1e-3, 1e-4)
    for scale in (1.0, 10.0)
    for loss in LOSSES
]
QUICK = [
    (100, 1e-1, 1.0, "squared"),
    (100, 1e-3, 10.0, "squared"),
    (100, 1e-2, 10.0, "logistic"),
    (100, 1e-4, 10.0, "softmax"),
]


@pytest.fixture(autouse=True)
def as_jax_comes():
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)


def linear(theta, x):
    return jnp.matmul(x, theta)


def problem(n, scale, loss_name, seed=0):
    """Features and targets in float32; targets of classes as numbers for the oracle."""
    rng, c = np.random.default_rng(seed + n), LOSSES[loss_name][2]
    x = (scale * rng.normal(size=(n, FEATURES))).astype(np.float32)
    z = x @ rng.normal(size=(FEATURES, 3)) / scale + 0.5 * rng.normal(size=(n, 3))
    if loss_name == "softmax":
        return x, z.argmax(1), np.eye(c)[z.argmax(1)]
    y = z[:, :1].astype(np.float32) if loss_name == "squared" else (z[:, :1] > 0) * 1.0
    return x, y, y.astype(float)


def truth(x, y, ridge, loss_name, kept=None):
    """The optimum by the oracle's Newton steps in parameter space."""
    loss, c = LOSSES[loss_name][1:]
    w = np.ones(len(x)) if kept is None else kept.astype(float)
    J = np.einsum("ni,ab->naib", x.astype(float), np.eye(c)).reshape(len(x), c, -1)
    return oracles.retrain(J, np.zeros((len(x), c)), y, w / w.sum(), ridge, loss)


def fit(x, y, ridge, loss_name, **options):
    loss, _, c = LOSSES[loss_name]
    model = dfl.linearize(linear, jnp.zeros((FEATURES, c)))
    return dfl.fit(model, x, y, loss=loss, ridge=ridge, progress=False, **options)


def check(answer, want):
    """Right to the digits of float32, and certified to within a hundred times what it is off."""
    theta = answer.params()
    assert theta.dtype == jnp.float32
    off = np.linalg.norm(np.asarray(theta, float).reshape(-1) - want) / np.linalg.norm(want)
    bound = answer.certificate.distance_bound / np.linalg.norm(want)
    # The bound is about the model before its parameters are rounded, which adds half a unit at most.
    assert off <= bound
    if jax.default_backend() == "cpu":  # an accelerator takes float64 only where float32 is refused
        assert off <= 1e-6
        assert bound <= max(100 * off, 1e-5)


@pytest.mark.parametrize(("n", "ridge", "scale", "loss_name"), table(PROBLEMS, QUICK))
def test_ordinary_linear_problems_are_fitted_and_edited(n, ridge, scale, loss_name):
    x, y, targets = problem(n, scale, loss_name)
    fitted = fit(x, y, ridge, loss_name)
    assert fitted.stats.converged
    check(fitted, truth(x, targets, ridge, loss_name))
    gone = np.arange(5)
    update = fitted.edit(dfl.Remove(gone), until=1e-5 * fitted.certificate.parameter_norm)
    assert update.certificate.relative_bound <= 1.1e-5
    kept = ~np.isin(np.arange(n), gone)
    want = truth(x, targets, ridge, loss_name, kept)
    off = np.linalg.norm(np.asarray(update.params(), float).reshape(-1) - want)
    assert off <= update.certificate.distance_bound


@pytest.mark.parametrize(
    ("n", "loss_name", "form"),
    table(
        [(33, "softmax", "dense"), (33, "logistic", "matrix-free"), (5, "squared", "dense")],
        [(5, "squared", "dense")],
    ),
)
def test_a_mesh_answers_like_one_device(n, loss_name, form):
    """Without float64 these are refused, or certified to no better than 0.1."""
    x, y, targets = problem(n, 10.0, loss_name)
    fitted = fit(x, y, 1e-3, loss_name, mesh=jax.devices(), kernel=form)
    assert fitted.layout.num_devices == len(jax.devices())
    check(fitted, truth(x, targets, 1e-3, loss_name))
    kept = np.arange(n) != 2
    edited = fitted.edit(dfl.Remove([2]), until=1e-5, progress=False)
    check(edited, truth(x, targets, 1e-3, loss_name, kept))
    assert fitted.predict(x[:3]).dtype == edited.outputs.dtype == jnp.float32


@pytest.mark.host  # an accelerator stays in float32, and its bound says so
def test_a_kernel_function_on_a_mesh_answers_like_one_device():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(33, 3)), rng.normal(size=(33, 1))  # NumPy's numbers have 64 bits

    def rbf(a, b):
        return jnp.exp(-jnp.sum((a[:, None] - b[None]) ** 2, axis=-1) / 20)

    options = {"loss": dfl.SquaredError(), "ridge": 1e-4, "progress": False}
    fitted = dfl.fit(rbf, x, y, mesh=jax.devices(), **options)
    K = np.exp(-np.sum((x[:, None] - x[None]) ** 2, axis=-1) / 20)
    alpha = np.linalg.solve(K + 33e-4 * np.eye(33), y)
    np.testing.assert_allclose(fitted.outputs, K @ alpha, atol=1e-6)
    np.testing.assert_allclose(fitted.predict(x[:5]), (K @ alpha)[:5], atol=1e-6)
    assert fitted.certificate.relative_bound < 1e-5


@pytest.mark.parametrize("n", gates.table([1, 5, 33], [5]))
def test_everything_that_a_model_hands_out_is_float32(n):
    x, y, _ = problem(n, 10.0, "squared")
    fitted = fit(x, y, 1e-3, "squared")
    update = fitted.edit(dfl.Reweight([0], [2.0]))
    handed_out = [
        fitted.alpha,
        fitted.outputs,
        fitted.predict(x),
        fitted.params(),
        update.delta_alpha,
        update.delta_outputs(x),
        update.delta_loss(x, y),
        update.commit().outputs,
    ]
    assert {leaf.dtype for leaf in handed_out} == {jnp.dtype("float32")}
    assert fitted.network.dtype == jnp.float32


@pytest.mark.host  # an accelerator stays in float32, and its bound says so
def test_numbers_from_numpy_keep_their_64_bits():
    """Features and targets that come in float64 are those that are fitted."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, FEATURES)) + 1000
    y = rng.normal(size=(40, 1))
    fitted = fit(x, y, 1e-2, "squared")
    want = truth(x, y, 1e-2, "squared")
    np.testing.assert_allclose(
        fitted.params().reshape(-1), want, rtol=0, atol=1e-6 * np.abs(want).max()
    )


def test_float32_can_be_insisted_on():
    x, y, _ = problem(100, 10.0, "squared")
    with pytest.raises(dfl.NotConverged, match="float64"):
        fit(x, y, 1e-4, "squared", kernel=dfl.KernelOptions(refine=False))


@pytest.mark.parametrize("refine", [None, False])
def test_a_file_keeps_what_was_said_of_float32(refine, tmp_path):
    x, y, _ = problem(100, 1.0, "squared")
    network = dfl.linearize(linear, jnp.zeros((FEATURES, 1)))
    kernel = dfl.KernelOptions(refine=refine)
    fitted = fit(x, y, 1e-1, "squared", kernel=kernel)
    fitted.save(tmp_path / "m.npz")
    loaded = dfl.load(tmp_path / "m.npz", network, progress=False)
    gone = {"until": 5e-6, "progress": False}
    if refine is None:
        assert loaded.edit(dfl.Remove([3]), **gone).certificate.distance_bound <= 5e-6
    else:
        with pytest.raises(dfl.NotConverged):
            loaded.edit(dfl.Remove([3]), **gone)


def test_numbers_that_overflow_float32_are_an_error():
    x, y, _ = problem(5, 1.0, "squared")
    fitted = fit(x, 1e30 * np.asarray(y, float), 1e-3, "squared")
    with pytest.raises(ValueError, match="overflow"):
        fitted.predict(np.full((1, FEATURES), 1e10, np.float32))


@pytest.mark.parametrize("rows", gates.table(["equal", "spread"], ["equal"]))
def test_the_bound_covers_sums_of_many_equal_terms(rows):
    """Rows that are alike round alike: their errors add up instead of cancelling."""
    n, ridge = 100_000, 10.0
    y = np.full((n, 1), 1.7, np.float32)
    if rows == "spread":
        y += np.random.default_rng(0).normal(size=(n, 1)).astype(np.float32)
    model = dfl.linearize(linear, jnp.zeros((1, 1)))
    kernel = dfl.KernelOptions(form="matrix-free", refine=False)
    x, options = np.ones((n, 1), np.float32), {"loss": dfl.SquaredError(), "ridge": ridge}
    fitted = dfl.fit(model, x, y, kernel=kernel, progress=False, **options)
    want = y.astype(float).mean() / (1 + ridge)
    bound = fitted.certificate.distance_bound
    assert abs(np.asarray(fitted.alpha, float).sum() - want) <= bound
    assert abs(float(fitted.params()[0, 0]) - want) <= bound
    assert bound <= 1e-4 * want


def test_a_desk_removes_point_after_point(tmp_path):
    x, y, _ = problem(33, 10.0, "softmax")
    fitted = fit(x, y, 1e-2, "softmax")
    with dfl.unlearning.open(tmp_path / "desk", fitted) as desk:
        for point in range(3):
            desk.remove([point])
        want = desk.model.alpha
    with dfl.unlearning.open(tmp_path / "desk", fitted) as again:
        assert again.notes == []
        np.testing.assert_array_equal(again.model.alpha, want)
