"""Parameter-space influence against dense oracles, the dual step and the network's own Hessian."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import dualfluence as dfl
import gates
import oracles
import problems
from dualfluence.primal import _solvers
from users import ordinary

LOSSES = {
    "squared": dfl.SquaredError(),
    "softmax": dfl.SoftmaxCrossEntropy(),
    "logistic": dfl.Logistic(),
}
RTOL = 1e-12
"""Of the solves. The condition number is below 100 here, so that 1e-9 on Δθ has room."""


def linear_case(loss_name, *, weighted=False, n=12, c=3, p=20, seed=0):
    """A problem, its library model, and the exact minimiser."""
    case = problems.linear_problem(n, c, p, loss_name, seed=seed, weighted=weighted)
    model = dfl.linearize(problems.apply, jnp.zeros(p))
    w = oracles.normalise(case.sample_weights)
    theta = oracles.retrain(case.J, case.f0, case.y, w, case.ridge, oracles.LOSSES[case.loss_name])
    return case, model, theta


def run(case, model, theta, edit, **options):
    options = {"rtol": RTOL, "ridge": case.ridge, "weights": case.sample_weights} | options
    return dfl.primal.influence(
        model, jnp.asarray(theta), case.x, case.y, edit, loss=LOSSES[case.loss_name], **options
    )


def newton(case, theta, y=None, s=None, x=None):
    """Dense Newton step on an edited problem."""
    y, s, x = (case.y if y is None else y), (case.sample_weights if s is None else s), x
    J, f0 = (case.J, case.f0) if x is None else (x[..., :-1], x[..., -1])
    loss = oracles.LOSSES[case.loss_name]
    return oracles.one_step_theta(J, f0, theta, y, oracles.normalise(s), case.ridge, loss)


# The linearised model.


@pytest.mark.parametrize("loss_name", problems.LOSS_NAMES)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("stationary", [True, False])
def test_removal_is_eq1_as_printed(loss_name, share, stationary):
    case, model, theta = linear_case(loss_name)
    if not stationary:  # where eq. 1 and the Newton step differ
        theta = theta + 0.1 * np.random.default_rng(1).normal(size=theta.shape)
    gone = np.random.default_rng(2).permutation(12)[: max(1, round(12 * share))]
    keep = ~np.isin(np.arange(12), gone)
    update = run(case, model, theta, dfl.Remove(gone))

    loss = oracles.LOSSES[loss_name]
    want = oracles.paper_eq1(case.J, case.f0, theta, case.y, keep, case.ridge, loss)
    np.testing.assert_allclose(update.delta_params, want, rtol=1e-9, atol=1e-11)
    step = newton(case, theta, s=keep.astype(float))
    assert np.allclose(update.delta_params, step, rtol=1e-9, atol=1e-11) == stationary
    np.testing.assert_allclose(update.params(), theta + want, rtol=1e-9, atol=1e-11)
    assert update.delta_norm == pytest.approx(np.linalg.norm(want), rel=1e-9)
    assert update.stats.converged
    assert update.stats.products == update.stats.iterations + 1
    assert update.stats.reason == "removal by eq. 1"


@pytest.mark.parametrize("loss_name", problems.LOSS_NAMES)
def test_counts_generalise_to_sample_weight_mass(loss_name):
    case, model, theta = linear_case(loss_name, weighted=True)
    s = case.sample_weights * ~np.isin(np.arange(12), [0, 5, 7])
    for edit in (dfl.Remove([0, 5, 7]), [dfl.Remove([5]), dfl.Remove([7, 0])]):
        delta = run(case, model, theta, edit).delta_params
        np.testing.assert_allclose(delta, newton(case, theta, s=s), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("loss_name", problems.LOSS_NAMES)
def test_other_edits_are_newton_steps(loss_name):
    case, model, theta = linear_case(loss_name, weighted=True)
    y, s = case.y.copy(), case.sample_weights.copy()
    y[[2, 3]] = case.y[[4, 6]]
    s[[1, 5]] = [0.0, 2.5]
    edit = [dfl.Relabel([2, 3], case.y[[4, 6]]), dfl.Reweight([1, 5], [0.0, 2.5]), dfl.Remove([9])]
    s[9] = 0
    update = run(case, model, theta, edit)
    np.testing.assert_allclose(
        update.delta_params, newton(case, theta, y, s), rtol=1e-8, atol=1e-10
    )

    x = np.concatenate([case.x, case.x_q])
    y, s = np.concatenate([y, case.y_q]), np.concatenate([s, np.ones(3)])
    update = run(case, model, theta, [*edit, dfl.Add(case.x_q, case.y_q)])
    want = newton(case, theta, y, s, x)
    np.testing.assert_allclose(update.delta_params, want, rtol=1e-8, atol=1e-10)

    y, s = (
        np.concatenate([case.y, case.y[[4]]]),
        np.append(case.sample_weights, case.sample_weights[4]),
    )
    s[4] = 0
    update = run(case, model, theta, dfl.Replace([4], x=case.x_q[:1]))
    want = newton(case, theta, y, s, np.concatenate([case.x, case.x_q[:1]]))
    np.testing.assert_allclose(update.delta_params, want, rtol=1e-8, atol=1e-10)


def test_squared_error_removal_is_retraining():
    case, model, theta = linear_case("squared")
    w = oracles.normalise((np.arange(12) >= 6).astype(float))
    want = oracles.retrain(case.J, case.f0, case.y, w, case.ridge, oracles.squared)
    got = run(case, model, theta, dfl.Remove(np.arange(6))).params()
    assert dfl.metrics.relative_distance(got, want) < 1e-9


def test_no_edit_changes_nothing():
    case, model, theta = linear_case("softmax")
    update = run(case, model, theta, [])
    assert update.delta_norm == 0
    assert update.stats.iterations == 0


@pytest.mark.parametrize("loss_name", problems.LOSS_NAMES)
def test_read_out_against_oracles(loss_name):
    case, model, theta = linear_case(loss_name)
    update = run(case, model, theta, dfl.Remove([0, 3, 4, 8]))
    delta, loss = np.asarray(update.delta_params), oracles.LOSSES[loss_name]
    f_q, after = (oracles.outputs(t, case.J_q, case.f0_q) for t in (theta, theta + delta))
    exact = {"rtol": 1e-10, "atol": 1e-12}
    np.testing.assert_allclose(update.predict(case.x_q), after, **exact)
    np.testing.assert_allclose(update.delta_outputs(case.x_q), case.J_q @ delta, **exact)

    value, grad, _ = loss(f_q, case.y_q)
    first_order = np.einsum("qa,qa->q", grad, case.J_q @ delta)
    change = loss(after, case.y_q)[0] - value
    squares = 0.5 * case.ridge * (np.sum((theta + delta) ** 2) - np.sum(theta**2))
    args = (case.x_q, case.y_q)
    ridge_first_order = case.ridge * theta @ delta
    for got, want in (
        (update.delta_loss(*args, first_order=True), first_order),
        (
            update.delta_loss(*args, first_order=True, include_ridge=True),
            first_order + ridge_first_order,
        ),
        (update.delta_loss(*args), change),
        (update.delta_loss(*args, include_ridge=True), change + squares),
    ):
        np.testing.assert_allclose(got, want, **exact)


# A network.


SOFTMAX = {"loss": dfl.SoftmaxCrossEntropy()}
RIDGE = 2.0
"""Large enough for the tiny network's own Hessian to be positive definite."""


