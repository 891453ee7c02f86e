"""A file's certificate is computed again from its residual; what cannot be is marked as a claim."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_damaged_states import forge, put, say

import cases
import dualfluence as dfl
import problems


@pytest.fixture(scope="module")
def case():
    p = problems.linear_problem(20, 2, 30, "softmax", ridge=0.05)
    return p, cases.fit(p)


def saved(fitted, path, **options):
    fitted.save(path, **options)
    return path


def five_times(header, arrays):
    for name in ("alpha", "k_alpha"):
        arrays[name] = 5 * arrays[name]


def swapped(name):
    def swap(array):
        array = array.copy()
        array[[0, 5]] = array[[5, 0]]
        return array

    return put(name, swap)


def nudged(name, size):
    """One row moved by a share of the largest entry, below the slack of another machine."""

    def nudge(array):
        array = array.copy()
        array[3] += size * np.abs(array).max()
        return array

    return put(name, nudge)


@pytest.mark.parametrize("include_kernel", [True, False])
@pytest.mark.parametrize(
    "change",
    [five_times, swapped("targets"), say("SquaredError", "loss", "name")],
    ids=["alpha", "targets", "loss"],
)
def test_a_certificate_that_the_residual_contradicts_is_not_believed(
    case, tmp_path, include_kernel, change
):
    p, fitted = case
    path = saved(fitted, tmp_path / "a.npz", include_kernel=include_kernel)
    assert fitted.certificate.relative_bound < 1e-9
    forge(path, change)
    again = dfl.load(path, cases.model(p), progress=False)
    assert again.certificate.relative_bound > 1e-2
    # The number is that of the definition: √ρᵀKρ / λ.
    alpha, f = np.asarray(again.alpha), np.asarray(again.outputs)
    K = np.einsum("iap,jbp->iajb", p.J, p.J)
    slope = f if again.loss == dfl.SquaredError() else np.exp(f) / np.exp(f).sum(1, keepdims=True)
    rho = (slope - np.asarray(again.data.targets)) / 20 + 0.05 * alpha
    want = np.sqrt(np.einsum("ia,iajb,jb->", rho, K, rho)) / 0.05
    np.testing.assert_allclose(again.certificate.distance_bound, want, rtol=1e-6)


@pytest.mark.parametrize("name", ["k_alpha", "offset"])
def test_outputs_nudged_within_the_slack_of_other_machines_gain_nothing(case, tmp_path, name):
    """Our own product takes the place of one, and rounding is as large as the other is off."""
    p, fitted = case
    path = saved(fitted, tmp_path / "a.npz", include_kernel=True)
    forge(path, nudged(name, 1e-13))
    again = dfl.load(path, cases.model(p), progress=False)
    if name == "k_alpha":
        np.testing.assert_allclose(again.state.k_alpha, fitted.state.k_alpha, atol=1e-15)
    else:
        off = np.abs(np.asarray(again.offset - fitted.offset)).max()
        assert off > 1e-14
        # At a point of weight 1/20 the softmax moves by at most a quarter of that in each output.
        assert again.certificate.rounding > 10 * fitted.certificate.rounding
        assert any("off by" in note for note in again.stats.notes)
    forge(path, nudged(name, 1e-3))
    with pytest.raises(ValueError, match="not the one that was saved"):
        dfl.load(path, cases.model(p), progress=False)


def test_entries_of_another_kernel_are_refused(tmp_path):
    """With `α = 0` nothing but the entries themselves tells."""
    p = problems.linear_problem(6, 2, 30, "softmax", ridge=0.05)
    fitted = cases.fit(p)
    path = saved(fitted, tmp_path / "a.npz", include_kernel=True)

    def other(header, arrays):
        for name in ("alpha", "k_alpha"):
            arrays[name] = 0 * arrays[name]
        arrays["kernel"] = np.diag(np.diagonal(arrays["kernel"]))

    forge(path, other)
    with pytest.raises(ValueError, match="its kernel at 6 points differs"):
        dfl.load(path, cases.model(p), progress=False)


def close(again, fitted, bits=True):
    """The same certificate to rounding."""
    own, was = again.certificate, fitted.certificate
    assert abs(own.gradient_norm - was.gradient_norm) <= was.rounding + 1e-6 * was.gradient_norm
    np.testing.assert_allclose(own.parameter_norm, was.parameter_norm, rtol=1e-5)
    np.testing.assert_allclose(own.rounding, was.rounding, rtol=0.05)
    assert (own.ridge, own.gap, own.certified) == (was.ridge, was.gap, was.certified)
    assert again.stats == fitted.stats
    fitted = fitted.without_spare_rows()
    for got, want in ((again.alpha, fitted.alpha), (again.offset, fitted.offset)):
        np.testing.assert_array_equal(got, want)  # what a desk's digest covers
    assert cases.same_bits(again, fitted) or not bits


FORMS = ["dense", "matrix-free", "refined", "edited", "added"]


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        pytest.param(form, dtype, marks=[pytest.mark.thorough] if slow else [])
        for form in FORMS
        for dtype in (jnp.float32, jnp.float64)
        for slow in [(form, dtype) != ("edited", jnp.float32)]
    ],
)
def test_an_honest_file_has_the_certificate_that_it_was_saved_with(tmp_path, dtype, form):
    p = problems.linear_problem(7, 2, 20, "softmax", ridge=0.05)
    options = {"matrix-free": "matrix-free", "refined": dfl.KernelOptions(refine=True)}
    fitted = cases.fit(p, dtype=dtype, kernel=options.get(form))
    if form in ("edited", "added"):  # two steps, whose products are a running sum
        for point in (1, 4):
            fitted = fitted.edit(dfl.Remove([point]), progress=False).commit()
    if form == "added":
        more = dfl.Add(np.asarray(p.x_q[:2], dtype), p.y_q[:2])
        fitted = fitted.edit(more, progress=False).commit()
    for include_kernel in (False, True)[: 1 if form == "matrix-free" else 2]:
        path = saved(fitted, tmp_path / "a.npz", include_kernel=include_kernel)
        again = dfl.load(path, cases.model(p, dtype), progress=False)
        close(again, fitted, bits=form != "added")  # K of all points at once rounds otherwise


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64], ids=["float32", "float64"])
def test_an_honest_kronecker_file_and_one_on_disk(tmp_path, dtype):
    p, sigma, _ = problems.kronecker_problem(7, 2, 6, "logistic")
    sigma = jnp.asarray(sigma, dtype)
    options = {"loss": dfl.Logistic(), "ridge": 0.1, "progress": False}
    fitted = dfl.fit(sigma, None, p.y, **options)
    for include_kernel in (False, True):
        path = saved(fitted, tmp_path / "a.npz", include_kernel=include_kernel)
        close(dfl.load(path, sigma, progress=False), fitted)
    op = dfl.kernel_operator(sigma, jnp.arange(7), kernel=dfl.KernelOptions(num_outputs=2))
    close(dfl.load(path, sigma, kernel=op, progress=False), fitted)


def line(theta, x):
    return x @ theta


def trained(certified=True):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(9, 3)), rng.normal(size=(9, 2))
    apply = line if certified else lambda theta, x: jnp.tanh(x @ theta)
    model = dfl.linearize(apply, jnp.zeros((3, 2)))
    start = dfl.fit(model, x, y, loss=dfl.SquaredError(), ridge=0.1, progress=False)
    theta = start.params() + 0.01
    options = {"loss": dfl.SquaredError(), "ridge": 0.1, "progress": False}
    return model, dfl.from_trained(model, theta, x, y, **options)


def test_the_gap_of_a_trained_network_is_computed_again(tmp_path):
    model, fitted = trained()
    path = saved(fitted, tmp_path / "a.npz")
    again = dfl.load(path, model, progress=False)
    close(again, fitted)
    assert not again.reference.claimed
    forge(path, say(0.0, "reference", "gap"))
    forge(path, say(0.0, "certificate", "gap"))
    again = dfl.load(path, model, progress=False)
    np.testing.assert_allclose(again.certificate.gap, fitted.certificate.gap, rtol=1e-9)


@pytest.mark.filterwarnings("ignore::dualfluence.FidelityWarning")
def test_a_network_that_is_not_linear_stays_without_a_certificate(tmp_path):
    model, fitted = trained(certified=False)
    path = saved(fitted, tmp_path / "a.npz")
    forge(path, say(True, "reference", "certified"))
    forge(path, say(True, "certificate", "certified"))
    again = dfl.load(path, model, progress=False)
    assert not again.certificate.certified
    assert again.certificate.distance_bound == np.inf
    assert any("not linear in its parameters" in note for note in again.stats.notes)


def test_the_gap_of_purged_points_is_a_claim_and_marked_as_one(tmp_path):
    model, fitted = trained()
    fitted = fitted.edit(dfl.Remove([2]), progress=False).commit().purge()
    assert not fitted.reference.claimed
    path = saved(fitted, tmp_path / "a.npz")
    for _ in range(2):  # a file of a file
        again = dfl.load(path, model, progress=False)
        assert again.reference.claimed
        assert [note for note in again.stats.notes if "claims of the file" in note][1:] == []
        assert "claimed by the file" in repr(again)
        assert again.certificate.gap == fitted.certificate.gap
        path = saved(again, tmp_path / "b.npz")


@pytest.mark.thorough
def test_a_model_without_its_points_is_loaded_in_the_default_precision(tmp_path):
    """float32 as JAX comes, one and five rows, and what a user calls."""
    jax.config.update("jax_enable_x64", False)
    try:
        rng = np.random.default_rng(0)
        model = dfl.linearize(line, jnp.zeros((3, 2)))
        for n in (1, 5):
            x, y = rng.normal(size=(n, 3)).astype(np.float32), rng.integers(0, 2, n)
            fitted = dfl.fit(
                model, x, y, loss=dfl.SoftmaxCrossEntropy(), ridge=1e-2, progress=False
            )
            for include_kernel in (False, True):
                path = saved(fitted, tmp_path / "a.npz", include_kernel=include_kernel)
                close(dfl.load(path, model), fitted)
            forge(path, five_times)
            assert dfl.load(path, model).certificate.relative_bound > 1e-2
    finally:
        jax.config.update("jax_enable_x64", True)
