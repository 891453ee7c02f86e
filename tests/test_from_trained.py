"""Networks that the user trained, linear models anchored at zero, nonlinear networks."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cases
import dualfluence as dfl
import oracles
import problems
from dualfluence.dual._fidelity import see
from dualfluence.fitted._setup import _check_linear

SIZES = (5, 40, 3)
N = 20


def _network(seed=0):
    params = cases.mlp_params(jax.random.key(seed), SIZES)
    rng = np.random.default_rng(seed)
    return params, jnp.asarray(rng.normal(size=(N, 5))), jnp.asarray(rng.normal(size=(N, 3)))


def _train(theta_0, x, y, ridge, weights, steps=4000, rate=0.1):
    """Plain gradient descent on the nonlinear objective, independent of the library."""

    def risk(theta):
        f = cases.mlp(theta, x)
        pull = sum(jnp.sum((a - b) ** 2) for a, b in zip(theta, theta_0, strict=True))
        return jnp.sum(weights * 0.5 * jnp.sum((f - y) ** 2, axis=1)) + 0.5 * ridge * pull

    def step(theta, _):
        return jax.tree.map(lambda t, g: t - rate * g, theta, jax.grad(risk)(theta)), None

    return jax.lax.scan(step, theta_0, None, length=steps)[0]


def _flat(tree):
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)])


def test_a_trained_linear_model_is_taken_over_exactly():
    p = problems.linear_problem(N, 3, 80, "softmax", ridge=0.05)
    fitted = cases.fit(p)
    taken = dfl.from_trained(
        cases.model(p),
        fitted.params(),
        jnp.asarray(p.x),
        p.y,
        loss=dfl.SoftmaxCrossEntropy(),
        ridge=p.ridge,
    )
    np.testing.assert_allclose(taken.alpha, fitted.alpha, atol=1e-9)
    assert taken.fidelity.gradient_norm < 1e-9
    assert taken.fidelity.parameter_gap < 1e-8
    assert taken.fidelity.output_gap < 1e-12
    a, b = (f.edit(dfl.Remove([1, 5])) for f in (taken, fitted))
    assert cases.relative(a.params(), b.params()) < 1e-9
    np.testing.assert_allclose(a.predict(p.x_q), b.predict(p.x_q), rtol=1e-8)


@pytest.mark.parametrize("tangent", ["initial", "trained"])
def test_unlearning_from_a_nonlinear_network_beats_doing_nothing(tangent):
    theta_0, x, y = _network()
    ridge = 3.0  # large enough that the network stays near its linearisation
    model = dfl.linearize(cases.mlp, theta_0)
    theta = _train(theta_0, x, y, ridge, jnp.full(N, 1 / N))
    gone = np.arange(6)
    fitted = dfl.from_trained(
        model, theta, x, y, loss=dfl.SquaredError(), ridge=ridge, tangent=tangent
    )
    update = fitted.edit(dfl.Remove(gone))
    weights = jnp.asarray(np.where(np.isin(np.arange(N), gone), 0, 1 / (N - 6)))
    want = _flat(_train(theta_0, x, y, ridge, weights))
    before = np.linalg.norm(_flat(theta) - want)
    after = np.linalg.norm(_flat(update.params()) - want)
    assert fitted.fidelity.gradient_norm < 1e-8  # gradient descent converged
    assert after < 0.25 * before
    np.testing.assert_allclose(fitted.predict(x), cases.mlp(theta, x), rtol=1e-9, atol=1e-12)
    network = update.predict(x, linearised=False)
    np.testing.assert_allclose(network, cases.mlp(update.params(), x), rtol=1e-9)


def test_the_trained_tangent_represents_a_stationary_point_exactly():
    theta_0, x, y = _network(1)
    theta = _train(theta_0, x, y, 0.3, jnp.full(N, 1 / N))
    options = {"loss": dfl.SquaredError(), "ridge": 0.3}
    model = dfl.linearize(cases.mlp, theta_0)
    fitted = dfl.from_trained(model, theta, x, y, tangent="trained", **options)
    rebuilt = jax.tree.map(jnp.add, theta_0, fitted.network.vjp(x, fitted.alpha))
    assert cases.relative(_flat(rebuilt), _flat(theta)) < 1e-8
    assert fitted.fidelity.parameter_gap < 1e-7
    with pytest.warns(dfl.FidelityWarning, match="try tangent='trained'"):
        at_start = dfl.from_trained(model, theta, x, y, tangent="initial", **options)
    assert at_start.fidelity.parameter_gap > 1e-2


@pytest.mark.filterwarnings("ignore::dualfluence.FidelityWarning")
def test_fidelity_tells_an_undertrained_network():
    theta_0, x, y = _network()
    model = dfl.linearize(cases.mlp, theta_0)
    weights = jnp.full(N, 1 / N)
    options = {"loss": dfl.SquaredError(), "ridge": 0.3}
    early = dfl.from_trained(model, _train(theta_0, x, y, 0.3, weights, steps=5), x, y, **options)
    late = dfl.from_trained(model, _train(theta_0, x, y, 0.3, weights), x, y, **options)
    assert early.fidelity.gradient_norm > 1e3 * late.fidelity.gradient_norm
    assert early.fidelity.parameter_gap > late.fidelity.parameter_gap


def test_anchor_zero_is_ridge_regression_on_theta():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(15, 6)), rng.normal(size=(15, 2))
    model = dfl.linearize(lambda w, v: v @ w, jnp.asarray(rng.normal(size=(6, 2))), anchor="zero")
    fitted = dfl.fit(model, x, y, loss=dfl.SquaredError(), ridge=0.1)
    update = fitted.edit(dfl.Remove([0, 3]))
    keep = np.setdiff1d(np.arange(15), [0, 3])
    for got, rows in ((fitted.params(), np.arange(15)), (update.params(), keep)):
        want = np.linalg.solve(
            x[rows].T @ x[rows] + 0.1 * len(rows) * np.eye(6), x[rows].T @ y[rows]
        )
        np.testing.assert_allclose(got, want, rtol=1e-9)


def test_anchor_zero_refuses_a_nonlinear_network():
    theta_0, x, y = _network()
    model = dfl.linearize(cases.mlp, theta_0, anchor="zero")
    with pytest.raises(ValueError, match="linear in its parameters"):
        dfl.fit(model, x, y, loss=dfl.SquaredError(), ridge=0.1)


def test_integer_leaves_and_chosen_leaves():
    rng = np.random.default_rng(0)
    params = {
        "w": jnp.asarray(rng.normal(size=(4, 6))),
        "v": jnp.asarray(rng.normal(size=(6, 2))),
        "k": 3,
    }

    def net(p, x):
        return jnp.tanh(x @ p["w"]) @ p["v"] * p["k"]

    x, y = rng.normal(size=(10, 4)), rng.normal(size=(10, 2))
    last = dfl.linearize(net, params, trainable=lambda path, _: "v" in str(path))
    fitted = dfl.fit(last, x, y, loss=dfl.SquaredError(), ridge=0.1)
    new = fitted.params()
    assert new["k"] == 3
    np.testing.assert_array_equal(new["w"], params["w"])
    assert not np.allclose(new["v"], params["v"])
    np.testing.assert_allclose(net(new, x), fitted.outputs, rtol=1e-9)  # linear in v: exact


@pytest.mark.thorough
def test_batches_do_not_change_the_answer():
    theta_0, x, y = _network()
    options = {"loss": dfl.SquaredError(), "ridge": 0.1, "kernel": "matrix-free"}
    whole = dfl.fit(dfl.linearize(cases.mlp, theta_0), x, y, **options)
    pieces = dfl.fit(dfl.linearize(cases.mlp, theta_0, batch_size=7), x, y, **options)
    assert cases.relative(_flat(pieces.params()), _flat(whole.params())) < 1e-10
    np.testing.assert_allclose(pieces.kernel_diagonal, whole.kernel_diagonal, rtol=1e-10)
    dense = dfl.fit(dfl.linearize(cases.mlp, theta_0), x, y, **{**options, "kernel": "dense"})
    np.testing.assert_allclose(dense.kernel_diagonal, whole.kernel_diagonal, rtol=1e-10)


# Certificates of models that are linear in their parameters.

M, C, P = 12, 2, 15
STAGES = ("never", "random", "stopped", "converged")


def _trained_to(stage, p, f0, rng):
    """`θ − θ₀` as four kinds of users leave it; the oracle's model has `f0` for its outputs at `θ₀`."""
    w, loss = oracles.normalise(p.sample_weights), oracles.LOSSES[p.loss_name]
    if stage == "converged":
        return oracles.retrain(p.J, f0, p.y, w, p.ridge, loss)
    theta = rng.normal(size=P) if stage == "random" else np.zeros(P)
    for _ in range(30 if stage == "stopped" else 0):
        theta = theta - 0.2 * oracles.gradient(theta, p.J, f0, p.y, w, p.ridge, loss)
    return theta