@ordinary
def tiny_net(params, x):
    h = jnp.tanh(x @ params["w1"] + params["b1"])
    return params["scale"] * (h @ params["w2"])


def net_case(dtype=jnp.float64, n=11):
    """A small network with a leaf that is not trained, and made-up trained parameters."""
    rng = np.random.default_rng(0)

    def draw(scale):
        shapes = {"w1": (4, 5), "b1": (5,), "w2": (5, 3)}
        return {k: jnp.asarray(scale * rng.normal(size=v), dtype) for k, v in shapes.items()} | {
            "scale": 2
        }

    theta_0, step = draw(0.7), draw(0.05)
    params = {k: v if k == "scale" else v + step[k] for k, v in theta_0.items()}
    x = rng.normal(size=(n, 4)).astype(dtype)
    y = rng.integers(0, 3, n)
    return dfl.linearize(tiny_net, theta_0), params, x, y


def train(model, params, x, y):
    """A stationary point of the network's own objective, by dense Newton steps."""
    risk, flat, whole = dense_risk(model, params, x, y, np.ones(len(y)), RIDGE)

    @jax.jit
    def step(v):
        return v - jnp.linalg.solve(jax.hessian(risk)(v), jax.grad(risk)(v))

    for _ in range(8):
        flat = step(flat)
    return whole(flat)


