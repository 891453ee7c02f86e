"""What results print: one screen, the facts that one looks for, no arrays."""

import jax.numpy as jnp
import numpy as np
import pytest

import cases
import dualfluence as dfl
import problems

SCREEN = 24, 110  # lines and columns of a terminal


def _fits_a_screen(text):
    lines = text.splitlines()
    return len(lines) <= SCREEN[0] and max(map(len, lines)) <= SCREEN[1]


@pytest.fixture(scope="module")
def update():
    p = problems.linear_problem(20, 3, 80, "softmax", ridge=0.05)
    return cases.fit(p).edit(dfl.Remove([1, 5]))


def test_a_fitted_model_prints_what_one_looks_for(update):
    text = repr(update.before)
    assert _fits_a_screen(text)
    for part in ("Fitted\n", "20 of shape (3, 81)", "network with 80 parameters", "float64"):
        assert part in text
    for part in ("SoftmaxCrossEntropy, ridge 0.05", "DenseOperator", "converged", "‖θ − θ*‖ ≤ "):
        assert part in text
    assert f"{update.before.certificate.distance_bound:.2g}" in text
    starts = {
        len(line) - len(line[2:].split("  ", 1)[1].lstrip()) for line in text.splitlines()[1:]
    }
    assert len(starts) == 1  # aligned


def test_an_update_prints_what_changed(update):
    text = repr(update)
    assert _fits_a_screen(text)
    assert "Update\n" in text
    assert "18 of shape (3, 81), 2 more of weight zero" in text
    assert "1 step, " in text
    assert f"≤ {update.certificate.distance_bound:.2g}" in text


def test_a_certificate_prints_its_bound():
    text = repr(dfl.Certificate(0.25, 0.0, 2.0, 0.5, gap=0.5))
    assert _fits_a_screen(text)
    assert "‖θ − θ*‖ ≤ 1, 0.67 of ‖θ − θ₀‖, including a gap of 0.5" in text
    assert "distance_bound  1\n" in text
    none = repr(dfl.Certificate(0.25, 0.0, 2.0, 0.5, certified=False))
    assert "none: the network is not linear" in none
    assert "distance_bound  inf" in none


def test_stats_print_the_run(update):
    text = repr(update.before.stats)
    assert _fits_a_screen(text)
    assert "products with K" in text
    assert update.before.stats.solver in text
    assert "note" in text


def test_models_without_parameters_or_with_fidelity_print():
    fitted = dfl.fit(jnp.eye(4), None, np.ones(4), loss=dfl.SquaredError(), ridge=1.0)
    assert "kernel without parameters" in repr(fitted)
    model = dfl.linearize(lambda w, x: x @ w, jnp.zeros((3, 1)))
    x = np.random.default_rng(0).normal(size=(6, 3))
    with pytest.warns(dfl.FidelityWarning):
        taken = dfl.from_trained(
            model, jnp.ones((3, 1)), x, x[:, :1], loss=dfl.SquaredError(), ridge=0.1
        )
    assert _fits_a_screen(repr(taken))
    assert "fidelity" in repr(taken)
