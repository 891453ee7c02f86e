"""A network counts as linear by proof, or by a look at every answer."""

import jax.numpy as jnp
import numpy as np
import pytest

import dualfluence as dfl


def linear(theta, x):
    return jnp.matmul(x, theta)


def clipped(theta, x):
    """Linear wherever outputs are small, as they are at the parameters that were trained."""
    return jnp.clip(jnp.matmul(x, theta), -3, 3)


def taken_over(network):
    rng = np.random.default_rng(0)
    x = 0.3 * rng.normal(size=(40, 4))
    y = x @ rng.normal(size=(4, 1))
    options = {"loss": dfl.SquaredError(), "ridge": 1e-2, "progress": False}
    theta = dfl.fit(dfl.linearize(linear, jnp.zeros((4, 1))), x, y, **options).params()
    return dfl.from_trained(dfl.linearize(network, jnp.zeros((4, 1))), theta, x, y, **options), y


def test_operations_prove_a_network_linear():
    fitted, y = taken_over(linear)
    assert fitted.reference.proven
    far = fitted.edit(dfl.Relabel(np.arange(20), 8 * np.sign(y[:20])), until=1e-6)
    assert far.certificate.distance_bound <= 1e-6


def test_a_network_that_was_only_found_linear_loses_its_certificate_where_it_bends():
    fitted, y = taken_over(clipped)
    assert fitted.certificate.certified
    assert not fitted.reference.proven
    near = fitted.edit(dfl.Relabel([0], y[:1] + 0.1))
    assert near.certificate.certified
    edit = dfl.Relabel(np.arange(20), 8 * np.sign(y[:20]))
    far = fitted.edit(edit)
    assert not far.certificate.certified
    assert any("no certificate" in note for note in far.stats.notes)
    with pytest.raises(dfl.NotConverged, match="the network is not linear"):
        fitted.edit(edit, until=1e-3)


def test_an_edit_takes_a_step_however_much_it_may_be_off():
    fitted, _ = taken_over(linear)
    update = fitted.edit(dfl.Remove([3]), until=1.0)
    retrained = fitted.retrain(dfl.Remove([3]))
    moved = dfl.metrics.distance(update.params(), fitted.params())
    assert update.stats.steps == 1
    assert moved > 1e-4
    assert dfl.metrics.distance(update.params(), retrained.params()) < 1e-3 * moved
    assert fitted.edit([], until=1.0).stats.steps == 0