def dense_risk(model, params, x, y, s, ridge):
    """The network's objective as a function of a flat vector, written out once more."""
    theta, frozen = model.split(params)
    flat, unravel = ravel_pytree(theta)
    origin, _ = ravel_pytree(model.split(model.params)[0])
    w = s / s.sum()

    def whole(v):
        return unravel(v) | {"scale": frozen["scale"]}

    def risk(v):
        logp = jax.nn.log_softmax(tiny_net(whole(v), x))
        return -w @ logp[np.arange(len(y)), y] + 0.5 * ridge * jnp.sum((v - origin) ** 2)

    return risk, flat, whole


@pytest.mark.parametrize("trained", [True, False])
def test_network_removal_against_the_dense_hessian(trained):
    model, params, x, y = net_case()
    if trained:
        params = train(model, params, x, y)
    gone = np.array([1, 4, 10])
    keep = ~np.isin(np.arange(11), gone)
    update = dfl.primal.influence(
        model, params, x, y, dfl.Remove(gone), ridge=RIDGE, linearised=False, rtol=RTOL, **SOFTMAX
    )
    kept, flat, _ = dense_risk(model, params, x, y, keep.astype(float), RIDGE)
    lost, _, _ = dense_risk(model, params, x, y, (~keep).astype(float), RIDGE)
    hess, grad, grad_lost = jax.jit(
        lambda v: (jax.hessian(kept)(v), jax.grad(kept)(v), jax.grad(lost)(v))
    )(flat)
    want = 3 / 11 * np.linalg.solve(8 / 11 * hess, grad_lost)
    got, _ = ravel_pytree(update.delta_params)
    np.testing.assert_allclose(got, want, rtol=1e-8, atol=1e-10)
    assert np.allclose(got, -np.linalg.solve(hess, grad), rtol=1e-6, atol=1e-9) == trained
    assert update.params()["scale"] == 2
    assert update.delta_params["scale"] is None


def test_network_read_out_by_finite_differences():
    model, params, x, y = net_case()
    update = dfl.primal.influence(
        model, params, x, y, dfl.Remove([0, 2]), ridge=RIDGE, linearised=False, **SOFTMAX
    )
    np.testing.assert_allclose(update.predict(x), tiny_net(update.params(), x), rtol=1e-12)

    @jax.jit
    def moved(t):
        theta, frozen = model.split(params)
        new = jax.tree.map(lambda a, d: a + t * d, theta, update.delta_params)
        return tiny_net(new | {"scale": frozen["scale"]}, x)

    h = 1e-5  # central differences: h² truncation, eps/h rounding
    slope = (moved(h) - moved(-h)) / (2 * h)
    np.testing.assert_allclose(update.delta_outputs(x), slope, rtol=1e-6, atol=1e-9)
    loss, targets = dfl.SoftmaxCrossEntropy(), jax.nn.one_hot(y, 3)
    slope = (loss.value(moved(h), targets) - loss.value(moved(-h), targets)) / (2 * h)
    got = update.delta_loss(x, y, first_order=True)
    np.testing.assert_allclose(got, slope, rtol=1e-6, atol=1e-9)
    change = loss.value(moved(1.0), targets) - loss.value(moved(0.0), targets)
    np.testing.assert_allclose(update.delta_loss(x, y), change, rtol=1e-9)


@pytest.mark.parametrize("loss_name", gates.table(["softmax", "logistic"], ["softmax"]))
def test_agrees_with_one_dual_step(loss_name):
    model, _, x, labels = net_case()
    y = np.eye(3)[labels]
    options = {"loss": LOSSES[loss_name], "ridge": 0.1}
    fitted = dfl.fit(model, x, y, **options, tolerance=1e-12, progress=False)
    for gone in ([0], [1, 2, 3, 9], np.arange(9)):
        dual = fitted.edit(dfl.Remove(gone), progress=False)
        primal = dfl.primal.influence(
            model, fitted.params(), x, y, dfl.Remove(gone), **options, rtol=RTOL
        )
        gap = dfl.metrics.distance(primal.params(), dual.params())
        assert gap < 1e-8 * primal.delta_norm
        np.testing.assert_allclose(primal.predict(x), dual.predict(x), atol=1e-8)
        np.testing.assert_allclose(primal.delta_outputs(x), dual.delta_outputs(x), atol=1e-8)
        for first_order, ridge in itertools.product((False, True), repeat=2):
            reading = {"first_order": first_order, "include_ridge": ridge}
            got, want = (u.delta_loss(x, y, **reading) for u in (primal, dual))
            np.testing.assert_allclose(got, want, atol=1e-8)


