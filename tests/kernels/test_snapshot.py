"""What `apply_fn` closes over: read anew by every call that makes a model, kept by what it makes."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from ntk_oracles import jacobian_kernel

import dualfluence as dfl
import gates
from dualfluence.kernels import empirical_kernel, ntk_mv

RNG = np.random.default_rng(0)
X, Y, XQ = RNG.normal(size=(7, 4)), RNG.normal(size=(7, 2)), RNG.normal(size=(3, 4))
W = jnp.asarray(RNG.normal(size=(5, 2)))
FIRST, SECOND = RNG.normal(size=(2, 4, 5))
OPTIONS = {"loss": dfl.SquaredError(), "ridge": 0.1, "progress": False}
MODULE_LEVEL = np.array(FIRST)


def truth(mixer):
    """`(kernel, outputs at queries)` of ridge regression from zero on `tanh(x @ mixer)`."""
    phi, phi_q = np.tanh(X @ mixer), np.tanh(XQ @ mixer)
    gram = phi @ phi.T
    base, base_q = phi @ np.asarray(W), phi_q @ np.asarray(W)
    alpha = np.linalg.solve(gram / 7 + 0.1 * np.eye(7), (Y - base) / 7)
    return np.einsum("ij,ab->iajb", gram, np.eye(2)), base_q + phi_q @ phi.T @ alpha


class Net:
    def __init__(self):
        self.mixer = jnp.asarray(FIRST)

    def apply(self, p, x):
        return jnp.tanh(x @ self.mixer) @ p


def in_place():
    mixer = np.array(FIRST)

    def change():
        mixer[:] = SECOND

    return (lambda p, x: jnp.tanh(x @ mixer) @ p), change


def rebound_cell():
    mixer = jnp.asarray(FIRST)

    def change():
        nonlocal mixer
        mixer = jnp.asarray(SECOND)

    return (lambda p, x: jnp.tanh(x @ mixer) @ p), change


def attribute():
    net = Net()
    return net.apply, lambda: setattr(net, "mixer", jnp.asarray(SECOND))


def global_array():
    MODULE_LEVEL[:] = FIRST
    return _global_apply, lambda: MODULE_LEVEL.__setitem__(slice(None), SECOND)


def _global_apply(p, x):
    return jnp.tanh(x @ MODULE_LEVEL) @ p


def in_a_dict():
    held = {"mixers": [np.array(FIRST)]}

    def apply(held, p, x):
        return jnp.tanh(x @ held["mixers"][0]) @ p

    return functools.partial(apply, held), lambda: held["mixers"].__setitem__(0, np.array(SECOND))


def a_number():
    state = {"second": False}

    def apply(p, x):
        return jnp.tanh(x @ (SECOND if state["second"] else FIRST)) @ p

    return apply, lambda: state.update(second=True)


CASES = (in_place, rebound_cell, attribute, global_array, in_a_dict, a_number)


@pytest.fixture(params=gates.table(CASES, [in_place, attribute]), ids=lambda case: case.__name__)
def case(request):
    return request.param()


def test_kernels_and_products_follow_the_change(case):
    apply_fn, change = case
    model = dfl.linearize(apply_fn, W)
    v = RNG.normal(size=(7, 2))
    for mixer in (FIRST, SECOND):
        want = truth(mixer)[0]
        np.testing.assert_allclose(model.kernel(jnp.asarray(X), progress=False), want, atol=1e-12)
        got = empirical_kernel(apply_fn, W, X, progress=False).value
        np.testing.assert_allclose(got, want, atol=1e-12)
        np.testing.assert_allclose(
            ntk_mv(apply_fn, W, X, v), np.einsum("iajb,jb->ia", want, v), atol=1e-12
        )
        diagonal = np.einsum("iaia->ia", want)
        np.testing.assert_allclose(model.kernel_diagonal(jnp.asarray(X)), diagonal, atol=1e-12)
        change()


@pytest.mark.parametrize("form", gates.table(["dense", "matrix-free"], ["dense"]))
def test_a_fit_reads_anew_and_what_it_made_stays_whole(case, form):
    apply_fn, change = case
    model = dfl.linearize(apply_fn, W)
    before = dfl.fit(model, X, Y, kernel=form, **OPTIONS)
    np.testing.assert_allclose(before.predict(XQ), truth(FIRST)[1], atol=1e-7)
    change()
    # Programs that are compiled answer for the model they were made for; new ones are refused.
    np.testing.assert_allclose(before.predict(XQ), truth(FIRST)[1], atol=1e-7)
    with pytest.raises(ValueError, match="closes over has changed"):
        before.predict(np.concatenate([XQ, XQ]))
    after = dfl.fit(model, X, Y, kernel=form, **OPTIONS)
    np.testing.assert_allclose(after.predict(XQ), truth(SECOND)[1], atol=1e-7)
    np.testing.assert_allclose(
        after.predict(np.concatenate([XQ, XQ]))[3:], truth(SECOND)[1], atol=1e-7
    )


def test_an_equal_array_is_no_change():
    held = [np.array(FIRST)]
    model = dfl.linearize(lambda p, x: jnp.tanh(x @ held[0]) @ p, W)
    fitted = dfl.fit(model, X, Y, **OPTIONS)
    held[0] = np.array(FIRST)
    np.testing.assert_allclose(fitted.predict(XQ), truth(FIRST)[1], atol=1e-7)
    assert fitted.predict(np.concatenate([XQ, XQ])).shape == (6, 2)


def test_requests_do_not_trace_the_network():
    calls = []

    def apply(p, x):
        calls.append(x.shape)
        return jnp.tanh(x @ p)

    fitted = dfl.fit(dfl.linearize(apply, jnp.asarray(FIRST)), X, np.ones((7, 5)), **OPTIONS)
    fitted.edit(dfl.Remove([1])).predict(XQ)
    seen = len(calls)
    fitted.edit(dfl.Remove([2])).predict(XQ)
    assert len(calls) == seen


@pytest.mark.thorough
def test_tiles_of_a_planned_kernel_own_their_constants():
    """A plan made before a change must not read the change through shared memory."""
    mixer = np.array(FIRST)
    model = dfl.linearize(lambda p, x: jnp.tanh(x @ mixer) @ p, W).bound(X)
    want = jacobian_kernel(lambda p, x: jnp.tanh(x @ FIRST) @ p, W, jnp.asarray(X))
    np.testing.assert_allclose(model.kernel(jnp.asarray(X), progress=False), want, atol=1e-12)
    mixer[:] = SECOND
    got = model.kernel(jnp.asarray(X[:5]), progress=False)
    np.testing.assert_allclose(got, want[:5, :, :5], atol=1e-12)