def _slack(theta, J, f0, y, w, ridge, loss):
    """What is left to the optimum of the oracle's own answer, as in the tests of certificates."""
    left = np.linalg.norm(oracles.gradient(theta, J, f0, y, w, ridge, loss)) / ridge
    return left + 10 * np.finfo(float).eps * np.linalg.norm(theta)


def _distance(model, theta_0, x, y, s, p):
    """`‖θ − θ_retrained‖` with the truth from NumPy, less what the truth itself may be off."""
    keep = s > 0
    J, f0 = x[keep][..., :-1], x[keep][..., -1] + x[keep][..., :-1] @ theta_0
    args = (J, f0, y[keep], oracles.normalise(s[keep]), p.ridge, oracles.LOSSES[p.loss_name])
    true = oracles.retrain(*args)
    got = np.asarray(model.params()) - theta_0
    return np.linalg.norm(got - true) - _slack(true, *args)


drawn_cases = st.fixed_dictionaries(
    {
        "loss_name": st.sampled_from(problems.LOSS_NAMES),
        "stage": st.sampled_from(STAGES),
        "seed": st.integers(0, 10**6),
        "ridge": st.floats(1e-3, 3.0),
        "weighted": st.booleans(),
        "linearised": st.booleans(),
        "tangent": st.sampled_from(["initial", "trained"]),
        "steps": st.integers(1, 3),
        "jump": st.sampled_from([0.0, 1.0, 100.0]),
    }
)