@pytest.mark.parametrize("linearised", [True, False])
def test_batches_change_nothing(linearised):
    model, params, x, y = net_case()
    options = {"ridge": RIDGE, "linearised": linearised, "rtol": RTOL, **SOFTMAX}
    edit = dfl.Remove([0, 2, 7])
    whole = dfl.primal.influence(model, params, x, y, edit, **options)
    parts = dfl.primal.influence(
        model, params, x, y, edit, batch_size=4, **options
    )  # one row padded
    assert dfl.metrics.distance(parts.delta_params, whole.delta_params) < 1e-10


@pytest.mark.parametrize("linearised", [True, False])
def test_other_indices_compile_nothing(linearised):
    model, params, x, y = net_case()
    options = {"ridge": RIDGE, "linearised": linearised, **SOFTMAX}

    def once(edit):
        update = dfl.primal.influence(model, params, x, y, edit, **options)
        return update.predict(x)

    once(dfl.Remove([0]))
    before = _solvers.COUNTERS["traces"]
    for edit in (dfl.Remove([1]), dfl.Remove(np.arange(7)), dfl.Relabel([2], [0])):
        once(edit)
    options["ridge"], options["rtol"] = 1.5, 1e-6
    once(dfl.Reweight([0, 1], [2.0, 0.5]))
    assert _solvers.COUNTERS["traces"] == before


def test_convex_loss_matches_its_closed_form():
    model, params, x, y = net_case()
    convex = dfl.Convex(lambda f, t: jax.nn.logsumexp(f) - f[t])
    for linearised in (True, False):
        options = {"ridge": RIDGE, "linearised": linearised, "rtol": RTOL}
        a, b = (
            dfl.primal.influence(model, params, x, y, dfl.Remove([3, 5]), loss=loss, **options)
            for loss in (convex, dfl.SoftmaxCrossEntropy())
        )
        assert dfl.metrics.distance(a.params(), b.params()) < 1e-10


# Precision and failure.


@pytest.mark.parametrize("linearised", [True, False])
def test_float32_reports_what_it_reached(linearised):
    options = {"ridge": RIDGE, "linearised": linearised, **SOFTMAX}
    edit = dfl.Remove([0, 1, 2])
    wide = dfl.primal.influence(*net_case(), edit, **options)
    model, params, x, y = net_case(jnp.float32)
    paper = dfl.primal.influence(model, params, x, y, edit, on_failure="report", **options)
    assert paper.stats.residual > 1e-8
    assert not paper.stats.converged
    loose = {"rtol": 1e-5, "on_failure": "report"}
    loosely = dfl.primal.influence(model, params, x, y, edit, **loose, **options)
    assert loosely.stats.converged
    for update in (paper, loosely):
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(update.delta_params))
        assert dfl.metrics.distance(update.delta_params, wide.delta_params) < 1e-4 * wide.delta_norm
        assert update.predict(x).dtype == jnp.float32


@pytest.mark.parametrize("linearised", [True, False])
def test_float32_models_are_solved_in_float64_by_default(linearised):
    options = {"ridge": RIDGE, "linearised": linearised, **SOFTMAX}
    edit = dfl.Remove([0, 1, 2])
    wide = dfl.primal.influence(*net_case(), edit, **options)
    update = dfl.primal.influence(*net_case(jnp.float32), edit, **options)
    assert update.stats.residual <= 1e-8
    arrays = [leaf for leaf in jax.tree.leaves(update.params()) if hasattr(leaf, "dtype")]
    assert arrays
    assert all(leaf.dtype == jnp.float32 for leaf in arrays)
    # What is left is the rounding of the parameters and points that were given.
    assert dfl.metrics.distance(update.params(), wide.params()) < 1e-5 * wide.delta_norm


def test_stopping_early_is_an_error_unless_asked_for():
    model, params, x, y = net_case()
    options = {"ridge": 1e-3, "max_steps": 2, **SOFTMAX}
    with pytest.raises(dfl.NotConverged, match="after 2 iterations"):
        dfl.primal.influence(model, params, x, y, dfl.Remove([0]), **options)
    update = dfl.primal.influence(
        model, params, x, y, dfl.Remove([0]), on_failure="report", **options
    )
    assert not update.stats.converged
    assert update.stats.residual > 1e-8


def test_indefinite_network_hessian_is_reported():
    model, params, x, y = net_case()
    flipped = (y + 1) % 3  # large residuals, so that the network's curvature shows
    options = {"ridge": 1e-3, "linearised": False, **SOFTMAX}
    s = np.ones(11)
    s[0] = 0
    risk, flat, _ = dense_risk(model, params, x, flipped, s, 1e-3)
    assert np.linalg.eigvalsh(jax.jit(jax.hessian(risk))(flat))[0] < 0
    with pytest.raises(dfl.NotConverged, match="indefinite"):
        dfl.primal.influence(model, params, x, flipped, dfl.Remove([0]), **options)
    update = dfl.primal.influence(
        model, params, x, flipped, dfl.Remove([0]), on_failure="report", **options
    )
    assert not update.stats.converged
    assert "indefinite" in update.stats.notes[0]


@ordinary
def nan_above(params, x):
    """Finite at θ₀ = 1, NaN where the trained parameter is negative."""
    return jnp.log(params) * x


def test_what_is_not_finite_is_an_error():
    model = dfl.linearize(nan_above, jnp.ones(1))
    with pytest.raises(FloatingPointError, match="not finite"):
        dfl.primal.influence(
            model,
            -jnp.ones(1),
            np.ones((3, 1)),
            np.ones(3),
            dfl.Remove([0]),
            loss=dfl.SquaredError(),
            ridge=0.1,
            linearised=False,
        )


def test_loss_with_negative_curvature_is_an_error():
    model, params, x, y = net_case()
    loss = dfl.Convex(lambda f, t: -jnp.sum(f**2))
    with pytest.raises(ValueError, match="negative curvature"):
        dfl.primal.influence(model, params, x, y, dfl.Remove([0]), loss=loss, ridge=100.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": lambda p: {"w1": p["w1"]}}, "tree structure"),
        ({"params": lambda p: p | {"b1": p["b1"] * jnp.nan}}, r"params\['b1'\] has NaN"),
        (
            {"params": lambda p: p | {"b1": p["b1"][:2]}},
            r"params\['b1'\] must have the shape \(5,\)",
        ),
        ({"y": lambda y: y + 2}, r"labels must be in \[0, 3\)"),
        ({"y": lambda y: y[:-1]}, "expected 11 rows"),
        ({"x": lambda x: x * np.inf}, "x: every entry must be finite"),
        ({"edit": lambda e: dfl.Remove([11])}, r"indices must be in \[0, 11\)"),
        ({"edit": lambda e: dfl.Remove(np.arange(11))}, "every point has been removed"),
        ({"ridge": lambda r: 0.0}, "ridge: λ must be a positive"),
        ({"weights": lambda w: -np.ones(11)}, "weights must be"),
        ({"batch_size": lambda b: 0}, "batch_size must be a whole number, at least 1"),
    ],
)
def test_bad_input(change, message):
    model, params, x, y = net_case()
    given = {"params": params, "x": x, "y": y, "edit": dfl.Remove([0]), "ridge": 0.3}
    given |= {"weights": None, "batch_size": None}
    given |= {name: fn(given[name]) for name, fn in change.items()}
    with pytest.raises(ValueError, match=message):
        dfl.primal.influence(model, **given, **SOFTMAX)


def test_bad_queries():
    model, params, x, y = net_case()
    update = dfl.primal.influence(model, params, x, y, dfl.Remove([0]), ridge=0.3, **SOFTMAX)
    with pytest.raises(ValueError, match=r"expected shape \(q, 4\)"):
        update.predict(x[:, :2])
    with pytest.raises(ValueError, match="queries: every entry must be finite"):
        update.delta_outputs(x * np.nan)
    with pytest.raises(ValueError, match="11 queries but 10 targets"):
        update.delta_loss(x, y[:-1])