def _take_over(loss_name, stage, seed, ridge, weighted, linearised, tangent, jump):
    p = problems.linear_problem(M, C, P, loss_name, seed=seed, ridge=ridge, weighted=weighted)
    rng = np.random.default_rng(seed)
    theta_0 = jump * rng.normal(size=P)
    theta = theta_0 + _trained_to(stage, p, p.f0 + p.J @ theta_0, rng)
    fitted = dfl.from_trained(
        dfl.linearize(problems.apply, jnp.asarray(theta_0)),
        jnp.asarray(theta),
        jnp.asarray(p.x),
        p.y,
        loss=cases.LOSSES[loss_name],
        ridge=ridge,
        weights=p.sample_weights,
        tangent=tangent,
        linearised=linearised,
        progress=False,
    )
    return p, theta_0, fitted


def _chain(p, rng):
    """Edits in a row, each with the training set that it leaves."""
    x, y, s = p.x, p.y, p.sample_weights.copy()
    s[[1, 4]] = 0
    yield dfl.Remove([1, 4]), x, y, s
    y = y.copy()
    y[[0, 2]] = problems.make_targets(rng, 2, C, p.loss_name)
    yield dfl.Relabel([0, 2], y[[0, 2]]), x, y, s
    s = s.copy()
    s[[3, 5]] = [2.5, 0.3]
    yield dfl.Reweight([3, 5], s[[3, 5]]), x, y, s
    x, y = np.concatenate([x, p.x_q]), np.concatenate([y, p.y_q])
    s = np.concatenate([s, np.ones(len(p.x_q))])
    yield dfl.Add(p.x_q, p.y_q), x, y, s


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::dualfluence.FidelityWarning")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn_cases)
def test_certificates_of_trained_linear_models_hold_through_chains_of_edits(drawn):
    steps = drawn.pop("steps")
    p, theta_0, fitted = _take_over(**drawn)
    truth = (p.x, p.y, p.sample_weights, p)
    assert fitted.certificate.certified
    assert _distance(fitted, theta_0, *truth) <= fitted.certificate.distance_bound
    for edit, *data in _chain(p, np.random.default_rng(drawn["seed"])):
        update = fitted.edit(edit, steps=steps, on_failure="report", progress=False)
        assert _distance(update, theta_0, *data, p) <= update.certificate.distance_bound
        fitted = update.commit()
        assert fitted.certificate == update.certificate


@pytest.mark.filterwarnings("ignore::dualfluence.FidelityWarning")
@pytest.mark.parametrize("loss_name", problems.LOSS_NAMES)
def test_a_model_that_was_never_trained_is_certified_as_such(loss_name):
    """The bound is the true gradient over the ridge: no promise beyond what strong convexity gives."""
    drawn = {"seed": 0, "ridge": 0.05, "weighted": False, "tangent": "trained", "jump": 0.0}
    p, theta_0, fitted = _take_over(loss_name, "never", linearised=True, **drawn)
    w, loss = oracles.normalise(p.sample_weights), oracles.LOSSES[loss_name]
    want = np.linalg.norm(oracles.gradient(theta_0, p.J, p.f0, p.y, w, 0.05, loss)) / 0.05
    np.testing.assert_allclose(fitted.certificate.distance_bound, want, rtol=1e-10)
    assert not fitted.stats.converged


@pytest.mark.parametrize("loss_name", problems.LOSS_NAMES)
def test_a_converged_linear_model_keeps_a_useful_certificate(loss_name):
    drawn = {"seed": 0, "ridge": 0.05, "weighted": True, "tangent": "trained", "jump": 1.0}
    _, _, fitted = _take_over(loss_name, "converged", linearised=False, **drawn)
    assert fitted.certificate.distance_bound < 1e-11  # the oracle stops near 1e-13 itself
    assert fitted.stats.converged
    update = fitted.edit(dfl.Remove([0, 3]), until=1e-9)
    assert update.certificate.distance_bound <= 1e-9
    if loss_name == "squared":  # one step is exact
        assert fitted.edit(dfl.Remove([0, 3])).certificate.distance_bound < 1e-11


@pytest.mark.filterwarnings("ignore::dualfluence.FidelityWarning")
def test_until_counts_the_gap_or_says_that_it_cannot():
    drawn = {"seed": 3, "ridge": 0.3, "weighted": True, "tangent": "trained", "jump": 1.0}
    p, theta_0, fitted = _take_over("softmax", "stopped", linearised=False, **drawn)
    gap = fitted.certificate.gap
    update = fitted.edit(dfl.Remove([0, 3]), until=1.0001 * gap)
    assert gap < update.certificate.distance_bound <= 1.0001 * gap
    s = cases.without(p, [0, 3])
    assert _distance(update, theta_0, p.x, p.y, s, p) <= 1.0001 * gap
    with pytest.raises(ValueError, match=r"have a gap of .* fit, which trains to the optimum"):
        fitted.edit(dfl.Remove([0, 3]), until=0.5 * gap)


@pytest.mark.filterwarnings("ignore::dualfluence.FidelityWarning")
@pytest.mark.parametrize("tangent", ["initial", "trained"])
def test_gap_and_tangent_survive_saving(tmp_path, tangent):
    drawn = {"seed": 3, "ridge": 0.3, "weighted": True, "tangent": tangent, "jump": 1.0}
    p, theta_0, fitted = _take_over("softmax", "stopped", linearised=False, **drawn)
    fitted.save(tmp_path / "a.npz")
    again = dfl.load(tmp_path / "a.npz", dfl.linearize(problems.apply, jnp.asarray(theta_0)))
    assert again.certificate == fitted.certificate
    assert again.certificate.gap > 0.01
    a, b = (f.edit(dfl.Remove([0])) for f in (again, fitted))
    assert a.certificate == b.certificate
    np.testing.assert_array_equal(a.predict(p.x_q), b.predict(p.x_q))


# Networks that are not linear in their parameters.


@pytest.mark.parametrize("tangent", ["initial", "trained"])
def test_nonlinear_networks_are_never_certified(tangent, tmp_path):
    theta_0, x, y = _network()
    model = dfl.linearize(cases.mlp, theta_0)
    theta = _train(theta_0, x, y, 3.0, jnp.full(N, 1 / N))
    fitted = dfl.from_trained(
        model, theta, x, y, loss=dfl.SquaredError(), ridge=3.0, tangent=tangent
    )
    fitted.save(tmp_path / "a.npz")
    loaded = dfl.load(tmp_path / "a.npz", model)
    for made in (
        fitted,
        fitted.edit(dfl.Remove([0])),
        fitted.edit(dfl.Remove([0])).commit(),
        loaded,
    ):
        assert not made.certificate.certified
        assert made.certificate.distance_bound == np.inf
        assert made.certificate.relative_bound == np.inf
    with pytest.raises(ValueError, match=r"no certificate\. Leave it out; edits take steps="):
        fitted.edit(dfl.Remove([0]), until=1e-3)
    a, b = (f.edit(dfl.Remove([0]), steps=2).predict(x) for f in (loaded, fitted))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "net",
    [
        lambda w, x: x @ w + 1e-9 * x @ w**2,
        lambda w, x: x @ jnp.abs(w),
        lambda w, x: jnp.exp(100 * x @ w),
        lambda w, x: (x @ w) * (1 + 1e-10 * jnp.sum(w)),
    ],
)
def test_models_that_are_nearly_linear_or_overflow_are_not_called_linear(net):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10, 4))
    theta_0 = jnp.asarray(0.1 * np.abs(rng.normal(size=(4, 2))))
    trained = see(dfl.linearize(net, theta_0), theta_0 * 1.0001, jnp.asarray(x), False)
    assert not trained.is_linear


def test_far_networks_are_warned_of_and_near_ones_are_not(recwarn):
    theta_0, x, y = _network()
    model = dfl.linearize(cases.mlp, theta_0)
    options = {"loss": dfl.SquaredError()}
    near = _train(theta_0, x, y, 30.0, jnp.full(N, 1 / N), rate=0.02)
    fitted = dfl.from_trained(model, near, x, y, ridge=30.0, **options)
    assert not recwarn
    assert fitted.fidelity.output_gap < 0.1
    far = _train(theta_0, x, y, 1e-2, jnp.full(N, 1 / N))
    with pytest.warns(
        dfl.FidelityWarning, match=r"linearisation's by .* they carry no certificate"
    ):
        dfl.from_trained(model, far, x, y, ridge=1e-2, **options)
    early = _train(theta_0, x, y, 30.0, jnp.full(N, 1 / N), steps=1, rate=0.02)
    with pytest.warns(dfl.FidelityWarning, match="training stopped before its optimum"):
        fitted = dfl.from_trained(model, early, x, y, ridge=30.0, **options)
    assert not fitted.stats.converged


# Numbers that overflow.


OVERFLOWS = "from_trained: α = −g/λ or its norm overflows float64"


@pytest.mark.parametrize(
    ("ridge", "message"),
    [(1e-320, "range of float64"), (1e-308, "range of float64"), (1e-200, OVERFLOWS)],
)
def test_a_ridge_at_which_the_dual_variables_overflow_is_refused(ridge, message):
    p = problems.linear_problem(M, C, P, "softmax")
    with pytest.raises(ValueError, match=message):
        dfl.from_trained(
            cases.model(p), jnp.ones(P), p.x, p.y, loss=dfl.SoftmaxCrossEntropy(), ridge=ridge
        )


def test_a_ridge_that_float32_cannot_hold_is_refused():
    p = problems.linear_problem(M, C, P, "softmax")
    x, theta = p.x.astype(np.float32), jnp.ones(P, jnp.float32)
    model = dfl.linearize(problems.apply, jnp.zeros(P, jnp.float32))
    with pytest.raises(ValueError, match="range of float32"):
        dfl.from_trained(model, theta, x, p.y, loss=dfl.SoftmaxCrossEntropy(), ridge=1e-50)


@pytest.mark.parametrize(
    "net", [lambda w, x: jnp.exp(1e3 * x @ w), lambda w, x: 1e200 * (x @ w**3)]
)
def test_anchor_zero_refuses_a_model_that_overflows(net):
    rng = np.random.default_rng(0)
    x, y = 1e60 * rng.normal(size=(8, 3)), rng.normal(size=(8, 1))
    model = dfl.linearize(net, jnp.ones((3, 1)), anchor="zero")
    with pytest.raises(ValueError, match="linear in its parameters"):
        dfl.fit(model, x, y, loss=dfl.SquaredError(), ridge=0.1)


def test_anchor_zero_takes_linear_models_of_any_size():
    rng = np.random.default_rng(0)
    x = 1e200 * rng.normal(size=(8, 3))  # squares of outputs overflow, the model is linear
    model = dfl.linearize(lambda w, x: x @ w, jnp.ones((3, 1)), anchor="zero")
    _check_linear("fit", model, jnp.asarray(x))


def test_messages_name_what_was_called():
    """A check that several entries share speaks of the one that was called, and of its own option."""
    theta, x, y = _network()
    model = dfl.linearize(cases.mlp, theta)
    options = {"loss": dfl.SquaredError(), "ridge": 3.0, "progress": False}
    with pytest.raises(ValueError, match="from_trained: x is None, but a network needs"):
        dfl.from_trained(model, theta, None, y, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dfl.FidelityWarning)
        fitted = dfl.from_trained(model, theta, x, y, **options)
    with pytest.raises(ValueError, match="attribute: refine asks for a certified distance"):
        fitted.attribute(x[:1], y[:1], refine=1e-3, progress=False)
